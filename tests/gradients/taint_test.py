"""Fallbacks keep rows apart; what is not finite, or huge, leaves no trace."""

import numpy as np
import pytest
import tensorflow as tf

from tests.gradients import hostile_layers, model_zoo
from tests.gradients.taint import assert_untouched

# What is not proved runs one example at a time, which must be as tight.
FALLBACKS = [
    ("mlp", "vectorized_map"),
    ("conv2d", "vectorized_map"),
    ("mlp", "map_fn"),
    ("lstm", "map_fn"),
]
MIXING_FALLBACKS = [
    ("batch_mean", "vectorized_map"),
    ("batch_softmax", "map_fn"),
    ("pair_attention", "map_fn"),
    ("losses_divided_by_sum", "vectorized_map"),
]


@pytest.mark.parametrize(("name", "implementation"), FALLBACKS)
def test_fallback_keeps_rows_apart(name, implementation):
    problem = model_zoo.ZOO[name].build()
    assert_untouched(problem, model_zoo.traced(problem, implementation))


@pytest.mark.parametrize(("name", "implementation"), MIXING_FALLBACKS)
def test_fallback_unmixes_rows(name, implementation):
    problem = hostile_layers.CASES[name].problem()
    assert_untouched(problem, model_zoo.traced(problem, implementation))


IMPLEMENTATIONS = ["graph", "vectorized_map", "map_fn"]
BAD = 2  # the example whose entry is replaced


def spoil(inputs, value):
    """Inputs with one entry of one example replaced."""
    x, y = inputs
    spoilt = x.numpy()
    spoilt[BAD].flat[0] = value
    return tf.constant(spoilt), y


def without_bad(batch):
    ones = np.ones(batch, "float32")
    ones[BAD] = 0.0
    return ones


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["mlp", "dense_on_series", "conv2d"])
def test_example_that_is_not_finite_contributes_nothing(name, implementation):
    problem = model_zoo.ZOO[name].build()
    step = model_zoo.traced(problem, implementation)
    others = without_bad(problem.batch)
    clean = step(problem.inputs, others)
    for value in (np.nan, np.inf, -np.inf):
        spoilt = step(spoil(problem.inputs, value), np.ones_like(others))
        np.testing.assert_array_equal(spoilt.valid, others.astype(bool))
        for a, b in zip(spoilt.weighted_sum, clean.weighted_sum):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("length", [1, 7])
def test_example_too_large_to_square_contributes_nothing(
    length, implementation
):
    rng = np.random.default_rng(0)
    kernel = tf.Variable(rng.normal(size=(4, 3)).astype("float32"))
    x = rng.normal(size=(5, length, 4)).astype("float32")
    x[BAD, 0] = 1e22
    # The wrong label, or else the loss would have no gradient.
    y = np.argmin(x.mean(1) @ kernel.numpy(), -1)

    def loss_fn(inputs):
        x, y = inputs
        logits = tf.reduce_mean(x @ kernel, 1)
        return model_zoo.cross_entropy(y, logits), None

    inputs = tf.constant(x), tf.constant(y)
    problem = model_zoo.Problem(loss_fn, inputs, [kernel])
    others = without_bad(problem.batch)
    step = model_zoo.traced(problem, implementation)
    measured = step(inputs, np.ones_like(others))
    np.testing.assert_array_equal(measured.valid, others.astype(bool))
    np.testing.assert_array_equal(
        measured.weighted_sum[0], step(inputs, others).weighted_sum[0]
    )


@pytest.mark.parametrize("name", ["mlp", "dense_on_series", "conv2d"])
def test_huge_entry_moves_sums_by_its_bound_at_most(name):
    problem = model_zoo.ZOO[name].build()
    step = model_zoo.traced(problem)
    others = without_bad(problem.batch)
    clean = step(problem.inputs, others)
    for value in (1e15, 1e22, 1e30):
        inputs = spoil(problem.inputs, value)
        spoilt = step(inputs, others)
        for a, b in zip(spoilt.weighted_sum, clean.weighted_sum):
            np.testing.assert_array_equal(a, b)
        alone = step(inputs, 1.0 - others)
        moved = sum(
            np.sum(np.square(t, dtype="float64")) for t in alone.weighted_sum
        )
        assert moved <= alone.sq_norm_bounds[BAD]
        assert alone.valid[BAD] or moved == 0.0
