"""An example's rows may not move at all when the other examples do.

Whatever is proved, or run one example at a time, must give bit for bit the
same figures for one example while all its companions turn into NaN or grow by
a factor of 1e9, and their labels, tokens and masks are swapped.
"""

import numpy as np
import pytest
import tensorflow as tf

from tests.gradients import hostile_layers, model_zoo

PROVED = [
    name
    for name, case in hostile_layers.CASES.items()
    if case.expected == hostile_layers.PROVED
]

MODELS = [
    "mlp",
    "paper_cnn",
    "resnet_group_normalization",
    "conv1d_causal_dilated",
    "conv2d",
    "conv2d_strided",
    "conv2d_dilated_same",
    "conv2d_transpose",
    "depthwise_conv2d",
    "separable_conv2d",
    "conv3d",
    "dense_on_series",
    "einsum_dense_split",
    "einsum_dense_over_time",
    "multi_head_attention_causal",
    "multi_head_attention_masked",
    "layer_normalization",
    "prelu",
    "embedding_mask_zero",
    "reversible_embedding",
    "lstm_unrolled",
    "lstm",
    "recurrent_masked",
    "conv_lstm",
    "lora_dense",
    "lora_conv2d",
    "shared_layer",
    "two_inputs_two_outputs",
    "mlp_mixed_bfloat16",
]

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


def taint(inputs, i, factor):
    """Inputs with every example but `i` changed."""

    def others(t):
        values = t.numpy()
        changed = (
            values * factor if t.dtype.is_floating else np.roll(values, 1, 0)
        )
        changed[i] = values[i]
        return tf.constant(changed)

    return tf.nest.map_structure(others, inputs)


def assert_untouched(problem, implementation="graph"):
    step = model_zoo.traced(problem, implementation)
    for i in range(problem.batch):
        only_i = np.eye(problem.batch, dtype="float32")[i]
        clean = step(problem.inputs, only_i)
        assert clean.valid[i]
        for factor in np.float32("nan"), np.float32(1e9):
            tainted = step(taint(problem.inputs, i, factor), only_i)
            assert tainted.valid[i]
            np.testing.assert_array_equal(
                tainted.sq_norms[i], clean.sq_norms[i]
            )
            np.testing.assert_array_equal(
                tainted.sq_norm_bounds[i], clean.sq_norm_bounds[i]
            )
            for a, b in zip(tainted.sq_norms_of, clean.sq_norms_of):
                np.testing.assert_array_equal(a[i], b[i])
            for a, b in zip(tainted.rows, clean.rows):
                np.testing.assert_array_equal(a[i], b[i])
            for a, b in zip(tainted.weighted_sum, clean.weighted_sum):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", MODELS)
def test_model_keeps_rows_apart(name):
    assert_untouched(model_zoo.ZOO[name].build())


@pytest.mark.parametrize("name", PROVED)
def test_hostile_layer_keeps_rows_apart(name):
    assert_untouched(hostile_layers.CASES[name].problem())


@pytest.mark.parametrize(("name", "implementation"), FALLBACKS)
def test_fallback_keeps_rows_apart(name, implementation):
    assert_untouched(model_zoo.ZOO[name].build(), implementation)


@pytest.mark.parametrize(("name", "implementation"), MIXING_FALLBACKS)
def test_fallback_unmixes_rows(name, implementation):
    problem = hostile_layers.CASES[name].problem()
    assert_untouched(problem, implementation)


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


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["mlp", "dense_on_series", "conv2d"])
def test_example_that_is_not_finite_contributes_nothing(
    name, implementation, value
):
    problem = model_zoo.ZOO[name].build()
    step = model_zoo.traced(problem, implementation)
    others = without_bad(problem.batch)
    spoilt = step(spoil(problem.inputs, value), np.ones_like(others))
    clean = step(problem.inputs, others)
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


@pytest.mark.parametrize("value", [1e15, 1e22, 1e30])
@pytest.mark.parametrize("name", ["mlp", "dense_on_series", "conv2d"])
def test_huge_entry_moves_sums_by_its_bound_at_most(name, value):
    problem = model_zoo.ZOO[name].build()
    step = model_zoo.traced(problem)
    inputs = spoil(problem.inputs, value)
    others = without_bad(problem.batch)
    spoilt, clean = step(inputs, others), step(problem.inputs, others)
    for a, b in zip(spoilt.weighted_sum, clean.weighted_sum):
        np.testing.assert_array_equal(a, b)
    alone = step(inputs, 1.0 - others)
    moved = sum(
        np.sum(np.square(t, dtype="float64")) for t in alone.weighted_sum
    )
    assert moved <= alone.sq_norm_bounds[BAD]
    assert alone.valid[BAD] or moved == 0.0
