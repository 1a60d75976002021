"""Models with gradient carriers, trained by RGP, and their carriers."""

import keras
import numpy as np

import tf_dpsub
from tf_dpsub import layers
from tf_dpsub.optimizers import RGP

BATCH, RANK = 16, 3

_random = np.random.default_rng(0)
X = _random.normal(size=(BATCH, 5, 8)).astype("float32")
Y = _random.integers(0, 3, BATCH)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def network():
    keras.utils.set_random_seed(1)
    inputs = keras.Input(X.shape[1:])
    x = keras.layers.MultiHeadAttention(2, 4, name="attention")(inputs, inputs)
    x = keras.layers.LayerNormalization(name="norm")(x)
    x = keras.layers.Dense(10, "tanh", name="hidden")(x)
    x = keras.layers.Reshape((5, 5, 2))(x)
    x = keras.layers.Conv2D(6, 2, name="convolution")(x)
    x = keras.layers.Flatten()(x)
    return keras.Model(inputs, keras.layers.Dense(3, name="logits")(x))


def small_network():
    """Two kernels, for what is not about kinds of layers."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input(X.shape[1:])
    x = keras.layers.Dense(10, "tanh", name="hidden")(inputs)
    x = keras.layers.Flatten()(x)
    return keras.Model(inputs, keras.layers.Dense(3, name="logits")(x))


def rgp(inner=None, **arguments):
    defaults = {
        "noise_multiplier": 0.0,
        "l2_norm_clip": float("inf"),
        "batch_size": BATCH,
        "seed": 0,
    }
    if inner is None:
        inner = keras.optimizers.SGD(1.0)
    return RGP(inner, **{**defaults, **arguments})


def private(optimizer, rank=RANK, model=None, **compiled):
    model = network() if model is None else model
    if rank is not None:
        layers.reparametrize(model, rank)
    model = tf_dpsub.make_private(model)
    model.compile(optimizer, LOSS, **compiled)
    return model


def carriers(model):
    return {
        layer.name: layer.carriers
        for layer in layers.reparametrized_layers(model.model)
    }


def factors(own):
    return (
        np.reshape(own.left, [own.inputs, own.rank]),
        np.reshape(own.right, [own.rank, own.outputs]),
    )


def assert_orthonormal(own, atol=1e-5):
    left, right = factors(own)
    np.testing.assert_allclose(left.T @ left, np.eye(own.rank), atol=atol)
    np.testing.assert_allclose(right @ right.T, np.eye(own.rank), atol=atol)
