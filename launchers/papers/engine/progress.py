"""Progress of the trials of an experiment."""

import collections
import statistics
import time

from tf_dpsub.launchers.papers.engine import results
from tf_dpsub.launchers.terminal import durations, live_line

_SECONDS_BETWEEN_LINES = 300


class Progress:
    """Prints a line after each trial: its result and the time left.

    On a terminal, a live line below shows the epochs of running trials.

    Args:
        runner: `runner.Runner`, before it runs.
        folder: `pathlib.Path`, with one folder for each trial.
        total: int, number of trials, including those finished earlier.
    """

    def __init__(self, runner, folder, total):
        self._runner = runner
        self._folder = folder
        self._total = total
        self._trials = {trial.name: trial for trial in runner.waiting}
        self._finished_count = total - len(runner.waiting)
        self._first_epochs = {n: self._epochs(n) for n in self._trials}
        # Of the trials that succeeded, by method.
        self._seconds_per_epoch = collections.defaultdict(list)
        self._last_print = time.monotonic()
        self._line = live_line.LiveLine()

    def finished(self, outcome, summary):
        """Prints the line of a trial that succeeded or failed.

        Args:
            outcome: `runner.Finished`.
            summary: string, the result of the trial, if it succeeded.
        """
        self._finished_count += 1
        trial = outcome.trial
        if outcome.error is None:
            epochs = trial.config.epochs - self._first_epochs[trial.name]
            self._seconds_per_epoch[trial.method].append(
                outcome.seconds / max(epochs, 1)
            )
        self._print(
            f"[{self._finished_count}/{self._total}] {trial.name}: "
            f"{outcome.error or summary}, {durations.text(outcome.seconds)}; "
            f"{self._time_left()}"
        )

    def look(self):
        """Shows the epochs of running trials; in a log, every few minutes."""
        if not self._runner.running:
            return
        running = ", ".join(
            f"{name} {self._epochs(name)}/{self._trials[name].config.epochs}"
            for name in self._runner.running
        )
        text = (
            f"[{self._finished_count}/{self._total}] epoch {running}; "
            f"{self._time_left()}"
        )
        if self._line.is_drawn:
            self._line.draw(text)
        elif time.monotonic() - self._last_print > _SECONDS_BETWEEN_LINES:
            self._print(text)

    def _print(self, text):
        self._line.print(text)
        self._last_print = time.monotonic()

    def _epochs(self, name):
        return results.epochs_done(self._folder / name)

    def _time_left(self):
        """Text with the time left, estimated from the epochs so far."""
        estimates = {
            method: statistics.fmean(seconds)
            for method, seconds in self._seconds_per_epoch.items()
        }
        now = time.monotonic()
        for name, start in self._runner.running.items():
            epochs = self._epochs(name) - self._first_epochs[name]
            if epochs > 0:
                estimates.setdefault(
                    self._trials[name].method, (now - start) / epochs
                )
        if not estimates:
            return "time left not known yet"
        mean = statistics.fmean(estimates.values())
        seconds = 0.0
        waiting = [trial.name for trial in self._runner.waiting]
        for name in [*self._runner.running, *waiting]:
            trial = self._trials[name]
            epochs = trial.config.epochs - self._epochs(name)
            seconds += epochs * estimates.get(trial.method, mean)
        return f"{durations.text(seconds / self._runner.jobs)} left"
