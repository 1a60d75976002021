"""Residuals of pairs of directions are free of them before they are summed."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dpsub
from tests.gradients import tensor_cores
from tf_dpsub.gradients.graph import sites
from tf_dpsub.optimizers import GEP
from tf_dpsub.subspaces import KroneckerSubspace, residuals

layers = keras.layers

BATCH, TERMS, INPUTS, OUTPUTS = 6, 3, 20, 24
_random = np.random.default_rng(0)
X = _random.normal(size=(BATCH, TERMS, INPUTS)).astype("float32")
PUBLIC = _random.normal(size=(5, TERMS, INPUTS)).astype("float32")


def private(per_example="auto", inner="float32", **arguments):
    """A kernel whose vectors are known, and others of all kinds."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((TERMS, INPUTS))
    x = layers.Dense(OUTPUTS, name="known", dtype=inner)(inputs)
    x = layers.EinsumDense("btd,ed->bte", (None, 16), name="transposed")(x)
    x = layers.Conv1D(18, 2, name="filter")(x)
    plain = keras.Model(inputs, layers.GlobalAveragePooling1D()(x))
    model = tf_dpsub.make_private(plain)
    defaults = {
        "subspace": KroneckerSubspace(
            PUBLIC, np.zeros(5, "int32"), rank=9, side_rank=4, seed=0
        ),
        "l2_norm_clip": 1.0,
        "residual_norm_clip": 1.0,
        "noise_multiplier": 0.0,
        "batch_size": BATCH,
        "microbatch_size": BATCH,
        "per_example": per_example,
    }
    model.compile(
        GEP("sgd", **{**defaults, **arguments}),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.prepare_training(
        {
            "x": tf.TensorSpec(X.shape, tf.float32),
            "y": tf.TensorSpec([BATCH], tf.int32),
            "real": tf.TensorSpec([BATCH], tf.float32),
        }
    )
    model.optimizer.public_state.begin_run(10)
    model.optimizer.prepare()
    return model


def sums_and_rows(model, c, used=None):
    """Sums of residuals as they are released, rows, and the kind of sums."""
    subspace = model.optimizer.subspace
    kinds = []

    @tf.function(autograph=False)
    def found(x, y):
        batch = {"x": x, "y": y, "real": tf.ones([BATCH])}
        rows, _ = model.training_step.per_example_gradients(batch)
        coordinates = subspace.project(rows)
        if used is not None:
            coordinates *= used
        parts = subspace._pairs.residuals(rows, coordinates, used)
        kinds.append(parts)
        inside, *whole = parts.weighted_sum(c)
        sums = [a - b for a, b in zip(whole, subspace.lift(inside))]
        return sums, [rows.rows(v) for v in rows.variables], coordinates

    labels = tf.zeros([BATCH], tf.int32)
    sums, rows, coordinates = found(tf.constant(X), labels)
    sums = np.concatenate([np.ravel(s) for s in sums])
    rows = np.concatenate([np.reshape(r, (BATCH, -1)) for r in rows], 1)
    inside = [
        np.concatenate([np.ravel(t) for t in subspace.lift(w)])
        for w in tf.cast(coordinates, tf.float64)
    ]
    return sums, rows.astype("float64") - inside, kinds[0]


class TestSums:
    @pytest.fixture(autouse=True)
    def _rows_are_not_kept(self, monkeypatch):
        monkeypatch.setattr(sites, "KEPT_ROWS", 0)

    @pytest.mark.parametrize("used", [None, [1.0, 0.0, 1.0] * 3])
    def test_are_those_of_rows_without_what_is_chosen(self, used):
        """Also where not all directions are in use."""
        if used is not None:
            used = tf.constant(used)
        c = np.linspace(0.1, 1, BATCH, dtype="float32")
        sums, rows, parts = sums_and_rows(private(), tf.constant(c), used)
        assert isinstance(parts, residuals.KroneckerResiduals)
        # A dense kernel, and one whose matrix is transposed.
        assert len(parts._kernels) == 2
        expected = c.astype("float64") @ rows
        scale = np.linalg.norm(rows, axis=1).max()
        assert np.linalg.norm(sums - expected) <= 2.0**-20 * scale

    @pytest.mark.slow
    def test_of_large_batches_are_float64(self):
        c = tf.ones([BATCH], tf.float64)
        sums, rows, _ = sums_and_rows(private(), c)
        scale = np.linalg.norm(rows, axis=1).max()
        # Vectors are float32, of which the basis is taken away.
        assert np.linalg.norm(sums - rows.sum(0)) <= 2.0**-20 * scale

    @pytest.mark.slow
    def test_are_differences_where_vectors_are_not_known(self, monkeypatch):
        c = tf.ones([BATCH])
        model = private("vectorized_map")
        sums, rows, parts = sums_and_rows(model, c)
        assert isinstance(parts, residuals.Residuals)
        scale = np.linalg.norm(rows, axis=1).max()
        assert np.linalg.norm(sums - rows.sum(0)) <= 2.0**-20 * scale

    def test_are_differences_where_products_are_narrowed(self, monkeypatch):
        """A vector that is rounded later would no longer be free of a basis."""
        model = private()
        tensor_cores.narrow(monkeypatch)
        _, _, parts = sums_and_rows(model, tf.ones([BATCH]))
        assert isinstance(parts, residuals.Residuals)


def test_rounding_has_a_margin():
    """Vectors of one example that cancel: what they lose may not cancel."""
    x = np.repeat(_random.normal(size=(4, 1, 64)), 64, axis=1)
    d = _random.normal(size=(4, 64, 32))
    d[:, 1::2] = -d[:, ::2]
    left, right = (
        np.linalg.qr(_random.normal(size=(n, 16)))[0] for n in (64, 32)
    )
    x, d, left, right = (
        tf.constant(a, tf.float32) for a in (x, d, left, right)
    )
    chosen = tf.ones([16, 16])
    for i, c in enumerate(tf.eye(4)):
        found = residuals._sum_of_kernel(c, x, d, left, right, chosen)
        magnitude = np.sum(x[i] ** 2) * np.sum(d[i] ** 2)
        assert np.linalg.norm(found) ** 2 <= residuals._MARGIN / 4 * magnitude
