"""Configs are found in the working directory, or else in the package."""

import pathlib

import pytest

from launchers import config_flag

OWN = pathlib.Path(config_flag.__file__).parents[1] / "configs"


@pytest.mark.parametrize("prefix", ["--config=", "-config=", ""])
def test_configs_of_the_package(prefix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = ["train", f"{prefix}configs/digits_dpsgd.py", "--config.epochs=2"]
    found = config_flag.with_own_configs(given)
    assert found == [
        "train", f"{prefix}{OWN / 'digits_dpsgd.py'}", "--config.epochs=2"
    ]  # fmt: skip


def test_configs_of_the_working_directory_come_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = ["train", "--config=configs/digits_dpsgd.py"]
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "digits_dpsgd.py").touch()
    assert config_flag.with_own_configs(given) == given


@pytest.mark.parametrize(
    "argument",
    [
        "--config=configs/none.py",
        "--config=other/digits_dpsgd.py",
        "--workdir=configs/digits_dpsgd.py",
    ],
)
def test_other_arguments_stay(argument, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert config_flag.with_own_configs([argument]) == [argument]
