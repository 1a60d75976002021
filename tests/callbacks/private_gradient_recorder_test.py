"""Gradients that are kept, against explicit formulas."""

import keras
import numpy as np
import pytest

import tf_dpsub
from tf_dpsub import analysis, callbacks, optimizers, subspaces

_random = np.random.default_rng(0)
X = _random.normal(size=(12, 4)).astype("float32")
Y = _random.normal(size=(12, 1)).astype("float32")
CLIP = 0.7


@pytest.fixture
def plain():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(3, use_bias=False, name="hidden")(inputs)
    outputs = keras.layers.Dense(1, use_bias=False, name="last")(hidden)
    return keras.Model(inputs, outputs)


def private(
    plain, noise_multiplier=1.0, rate=0.1, microbatch_size=5, **compiled
):
    model = tf_dpsub.make_private(plain)
    optimizer = optimizers.DPSGD(
        keras.optimizers.SGD(rate),
        l2_norm_clip=CLIP,
        noise_multiplier=noise_multiplier,
        batch_size=12,
        microbatch_size=microbatch_size,
    )
    model.compile(optimizer, "mse", **compiled)
    return model


def mean_clipped(first, last):
    """Mean clipped gradient of (x A b - y)^2, with all examples."""
    rows = []
    for x, y in zip(X, Y):
        error = 2 * (x @ first @ last - y)
        row = [np.outer(x, error * last[:, 0]), np.outer(x @ first, error)]
        size = np.sqrt(sum(np.sum(part**2) for part in row))
        factor = min(1.0, CLIP * (1 - 1.25 * 2**-10) / size)
        rows.append([factor * part for part in row])
    return [np.mean(parts, 0) for parts in zip(*rows)]


def rows(store):
    return store.block(slice(None), slice(None))


@pytest.mark.parametrize("microbatch_size", [5, 12])
def test_keeps_the_mean_clipped_gradient_before_the_noise(
    plain, microbatch_size, tmp_path
):
    """It keeps that of every second step, at the weights of that step."""
    weights = []

    class Weights(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            weights.append([w.copy() for w in plain.get_weights()])

    model = private(plain, microbatch_size=microbatch_size)
    recorder = callbacks.PrivateGradientRecorder(tmp_path / "kept", every=2)
    # All examples are in each batch.
    model.fit(X, Y, epochs=4, verbose=0, callbacks=[Weights(), recorder])
    assert recorder.store.steps.tolist() == [1, 3]
    for row, step in zip(rows(recorder.store), (0, 2)):
        expected = np.concatenate(
            [part.ravel() for part in mean_clipped(*weights[step])]
        )
        np.testing.assert_allclose(row, expected, rtol=2e-3, atol=1e-5)
    assert np.abs(weights[1][0] - weights[0][0]).max() > 1e-3


def test_of_some_weights(plain, tmp_path):
    model = private(plain, rate=0.0)
    recorder = callbacks.PrivateGradientRecorder(tmp_path, weights=("last/",))
    model.fit(X, Y, verbose=0, callbacks=[recorder])
    assert [v["path"] for v in recorder.store.variables] == ["last/kernel"]
    expected = mean_clipped(*plain.get_weights())[1].ravel()
    np.testing.assert_allclose(rows(recorder.store)[0], expected, rtol=2e-3)


def test_nothing_is_kept_once_training_has_ended(plain, tmp_path):
    model = private(plain)
    model.fit(X, Y, verbose=0)
    assert "kept" not in model.privacy_statement(1e-5)
    recorder = callbacks.PrivateGradientRecorder(tmp_path / "kept")
    model.fit(X, Y, verbose=0, callbacks=[recorder])
    model.fit(X, Y, verbose=0)
    assert len(recorder.store) == 1
    statement = model.privacy_statement(1e-5)
    assert "ε does not cover the private gradients in kept" in statement
    # Another run goes on where it stopped.
    model.fit(X, Y, verbose=0, callbacks=[recorder])
    assert recorder.store.steps.tolist() == [2, 4]


@pytest.mark.parametrize("compiled", [{"steps_per_execution": 2}])
def test_blocks_of_steps(plain, tmp_path, compiled):
    model = private(plain, rate=0.0, **compiled)
    recorder = callbacks.PrivateGradientRecorder(tmp_path)
    model.fit(X, Y, steps_per_epoch=4, verbose=0, callbacks=[recorder])
    # The last step of each.
    assert recorder.store.steps.tolist() == [2, 4]


def test_says_when_the_folder_is_full(plain, tmp_path, caplog):
    caplog.set_level("WARNING", logger="absl")
    model = private(plain)
    recorder = callbacks.PrivateGradientRecorder(tmp_path, max_bytes=200)
    model.fit(X, Y, epochs=5, verbose=0, callbacks=[recorder])
    assert len(recorder.store) == 2
    assert model.ledger.steps == 5
    (line,) = [r.getMessage() for r in caplog.records if "No more" in r.msg]
    assert "with 2 of them, which may take 200 bytes, is full" in line


def test_says_when_the_disk_is_full(plain, tmp_path, caplog, monkeypatch):
    caplog.set_level("WARNING", logger="absl")

    def full(self, gradients, step):
        raise OSError(28, "The disk is full")

    model = private(plain)
    recorder = callbacks.PrivateGradientRecorder(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(analysis.GradientStore, "append", full)
        model.fit(X, Y, epochs=3, verbose=0, callbacks=[recorder])
    assert model.ledger.steps == 3
    (line,) = [r.getMessage() for r in caplog.records if "No more" in r.msg]
    assert "could not be written" in line and "disk is full" in line


class TestMistakes:
    def test_a_plain_model(self, plain, tmp_path):
        plain.compile("sgd", "mse")
        recorder = callbacks.PrivateGradientRecorder(tmp_path)
        with pytest.raises(ValueError, match="Expected a private model"):
            plain.fit(X, Y, verbose=0, callbacks=[recorder])

    def test_another_mechanism(self, plain, tmp_path):
        model = tf_dpsub.make_private(plain)
        model.compile(
            optimizers.GEP(
                keras.optimizers.SGD(0.1),
                subspace=subspaces.RandomSubspace(2),
                l2_norm_clip=1.0,
                residual_norm_clip=0.5,
                noise_multiplier=1.0,
                batch_size=4,
            ),
            "mse",
        )
        recorder = callbacks.PrivateGradientRecorder(tmp_path)
        with pytest.raises(ValueError, match="as DPSGD.*got GEP"):
            model.fit(X, Y, verbose=0, callbacks=[recorder])

    def test_no_such_weight(self, plain, tmp_path):
        recorder = callbacks.PrivateGradientRecorder(
            tmp_path, weights=("hidden", "query")
        )
        message = "got 'query'. Its weights are hidden/kernel, last/kernel"
        with pytest.raises(ValueError, match=message):
            private(plain).fit(X, Y, verbose=0, callbacks=[recorder])

    def test_gradients_of_another_model(self, plain, tmp_path):
        private(plain).fit(
            X,
            Y,
            verbose=0,
            callbacks=[callbacks.PrivateGradientRecorder(tmp_path)],
        )
        recorder = callbacks.PrivateGradientRecorder(
            tmp_path, weights=("last",)
        )
        with pytest.raises(ValueError, match="those of another"):
            private(plain).fit(X, Y, verbose=0, callbacks=[recorder])

    def test_no_steps(self, tmp_path):
        with pytest.raises(ValueError, match="every >= 1"):
            callbacks.PrivateGradientRecorder(tmp_path, every=0)
