"""Configs are found in the working directory, or else in the package."""

import pathlib
import re

import pytest

from tests.launchers.digits import digits_config
from tf_dpsub.launchers.training import config_flag

OWN = pathlib.Path(config_flag.__file__).parents[2] / "configs"


@pytest.mark.parametrize("prefix", ["--config=", "-config=", ""])
def test_configs_of_the_package(prefix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = ["train", f"{prefix}configs/digits_dpsgd.py", "--config.epochs=2"]
    completed = config_flag.with_own_configs(given)
    assert completed == [
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


class TestFlags:
    @pytest.mark.parametrize(
        "overridden, expected",
        [
            ([], (4.0, 2.0, None)),
            (["epochs"], (4.0, 2.0, None)),
            (["noise_multiplier"], (4.0, None, "no budget is kept: .* = 2; ")),
            (["epsilon"], (None, 2.0, "noise is calibrated .* = 4")),
            (["epsilon", "noise_multiplier"], (4.0, 2.0, None)),
        ],
    )
    def test_a_flag_for_the_noise_replaces_the_other(
        self, overridden, expected
    ):
        config = digits_config(noise_multiplier=4.0, epsilon=2.0)
        note = config_flag.let_flags_decide(config, overridden)
        *values, displaced = expected
        assert [config.noise_multiplier, config.epsilon] == values
        if displaced is None:
            assert note is None
        else:
            assert re.match(displaced, note)

    def test_a_flag_that_displaces_nothing_says_nothing(self):
        config = digits_config(noise_multiplier=4.0, epsilon=None)
        assert (
            config_flag.let_flags_decide(config, ["noise_multiplier"]) is None
        )

    @pytest.mark.parametrize(
        "field, cure",
        [
            ("lerning_rate", "Did you mean learning_rate or "),
            ("xyz", "There are accountant, bands, batch_size, "),
        ],
    )
    def test_unknown_field_in_a_file(self, field, cure):
        with pytest.raises(AttributeError) as error:
            setattr(digits_config(), field, 1)
        message = config_flag.unknown_field(error.value)
        assert f"got {field!r}. {cure}" in message
        assert "\n" not in message
