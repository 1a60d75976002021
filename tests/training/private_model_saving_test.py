"""Saving keeps the ledger, and the plain model needs nothing of us."""

import copy
import json
import subprocess
import sys
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dpsub
from tests.training.plain_models import (
    EXACT,
    EXAMPLES,
    X,
    Y,
    assert_same_weights,
    dpsgd,
    linear,
    mlp,
    private,
    twin,
)
from tf_dpsub import accounting


def trained(plain=None, optimizer=None, **compile_arguments):
    model = private(
        linear() if plain is None else plain,
        dpsgd() if optimizer is None else optimizer,
        **compile_arguments,
    )
    model.fit(X, Y, verbose=0)
    return model


@pytest.fixture(name="once_trained", scope="module")
def _once_trained():
    """A model of five steps that no test changes."""
    return trained()


def config_of(model):
    """As it is in a file, where tuples are lists."""
    return json.loads(json.dumps(model.get_config()))


class TestPlainFiles:
    """Where the plain model is meant, it is named or does it."""

    def test_export(self, once_trained, tmp_path):
        model = once_trained
        model.export(tmp_path / "exported", verbose=False)
        loaded = tf.saved_model.load(tmp_path / "exported")
        np.testing.assert_allclose(loaded.serve(X), model.model(X), rtol=1e-5)

    def test_weights_of_a_private_model(self, tmp_path, caplog):
        model = trained()
        model.save_weights(tmp_path / "private.weights.h5")
        assert "model.model.save_weights" in caplog.text
        caplog.clear()
        keeps = keras.callbacks.ModelCheckpoint(
            tmp_path / "kept.weights.h5", save_weights_only=True
        )
        model.fit(X, Y, verbose=0, callbacks=[keeps])
        assert "save_weights" not in caplog.text

    def test_weights_of_a_plain_model(self, once_trained, tmp_path):
        model = once_trained
        model.model.save_weights(tmp_path / "plain.weights.h5")
        fresh = tf_dpsub.make_private(linear())
        with pytest.raises(ValueError, match=r"model\.model\.load_weights"):
            fresh.load_weights(tmp_path / "plain.weights.h5")
        fresh.model.load_weights(tmp_path / "plain.weights.h5")
        assert_same_weights(fresh.model, model.model)


class TestArchive:
    def test_round_trip(self, tmp_path):
        model = trained(
            mlp(),
            dpsgd(keras.optimizers.Adam(0.05), microbatch_size=3, seed=1),
            metrics=["accuracy"],
        )
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        assert type(loaded) is tf_dpsub.PrivateModel
        assert type(loaded.model) is type(model.model)
        assert loaded.name == model.name
        assert config_of(loaded) == config_of(model)
        assert loaded.optimizer.get_config() == model.optimizer.get_config()
        assert loaded.ledger.entries == model.ledger.entries
        assert loaded.ledger.steps == 5
        assert loaded.epsilon(1e-5) == model.epsilon(1e-5)
        np.testing.assert_array_equal(
            loaded.predict(X, verbose=0), model.predict(X, verbose=0)
        )
        assert loaded.evaluate(X, Y, verbose=0) == model.evaluate(
            X, Y, verbose=0
        )

    def test_training_goes_on_as_if_nothing_had_happened(self, tmp_path):
        model = trained(
            optimizer=dpsgd(
                keras.optimizers.Adam(0.05), batch_size=EXAMPLES, **EXACT
            )
        )
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        for each in (model, loaded):
            each.fit(X, Y, epochs=2, verbose=0)
            assert each.ledger.steps == int(each.optimizer.iterations) == 3
        assert_same_weights(loaded.model, model.model, tolerance=1e-6)

    def test_before_compiling(self, tmp_path):
        model = tf_dpsub.make_private(linear())
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        assert loaded.ledger.steps == 0
        assert_same_weights(loaded, model)

    def test_copies_count_for_themselves(self, once_trained):
        copied = copy.deepcopy(once_trained)
        copied.fit(X, Y, verbose=0)
        assert (once_trained.ledger.steps, copied.ledger.steps) == (5, 10)


def test_config_round_trip():
    model = private(mlp(), dpsgd())
    again = tf_dpsub.PrivateModel.from_config(config_of(model))
    assert config_of(again) == config_of(model)
    assert [w.shape for w in again.get_weights()] == [
        w.shape for w in model.get_weights()
    ]
    assert again.ledger.steps == 0


