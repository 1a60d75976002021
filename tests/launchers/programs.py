"""Runs the programs of the repository as a user would."""

import pathlib
import subprocess
import sys

_ROOT = pathlib.Path(__file__).parents[2]


def run_program(name, *flags):
    """Runs `launchers/NAME.py` in a process of its own.

    Returns:
        A `subprocess.CompletedProcess`, with texts.
    """
    return subprocess.run(
        [sys.executable, _ROOT / "launchers" / f"{name}.py", *map(str, flags)],
        capture_output=True,
        text=True,
        cwd=_ROOT,
        check=False,
    )
