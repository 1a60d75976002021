"""Private models whose per-example gradients are given, and their bases.

The loss is `y * (w @ x)`: the gradient of an example is `y * x`, whatever the
weights are, which lie in one layer or in several.
"""

import keras
import numpy as np
import tensorflow as tf

import tf_dpsub
from tf_dpsub import gradients, optimizers, subspaces
from tf_dpsub.data import given_batches

layers = keras.layers

SIZES = (5, 7)
PARAMETERS = sum(SIZES)


def product(y_true, y_pred):
    return keras.ops.sum(y_true * y_pred, -1)


@keras.saving.register_keras_serializable("tests")
class ScaledSubspace(subspaces.FixedSubspace):
    """A subspace whose coordinates have scales that are given."""

    def __init__(self, basis, scales):
        super().__init__(basis, public=True)
        self._scales = np.array(scales, np.float32)

    @property
    def is_whitened(self):
        return True

    @property
    def scales(self):
        return tf.constant(self._scales)


def network(sizes=SIZES):
    """Layers `part0`, `part1` and so on, each with one weight of that size."""
    inputs = keras.Input((sum(sizes),))
    parts, start = [], 0
    for k, size in enumerate(sizes):
        part = layers.Dense(
            1, use_bias=False, kernel_initializer="zeros", name=f"part{k}"
        )
        parts.append(part(inputs[:, start : start + size]))
        start += size
    outputs = layers.Add()(parts) if len(parts) > 1 else parts[0]
    return keras.Model(inputs, outputs)


def network_of_rows(examples, parameters):
    """One weight, whose gradients are the rows of the frozen layer `rows`.

    Inputs are rows of the identity: they pick the examples.
    """
    inputs = keras.Input((examples,))
    rows = layers.Dense(
        parameters, use_bias=False, trainable=False, name="rows"
    )(inputs)
    part = layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    return keras.Model(inputs, part(rows))


def projected(subspace, **arguments):
    """PDP-SGD, for what is not about the mechanism."""
    defaults = {
        "noise_multiplier": 1.0,
        "l2_norm_clip": 1.0,
        "batch_size": 4,
        "microbatch_size": 4,
    }
    inner = arguments.pop("inner", None) or keras.optimizers.SGD(0.1)
    return optimizers.ProjectedDPSGD(
        inner, subspace=subspace, **{**defaults, **arguments}
    )


def make_private(optimizer, sizes=SIZES, **arguments):
    """A compiled private model."""
    model = tf_dpsub.make_private(network(sizes))
    model.compile(optimizer, **{"loss": product, **arguments})
    return model


def batch_of(model, x, y=None):
    """A batch as the step of a model takes it."""
    x = np.asarray(x, "float32")
    y = np.ones(len(x)) if y is None else y
    y = np.asarray(y, "float32").reshape(-1, 1)
    return given_batches.padded(
        given_batches.named(x, y), model.microbatch_size
    )


def attach(model, steps=None):
    """Builds the step of a model, without training it."""
    x = np.zeros([1, model.input_shape[1]])
    specs = tf.nest.map_structure(tf.type_spec_from_value, batch_of(model, x))
    model.prepare_training(specs)
    model.optimizer.public_state.begin_run(steps)
    return model


def attach_basis(model):
    """Makes the basis of a model's optimizer alone, without its step.

    Not for a basis that follows the gradients of public data.
    """
    model.optimizer.build_for(model)
    model.optimizer.public_state.attach(model)
    return model


def stored(model, rows):
    """Per-example gradients that are given."""
    variables = model.trainable_variables
    ends = np.cumsum([int(np.prod(v.shape)) for v in variables])
    parts = tf.split(
        tf.cast(rows, tf.float32), np.diff(ends, prepend=0).tolist(), 1
    )
    return gradients.StoredGradients(
        variables,
        [
            tf.reshape(part, [part.shape[0], *v.shape])
            for part, v in zip(parts, variables)
        ],
    )


def flat(tensors):
    """One vector in float64."""
    return np.concatenate([np.ravel(t) for t in tensors]).astype("float64")


def matrix_of(subspace):
    """The basis V, [parameters, rank], in float64."""
    units = np.eye(subspace.rank, dtype="float32")
    return np.stack([flat(subspace.lift(unit)) for unit in units], 1)


def orthonormal(size, rank, seed=0):
    """A random orthonormal basis."""
    random = np.random.default_rng(seed)
    return np.linalg.qr(random.normal(size=(size, rank)))[0]


def largest_sine(first, second):
    """Sine of the largest principal angle between two spans."""
    first, second = (np.linalg.qr(v)[0] for v in (first, second))
    return np.linalg.norm(second - first @ (first.T @ second), 2)


def top_eigenspace(rows, rank):
    """The top right singular vectors, as NumPy finds them."""
    return np.linalg.svd(np.asarray(rows, "float64"))[2][:rank].T
