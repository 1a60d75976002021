"""Terms of value zero are never computed, and gradients are as if they were."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_dpsub import gradients, layers
from tf_dpsub.gradients import zero_terms

BATCH, RANK = 4, 2


class _InFunction(keras.layers.Layer):
    """Calls a layer within a function, whose tensors are of its own graph."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def build(self, shape):
        self.layer.build(shape)

    def call(self, x, training=None):
        inner = lambda x: self.layer(x, training=training)  # noqa: E731
        return tf.function(inner, autograph=False)(x)


class _Twice(_InFunction):
    """Calls a layer, and then once more on what it returned."""

    def call(self, x, training=None):
        once = tf.tanh(self.layer(x, training=training))
        return self.layer(once, training=training)


MODELS = {
    "dense": ((6,), [layers.RGPDense(5, rank=RANK, activation="tanh")]),
    "two layers": (
        (3, 6),
        [
            layers.RGPDense(5, rank=RANK, activation="tanh"),
            layers.RGPEinsumDense("abc,cd->abd", (None, 4), rank=RANK),
        ],
    ),
    "convolution": ((5, 5, 2), [layers.RGPConv2D(4, 2, rank=RANK)]),
    "shared": ((6,), [_Twice(layers.RGPDense(6, rank=RANK))]),
    "in a function": ((6,), [_InFunction(layers.RGPDense(5, rank=RANK))]),
}


def _carriers(shape, parts):
    model = keras.Sequential([keras.Input(shape), *parts])
    rng = np.random.default_rng(0)
    variables = []
    for layer in model._flatten_layers():
        found = getattr(layer, "carriers", None)
        if found is not None:
            variables += [found.left, found.right]
    for variable in variables:
        variable.assign(rng.normal(size=variable.shape))
    return model, variables


def _losses(model):
    def loss_fn(x):
        outputs = model(x, training=True)
        return tf.reduce_sum(
            tf.reshape(outputs, [x.shape[0], -1]) ** 2, 1
        ), None

    return loss_fn


@pytest.mark.parametrize("case", MODELS)
def test_rows_are_those_of_the_sum(case):
    shape, parts = MODELS[case]
    model, variables = _carriers(shape, parts)
    x = np.random.default_rng(1).normal(size=(BATCH, *shape))

    def rows(implementation):
        @tf.function(autograph=False)
        def compute(x):
            found, _ = gradients.per_example_gradients(
                _losses(model), x, variables, implementation
            )
            return [found.rows(v) for v in variables], found.sq_norms()

        return tf.nest.flatten(compute(tf.constant(x, tf.float32)))

    if case == "in a function":  # of two operations: there is no proof
        with pytest.raises(gradients.Unproven):
            rows("graph")
        return
    for graph, one_by_one in zip(rows("graph"), rows("vectorized_map")):
        assert np.any(graph)
        np.testing.assert_allclose(graph, one_by_one, rtol=1e-4, atol=1e-4)


def test_the_product_is_never_computed():
    """It would be no number, and so would the sum."""
    model, (_, right) = _carriers(*MODELS["dense"])
    right.assign(np.full(right.shape, np.inf))

    def loss_fn(x):
        losses, _ = _losses(model)(x)
        return losses, losses

    @tf.function(autograph=False)
    def losses_and_norms(x):
        rows, losses = gradients.per_example_gradients(loss_fn, x, [right])
        return losses, rows.sq_norms()

    for values in losses_and_norms(tf.ones([BATCH, 6])):
        assert np.isfinite(values).all() and np.all(values > 0)


def test_an_output_that_no_loss_needs():
    model, variables = _carriers(*MODELS["dense"])

    def loss_fn(x):
        model(x, training=True)
        return tf.reduce_sum(x**2, 1), None

    @tf.function(autograph=False)
    def norms(x):
        rows, _ = gradients.per_example_gradients(loss_fn, x, variables)
        return rows.sq_norms()

    assert not np.any(norms(tf.ones([BATCH, 6])))


def test_terms_of_another_graph_are_added():
    @tf.function(autograph=False)
    def outer(x):
        inner = tf.function(lambda x: zero_terms.added(x, x), autograph=False)
        with zero_terms.left_out() as terms:
            outputs = inner(x)
            zero_terms.added(x, x)
        zero_terms.added(x, x)
        assert len(terms) == 1
        return outputs

    np.testing.assert_array_equal(outer(tf.ones(2)), np.ones(2))


def test_eager_terms_are_added():
    x = tf.Variable(2.0)
    with tf.GradientTape() as tape:
        y = zero_terms.added(3 * x, x**2)
    assert y == 6 and tape.gradient(y, x) == 3 + 2 * 2
