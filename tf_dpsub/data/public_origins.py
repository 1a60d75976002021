"""Which public examples weights were computed from."""

import dataclasses
import weakref
from typing import Any

import numpy as np
from keras import tree


@dataclasses.dataclass(frozen=True)
class PublicOrigin:
    """Public examples, and the weights that were computed from them.

    Attributes:
        inputs: structure of arrays.
        purpose: string, what was done with them, such as `"that the weights
            were trained on before"`.
        allow_private: bool, whether they may be private ones as well.
        are_preprocessed: bool, whether they are what a preprocessor made of
            inputs.
        weights: list of weak references to variables.
    """

    inputs: Any
    purpose: str
    allow_private: bool
    are_preprocessed: bool
    weights: list

    @property
    def examples(self) -> int:
        """Number of public examples."""
        return len(tree.flatten(self.inputs)[0])

    @property
    def is_alive(self) -> bool:
        """Whether a weight is left that was computed from them."""
        return any(weight() is not None for weight in self.weights)

    def is_of(self, model) -> bool:
        """Returns whether a model has one of the weights."""
        weights = {id(weight) for weight in model.weights}
        return any(id(weight()) in weights for weight in self.weights)


_origins: list[PublicOrigin] = []


def remember(
    inputs,
    weights,
    purpose: str,
    *,
    allow_private: bool = False,
    are_preprocessed: bool = False,
):
    """Remembers what weights come from, as long as one of them exists.

    Files and copies of the weights do not tell.

    Args:
        inputs: structure of arrays, which is copied: what is compared with
            private data has to be what was used.
        weights: iterable of `keras.Variable`.
        purpose: string, as of `PublicOrigin`.
        allow_private: bool. Defaults to `False`.
        are_preprocessed: bool. Defaults to `False`.
    """
    _origins[:] = [origin for origin in _origins if origin.is_alive]
    _origins.append(
        PublicOrigin(
            tree.map_structure(np.array, inputs),
            purpose,
            bool(allow_private),
            are_preprocessed,
            [weakref.ref(weight) for weight in weights],
        )
    )


def origins_of(model) -> list[PublicOrigin]:
    """Lists the origins of a model's weights.

    Args:
        model: plain `keras.Model`.
    """
    return [origin for origin in _origins if origin.is_of(model)]
