"""Runs that are killed, or cannot write, and go on afterwards."""

import multiprocessing
import os
import pathlib
import resource
import secrets
import shutil
import signal

import keras
import numpy as np
import pytest

from tests.launchers.digits import StopAt, digits_config
from tests.launchers.programs import contents
from tf_dpsub import accounting
from tf_dpsub.launchers.training import run_recorder, training_run

pytestmark = pytest.mark.slow

# Modules are loaded once, TensorFlow begins in each process.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload([__name__])
EPOCHS, STEPS_PER_EPOCH = 2, 3
SETTINGS = {
    "batch_size": 480,
    "epochs": EPOCHS,
    "epsilon": None,
    "noise_multiplier": 2.0,
}
# Every example is drawn, so that runs are equal.
EQUAL_RUNS = {
    "batch_size": 1438,
    "epochs": 5,
    "epsilon": None,
    "noise_multiplier": 0.0,
}


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def run_apart(target, *args):
    """Exit code of a function in a process of its own."""
    process = _PROCESSES.Process(target=target, args=args)
    process.start()
    process.join()
    return process.exitcode


def train(changes, workdir, entropy=None, results_only=True):
    """Trains with the seeds of subspaces and carriers given, if they are."""
    with pytest.MonkeyPatch.context() as patch:
        if entropy is not None:
            patch.setattr(secrets, "randbits", lambda bits: entropy)
        return training_run.train(
            digits_config(**changes),
            workdir,
            resume=True,
            results_only=results_only,
        )


def _train_until(changes, workdir, epoch, step, entropy):
    with pytest.MonkeyPatch.context() as patch:
        StopAt(patch, epoch, step, kill)
        train(changes, workdir, entropy)


def killed(changes, workdir, epoch, step, entropy=None):
    """A run that is killed before a step."""
    code = run_apart(_train_until, changes, workdir, epoch, step, entropy)
    assert code == -signal.SIGKILL


def ledger_of(workdir):
    return accounting.PrivacyLedger(workdir / "ledger.json")


@pytest.mark.parametrize("epoch", range(1, EPOCHS + 1))
@pytest.mark.parametrize("step", range(1, STEPS_PER_EPOCH + 1))
def test_restart_from_every_step_gives_the_same_ledger(tmp_path, epoch, step):
    killed(SETTINGS, tmp_path, epoch, step)
    # What began to run had been written before.
    begun = (epoch - 1) * STEPS_PER_EPOCH + step - 1
    written = ledger_of(tmp_path).steps
    assert written >= begun
    result = train(SETTINGS, tmp_path)
    assert result["epochs"] == EPOCHS
    # The epoch in which it was killed counts twice, unless nothing had begun.
    lost = 0 if step == 1 else STEPS_PER_EPOCH
    assert written == begun - (step - 1) + lost
    assert result["steps"] == EPOCHS * STEPS_PER_EPOCH + lost
    assert ledger_of(tmp_path).steps == result["steps"]
    assert result["epsilon"] == pytest.approx(
        accounting.epsilon(
            noise_multiplier=2.0,
            sampling_rate=480 / 1438,
            steps=result["steps"],
            delta=1e-5,
        )
    )


def _train_until_checkpoint(workdir, moment):
    def replace(source, target):
        if ".weights.h5" in str(target) and "_000002" in str(target):
            if moment == "before":
                kill()
            original(source, target)
            kill()
        original(source, target)

    original = os.replace
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", replace)
        train(SETTINGS | {"epochs": 3}, workdir)


@pytest.mark.parametrize(
    "moment, epochs", [("before", 1), ("after", 2)], ids=str
)
def test_killed_while_a_checkpoint_is_written(tmp_path, moment, epochs):
    """The one before is whole, or there are two."""
    settings = SETTINGS | {"epochs": 3}
    code = run_apart(_train_until_checkpoint, tmp_path, moment)
    assert code == -signal.SIGKILL
    assert ledger_of(tmp_path).steps == 2 * STEPS_PER_EPOCH
    result = train(settings, tmp_path)
    assert result["epochs"] == 3
    assert result["steps"] == (2 + 3 - epochs) * STEPS_PER_EPOCH


def weights_of_epochs(*args):
    """Weights after each epoch that `train` trains."""
    weights = []

    def on_epoch_end(recorder, epoch, logs=None):
        original(recorder, epoch, logs)
        trained = recorder.model.model.trainable_variables
        weights.append([v.numpy() for v in trained])

    original = run_recorder.RunRecorder.on_epoch_end
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_recorder.RunRecorder, "on_epoch_end", on_epoch_end)
        train(*args)
    return weights