class TestWeights:
    def test_keep_the_ledger(self, once_trained, tmp_path):
        model = once_trained
        model.save_weights(tmp_path / "model.weights.h5")
        fresh = private(linear(), dpsgd())
        for _ in range(2):
            fresh.load_weights(tmp_path / "model.weights.h5")
            assert_same_weights(fresh, model)
            assert fresh.ledger.entries == model.ledger.entries

    def test_loading_never_shortens(self, tmp_path):
        model = trained()
        model.save_weights(tmp_path / "early.weights.h5")
        model.fit(X, Y, epochs=2, verbose=0)
        before = model.epsilon(1e-5)
        model.load_weights(tmp_path / "early.weights.h5")
        assert model.ledger.steps == 15
        assert model.epsilon(1e-5) == before

    def test_loading_adds_what_others_spent(self, once_trained, tmp_path):
        once_trained.save_weights(tmp_path / "other.weights.h5")
        model = trained()
        model.load_weights(tmp_path / "other.weights.h5")
        assert model.ledger.steps == 10

    def test_of_the_plain_model_leave_the_ledger(self, tmp_path):
        model = trained()
        linear().save_weights(tmp_path / "plain.weights.h5")
        model.model.load_weights(tmp_path / "plain.weights.h5")
        assert model.ledger.steps == 5

    def test_best_weights_of_a_callback_keep_the_steps(self):
        stop = keras.callbacks.EarlyStopping(
            "val_loss", patience=0, mode="max", restore_best_weights=True
        )
        model = private(linear(), dpsgd())
        model.fit(
            X,
            Y,
            epochs=4,
            validation_data=(X + 1, Y),
            validation_data_is_public=True,
            callbacks=[stop],
            verbose=0,
        )
        assert model.ledger.steps == int(model.optimizer.iterations) > 0


def run(program, folder):
    """Output of a program in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    ).stdout


@pytest.mark.slow
def test_loads_in_a_process_that_has_imported_us_first(once_trained, tmp_path):
    once_trained.save(tmp_path / "private.keras")
    program = """
import tf_dpsub, keras
tf_dpsub.make_private
model = keras.models.load_model("private.keras")
print(model.ledger.steps)
"""
    assert int(run(program, tmp_path)) == once_trained.ledger.steps > 0


class TestPlainModel:
    def test_file_does_not_mention_us(self, once_trained, tmp_path):
        model = once_trained
        model.model.save(tmp_path / "plain.keras")
        with zipfile.ZipFile(tmp_path / "plain.keras") as archive:
            for name in archive.namelist():
                assert b"dpsub" not in archive.read(name)
        loaded = keras.models.load_model(tmp_path / "plain.keras")
        assert type(loaded) is keras.Sequential
        assert_same_weights(loaded, model.model, tolerance=0)

    @pytest.mark.slow
    def test_loads_without_us_and_a_private_one_afterwards(
        self, once_trained, tmp_path
    ):
        """Keras may be imported first, and be used."""
        model = once_trained
        model.model.save(tmp_path / "plain.keras")
        model.save(tmp_path / "private.keras")
        np.save(tmp_path / "x.npy", X)
        program = """
import sys
sys.modules["tf_dpsub"] = None
import keras, numpy as np
model = keras.models.load_model("plain.keras")
np.save("y.npy", model.predict(np.load("x.npy"), verbose=0))
del sys.modules["tf_dpsub"]
import tf_dpsub
print(keras.models.load_model("private.keras").ledger.steps)
"""
        assert int(run(program, tmp_path)) == model.ledger.steps > 0
        np.testing.assert_array_equal(
            np.load(tmp_path / "y.npy"), model.predict(X, verbose=0)
        )


class TestLedgerFile:
    def steps_on_disk(self, path):
        return accounting.PrivacyLedger(path).steps

    def test_is_ahead_of_every_step(self, tmp_path):
        path = tmp_path / "ledger.json"
        ahead = []

        class Compare(keras.callbacks.Callback):
            def on_train_batch_end(callback, batch, logs=None):
                taken = int(callback.model.optimizer.iterations)
                ahead.append(self.steps_on_disk(path) - taken)

        model = tf_dpsub.make_private(linear(), ledger_path=path)
        model.compile(dpsgd(), loss="mse")
        model.fit(X, X[:, :3], callbacks=[Compare()], epochs=2, verbose=0)
        assert len(ahead) == 10
        assert min(ahead) >= 0
        assert self.steps_on_disk(path) == model.ledger.steps == 10

    def test_counts_a_crash_as_spent(self, tmp_path):
        path = tmp_path / "ledger.json"
        plain = linear()
        model = tf_dpsub.make_private(plain, ledger_path=path)
        model.compile(dpsgd(), loss="mse")
        # What the process would leave, if it died here.
        left = []
        read = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: left.append(
                path.read_bytes()
            )
        )
        model.fit(X, X[:, :3], callbacks=[read], verbose=0)
        path.write_bytes(left[2])
        again = tf_dpsub.make_private(twin(plain), ledger_path=path)
        assert again.ledger.steps >= 3
        spent = again.ledger.steps
        again.compile(dpsgd(), loss="mse")
        again.fit(X, X[:, :3], verbose=0)
        assert again.ledger.steps == spent + 5

    def test_is_continued(self, tmp_path):
        path = tmp_path / "ledger.json"
        for expected in (1, 2):
            model = tf_dpsub.make_private(linear(), ledger_path=path)
            model.compile(dpsgd(), loss="mse")
            model.train_on_batch(X[:4], X[:4, :3])
            assert self.steps_on_disk(path) == model.ledger.steps == expected
