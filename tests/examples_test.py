"""Programs of docs/examples run, and one is the other after migration."""

import ast
import difflib
import pathlib
import re
import subprocess
import sys

import pytest

from tf_dpsub import accounting

FOLDER = pathlib.Path(__file__).parents[1] / "docs" / "examples"


def code(name):
    """The lines of a program after its docstring."""
    text = (FOLDER / name).read_text("utf-8")
    begin = ast.parse(text).body[0].end_lineno
    return text.splitlines()[begin:]


def test_moving_from_tensorflow_privacy_takes_few_lines():
    changes = difflib.ndiff(
        code("mnist_tensorflow_privacy.py"), code("mnist_tf_dpsub.py")
    )
    new = [line[2:] for line in changes if line.startswith("+ ")]
    new = [line for line in new if line]
    assert len(new) == 7
    # The guide shows them, with values for flags.
    guide = (FOLDER.parent / "migrating.md").read_text("utf-8")
    (shown,) = re.findall(r"```text\n(\+.*?)```", guide, re.DOTALL)
    shown = [line[1:] for line in shown.splitlines() if line[0] == "+"]
    for line, shown_line in zip(new, shown, strict=True):
        beginning = (
            shown_line.strip().partition("=")[0].partition("(learning")[0]
        )
        assert line.strip().startswith(beginning)


@pytest.mark.slow
def test_mnist_trains(data_dir):
    done = subprocess.run(
        [sys.executable, FOLDER / "mnist_tf_dpsub.py", "--epochs=1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # 0.73 on average, with a standard deviation of 0.04.
    assert float(re.search(r"val_accuracy: ([\d.]+)", done.stdout)[1]) > 0.5
    epsilon = accounting.epsilon(
        noise_multiplier=1.1, sampling_rate=250 / 60_000, steps=240, delta=1e-5
    )
    stated = re.search(r"with Poisson sampling +([\d.]+)", done.stdout)[1]
    assert epsilon <= float(stated) < epsilon + 1e-3
