"""A callback that records metrics and checkpoints of a run."""

import copy
import csv
import io
import math
import os
import statistics
import time
import warnings

import keras

from tf_dpsub import files
from tf_dpsub.launchers.training import resumption, run_directory

_CHECKPOINT = "epoch_{:06d}.weights.h5"
# Bytes of a checkpoint per variable, in addition to its values.
_OVERHEAD = 4096


class RunRecorder(keras.callbacks.Callback):
    """Writes `metrics.csv` and a checkpoint after each epoch; times the steps.

    Formal guarantees: nothing is released. Training metrics are private
    results: whoever publishes `metrics.csv` publishes them, and no epsilon
    covers them.

    Args:
        directory: `RunDirectory`; training begins it.
        data: dict, the digest of the private data.

    Attributes:
        rows: list of dicts, the logs of all epochs so far.
        epochs: int, number of epochs before the latest checkpoint.
    """

    def __init__(self, directory, data):
        super().__init__()
        self.rows = []
        self._directory = directory
        self._data = data
        self._checkpoints = directory.path / run_directory.CHECKPOINTS
        checkpoint = self._latest()
        self.epochs = 0 if checkpoint is None else _epochs(checkpoint)
        self._step_seconds = []

    @property
    def step_seconds(self):
        """Median time of a step in this process; None if none ran.

        The first execution, which traces the step, only counts if it is alone.
        """
        times = self._step_seconds[1:] or self._step_seconds
        return statistics.median(times) if times else None

    def restore(self, model, steps_per_epoch):
        """Restores the model from the latest checkpoint, if there is one.

        Args:
            model: compiled `tf_dpsub.PrivateModel`. Its ledger is kept: the
                file is never behind the checkpoint.
            steps_per_epoch: int.

        Raises:
            ValueError: if the checkpoint is damaged, or if the ledger has lost
                steps that the checkpoint or `metrics.csv` counts.
        """
        ledger, checkpoint = model.ledger, self._latest()
        metrics = self._directory.path / "metrics.csv"
        rows = _read_metrics(metrics)
        if rows:
            # A budget may end an epoch early.
            least_steps = (rows[-1]["epoch"] - 1) * steps_per_epoch + 1
            run_directory.require_counted(ledger, least_steps, metrics)
        if checkpoint is None:
            return
        if len(rows) < self.epochs:
            raise ValueError(
                f"Expected {metrics} to have the {self.epochs} epochs of "
                f"{checkpoint}, got {len(rows)}. Restore it."
            )
        model.optimizer.build_for(model)
        # A copy in memory: nothing is written before all checks have passed.
        model.ledger = copy.copy(ledger)
        try:
            with warnings.catch_warnings():
                # Keras only warns of weights that it does not load.
                warnings.simplefilter("error", UserWarning)
                model.load_weights(checkpoint)
        except (ValueError, OSError, KeyError, UserWarning) as error:
            raise ValueError(
                f"Expected a checkpoint of this run, got {checkpoint}, which "
                "is damaged or of another model. Nothing was changed. Restore "
                "it, or remove it: the run then begins again, and what was "
                "spent counts."
            ) from error
        run_directory.require_counted(ledger, model.ledger.steps, checkpoint)
        model.ledger = ledger
        self.rows = rows[: self.epochs]

    def on_train_begin(self, logs=None):
        self._directory.begin(
            lambda: resumption.begin(
                self._directory, self.model.ledger, self._data
            )
        )

    def on_train_batch_begin(self, batch, logs=None):
        self._first_step, self._start = batch, time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        seconds = time.perf_counter() - self._start
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

    def _latest(self):
        return max(self._checkpoints.glob("epoch_*.weights.h5"), default=None)

    def _save_checkpoint(self, epochs):
        if not self._directory.writes:
            return
        files.make_folder(self._checkpoints)
        earlier = self._latest()
        files.replace(
            self._checkpoints / _CHECKPOINT.format(epochs), self._write_weights
        )
        if earlier is not None:
            earlier.unlink()

    def _write_weights(self, path):
        _require_room(path, self.model)
        self.model.save_weights(path, overwrite=True)


def _read_metrics(metrics):
    """Rows of the file of metrics; empty if there is none."""
    if not metrics.exists():
        return []
    try:
        table = csv.DictReader(io.StringIO(metrics.read_text("utf-8")))
        rows = [
            {name: float(value) for name, value in row.items()} for row in table
        ]
        return [{**row, "epoch": int(row["epoch"])} for row in rows]
    except (
        KeyError,
        TypeError,
        ValueError,
        OverflowError,
        csv.Error,
    ) as error:
        raise files.damaged(metrics) from error


def _require_room(path, model):
    """Allocates the file before it is written: HDF5 crashes on a full disk."""
    variables = [*model.variables, *model.optimizer.variables]
    size = sum(v.value.dtype.size * math.prod(v.shape) for v in variables)
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, size + _OVERHEAD * len(variables))


def _epochs(checkpoint):
    number = checkpoint.name.partition(".")[0].removeprefix("epoch_")
    if not number.isdecimal():
        raise ValueError(
            f"Expected checkpoints with names like {_CHECKPOINT.format(1)}, "
            f"got {checkpoint}. Remove it, or give it back its name."
        )
    return int(number)
