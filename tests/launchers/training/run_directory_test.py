"""The directory of a run belongs to one run, and to one process at a time."""

import json
import stat

import pytest

from tf_dpsub import files
from tf_dpsub.configs import default
from tf_dpsub.launchers.training import run_directory

CONFIG = run_directory.json_fields(default.get_config())


def opened(path, changes=(), resume=False):
    return run_directory.RunDirectory(path, CONFIG | dict(changes), resume)


def kill_while_writing(path):
    """Leaves what a process leaves that is killed before a file is whole."""
    incomplete = []
    files.replace(
        path, lambda p: (incomplete.append(p.name), p.write_text("{", "utf-8"))
    )
    path.rename(path.with_name(incomplete[0]))


def test_killed_while_the_config_is_first_written(tmp_path):
    kill_while_writing(tmp_path / "config.json")
    with opened(tmp_path, resume=True) as directory:
        assert not directory.exists
        directory.begin()
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_what_a_killed_run_left_is_removed_when_it_is_resumed(tmp_path):
    with opened(tmp_path / "run") as directory:
        directory.begin()
    checkpoints = files.make_folder(directory.path / run_directory.CHECKPOINTS)
    kill_while_writing(directory.path / "metrics.csv")
    kill_while_writing(checkpoints / "epoch_000001.weights.h5")
    with opened(directory.path, resume=True):
        assert not [*checkpoints.iterdir()]
    assert {p.name for p in directory.path.iterdir()} == {
        "config.json",
        run_directory.CHECKPOINTS,
    }


def test_two_starts_on_a_new_folder_while_one_trains(tmp_path):
    path = tmp_path / "run"
    with opened(path) as first, opened(path, {"epochs": 7}) as second:
        first.begin()
        with pytest.raises(ValueError, match="no other process uses"):
            second.begin()
    assert json.loads((path / "config.json").read_text("utf-8")) == CONFIG


@pytest.mark.parametrize("resume", [False, True])
def test_two_starts_on_a_new_folder_one_after_the_other(tmp_path, resume):
    """The later one has looked at the folder before the earlier began."""
    path = tmp_path / "run"
    with opened(path, {"epochs": 7}, resume) as late:
        with opened(path) as early:
            early.begin()
        with pytest.raises(ValueError, match="has begun a run meanwhile"):
            late.begin()
    assert json.loads((path / "config.json").read_text("utf-8")) == CONFIG


def test_files_are_their_owners_alone(tmp_path):
    with opened(tmp_path / "run") as directory:
        directory.begin()
        directory.write_text("metrics.csv", "loss\n")
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    for file in directory.path.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_json_holds_infinite_numbers_by_name():
    config = default.get_config()
    assert run_directory.json_fields(config)["l2_norm_clip"] == 1.0
    config.l2_norm_clip = float("inf")
    assert run_directory.json_fields(config)["l2_norm_clip"] == "Infinity"
