"""Runs that are killed, or cannot write, and go on afterwards."""

import functools
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
CHECKPOINT = "_000002"
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


def _train_until(workdir, epoch, step):
    with pytest.MonkeyPatch.context() as patch:
        StopAt(patch, epoch, step, kill)
        train(SETTINGS, workdir)


def ledger_of(workdir):
    return accounting.PrivacyLedger(workdir / "ledger.json")


@pytest.fixture(name="at_every_step", scope="module")
def _at_every_step(tmp_path_factory):
    """Copies of a workdir before each step: all that a kill there leaves.

    And before and after the second checkpoint is written.
    """
    folder = tmp_path_factory.mktemp("steps")
    workdir = folder / "run"
    copies = {}

    def copy(epoch, step):
        copies[epoch, step] = workdir.with_name(f"{epoch}_{step}")
        shutil.copytree(workdir, copies[epoch, step])

    with pytest.MonkeyPatch.context() as patch:
        for epoch in range(1, EPOCHS + 1):
            for step in range(1, STEPS_PER_EPOCH + 1):
                StopAt(patch, epoch, step, functools.partial(copy, epoch, step))
        copies |= copies_at_files(folder, [CHECKPOINT], SETTINGS)
    return copies


@pytest.mark.parametrize("epoch", range(1, EPOCHS + 1))
def test_within_an_epoch_nothing_is_written(at_every_step, epoch):
    """A restart from a later step is that from the second one."""
    epoch_contents = [
        {
            path.relative_to(at_every_step[epoch, step]): content
            for path, content in contents(at_every_step[epoch, step]).items()
        }
        for step in range(2, STEPS_PER_EPOCH + 1)
    ]
    assert epoch_contents[0] and all(
        epoch_content == epoch_contents[0] for epoch_content in epoch_contents
    )


@pytest.mark.parametrize("epoch", range(1, EPOCHS + 1))
@pytest.mark.parametrize("step", [1, 2])
def test_restart_from_every_step_gives_the_same_ledger(
    at_every_step, tmp_path, epoch, step
):
    shutil.copytree(at_every_step[epoch, step], tmp_path, dirs_exist_ok=True)
    # Steps are written before they run.
    begun = (epoch - 1) * STEPS_PER_EPOCH + step - 1
    written = ledger_of(tmp_path).steps
    assert written >= begun
    result = train(SETTINGS, tmp_path)
    assert result["epochs"] == EPOCHS
    # The epoch in which it was killed counts twice, unless nothing had begun.
    lost_steps = 0 if step == 1 else STEPS_PER_EPOCH
    assert written == begun - (step - 1) + lost_steps
    assert result["steps"] == EPOCHS * STEPS_PER_EPOCH + lost_steps
    assert ledger_of(tmp_path).steps == result["steps"]
    assert result["epsilon"] == pytest.approx(
        accounting.epsilon(
            noise_multiplier=2.0,
            sampling_rate=480 / 1438,
            steps=result["steps"],
            delta=1e-5,
        )
    )


def copies_at_files(folder, names, changes, **arguments):
    """Copies of a workdir before and after files of these names are written.

    Args:
        folder: `pathlib.Path`, for the run and the copies.
        names: strings, which the names of the files contain.
        changes: dict, of the config.
        **arguments: of `train`.

    Returns:
        dict from pairs of a name and "before" or "after" to folders; the
        folder of the finished run is that of `None`.
    """
    workdir = folder / "run"
    copies = {None: workdir}

    def copy(target, moment):
        for name in names:
            if name in pathlib.Path(target).name:
                copies[name, moment] = folder / f"{name}_{moment}"
                shutil.copytree(workdir, copies[name, moment])

    def replace(source, target):
        copy(target, "before")
        original(source, target)
        copy(target, "after")

    original = os.replace
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", replace)
        train(changes, workdir, **arguments)
    return copies


