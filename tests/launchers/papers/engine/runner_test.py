import json
import multiprocessing
import os
import signal

import pytest

from tf_dpsub.configs import default
from tf_dpsub.launchers.papers.engine import results, runner, trials

pytestmark = pytest.mark.slow

# Processes as those that are spawned, but TensorFlow is loaded once for all.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["tf_dpsub.launchers.training.training_run"])


@pytest.fixture
def starts_fast(monkeypatch):
    monkeypatch.setattr(
        runner.multiprocessing, "get_context", lambda method: _PROCESSES
    )


@pytest.fixture(autouse=True)
def looks_often(monkeypatch):
    monkeypatch.setattr(runner, "_SECONDS_TO_LOOK", 0.05)


def digits_trial(name, **changes):
    config = default.get_config()
    config.model_kwargs = {"hidden": (16,)}
    config.noise_multiplier = 4.0
    config.batch_size = 256
    config.epochs = 2
    for field, value in changes.items():
        config[field] = value
    return trials.Trial(name=name, labels={"method": "DP-SGD"}, config=config)


def run(to_run, folder, jobs=1):
    """Outcomes of trials, by their names."""
    with runner.Runner(to_run, folder, jobs) as running:
        return {e.trial.name: e for e in running if e is not None}


def test_a_process_runs_many_and_a_failure_loses_no_other(tmp_path, capfd):
    to_run = [
        digits_trial("good"),
        digits_trial("wrong", l2_norm_clip=-1.0),
        digits_trial("later", seed=1),
    ]
    outcomes = run(to_run, tmp_path)
    assert list(outcomes) == ["good", "wrong", "later"]
    assert outcomes["good"].error is None and outcomes["later"].error is None
    assert outcomes["wrong"].error.startswith(
        "ValueError: Expected l2_norm_clip"
    )
    for name in ("good", "later"):
        folder = tmp_path / "trials" / name
        result = json.loads((folder / "result.json").read_text("utf-8"))
        assert result["epochs"] == 2
        assert not (folder / "model.keras").exists()
        log = (tmp_path / "logs" / f"{name}.log").read_text("utf-8")
        assert "test accuracy" in log
    assert not results.is_finished(tmp_path / "trials" / "wrong")
    log = (tmp_path / "logs" / "wrong.log").read_text("utf-8")
    assert "Traceback" in log
    # The output of trials goes to their logs alone.
    assert capfd.readouterr() == ("", "")


def test_a_process_that_dies_loses_its_trial_alone(tmp_path, starts_fast):
    to_run = [digits_trial("long", epochs=10_000), digits_trial("short")]
    outcomes = {}
    with runner.Runner(to_run, tmp_path, 1) as running:
        for event in running:
            if event is not None:
                outcomes[event.trial.name] = event.error
            elif "long" in running.running:
                if results.epochs_done(tmp_path / "trials" / "long"):
                    (process,) = multiprocessing.active_children()
                    os.kill(process.pid, signal.SIGKILL)
    assert outcomes == {
        "long": "its process died with exit code -9",
        "short": None,
    }


def test_a_process_whose_outcome_nobody_reads_ends(tmp_path):
    ours, theirs = _PROCESSES.Pipe()
    process = _PROCESSES.Process(target=runner._serve, args=(theirs, 1))
    process.start()
    theirs.close()
    wrong = digits_trial("wrong", l2_norm_clip=-1.0).config
    ours.send((wrong, str(tmp_path / "wrong"), str(tmp_path / "wrong.log")))
    ours.close()
    process.join(120)
    assert process.exitcode == 0
    assert "Expected l2_norm_clip" in (tmp_path / "wrong.log").read_text()


def test_leaving_early_stops_what_runs_and_it_can_go_on(tmp_path, starts_fast):
    to_run = [digits_trial("a", epochs=30), digits_trial("b", epochs=10_000)]
    folder = tmp_path / "trials" / "a"
    with runner.Runner(to_run, tmp_path, 2) as running:
        for _ in running:
            if results.epochs_done(folder):
                break
        assert list(running.running) == ["a", "b"]
    assert multiprocessing.active_children() == []
    done = results.epochs_done(folder)
    assert 0 < done < 30
    assert not results.is_finished(tmp_path / "trials" / "b")
    log = (tmp_path / "logs" / "a.log").read_text("utf-8")
    assert "--resume goes on" in log

    outcomes = run(to_run[:1], tmp_path)
    assert [e.error for e in outcomes.values()] == [None]
    result = json.loads((folder / "result.json").read_text("utf-8"))
    assert result["epochs"] == 30
    # 6 steps an epoch; those after the last checkpoint were lost.
    assert 180 <= result["steps"] <= 180 + 2 * 6
