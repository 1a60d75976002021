"""The walk builds one backward pass, and none of its results twice."""

import collections

import keras
import pytest
import tensorflow as tf

from tf_dpsub import gradients
from tf_dpsub.gradients.tracing import trace

BATCH, TERMS, WIDTH = 4, 3, 8


class _Positions(keras.layers.Layer):
    """Adds a weight that is repeated along the batch before it is added."""

    def build(self, shape):
        self.table = self.add_weight(shape=shape[1:], name="table")

    def call(self, x):
        return x + tf.broadcast_to(self.table[None], x.shape)


class _Scale(keras.layers.Layer):
    """Multiplies by a weight that is repeated, but not along the batch."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(1,), name="scale")

    def call(self, x):
        return x * tf.tile(self.scale, [x.shape[-1]])


def _walked(*layers):
    """The operations of a walk."""
    first, last = (keras.layers.Dense(WIDTH, "tanh") for _ in range(2))
    model = keras.Sequential([first, *layers, last])
    model.build((BATCH, TERMS, WIDTH))

    def loss_fn(x):
        return tf.reduce_mean(tf.square(model(x)), [1, 2]), None

    def walk(x):
        rows, _ = gradients.per_example_gradients(
            loss_fn, x, model.trainable_variables
        )
        return rows.sq_norms(), rows.weighted_sum(tf.ones(BATCH))

    graph = trace(walk, tf.TensorSpec([BATCH, TERMS, WIDTH])).graph
    return graph.get_operations()


def _types(operations):
    return collections.Counter(op.type for op in operations)


@pytest.mark.parametrize("layer", [_Positions, _Scale])
def test_repeated_weights_take_no_backward_pass_of_their_own(layer):
    assert _types(_walked(layer(), layer()))["TanhGrad"] == 2


def test_norms_and_their_bounds_share_what_is_traced_once():
    """One call for each kernel, and the squares of each bias."""
    operations = _walked()
    kernels = biases = 2
    called = [
        name
        for o in operations
        if "Call" in o.type and "norms" in (name := o.get_attr("f").name)
    ]
    assert len(called) == kernels
    assert len(set(called)) == 1
    assert _types(operations)["Square"] <= biases + 1  # ... and the loss


class _Rounded(keras.layers.Layer):
    """Multiplies by a weight that is rounded: its gradient is zero."""

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[-1:], initializer="uniform")

    def call(self, x):
        return x * tf.round(100 * self.scale)


def test_a_weight_without_a_gradient_has_rows_of_zeros():
    rounded, last = _Rounded(), keras.layers.Dense(1)
    model = keras.Sequential([keras.Input((WIDTH,)), rounded, last])

    @tf.function(autograph=False)
    def compute(x):
        rows, _ = gradients.per_example_gradients(
            lambda x: (model(x)[:, 0], None), x, model.trainable_variables
        )
        return [rows.rows(v) for v in (rounded.scale, last.kernel)]

    of_rounded, of_kernel = compute(tf.ones([BATCH, WIDTH]))
    assert of_rounded.shape == (BATCH, WIDTH)
    assert not of_rounded.numpy().any()
    assert of_kernel.numpy().any()
