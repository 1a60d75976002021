"""The moving average of the weights is what is evaluated and saved."""

import keras
import numpy as np
import pytest

import tf_dpsub
from tests.training.plain_models import EXAMPLES, X, Y, dpsgd, linear, private
from tf_dpsub.callbacks import SwapEMAWeights

MOMENTUM = 0.9
CHANGED = "outside of private training"


def averaging(**arguments):
    inner = keras.optimizers.SGD(0.3, use_ema=True, ema_momentum=MOMENTUM)
    optimizer = dpsgd(inner, **{"batch_size": EXAMPLES, **arguments})
    return private(linear(), optimizer, metrics=["accuracy"])


class Record(keras.callbacks.Callback):
    """Keeps the weights after each step, and those that are validated."""

    def __init__(self):
        super().__init__()
        self.trained, self.validated = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.trained.append(self.model.get_weights())

    def on_test_batch_begin(self, batch, logs=None):
        self.validated.append(self.model.get_weights())


def averages(trained, warmup):
    """The average after each step, in float64."""
    average = [w.astype(float) for w in trained[0]]
    every = [average]
    for t, weights in enumerate(trained[1:], 1):
        momentum = min(MOMENTUM, (1 + t) / (10 + t)) if warmup else MOMENTUM
        average = [
            momentum * a + (1 - momentum) * w for a, w in zip(average, weights)
        ]
        every.append(average)
    return every


def assert_close(weights, expected):
    for one, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("warmup", [False, True])
def test_is_the_average_of_the_weights_of_all_steps(warmup):
    """In validation and at the end; training goes on from its own weights."""
    model, record = averaging(ema_warmup=warmup), Record()
    model.fit(
        X,
        Y,
        epochs=8,
        steps_per_epoch=2,
        validation_data=(X, Y),
        callbacks=[SwapEMAWeights(), record],
        verbose=0,
    )
    expected = averages(record.trained, warmup)
    assert len(record.trained) == 16 and len(record.validated) == 8
    for validated, average in zip(record.validated, expected[1::2]):
        assert_close(validated, average)
    assert_close(model.get_weights(), expected[-1])
    # What is averaged moves: else any weights would pass.
    distance = np.abs(record.trained[-1][0] - expected[-1][0]).max()
    assert distance > 0.01
    assert CHANGED not in model.privacy_statement(1e-5)


def test_warm_up_counts_steps_and_not_executions():
    results = []
    for size in (1, 4):
        keras.utils.set_random_seed(0)
        inner = keras.optimizers.SGD(0.3, use_ema=True, ema_momentum=MOMENTUM)
        model = private(
            linear(),
            dpsgd(inner, batch_size=EXAMPLES, seed=1, ema_warmup=True),
            steps_per_execution=size,
        )
        model.fit(X, Y, epochs=1, steps_per_epoch=8, verbose=0)
        results.append(model.get_weights())
    assert_close(*results)


def test_training_is_the_same_without_it():
    results = []
    for callbacks in ([], [SwapEMAWeights(swap_on_epoch=True)]):
        keras.utils.set_random_seed(0)
        model = averaging(seed=3, ema_warmup=True)
        model.fit(X, Y, epochs=5, callbacks=callbacks, verbose=0)
        results.append(model.get_weights())
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


def test_files_of_a_run_have_the_average(tmp_path):
    model, record = averaging(ema_warmup=True), Record()
    path = tmp_path / "{epoch}.keras"
    model.fit(
        X,
        Y,
        epochs=4,
        callbacks=[
            record,
            SwapEMAWeights(swap_on_epoch=True),
            keras.callbacks.ModelCheckpoint(path),
        ],
        verbose=0,
    )
    assert CHANGED not in model.privacy_statement(1e-5)
    for epoch, average in enumerate(averages(record.trained, True), 1):
        loaded = keras.models.load_model(tmp_path / f"{epoch}.keras")
        assert_close(loaded.get_weights(), average)
        assert loaded.optimizer.ema_warmup
        assert loaded.ledger.steps == epoch
        assert CHANGED not in loaded.privacy_statement(1e-5)


def test_stopping_early():
    """The model ends with the average, whoever stops the run."""

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = epoch == 2

    model, record = averaging(ema_warmup=True), Record()
    model.fit(
        X,
        Y,
        epochs=9,
        callbacks=[record, SwapEMAWeights(swap_on_epoch=True), Stop()],
        verbose=0,
    )
    assert len(record.trained) == 3
    assert_close(model.get_weights(), averages(record.trained, True)[-1])
    assert CHANGED not in model.privacy_statement(1e-5)


def test_resuming(tmp_path):
    """A backup has the average: the run ends as if it had not been broken."""

    class Stop(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 3:
                raise InterruptedError

    def run(folder, *callbacks):
        keras.utils.set_random_seed(0)
        model = tf_dpsub.make_private(
            linear(), ledger_path=str(tmp_path / f"{folder}.json")
        )
        inner = keras.optimizers.SGD(0.3, use_ema=True, ema_momentum=MOMENTUM)
        model.compile(
            dpsgd(
                inner,
                batch_size=EXAMPLES,
                noise_multiplier=0.0,
                ema_warmup=True,
            ),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        backup = keras.callbacks.BackupAndRestore(tmp_path / folder)
        model.fit(
            X,
            Y,
            epochs=6,
            callbacks=[backup, SwapEMAWeights(swap_on_epoch=True), *callbacks],
            verbose=0,
        )
        return model.get_weights()

    with pytest.raises(InterruptedError):
        run("broken", Stop())
    assert_close(run("broken"), run("whole"))


class TestErrors:
    def test_callback_of_keras(self):
        model = averaging()
        with pytest.raises(ValueError, match="rounds the weights"):
            model.fit(X, Y, callbacks=[keras.callbacks.SwapEMAWeights()])

    def test_backup_of_swapped_weights(self, tmp_path):
        model = averaging()
        with pytest.raises(ValueError, match="Put it first"):
            model.fit(
                X,
                Y,
                callbacks=[
                    SwapEMAWeights(swap_on_epoch=True),
                    keras.callbacks.BackupAndRestore(tmp_path / "backup"),
                ],
            )
        assert model.ledger.steps == 0

    def test_without_an_average(self):
        with pytest.raises(ValueError, match="use_ema=True"):
            dpsgd(ema_warmup=True)
        model = private(linear(), dpsgd())
        with pytest.raises(ValueError, match="use_ema=True"):
            model.fit(
                X, Y, validation_data=(X, Y), callbacks=[SwapEMAWeights()]
            )
