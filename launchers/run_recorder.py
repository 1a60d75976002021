"""A callback that writes down how a run goes, so that it can be resumed."""

import csv
import io
import math
import os
import shutil
import statistics
import time
import warnings

import keras

_CHECKPOINT = "epoch_{:06d}.weights.h5"
# Bytes of a checkpoint beside the numbers, for each variable.
_OVERHEAD = 4096


class RunRecorder(keras.callbacks.Callback):
    """Writes `metrics.csv` and a checkpoint after each epoch; times the steps.

    Formal guarantees: nothing is released. Training metrics are private
    results: whoever publishes `metrics.csv` publishes them, and no epsilon
    covers them.

    Args:
        directory: `RunDirectory`, which is the run's own once training begins.

    Attributes:
        rows: list of dicts, the logs of all epochs so far.
        epochs: int, number of epochs that the latest checkpoint has seen.
    """

    def __init__(self, directory):
        super().__init__()
        self.rows = []
        self._directory = directory
        self._checkpoints = directory.path / "checkpoint"
        checkpoint = self._latest()
        self.epochs = 0 if checkpoint is None else _epochs(checkpoint)
        self._step_seconds = []

    @property
    def step_seconds(self):
        """Median time of a step in this process; None without any.

        The first execution, which traces the step, only counts if it is alone.
        """
        times = self._step_seconds[1:] or self._step_seconds
        return statistics.median(times) if times else None

    def restore(self, model):
        """Takes up the state that the latest checkpoint holds, if any.

        Args:
            model: compiled `tf_dpsub.PrivateModel`. Its ledger is not
                shortened.
        """
        checkpoint = self._latest()
        if checkpoint is None:
            return
        model.optimizer.build_for(model)
        try:
            with warnings.catch_warnings():
                # Keras warns of weights that it leaves as they are.
                warnings.simplefilter("error", UserWarning)
                model.load_weights(checkpoint)
        except (ValueError, OSError, KeyError, UserWarning) as error:
            raise ValueError(
                f"Expected a checkpoint of this run, got {checkpoint}, which "
                "is damaged or of another model. Nothing was changed. Restore "
                "it, or remove it: the run then begins again, and what was "
                "spent counts."
            ) from error
        text = (self._directory.path / "metrics.csv").read_text("utf-8")
        rows = [
            {name: float(value) for name, value in row.items()}
            for row in csv.DictReader(io.StringIO(text))
        ]
        self.rows = [
            {**row, "epoch": int(row["epoch"])}
            for row in rows
            if row["epoch"] <= self.epochs
        ]

    def on_train_begin(self, logs=None):
        self._directory.begin()

    def on_train_batch_begin(self, batch, logs=None):
        self._first_step, self._began = batch, time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        seconds = time.perf_counter() - self._began
        self._step_seconds.append(seconds / (batch - self._first_step + 1))

    def on_epoch_end(self, epoch, logs=None):
        self.rows.append({"epoch": epoch + 1, **logs})
        table = io.StringIO(newline="")
        writer = csv.DictWriter(table, self.rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        self._directory.write_text("metrics.csv", table.getvalue())
        self._save_checkpoint(epoch + 1)
        self.epochs = epoch + 1

    def remove_checkpoint(self):
        """Removes the checkpoint of a run that is finished."""
        if self._directory.writes:
            shutil.rmtree(self._checkpoints)

    def _latest(self):
        return max(self._checkpoints.glob("epoch_*.weights.h5"), default=None)

    def _save_checkpoint(self, epochs):
        if not self._directory.writes:
            return
        self._checkpoints.mkdir(exist_ok=True)
        incomplete = self._checkpoints / "incomplete.weights.h5"
        _require_room(incomplete, self.model)
        self.model.save_weights(incomplete, overwrite=True)
        with open(incomplete, "rb") as file:
            os.fsync(file.fileno())
        earlier = self._latest()
        os.replace(incomplete, self._checkpoints / _CHECKPOINT.format(epochs))
        if earlier is not None:
            earlier.unlink()


def _require_room(path, model):
    """Lets the system say that a disk is full: HDF5 dies of it."""
    variables = [*model.variables, *model.optimizer.variables]
    size = sum(v.value.dtype.size * math.prod(v.shape) for v in variables)
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, size + _OVERHEAD * len(variables))


def _epochs(checkpoint):
    return int(checkpoint.name.partition(".")[0].removeprefix("epoch_"))
