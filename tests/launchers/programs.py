"""Runs the programs of the repository as a user would."""

import os
import pathlib
import subprocess
import sys

from absl import flags
from absl.testing import flagsaver

from tf_dpsub.launchers.terminal import program

_ROOT = pathlib.Path(__file__).parents[2]


def run_program(name, *flags):
    """Runs `launchers/NAME.py` in a process of its own.

    Returns:
        A `subprocess.CompletedProcess`, with texts.
    """
    return python(f"launchers/{name}.py", *map(str, flags))


def python(*arguments):
    """Runs Python in the tree, as a user does after installing it.

    Returns:
        A `subprocess.CompletedProcess`, with texts.
    """
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=_ROOT,
        env=os.environ | {"PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def run_main(module, capsys, **values):
    """Output, messages and exit code of a program with these flags."""
    flags.FLAGS.mark_as_parsed()
    with flagsaver.flagsaver(**values):
        code = program.ended(module.main)
    return (*capsys.readouterr(), code)


def contents(folder):
    """The bytes of all files in a folder, by their paths."""
    return {
        path: path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }
