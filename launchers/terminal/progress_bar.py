"""What a run shows while it trains."""

import math
import shutil
import sys
import time

import keras

from tf_dpsub.launchers.terminal import durations

_SECONDS_BETWEEN_DRAWINGS = 0.5
_WIDTH = 24


class ProgressBar(keras.callbacks.Callback):
    """Prints a line per epoch, with the ε spent and the time left.

    On a terminal, a bar over the whole run stays below.

    Formal guarantees: nothing is released. Training metrics are private
    results, which no epsilon covers.

    Args:
        delta: float, of the epsilon that is shown.
        accountant: string, `"rdp"` or `"pld"`.
        budget: float, the epsilon to keep; None without one. Defaults to
            `None`.
    """

    def __init__(self, delta, accountant, budget=None):
        super().__init__()
        self._delta = delta
        self._accountant = accountant
        self._budget = budget
        self._live = sys.stdout.isatty()

    def on_train_begin(self, logs=None):
        self._drawn = time.monotonic()
        self._began = None

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        now = time.monotonic()
        done = self._epoch + (batch + 1) / self.params["steps"]
        if self._began is None:
            # The first step includes tracing and is not timed.
            self._began, self._first = now, done
        if self._live and now - self._drawn > _SECONDS_BETWEEN_DRAWINGS:
            self._drawn = now
            self._draw(done)

    def on_epoch_end(self, epoch, logs=None):
        shown = ", ".join(
            f"{name} {value:.4g}"
            for name, value in logs.items()
            if name != "epsilon" and (name != "dropped" or value)
        )
        start = "\r\033[K" if self._live else ""
        print(
            f"{start}epoch {epoch + 1}/{self.params['epochs']}: {shown}; "
            f"{self._state(epoch + 1)}",
            flush=True,
        )
        if self._live and epoch + 1 < self.params["epochs"]:
            self._draw(epoch + 1)

    def _draw(self, done):
        """Draws the bar after `done` epochs, a float."""
        total = self.params["epochs"]
        filled = round(_WIDTH * done / total)
        bar = "━" * filled + "─" * (_WIDTH - filled)
        text = f"{bar} {100 * done / total:.0f} %; {self._state(done)}"
        room = shutil.get_terminal_size().columns - 1
        print(f"\r\033[K{text[:room]}", end="", flush=True)

    def _state(self, done):
        spent = self.model.epsilon(self._delta, self._accountant)
        text = "not private" if math.isinf(spent) else f"ε = {spent:.3g}"
        if self._budget is not None:
            text += f" of {self._budget:g}"
        left = self.params["epochs"] - done
        if done > self._first and left > 0:
            timed = done - self._first
            seconds = (time.monotonic() - self._began) / timed
            text += f"; {durations.text(left * seconds)} left"
        return text
