"""Shares of gradients that carriers miss, against known matrices."""

import csv

import keras
import numpy as np
import pytest

import tf_dpsub
from tf_dpsub import callbacks, layers
from tf_dpsub.analysis import projection_residual, stable_rank

RANK = 2
_random = np.random.default_rng(0)
X = _random.normal(size=(30, 8)).astype("float32")
Y = _random.integers(0, 3, 30)
PUBLIC = _random.normal(size=(600, 8)).astype("float32")
LABELS = _random.integers(0, 3, 600)


def orthonormal(n, k):
    return np.linalg.qr(_random.normal(size=(n, k)))[0]


def private(reparametrized=False):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((8,))
    hidden = keras.layers.Dense(6, "tanh", name="hidden")(inputs)
    plain = keras.Model(inputs, keras.layers.Dense(3, name="logits")(hidden))
    arguments = {"l2_norm_clip": 1.0, "noise_multiplier": 0.5, "batch_size": 10}
    inner = keras.optimizers.SGD(0.3)
    if reparametrized:
        layers.reparametrize(plain, RANK)
        optimizer = tf_dpsub.optimizers.RGP(inner, **arguments)
    else:
        optimizer = tf_dpsub.optimizers.DPSGD(inner, **arguments)
    model = tf_dpsub.make_private(plain)
    model.compile(
        optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return model


def read(file):
    with file.open() as table:
        return list(csv.DictReader(table))


@pytest.mark.parametrize("reparametrized", [False, True])
def test_follows_the_weights(tmp_path, reparametrized):
    """Examples come in chunks, whatever batches the optimizer has."""
    model = private(reparametrized)
    first = model.model.layers[1].kernel.numpy()
    file = tmp_path / "residual.csv"
    recorder = callbacks.ProjectionResidualRecorder(
        PUBLIC, LABELS, file, rank=RANK
    )
    model.fit(X, Y, epochs=2, verbose=0, callbacks=[recorder])
    kernel, bias, *_ = (v.numpy() for v in model.trainable_variables)
    logits, shift = (v.numpy() for v in model.trainable_variables[2:])
    hidden = np.tanh(PUBLIC @ kernel + bias)
    shares = np.exp(hidden @ logits + shift)
    shares /= shares.sum(1, keepdims=True)
    delta = (shares - np.eye(3)[LABELS]) @ logits.T * (1 - hidden**2)
    gradient = PUBLIC.T.astype("float64") @ delta / len(PUBLIC)
    rows = read(file)
    assert [(r["epoch"], r["kernel"]) for r in rows] == [
        (epoch, f"{name}/kernel")
        for epoch in ("1", "2")
        for name in ("hidden", "logits")
    ]
    history = kernel.astype("float64") - first
    expected = {
        "historical": projection_residual(gradient, history, RANK),
        "self": projection_residual(gradient, gradient, RANK),
        "stable_rank": stable_rank(gradient),
        "stable_rank_of_history": stable_rank(history),
    }
    for name, value in expected.items():
        assert float(rows[2][name]) == pytest.approx(value, abs=1e-4)
    assert float(rows[2]["self"]) <= float(rows[2]["historical"]) + 1e-9


def test_a_resumed_run_keeps_its_history(tmp_path):
    file = tmp_path / "residual.csv"

    def recorder():
        return callbacks.ProjectionResidualRecorder(
            PUBLIC, LABELS, file, rank=RANK
        )

    whole = private()
    first = whole.model.layers[1].kernel.numpy()
    narrow_file = tmp_path / "narrow.csv"
    narrow = callbacks.ProjectionResidualRecorder(
        PUBLIC, LABELS, narrow_file, rank=3
    )
    whole.fit(X, Y, verbose=0, callbacks=[recorder(), narrow])
    whole.fit(
        X, Y, initial_epoch=1, epochs=2, verbose=0, callbacks=[recorder()]
    )
    rows = read(file)
    history = whole.model.layers[1].kernel.numpy().astype("float64") - first
    assert [row["epoch"] for row in rows] == ["1", "1", "2", "2"]
    value = float(rows[2]["stable_rank_of_history"])
    assert value == pytest.approx(stable_rank(history), rel=1e-4)
    # Kernels that are too narrow for a rank are left out.
    assert {row["kernel"] for row in read(narrow_file)} == {"hidden/kernel"}


def test_biases_of_heads_are_left_out(tmp_path):
    """They have two axes, and no carriers."""
    inputs = keras.Input((4, 8))
    attention = keras.layers.MultiHeadAttention(4, 3, name="attention")
    outputs = keras.layers.Flatten()(attention(inputs, inputs))
    model = tf_dpsub.make_private(
        keras.Model(inputs, keras.layers.Dense(3)(outputs))
    )
    model.compile(
        tf_dpsub.optimizers.DPSGD(
            keras.optimizers.SGD(0.1),
            l2_norm_clip=1.0,
            noise_multiplier=1.0,
            batch_size=10,
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    file = tmp_path / "residual.csv"
    generator = np.random.default_rng(2)
    x, public = (generator.normal(size=(n, 4, 8)) for n in (30, 20))
    recorder = callbacks.ProjectionResidualRecorder(
        public.astype("float32"), np.arange(20) % 3, file, rank=RANK
    )
    model.fit(x.astype("float32"), Y, verbose=0, callbacks=[recorder])
    assert {row["kernel"].rpartition("/")[2] for row in read(file)} == {
        "kernel"
    }
    assert sum("attention" in row["kernel"] for row in read(file)) == 4


def test_private_examples_raise(tmp_path):
    recorder = callbacks.ProjectionResidualRecorder(
        X[:5], Y[:5], tmp_path / "residual.csv"
    )
    with pytest.raises(ValueError, match="Expected public examples"):
        private().fit(X, Y, verbose=0, callbacks=[recorder])
