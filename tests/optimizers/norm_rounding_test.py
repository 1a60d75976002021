"""One example whose norm, or whose part in a subspace, rounding changes.

The examples below are made so that roundings of all additions add up, where
products are added up one after another, as some programs do.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dpsub
from tests.gradients import tensor_cores
from tf_dpsub import gradients, optimizers, subspaces
from tf_dpsub.data import given_batches
from tf_dpsub.gradients import per_example, precision
from tf_dpsub.gradients.graph import graph_gradients, sites, tied
from tf_dpsub.primitives import clipping
from tf_dpsub.subspaces import random_subspace

_ULP = 2.0**-23


def dpsgd(clip):
    return optimizers.DPSGD(
        "sgd",
        l2_norm_clip=clip,
        noise_multiplier=1.0,
        batch_size=4,
        microbatch_size=4,
    )


def clipped_sums(model, x, y):
    """Clipped sums of a batch by a private model."""
    batch = given_batches.padded(
        given_batches.named(x, y), model.microbatch_size
    )
    model.prepare_training(
        tf.nest.map_structure(tf.type_spec_from_value, batch)
    )
    model.optimizer.prepare()
    return model.training_step(batch)


def moved(model, x, y, sums):
    """The norm by which the first example moves sums of gradients.

    Args:
        model: Keras model, whose gradients are those of products with `y`.
        x, y: arrays.
        sums: function of `PerExampleGradients`, and of which rows count.
    """

    @tf.function(autograph=False)
    def summed(keep):
        rows, _ = gradients.per_example_gradients(
            lambda b: (
                tf.reduce_sum(model(b["x"]) * b["y"], list(range(1, y.ndim))),
                None,
            ),
            {"x": tf.constant(x), "y": tf.constant(y)},
            model.trainable_variables,
            "graph",
        )
        return sums(rows, keep)

    keep = np.ones(len(x), "float32")
    whole = summed(keep)
    keep[0] = 0
    differences = [
        np.ravel(np.subtract(a, b, dtype=np.float64))
        for a, b in zip(whole, summed(keep), strict=True)
    ]
    return np.linalg.norm(np.concatenate(differences))


def long_sums(monkeypatch):
    """Lets inner products be one float32 sum, however long."""
    in_parts = precision.matmul_in_parts

    def in_one_part(*args, **kwargs):
        return in_parts(*args, **kwargs | {"longest": 2**30})

    monkeypatch.setattr(precision, "matmul_in_parts", in_one_part)


@pytest.mark.parametrize("is_long", [False, True])
def test_norms_by_inner_products(is_long, monkeypatch):
    """Each addition rounds the squares down, or their product up."""
    monkeypatch.setattr(precision, "bilinear", tensor_cores.all_in_order)
    # It may have been traced by other tests.
    by_gram = sites._norms_by_gram.__wrapped__
    monkeypatch.setattr(sites, "_norms_by_gram", by_gram)
    if is_long:
        long_sums(monkeypatch)
        monkeypatch.setattr(precision, "gram_margin", lambda *_: 0.0)
    right = np.zeros([2, 1040])
    right[:, 0] = 1
    right[0, 1:-1] = np.sqrt(1.49 * _ULP)
    right[1, 1:-1] = np.sqrt(4.49 * _ULP)
    right[1] *= -1
    left = np.zeros([2, 7])
    left[:, 0] = 1
    # So that the norm is just not small enough for rows to be formed.
    left[0, 1] = np.sqrt(1.16 * 2.0**-10)
    layer = keras.layers.Dense(1040, use_bias=False)
    model = keras.Sequential([keras.Input((2, 7)), layer])
    x, y = (
        np.stack([side, 0 * side]).astype("float32") for side in (left, right)
    )
    share = 1e3 * moved(
        model, x, y, lambda *rows: clipping.clipped_sum(*rows, 1e-3, 4)
    )
    assert share > 1.05 if is_long else 0.9 < share <= 1


class Twice(keras.layers.Layer):
    """A square matrix, and its transpose, of two inputs."""

    def build(self, shape):
        self.matrix = self.add_weight(shape=(shape[-1], shape[-1]))

    def call(self, x):
        ops = keras.ops
        transposed = ops.matmul(x[:, 1], ops.transpose(self.matrix))
        return ops.stack([ops.matmul(x[:, 0], self.matrix), transposed], 1)


@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize("places", [1, 2])
def test_uses_of_a_weight_that_cancel(is_apart, places, monkeypatch):
    """Added up apart in float32, each is long: the others are lost in it.

    Those of several terms are, and factors hold each use to two clips.
    """
    monkeypatch.setattr(precision, "bilinear", tensor_cores.one_after_another)
    monkeypatch.setattr(sites, "KEPT_ROWS", 0)
    tensor_cores.merge_terms(monkeypatch)
    if is_apart:
        monkeypatch.setattr(
            graph_gradients.GraphGradients,
            "sq_levels",
            per_example.PerExampleGradients.sq_levels,
        )
        monkeypatch.setattr(
            tied.Tied,
            "weighted_sum",
            lambda self, c: tf.add_n(
                [v.pull_back(s.weighted_sum(c)) for s, v in self.uses]
            ),
        )
    count, half, side, power = 128, 63, 16, 256.0
    spacing = power * _ULP
    level = (power - 12 * spacing) / half
    # Rounding of norms leaves as much: rows that cancel are as long as that.
    lacking = 2.0**-18 + precision.gram_margin(side, side)
    clip = lacking**0.5 * 2 * level * side / (1 - places * 2.0**-9)
    x = np.zeros([count, 2, side], "float32")
    y = np.zeros_like(x)
    x[:, 0] = 1
    y[0, 0] = 10 * clip / side
    x[1 : 1 + half, 1] = level
    y[1 : 1 + half, 0] = level
    y[1 : 1 + half, 1] = -1
    y[1 + half :, 0] = -0.37 * spacing
    x, y = (np.zeros([places, *a.shape], "float32") + a for a in (x, y))
    x[1:] = y[1:] = 0  # Further places add nothing.
    x, y = (np.moveaxis(a, 0, 2) for a in (x, y))
    model = keras.Sequential([keras.Input(x.shape[1:]), Twice()])
    share = moved(
        model, x, y, lambda *rows: clipping.clipped_sum(*rows, clip, count)
    )
    share /= clip
    assert share > 1.01 if is_apart else 0.99 < share <= 1


class Often(keras.layers.Layer):
    """Sums `x_u W^T` over uses u, each by a transpose of its own."""

    def build(self, shape):
        self.matrix = self.add_weight(shape=(shape[-1], shape[-1]))

    def call(self, x):
        ops = keras.ops
        products = [
            ops.matmul(x[:, use], ops.transpose(self.matrix))
            for use in range(x.shape[1])
        ]
        return ops.stack(products, 1)


@pytest.mark.parametrize("is_of_squares", [False, True])
def test_many_uses_of_a_weight_that_round_alike(is_of_squares, monkeypatch):
    """All uses round the same coordinates: their lengths add up.

    Uses cancel in pairs, and half of the rows bring each sum to a power of two.
    The first row carries all of them across it, from where on the other half is
    lost, or is not. Squares of lengths that add up allow for 2 clips alone.
    """
    monkeypatch.setattr(precision, "bilinear", tensor_cores.one_after_another)
    monkeypatch.setattr(sites, "KEPT_ROWS", 0)
    tensor_cores.merge_terms(monkeypatch)
    uses, count, batch_size, side, places = 8, 256, 177, 16, 2
    if is_of_squares:
        monkeypatch.setattr(graph_gradients.GraphGradients, "merged_length", 2)
        monkeypatch.setattr(
            tied.Tied,
            "sq_length",
            lambda self, sq_norms: tf.add_n(self._sq_norms_of_uses),
        )
        monkeypatch.setattr(
            tied.Tied,
            "sq_level",
            lambda self, most, _: tf.add_n(
                [s.sq_level(most, s.sq_magnitudes()) for s in self._sites]
            ),
        )
    half = (count - 1) // 2
    # All uses of a row together are 1.95 clips long, as squares add up.
    clip = side * uses**0.5 / half / 1.95
    first = 0.99 * clip / side / uses
    signs = np.resize([1.0, -1.0], uses)
    x = np.ones([count, uses, places, side], "float32")
    y = np.zeros_like(x)
    y[0] = 10 * clip / side / uses / places
    # Just below the power where the sign is that of the first row, or above.
    level = (1 - signs * first / 2) / half / places
    y[1 : 1 + half] = (signs * level)[:, None, None]
    y[1 + half :] = (-signs * 0.499 * _ULP)[:, None, None]
    model = keras.Sequential([keras.Input(x.shape[1:]), Often()])
    share = moved(
        model,
        x,
        y,
        lambda *rows: clipping.clipped_sum(*rows, clip, batch_size),
    )
    share /= clip
    assert share > 1.003 if is_of_squares else 0.98 < share <= 1


@pytest.mark.parametrize("is_long", [False, True])
def test_coordinates_of_long_rows(is_long, monkeypatch):
    """Each addition rounds a coordinate up: the residual seems too short."""
    size, clip = 2**15, 1e-3
    basis = np.ones([size, 1], "float32")
    basis[-1] = 0
    optimizer = optimizers.GEP(
        "sgd",
        subspace=subspaces.FixedSubspace(basis, public=True),
        l2_norm_clip=1e9,
        residual_norm_clip=clip,
        noise_multiplier=1.0,
        batch_size=4,
        microbatch_size=4,
    )
    layer = keras.layers.Dense(1, use_bias=False)
    model = keras.Sequential([keras.Input((size,)), layer])
    private = tf_dpsub.make_private(model)
    private.compile(optimizer, loss="mse")
    clipped_sums(private, np.zeros([4, size]), np.zeros([4, 1]))
    monkeypatch.setattr(precision, "bilinear", tensor_cores.all_in_order)
    if is_long:
        long_sums(monkeypatch)
    (direction,) = optimizer.subspace.lift(tf.ones([1]))
    unit = abs(float(np.ravel(direction)[0]))
    row, total = np.ones(size, "float32"), np.float32(0)
    for k in range(size - 1):
        spacing = float(np.spacing(total))
        # Just more than a whole number and a half of spacings.
        if spacing > 2.0**-8 * unit * 2.0**-16:
            row[k] = (np.floor(unit / spacing) + 0.503) * spacing / unit
        total = np.float32(float(total) + float(row[k]) * unit)
    within = np.sum(row[:-1].astype(np.float64) ** 2)
    row[-1] = np.sqrt(2.0**-8 * within)
    x = np.stack([row, 0 * row])
    y = np.array([[1.0], [0.0]], "float32")
    share = moved(
        model,
        x,
        y,
        lambda *rows: optimizer.released_sums(optimizer.clipped_sums(*rows))[
            1:
        ],
    )
    share /= clip
    assert share > 1.02 if is_long else 0.8 < share <= 1


@pytest.mark.parametrize("units", [16, 64])
def test_xla_computes_rows_once(units):
    """It rounds `a * b - c` once or twice, and here all of it is rounding."""
    rng = np.random.default_rng(1)
    scale = 2.0**17
    a, b = scale * rng.uniform(1, 2, (2, units)).astype("float32")
    y = np.zeros([2, 3, units], "float32")
    y[0] = a, b, a * b
    x = np.zeros([2, 24], "float32")
    x[0] = rng.standard_normal(24)

    def loss(y, outputs):
        a, b, c = y[:, 0], y[:, 1], y[:, 2]
        rounding = a * b - c
        flipped = keras.ops.flip(rounding, -1)
        weights = flipped + rounding * (a * b) * scale**-2
        return keras.ops.sum(weights * outputs, -1)

    layer = keras.layers.Dense(units, use_bias=False)
    model = tf_dpsub.make_private(keras.Sequential([keras.Input((24,)), layer]))
    model.compile(dpsgd(1.0), loss=loss, jit_compile=True)
    (total,) = clipped_sums(model, x, y)
    # The second example's gradient is zero.
    assert np.linalg.norm(total) <= 1


def test_rows_that_are_not_finite_are_zero_in_xla():
    layer = keras.layers.Dense(8, use_bias=False)
    model = keras.Sequential([keras.Input((3,)), layer])
    model = tf_dpsub.make_private(model)
    model.compile(
        dpsgd(1.0),
        loss=lambda y, outputs: keras.ops.sum(y * outputs, -1),
        jit_compile=True,
    )
    x = np.ones([4, 3], "float32")
    y = np.ones([4, 8], "float32")
    y[1, 2], x[2, 0] = np.nan, np.inf
    (total,) = clipped_sums(model, x, y)
    assert np.isfinite(total).all()
    # Each of the two others has the norm of the clip.
    assert np.linalg.norm(total) == pytest.approx(2, rel=0.01)


class Compared(keras.layers.Layer):
    """Embeddings of numbers that the sign of a rounding error chooses."""

    def build(self, shape):
        count = shape[-1] + 1
        self.table = self.add_weight(shape=(count, 8), initializer="ones")

    def call(self, x):
        ops = keras.ops
        a, b, c = ops.unstack(x, axis=1)
        halves = [v[:, ::2] for v in (a, b)]
        product = ops.repeat(halves[0] * halves[1], 2, axis=1)
        numbers = ops.arange(1, x.shape[-1] + 1, dtype="int32")
        chosen = ops.where(ops.abs(product - c) > 2e-9, numbers, 0)
        return ops.take(self.table, chosen, axis=0)


def test_xla_looks_up_the_rows_whose_norms_are_taken():
    x = np.zeros([2, 3, 32], "float32")
    x[:, 0], x[:, 1] = 1.2345, 1.1
    x[:, 2] = x[:, 0] * x[:, 1]
    y = np.zeros([2, 32, 8], "float32")
    y[0] = 1
    model = keras.Sequential([keras.Input((3, 32)), Compared()])
    model = tf_dpsub.make_private(model)
    model.compile(
        dpsgd(1.0),
        loss=lambda y, outputs: keras.ops.sum(y * outputs, (1, 2)),
        jit_compile=True,
    )
    (total,) = clipped_sums(model, x, y)
    assert 0.99 < np.linalg.norm(total) <= 1


@pytest.mark.parametrize("stored", [2**30, 1])
def test_coordinates_in_random_directions_have_short_sums(stored, monkeypatch):
    """Kept directions, and those that are drawn again."""
    monkeypatch.setattr(random_subspace, "_STORED", stored)
    size = 3 * 2**13
    layer = keras.layers.Dense(1, use_bias=False)
    model = keras.Sequential([keras.Input((size,)), layer])
    private = tf_dpsub.make_private(model)
    optimizer = optimizers.GEP(
        "sgd",
        subspace=subspaces.RandomSubspace(rank=1, seed=0),
        l2_norm_clip=1.0,
        residual_norm_clip=1.0,
        noise_multiplier=1.0,
        batch_size=4,
        microbatch_size=4,
    )
    private.compile(optimizer, loss="mse")
    clipped_sums(private, np.zeros([4, size]), np.zeros([4, 1]))
    lengths = []
    bilinear = precision.bilinear

    def recorded(function, a, b, short=(False, False)):
        if a.dtype == tf.float32:
            axis = -2 if function.keywords.get("transpose_a") else -1
            lengths.append(a.shape[axis])
        return bilinear(function, a, b, short)

    monkeypatch.setattr(precision, "bilinear", recorded)
    x = np.ones([4, size], "float32")
    moved(
        model,
        x,
        np.ones([4, 1], "float32"),
        lambda rows, keep: [optimizer.subspace.project(rows)],
    )
    assert max(lengths) == 2**12


def test_a_norm_that_is_not_a_number_leaves_nothing():
    factors = clipping.clip_factors(tf.constant([4.0, np.nan, 0.0]), 1.0)
    np.testing.assert_allclose(factors, [0.5, 0, 1], rtol=2e-3)
