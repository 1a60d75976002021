"""Small models, data and optimizers that tests of private training share."""

import math

import keras
import numpy as np

import tf_dpsub
from tf_dpsub import optimizers

layers = keras.layers

EXAMPLES, FEATURES, CLASSES = 20, 4, 3

_random = np.random.default_rng(0)
X = _random.normal(size=(EXAMPLES, FEATURES)).astype("float32")
Y = _random.integers(0, CLASSES, EXAMPLES)
W = _random.uniform(0.5, 2.0, EXAMPLES).astype("float32")

# Not private: what is left of a step is exact.
EXACT = {"noise_multiplier": 0.0, "l2_norm_clip": math.inf}


def linear():
    return keras.Sequential(
        [keras.Input((FEATURES,)), layers.Dense(CLASSES, name="head")]
    )


def mlp(*hidden):
    hidden = hidden or [layers.Dense(5, activation="tanh")]
    return keras.Sequential(
        [keras.Input((FEATURES,)), *hidden, layers.Dense(CLASSES)]
    )


def twin(model):
    """A copy with the same weights."""
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    return copy


def loss(reduction="sum_over_batch_size"):
    return keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=reduction
    )


def dpsgd(inner=None, **arguments):
    defaults = {
        "noise_multiplier": 1.0,
        "l2_norm_clip": 1.0,
        "batch_size": 4,
        "microbatch_size": 4,
    }
    return optimizers.DPSGD(
        inner or keras.optimizers.SGD(0.1), **{**defaults, **arguments}
    )


def private(plain, optimizer, **compile_arguments):
    model = tf_dpsub.make_private(plain)
    model.compile(optimizer, **{"loss": loss(), **compile_arguments})
    return model


def assert_same_weights(model, expected, tolerance=1e-5):
    """Compares by norm: single weights may be close to zero."""
    for own, other in zip(
        model.get_weights(), expected.get_weights(), strict=True
    ):
        error = np.linalg.norm(own - other)
        assert error <= tolerance * np.linalg.norm(other)


def fit_plainly(plain, inner, epochs=3, **data):
    """The reference: Keras, with all examples in each batch."""
    plain.compile(inner, loss=loss(), run_eagerly=True, metrics=["accuracy"])
    return plain.fit(
        **{"x": X, "y": Y, **data},
        batch_size=EXAMPLES,
        epochs=epochs,
        shuffle=False,
        verbose=0,
    ).history
