"""Progress of a training run: its epochs, the spent ε and the time left.

Not the bar of Keras, tqdm or rich: a line per epoch must read well in a log,
and the bar is of the whole run, with its ε.
"""

import math
import time

import keras

from tf_dpsub.launchers.terminal import durations, live_line

_SECONDS_BETWEEN_DRAWINGS = 0.5
_WIDTH = 24


class ProgressBar(keras.callbacks.Callback):
    """Prints a line per epoch, with the ε spent and the time left.

    On a terminal, a bar over the whole run stays below.

    Formal guarantees: nothing is released. Training metrics are private
    results, which no epsilon covers.

    Args:
        delta: float, of the epsilon that is shown: an upper bound by RDP, which
            takes no time.
        budget: float, the epsilon to keep; None without one. Defaults to
            `None`.
        rows_per_person: int, as for `PrivateModel.epsilon`. Defaults to `None`.
    """

    def __init__(self, delta, budget=None, rows_per_person=None):
        super().__init__()
        self._rows_per_person = rows_per_person
        self._delta = delta
        self._budget = budget
        self._line = live_line.LiveLine()

    def on_train_begin(self, logs=None):
        self._last_drawing = time.monotonic()
        self._timed_since = None

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        now = time.monotonic()
        epochs = self._epoch + (batch + 1) / self.params["steps"]
        if self._timed_since is None:
            # The first step includes tracing and is not timed.
            self._timed_since, self._untimed_epochs = now, epochs
        if (
            self._line.is_drawn
            and now - self._last_drawing > _SECONDS_BETWEEN_DRAWINGS
        ):
            self._last_drawing = now
            self._draw(epochs)

    def on_epoch_end(self, epoch, logs=None):
        metrics = ", ".join(
            f"{name} {value:.4g}"
            for name, value in logs.items()
            if name != "epsilon" and (name != "dropped" or value)
        )
        self._line.print(
            f"epoch {epoch + 1}/{self.params['epochs']}: {metrics}; "
            f"{self._state(epoch + 1)}"
        )
        if self._line.is_drawn and epoch + 1 < self.params["epochs"]:
            self._draw(epoch + 1)

    def _draw(self, epochs):
        """Draws the bar after `epochs`, a float."""
        share = epochs / self.params["epochs"]
        filled = round(_WIDTH * share)
        bar = "━" * filled + "─" * (_WIDTH - filled)
        self._line.draw(f"{bar} {100 * share:.0f} %; {self._state(epochs)}")

    def _state(self, epochs):
        """The spent ε and the time left after `epochs`, a float."""
        epsilon = self.model.epsilon(self._delta, "rdp", self._rows_per_person)
        if math.isinf(epsilon):
            text = "not private"
        else:
            text = f"ε at most {epsilon:.3g}"
            if self._budget is not None:
                # The budget is kept by another accountant perhaps.
                text = f"ε at most {min(epsilon, self._budget):.3g}"
                text += f", of {self._budget:g}"
        timed_epochs = epochs - self._untimed_epochs
        remaining_epochs = self.params["epochs"] - epochs
        if timed_epochs > 0 and remaining_epochs > 0:
            seconds = (time.monotonic() - self._timed_since) / timed_epochs
            text += f"; {durations.text(remaining_epochs * seconds)} left"
        return text