@pytest.mark.parametrize(
    "moment, epochs", [("before", 1), ("after", 2)], ids=str
)
def test_killed_while_a_checkpoint_is_written(at_every_step, moment, epochs):
    """The one before is whole, or there are two."""
    workdir = at_every_step[CHECKPOINT, moment]
    assert ledger_of(workdir).steps == 2 * STEPS_PER_EPOCH
    result = train(SETTINGS, workdir)
    assert result["epochs"] == EPOCHS
    assert result["steps"] == (2 + EPOCHS - epochs) * STEPS_PER_EPOCH


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
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    with pytest.MonkeyPatch.context() as patch:
        StopAt(patch, 4, 1, lambda: shutil.copytree(whole, stopped))
        _, _, third, _, last = weights_of_epochs(settings, whole, 7)
    # Seeds are part of the state.
    *_, weights = weights_of_epochs(settings, stopped, 9)
    for a, b, c in zip(weights, last, third, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
        assert np.abs(a - c).max() > 1e-3


@pytest.fixture(name="at_files", scope="module")
def _at_files(tmp_path_factory):
    names = ["config.json", "model.keras", "result.json"]
    return copies_at_files(
        tmp_path_factory.mktemp("files"),
        names,
        SETTINGS | {"epochs": 1},
        results_only=False,
    )


@pytest.mark.parametrize(
    "name, moment",
    [
        ("config.json", "before"),
        ("model.keras", "before"),
        ("result.json", "after"),
    ],
)
def test_killed_before_or_after_other_files(at_files, name, moment):
    workdir = at_files[name, moment]
    # Whole or not at all.
    assert (workdir / name).exists() == (moment == "after")
    train(SETTINGS | {"epochs": 1}, workdir, results_only=False)
    whole = {file.name for file in at_files[None].iterdir()}
    assert {file.name for file in workdir.iterdir()} == whole
    assert "report.html" in whole
    keras.models.load_model(workdir / "model.keras")


def _train_with_little_room(workdir, room, output_file):
    # Stands in for a full disk: a write fails after so many bytes.
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
    try:
        train(SETTINGS, workdir)
    except OSError as error:
        resource.setrlimit(
            resource.RLIMIT_FSIZE,
            (resource.RLIM_INFINITY, resource.RLIM_INFINITY),
        )
        output_file.write_text(str(error), "utf-8")
        raise SystemExit(7) from None


@pytest.mark.parametrize(
    "room, steps",
    # A write of a ledger, and one of a checkpoint.
    [(100, 0), (20_000, STEPS_PER_EPOCH)],
    ids=["ledger", "checkpoint"],
)
def test_a_full_disk_stops_the_run_which_goes_on(tmp_path, room, steps):
    workdir, output_file = tmp_path / "run", tmp_path / "told"
    assert run_apart(_train_with_little_room, workdir, room, output_file) == 7
    assert "File too large" in output_file.read_text("utf-8")
    assert ledger_of(workdir).steps == steps
    result = train(SETTINGS, workdir)
    assert result["epochs"] == EPOCHS
    assert result["steps"] == steps + EPOCHS * STEPS_PER_EPOCH


@pytest.fixture(name="interrupted", scope="module")
def _interrupted(tmp_path_factory):
    """A run with a checkpoint of its first epoch, which was killed."""
    workdir = tmp_path_factory.mktemp("run")
    code = run_apart(_train_until, workdir, EPOCHS, 1)
    assert code == -signal.SIGKILL
    return workdir


def test_a_kill_leaves_what_the_copy_of_the_workdir_has(
    interrupted, at_every_step
):
    """The tests above take copies for what a kill leaves."""
    folders = interrupted, at_every_step[EPOCHS, 1]
    killed, copied = (
        sorted(path.relative_to(folder) for path in folder.rglob("*"))
        for folder in folders
    )
    assert killed == copied
    for folder in folders:
        assert ledger_of(folder).steps == STEPS_PER_EPOCH


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


def test_without_its_checkpoint_a_run_begins_again(interrupted, tmp_path):
    """Follows the advice of the message."""
    workdir = tmp_path / "run"
    shutil.copytree(interrupted, workdir)
    (checkpoint,) = (workdir / "checkpoint").iterdir()
    checkpoint.unlink()
    result = train(SETTINGS, workdir)
    assert result["steps"] == (1 + EPOCHS) * STEPS_PER_EPOCH
