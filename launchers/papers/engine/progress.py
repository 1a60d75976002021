"""Progress of the trials of an experiment."""

import collections
import shutil
import statistics
import sys
import time

from tf_dpsub.launchers.papers.engine import results
from tf_dpsub.launchers.terminal import durations

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
        self._done = total - len(runner.waiting)
        self._first_epochs = {n: self._epochs(n) for n in self._trials}
        self._seconds = collections.defaultdict(list)
        self._said = time.monotonic()
        self._live = sys.stdout.isatty()

    def finished(self, ended, summary):
        """Prints the line of a trial that has ended.

        Args:
            ended: `runner.Finished`.
            summary: string, the result of the trial, if it succeeded.
        """
        self._done += 1
        trial = ended.trial
        if ended.error is None:
            epochs = trial.config.epochs - self._first_epochs[trial.name]
            self._seconds[trial.method].append(ended.seconds / max(epochs, 1))
        self._print(
            f"[{self._done}/{self._total}] {trial.name}: "
            f"{ended.error or summary}, {durations.text(ended.seconds)}; "
            f"{self._left()}"
        )

    def look(self):
        """Prints the epochs of running trials, at most every few minutes."""
        if not self._runner.running:
            return
        running = ", ".join(
            f"{name} {self._epochs(name)}/{self._trials[name].config.epochs}"
            for name in self._runner.running
        )
        text = f"[{self._done}/{self._total}] epoch {running}; {self._left()}"
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\033[K{text[:width]}", end="", flush=True)
        elif time.monotonic() - self._said > _SECONDS_BETWEEN_LINES:
            self._print(text)

    def _print(self, text):
        start = "\r\033[K" if self._live else ""
        print(f"{start}{text}", flush=True)
        self._said = time.monotonic()

    def _epochs(self, name):
        return results.epochs_done(self._folder / name)

    def _left(self):
        """Text with the time left, estimated from the epochs so far."""
        known = {m: statistics.fmean(s) for m, s in self._seconds.items() if s}
        now = time.monotonic()
        for name, began in self._runner.running.items():
            epochs = self._epochs(name) - self._first_epochs[name]
            if epochs > 0:
                known.setdefault(
                    self._trials[name].method, (now - began) / epochs
                )
        if not known:
            return "time left not known yet"
        others = statistics.fmean(known.values())
        seconds = 0.0
        waiting = [trial.name for trial in self._runner.waiting]
        for name in [*self._runner.running, *waiting]:
            trial = self._trials[name]
            epochs = trial.config.epochs - self._epochs(name)
            seconds += epochs * known.get(trial.method, others)
        return f"{durations.text(seconds / self._runner.jobs)} left"
