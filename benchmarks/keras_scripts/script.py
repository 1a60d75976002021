"""Parts of a script: a plain model, its loss, and a batch of data."""

import dataclasses

import keras
import numpy as np


@dataclasses.dataclass(frozen=True)
class Script:
    """A Keras script up to its call of `compile`.

    Attributes:
        model: plain `keras.Model`.
        loss: as for `compile`.
        x: structure of arrays, inputs of a batch.
        y: structure of arrays, targets; None if there are none.
        weights: sample weights. Defaults to None.
    """

    model: keras.Model
    loss: object
    x: object
    y: object = None
    weights: object = None


def floats(*shape):
    """Numbers between 0 and 1."""
    return np.random.default_rng(0).uniform(size=shape).astype("float32")


def integers(limit, *shape):
    """Whole numbers from 0 to below a limit."""
    return np.random.default_rng(1).integers(0, limit, shape).astype("int32")


def one_hot(classes, *shape):
    """Labels as vectors."""
    return np.eye(classes, dtype="float32")[integers(classes, *shape)]
