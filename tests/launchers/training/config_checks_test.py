"""Checks of configs that need no TensorFlow."""

import re

import pytest

from tests.launchers.programs import python
from tf_dpsub.configs import default
from tf_dpsub.launchers.training import config_checks


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"epsilon": -1.0}, "Expected epsilon > 0, got -1"),
        ({"learning_rate": float("inf")}, "a finite learning_rate > 0"),
        ({"learning_rate": float("nan")}, "Expected learning_rate > 0, got n"),
        ({"ridge_start_examples": -1}, "Expected ridge_start_examples >= 0"),
        ({"dataset": "none.npz"}, "there is no none.npz"),
        ({"rows_per_person": 0}, "Expected rows_per_person >= 1, got 0"),
        ({"accountant": "rpd"}, "Did you mean 'rdp'"),
    ],
)
def test_mistakes(changes, message):
    config = default.get_config()
    config.noise_multiplier = 1.0
    config.update(changes)
    with pytest.raises(ValueError, match=message):
        config_checks.check(config)
        config_checks.check_data(config)


def test_nothing_slow_is_loaded():
    code = (
        "import sys; from tf_dpsub.launchers import train; "
        "slow = {'tensorflow', 'keras'} & set(sys.modules); assert not slow"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "text, message",
    [
        ("def get_config(:\n", "line 1 of .*: SyntaxError: invalid syntax"),
        ("def get_config():\n    return {}\n", "to return .*, got dict"),
        ("import nothing_like_it\n", "ModuleNotFoundError: No module"),
        ("def get_config():\n    return x\n", "line 2 .*NameError: name 'x'"),
    ],
)
def test_a_config_that_is_none_ends_in_one_line(tmp_path, text, message):
    file = tmp_path / "config.py"
    file.write_text(text, "utf-8")
    code = (
        "from tf_dpsub.launchers.training import config_flag; "
        "config_flag.run(lambda: 0)"
    )
    arguments = [f"--config={file}", f"--workdir={tmp_path / 'run'}"]
    done = python("-c", code, *arguments)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: Expected ")
    assert re.search(message, line), line
