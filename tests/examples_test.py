"""Programs of docs/examples run, and one is the other after migration."""

import ast
import difflib
import functools
import pathlib
import re
import runpy

import keras
import pytest
from absl import app, flags

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


def run(name, monkeypatch, *arguments):
    """Runs a program in this process, whose entropy is seeded."""
    own = flags.FlagValues()
    for kind in ("float", "integer"):
        define = getattr(flags, f"DEFINE_{kind}")
        monkeypatch.setattr(
            flags,
            f"DEFINE_{kind}",
            functools.partial(define, flag_values=own),
        )
    monkeypatch.setattr(app, "run", lambda main: main(own([name, *arguments])))
    runpy.run_path(str(FOLDER / name), run_name="__main__")


@pytest.mark.slow
def test_mnist_trains(data_dir, monkeypatch, capsys):
    keras.utils.set_random_seed(0)
    run(
        "mnist_tf_dpsub.py",
        monkeypatch,
        *("--epochs=1", "--examples=15000", "--learning_rate=0.5"),
    )
    out = capsys.readouterr().out
    assert float(re.search(r"val_accuracy: ([\d.]+)", out)[1]) > 0.5
    epsilon = accounting.epsilon(
        noise_multiplier=1.1,
        sampling_rate=250 / 15_000,
        steps=60,
        delta=1e-5,
        accountant="rdp",
    )
    stated = re.search(r"with Poisson sampling +([\d.]+)", out)[1]
    assert epsilon <= float(stated) < epsilon + 1e-3
