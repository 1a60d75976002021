"""Runs the programs of the repository as a user would."""

import contextlib
import importlib
import io
import os
import pathlib
import subprocess
import sys
import warnings

import pytest
from absl import app, flags, logging
from absl.testing import flagsaver

from tf_dpsub.launchers.terminal import program

_ROOT = pathlib.Path(__file__).parents[2]


def run_program(name, *flags):
    """Runs `launchers/NAME.py` in a process of its own.

    Returns:
        A `subprocess.CompletedProcess`, with texts.
    """
    return python(f"launchers/{name}.py", *map(str, flags))


def run_here(name, *arguments):
    """Runs `launchers/NAME.py` in this process, which has loaded TensorFlow.

    For tests of what a program says and writes; those of what a process of its
    own does need `run_program`.

    Returns:
        A `subprocess.CompletedProcess`, with texts.
    """
    module = importlib.import_module(f"tf_dpsub.launchers.{name}")
    argv = [name, *map(str, arguments)]
    out, err = io.StringIO(), io.StringIO()
    code = None
    handler = logging.get_absl_handler()
    with (
        pytest.MonkeyPatch.context() as patch,
        flagsaver.flagsaver(),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        warnings.catch_warnings(),
    ):
        # A new process ignores it: ml_collections has a deprecated loader.
        warnings.simplefilter("ignore", DeprecationWarning)
        patch.setattr(sys, "argv", argv)
        patch.setattr(app, "run", _run)
        patch.setattr(os, "umask", lambda mask: None)
        # Programs set how these look, for the process.
        patch.setattr(warnings, "formatwarning", warnings.formatwarning)
        patch.setattr(handler, "setFormatter", lambda formatter: None)
        patch.chdir(_ROOT)
        try:
            module.run()
        except SystemExit as end:
            code = end.code
    return subprocess.CompletedProcess(
        argv, code, out.getvalue(), err.getvalue()
    )


def _run(main, flags_parser):
    """Stands in for `absl.app.run`, without settings of the process."""
    sys.exit(main(flags_parser(sys.argv)))


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
        code = program.exit_code_of(module.main)
    return (*capsys.readouterr(), code)


def contents(folder):
    """The bytes of all files in a folder, by their paths."""
    return {
        path: path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }
