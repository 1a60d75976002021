import time

from tests.launchers.papers.engine import finished_trials
from tf_dpsub.launchers.papers.engine import progress, runner


class Runner:
    """The attributes of a runner that `Progress` reads."""

    def __init__(self, trials, jobs=1):
        self.waiting = list(trials)
        self.running = {}
        self.jobs = jobs


def finished_trial(trial, seconds, error=None):
    return runner.Finished(trial=trial, seconds=seconds, error=error)


class TestLines:
    def test_count_result_and_time_left(self, tmp_path, capsys):
        trials = [finished_trials.trial(f"t{i}", "GP") for i in range(4)]
        running = Runner(trials, jobs=2)
        display = progress.Progress(running, tmp_path, total=10)
        first = running.waiting.pop(0)
        display.finished(finished_trial(first, 60.0), "90.0 % at ε = 2")
        # Three trials of a minute remain, two at a time.
        assert capsys.readouterr().out == (
            "[7/10] t0: 90.0 % at ε = 2, 1 min 0 s; 1 min 30 s left\n"
        )

    def test_methods_take_their_own_time(self, tmp_path, capsys):
        methods = ("GP", "GEP", "GP", "GEP", "GEP")
        trials = [
            finished_trials.trial(f"t{i}", method)
            for i, method in enumerate(methods)
        ]
        running = Runner(trials)
        display = progress.Progress(running, tmp_path, total=5)
        for seconds in (1.0, 100.0):
            display.finished(
                finished_trial(running.waiting.pop(0), seconds), "done"
            )
        last = capsys.readouterr().out.splitlines()[-1]
        # One of a second and two of 100.
        assert last.endswith("3 min 21 s left")

    def test_epochs_of_trials_that_run_count(self, tmp_path, capsys):
        first, second = (finished_trials.trial(n, "GP") for n in ("a", "b"))
        running = Runner([first, second])
        display = progress.Progress(running, tmp_path, total=2)
        running.waiting.remove(first)
        running.waiting.remove(second)
        running.running["b"] = time.monotonic()
        # Both of its epochs are recorded.
        finished_trials.write(tmp_path, second, 0.5)
        display.finished(finished_trial(first, 60.0), "done")
        assert capsys.readouterr().out.endswith("; 0 s left\n")

    def test_a_failure_says_what_was_wrong_and_tells_no_time(
        self, tmp_path, capsys
    ):
        trials = [finished_trials.trial(n, "GP") for n in ("a", "b")]
        running = Runner(trials)
        display = progress.Progress(running, tmp_path, total=2)
        running.waiting.pop(0)
        display.finished(
            finished_trial(trials[0], 0.1, "ValueError: no."), None
        )
        out = capsys.readouterr().out
        assert "[1/2] a: ValueError: no., 0 s; time left not known yet" in out

    def test_looks_are_few_where_no_terminal_is(
        self, tmp_path, capsys, monkeypatch
    ):
        trials = [finished_trials.trial("a", "GP")]
        running = Runner(trials)
        display = progress.Progress(running, tmp_path, total=1)
        running.waiting.clear()
        running.running["a"] = time.monotonic()
        display.look()
        assert capsys.readouterr().out == ""
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 3600)
        display.look()
        display.look()
        out = capsys.readouterr().out
        assert out.count("\n") == 1
        assert out.startswith("[0/1] epoch a 0/2; ")
