"""A process that is killed in `fit`, and `BackupAndRestore` afterwards."""

import multiprocessing
import os
import shutil
import signal

import keras
import pytest
from keras.src.saving import saving_lib

import tf_dpsub
from tests.training.plain_models import X, Y, dpsgd, linear, loss
from tf_dpsub import accounting

pytestmark = pytest.mark.slow

# Modules are loaded once, TensorFlow begins in each process.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload([__name__])
EPOCHS, STEPS_PER_EPOCH = 2, 3
EXAMPLES = STEPS_PER_EPOCH * 4


class KillAt(keras.callbacks.Callback):
    """Kills its process before a step, both counted from 0."""

    def __init__(self, epoch, step):
        super().__init__()
        self.at = epoch, step

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if (self.epoch, batch) == self.at:
            kill()


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def fit(folder, callbacks=(), **settings):
    """Trains until the last epoch; returns the model."""
    keras.utils.set_random_seed(0)
    model = tf_dpsub.make_private(linear(), ledger_path=folder / "ledger.json")
    # Momentum is part of the state.
    model.compile(dpsgd(keras.optimizers.SGD(0.1, momentum=0.9)), loss())
    backup = keras.callbacks.BackupAndRestore(folder / "backup", **settings)
    x, y = X[:EXAMPLES], Y[:EXAMPLES]
    model.fit(x, y, epochs=EPOCHS, callbacks=[backup, *callbacks], verbose=0)
    return model


def _fit_until(folder, epoch, step, settings):
    fit(folder, [KillAt(epoch, step)], **settings)


def killed(target, *args):
    process = _PROCESSES.Process(target=target, args=args)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def ledger_of(folder):
    return accounting.PrivacyLedger(folder / "ledger.json")


class Copies(keras.callbacks.Callback):
    """Copies a folder before each step: what a kill there would leave of it.

    Attributes:
        by_step: dict of the copies, by epoch and step, both counted from 0.
    """

    def __init__(self, folder, parent):
        super().__init__()
        self._folder, self._parent = folder, parent
        self.by_step = {}

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        self.by_step[self.epoch, batch] = shutil.copytree(
            self._folder, self._parent / f"{self.epoch}-{batch}"
        )


def contents(folder):
    """Bytes of all files of a folder, by their paths within it."""
    return {
        path.relative_to(folder): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("save_freq", ["epoch", 2])
def test_restored_from_every_step(tmp_path, save_freq):
    settings = {"save_freq": save_freq}
    folder = tmp_path / "run"
    folder.mkdir()
    copies = Copies(folder, tmp_path)
    fit(folder, [copies], **settings)
    assert len(copies.by_step) == EPOCHS * STEPS_PER_EPOCH
    before = None
    for (epoch, step), copy in copies.by_step.items():
        # Of an epoch all steps are written before the first runs.
        begun = (epoch + (step > 0)) * STEPS_PER_EPOCH
        assert ledger_of(copy).steps == begun
        restored = epoch
        if save_freq == 2:
            # Keras goes on from the beginning of the epoch of the last backup.
            done = epoch * STEPS_PER_EPOCH + step
            restored = max(0, done // 2 * 2 - 1) // STEPS_PER_EPOCH
        left = (EPOCHS - restored) * STEPS_PER_EPOCH
        state = contents(copy), begun, left
        if before is not None and state[0] == before[0]:
            # The files of the step before, from which a run went on already.
            assert state == before
            continue
        before = state
        model = fit(copy, **settings)
        assert model.ledger.steps == ledger_of(copy).steps == begun + left
        assert model.epsilon(1e-5) == pytest.approx(
            accounting.epsilon(
                noise_multiplier=1.0,
                sampling_rate=1 / STEPS_PER_EPOCH,
                steps=begun + left,
                delta=1e-5,
            )
        )


def test_a_restored_run_goes_on_where_the_backup_was(tmp_path):
    killed(_fit_until, tmp_path, 1, 2, {})
    assert ledger_of(tmp_path).steps == EPOCHS * STEPS_PER_EPOCH
    model = fit(tmp_path, delete_checkpoint=False)
    # Of the epoch that was killed nothing is left but its cost.
    assert int(model.optimizer.iterations) == EPOCHS * STEPS_PER_EPOCH
    assert model.ledger.steps == (EPOCHS + 1) * STEPS_PER_EPOCH


def _fit_until_a_backup_is_written(folder, settings):
    def close(store):
        if finished:
            # The file is open, and not whole.
            kill()
        finished.append(1)
        original(store)

    finished = []
    original = saving_lib.H5IOStore.close
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving_lib.H5IOStore, "close", close)
        fit(folder, **settings)


def test_killed_while_a_backup_is_written(tmp_path):
    """Keras writes in place: it takes two files to have one that is whole."""
    settings = {"double_checkpoint": True}
    killed(_fit_until_a_backup_is_written, tmp_path, settings)
    assert ledger_of(tmp_path).steps == 2 * STEPS_PER_EPOCH
    model = fit(tmp_path, **settings)
    # The epoch whose backup was lost is done again, and counts twice.
    assert model.ledger.steps == (EPOCHS + 1) * STEPS_PER_EPOCH
    assert int(model.optimizer.iterations) == EPOCHS * STEPS_PER_EPOCH


def test_a_backup_that_is_not_whole_is_refused(tmp_path):
    killed(_fit_until_a_backup_is_written, tmp_path, {})
    before = (tmp_path / "ledger.json").read_bytes()
    with pytest.raises(OSError, match="whole, got .*latest.weights.h5: "):
        fit(tmp_path)
    assert (tmp_path / "ledger.json").read_bytes() == before
