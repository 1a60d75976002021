"""Runs of several processes that share a workdir."""

import json
import time

import pytest

from tests import workers
from tests.launchers.programs import contents
from tf_dpsub import accounting

pytestmark = pytest.mark.slow

EPOCHS, STEPS_PER_EPOCH = 20, 6


def started(workdir, *flags):
    return workers.started(
        2,
        workers.program,
        "--config=configs/digits_dpsgd.py",
        "--config.distribution=multi_worker",
        f"--config.epochs={EPOCHS}",
        # It keeps the budget, and need not be calibrated in each process.
        "--config.noise_multiplier=8",
        "--config.epsilon=2",
        f"--workdir={workdir}",
        *flags,
    )


def result_of(process):
    """Standard output, standard error and exit code of a worker."""
    return *process.communicate(timeout=300), process.returncode


def error_of(process):
    _, errors, code = result_of(process)
    assert code == 2
    assert "Traceback" not in errors
    return errors.strip().splitlines()[-1]


def interrupted(workdir, lost_worker):
    """Kills a worker after the first checkpoint; returns epochs and steps."""
    with started(workdir) as processes:
        while not list(workdir.glob("checkpoint/epoch_*.h5")):
            assert all(p.poll() is None for p in processes)
            time.sleep(0.05)
        processes[lost_worker].kill()
        assert error_of(processes[1 - lost_worker]).startswith(
            "error: Expected all workers to train to the end"
        )
    (checkpoint,) = workdir.glob("checkpoint/epoch_*.h5")
    epochs = int(checkpoint.name.split(".")[0].removeprefix("epoch_"))
    steps = accounting.PrivacyLedger(workdir / "ledger.json").steps
    assert epochs < EPOCHS
    assert steps >= epochs * STEPS_PER_EPOCH
    return epochs, steps


def test_the_chief_is_lost_and_the_run_resumed(tmp_path):
    epochs, steps = interrupted(tmp_path, lost_worker=0)
    with started(tmp_path, "--resume") as processes:
        chief, other = map(result_of, processes)
    assert chief[2] == other[2] == 0, chief[1] + other[1]
    assert f"after {epochs} of {EPOCHS} epochs" in chief[0]
    assert "test accuracy" in chief[0]
    # One of them writes.
    assert other[0] == ""
    result = json.loads((tmp_path / "result.json").read_text("utf-8"))
    assert result["steps"] == steps + STEPS_PER_EPOCH * (
        result["epochs"] - epochs
    )
    assert result["epsilon"] <= 2.0
    assert (tmp_path / "model.keras").exists()
    assert not (tmp_path / "checkpoint").exists()


def test_workers_must_see_the_same_run(tmp_path):
    """The chief would go on with it, another one begin it."""
    interrupted(tmp_path / "0", lost_worker=1)
    before = contents(tmp_path)
    with started(tmp_path / "{index}", "--resume") as processes:
        for process in processes:
            assert "a workdir that all workers share" in error_of(process)
    assert contents(tmp_path) == before


def test_workers_must_have_the_same_config(tmp_path):
    """Each would clip by its own, and the statement name the chief's."""
    with workers.started(
        2,
        workers.program,
        "--config=configs/digits_dpsgd.py",
        "--config.distribution=multi_worker",
        "--config.noise_multiplier=8",
        "--config.l2_norm_clip=1{index}",
        f"--workdir={tmp_path / 'run'}",
    ) as processes:
        for index, process in enumerate(processes):
            message = error_of(process)
            assert "another l2_norm_clip on some of them than here" in message
            assert f"(l2_norm_clip=1{index}.0)" in message
    assert not (tmp_path / "run").exists()