@pytest.mark.parametrize(
    "changes",
    [
        {"inner_optimizer": "Adam", "inner_optimizer_kwargs": {}},
        {
            "optimizer": "GEP",
            "optimizer_kwargs": {"residual_norm_clip": 0.2},
            "subspace": "PublicSubspace",
            "subspace_kwargs": {"rank": 10, "method": "gram"},
            "public_examples": 60,
            "batch_size": 1378,
        },
        {
            "optimizer": "ProjectedDPSGD",
            "subspace": "RandomSubspace",
            "subspace_kwargs": {"rank": 500, "update_every": 3},
        },
        {
            "optimizer": "RGP",
            "optimizer_kwargs": {"warmup_steps": 2},
            "reparametrize": {"rank": 4},
        },
        {"optimizer": "DPPowerSGD", "optimizer_kwargs": {"rank": 4}},
    ],
    ids=["DP-SGD", "GEP", "RPDP-SGD", "RGP", "DP-PowerSGD"],
)
def test_state_is_that_of_a_run_without_a_break(tmp_path, changes):
    """Without noise: subspace, carriers and optimizer go on as they were."""
    settings = EQUAL_RUNS | changes
    killed(settings, tmp_path / "killed", 4, 1, entropy=7)
    # Seeds are part of the state.
    *_, own = weights_of_epochs(settings, tmp_path / "killed", 9)
    _, _, third, _, whole = weights_of_epochs(settings, tmp_path / "whole", 7)
    for a, b, c in zip(own, whole, third, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
        assert np.abs(a - c).max() > 1e-3


def _train_until_replaced(workdir, name, after):
    """Kills the run before or after a file is whole."""

    def replace(source, target):
        if pathlib.Path(target).name == name and not after:
            kill()
        original(source, target)
        if pathlib.Path(target).name == name:
            kill()

    original = os.replace
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", replace)
        train(SETTINGS | {"epochs": 1}, workdir, results_only=False)


@pytest.fixture(name="whole", scope="module")
def _whole(tmp_path_factory):
    """Names of the files of a run without a break."""
    workdir = tmp_path_factory.mktemp("whole")
    train(SETTINGS | {"epochs": 1}, workdir, results_only=False)
    return {file.name for file in workdir.iterdir()}


@pytest.mark.parametrize(
    "name, after",
    [
        ("config.json", False),
        ("model.keras", False),
        ("result.json", True),
    ],
)
def test_killed_before_or_after_other_files(tmp_path, name, after, whole):
    workdir = tmp_path / "run"
    code = run_apart(_train_until_replaced, workdir, name, after)
    assert code == -signal.SIGKILL
    # Whole or not at all.
    assert (workdir / name).exists() == after
    train(SETTINGS | {"epochs": 1}, workdir, results_only=False)
    assert {file.name for file in workdir.iterdir()} == whole
    assert "report.html" in whole
    keras.models.load_model(workdir / "model.keras")


def _train_with_little_room(workdir, room, told):
    # What a full disk does, without one: a write fails after so many bytes.
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
    try:
        train(SETTINGS, workdir)
    except OSError as error:
        resource.setrlimit(
            resource.RLIMIT_FSIZE,
            (resource.RLIM_INFINITY, resource.RLIM_INFINITY),
        )
        told.write_text(str(error), "utf-8")
        raise SystemExit(7) from None


@pytest.mark.parametrize(
    "room, steps",
    # Of a ledger, of a checkpoint.
    [(100, 0), (20_000, STEPS_PER_EPOCH)],
    ids=["ledger", "checkpoint"],
)
def test_a_full_disk_stops_the_run_which_goes_on(tmp_path, room, steps):
    workdir, told = tmp_path / "run", tmp_path / "told"
    assert run_apart(_train_with_little_room, workdir, room, told) == 7
    assert "File too large" in told.read_text("utf-8")
    assert ledger_of(workdir).steps == steps
    result = train(SETTINGS, workdir)
    assert result["epochs"] == EPOCHS
    assert result["steps"] == steps + EPOCHS * STEPS_PER_EPOCH


@pytest.fixture(name="interrupted", scope="module")
def _interrupted(tmp_path_factory):
    """A run with a checkpoint of its first epoch."""
    workdir = tmp_path_factory.mktemp("run")
    killed(SETTINGS, workdir, 2, 1)
    return workdir


def cut(checkpoint):
    with open(checkpoint, "r+b") as file:
        file.truncate(checkpoint.stat().st_size // 2)


def of_another_model(checkpoint):
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
    model.save_weights(checkpoint, overwrite=True)


def no_archive(checkpoint):
    checkpoint.write_text("not weights", "utf-8")


@pytest.mark.parametrize("damage", [cut, of_another_model, no_archive])
def test_a_damaged_or_foreign_checkpoint_is_refused(
    interrupted, tmp_path, damage
):
    workdir = tmp_path / "run"
    shutil.copytree(interrupted, workdir)
    (checkpoint,) = (workdir / "checkpoint").iterdir()
    damage(checkpoint)
    before = contents(workdir)
    with pytest.raises(ValueError, match="Expected a checkpoint of this run"):
        train(SETTINGS, workdir)
    assert contents(workdir) == before
    # As the message says.
    checkpoint.unlink()
    result = train(SETTINGS, workdir)
    assert result["steps"] == (1 + EPOCHS) * STEPS_PER_EPOCH
