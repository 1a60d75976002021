"""Callbacks that record properties of gradients."""

import csv

import keras
import numpy as np
import pytest

import tf_dpsub
from tf_dpsub import callbacks, optimizers, subspaces

_SIZE = 4


def data(examples=12, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(examples, _SIZE)).astype(np.float32)
    return x, (x[:, :1] @ np.ones((1, 1), np.float32))


@pytest.fixture
def plain():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [keras.Input((_SIZE,)), keras.layers.Dense(1, use_bias=False)]
    )


def compiled(plain, subspace=None):
    model = tf_dpsub.make_private(plain)
    arguments = {"l2_norm_clip": 1.0, "noise_multiplier": 1.0, "batch_size": 4}
    inner = keras.optimizers.SGD(0.0)
    if subspace is None:
        optimizer = optimizers.DPSGD(inner, **arguments)
    else:
        optimizer = optimizers.ProjectedDPSGD(
            inner, subspace=subspace, **arguments
        )
    model.compile(optimizer, "mse")
    return model


def gradients(plain, x, y):
    """Rows of the gradient of (x w - y)^2."""
    w = plain.trainable_variables[0].numpy()
    return 2 * (x @ w - y) * x


def read(file):
    with file.open() as table:
        return list(csv.DictReader(table))


class TestProjectionErrorRecorder:
    def test_is_the_energy_outside(self, plain, tmp_path):
        basis = np.eye(_SIZE, dtype=np.float32)[:, :2]
        model = compiled(plain, subspaces.FixedSubspace(basis, public=True))
        x, y = data(seed=1)
        file = tmp_path / "error.csv"
        per_example = gradients(plain, x, y)
        outside = np.sum(per_example[:, 2:] ** 2) / np.sum(per_example**2)
        # A run that is resumed replaces its later epochs.
        for first in (0, 1):
            recorder = callbacks.ProjectionErrorRecorder(x, y, file)
            model.fit(
                *data(),
                epochs=3,
                initial_epoch=first,
                verbose=0,
                callbacks=[recorder],
            )
            rows = read(file)
            epochs = [row["epoch"] for row in rows]
            assert epochs == ["1", "1", "2", "2", "3", "3"]
            assert [row["group"] for row in rows] == [
                plain.layers[0].name,
                "all",
            ] * 3
            for row in rows:
                np.testing.assert_allclose(
                    float(row["error"]), outside, rtol=1e-5
                )

    def test_needs_a_subspace(self, plain, tmp_path):
        recorder = callbacks.ProjectionErrorRecorder(
            *data(seed=1), tmp_path / "e"
        )
        with pytest.raises(ValueError, match="with a subspace"):
            compiled(plain).fit(*data(), verbose=0, callbacks=[recorder])

    def test_needs_a_private_model(self, plain, tmp_path):
        plain.compile("sgd", "mse")
        recorder = callbacks.ProjectionErrorRecorder(*data(), tmp_path / "e")
        with pytest.raises(ValueError, match="private model"):
            plain.fit(*data(), verbose=0, callbacks=[recorder])


class TestSpectrumRecorder:
    def test_eigenvalues_of_the_second_moment(self, plain, tmp_path):
        x, y = data(seed=1)
        file = tmp_path / "spectrum.npz"
        recorder = callbacks.SpectrumRecorder(
            x, y, file, eigenvalues=3, epochs=[1, 3]
        )
        model = compiled(plain)
        model.fit(*data(), epochs=3, verbose=0, callbacks=[recorder])
        per_example = gradients(plain, x, y)
        expected = np.linalg.svd(per_example, compute_uv=False)[:3] ** 2 / len(
            x
        )
        with np.load(file) as written:
            assert written["epochs"].tolist() == [1, 3]
            for row in written["eigenvalues"]:
                np.testing.assert_allclose(row, expected, rtol=1e-4)
        # Gradients are public: the statement is left alone.
        assert "spectra" not in model.privacy_statement(1e-5)

    def test_refuses_private_examples(self, plain, tmp_path):
        recorder = callbacks.SpectrumRecorder(*data(), tmp_path / "s.npz")
        with pytest.raises(ValueError, match="Expected public examples"):
            compiled(plain).fit(*data(), verbose=0, callbacks=[recorder])

    def test_examples_are_worked_through_in_chunks(self, plain, tmp_path):
        sizes = 250, 251, 500
        recorders = [
            callbacks.SpectrumRecorder(
                *data(size, seed=1), tmp_path / f"{size}.npz", eigenvalues=2
            )
            for size in sizes
        ]
        compiled(plain).fit(*data(), verbose=0, callbacks=recorders)
        for size in sizes:
            per_example = gradients(plain, *data(size, seed=1))
            expected = (
                np.linalg.svd(per_example, compute_uv=False)[:2] ** 2 / size
            )
            with np.load(tmp_path / f"{size}.npz") as written:
                np.testing.assert_allclose(
                    written["eigenvalues"][0], expected, rtol=1e-4
                )

    def test_needs_two_examples(self, tmp_path):
        with pytest.raises(ValueError, match="two examples"):
            callbacks.SpectrumRecorder(*data(1), tmp_path / "s.npz")

    def test_of_private_gradients_says_so(self, plain, tmp_path):
        model = compiled(plain)
        recorder = callbacks.PrivateSpectrumRecorder(
            *data(), tmp_path / "private.npz"
        )
        model.fit(*data(), verbose=0, callbacks=[recorder])
        statement = " ".join(model.privacy_statement(1e-5).split())
        assert (
            "not cover the spectra of private gradients in private.npz"
            in statement
        )
