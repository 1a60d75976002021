"""The command `tf-dpsub` finds programs, and their help is complete."""

import importlib
import re
import subprocess
import sys

import pytest
from absl import flags

from tf_dpsub.launchers import cli
from tf_dpsub.launchers.terminal import program

COMMANDS = [
    importlib.import_module(f"tf_dpsub.launchers.{name}")
    for name in cli.COMMANDS
]


def tf_dpsub(*arguments, code=0):
    """Standard output and error of the command."""
    done = subprocess.run(
        [sys.executable, "-m", "launchers.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


class TestOverview:
    def test_names_every_command_with_what_it_does(self):
        text = cli.overview()
        for name, module in zip(cli.COMMANDS, COMMANDS):
            first = module.__doc__.splitlines()[0]
            assert re.search(rf"^  {name} +{re.escape(first)}$", text, re.M)

    @pytest.mark.parametrize("arguments", [(), ("--help",), ("help",)])
    def test_is_what_help_shows(self, arguments):
        out, err = tf_dpsub(*arguments)
        assert out == cli.overview() + "\n"
        assert err == ""


def test_runs_the_program():
    out, _ = tf_dpsub(
        "account",
        "--noise_multiplier=4",
        "--sampling_rate=0.1",
        "--steps=10",
        "--delta=1e-5",
    )
    assert "with Poisson sampling" in out


def test_version():
    out, _ = tf_dpsub("--version")
    assert re.fullmatch(r"tf-dpsub \d+\.\d+\.\d+\n", out)


def test_unknown_command():
    out, err = tf_dpsub("acount", "--delta=1", code=program.REFUSED)
    assert out == ""
    assert err.startswith("error: Expected one of train, account")
    assert err.endswith("got 'acount'. Did you mean account?\n")


@pytest.mark.parametrize("module", COMMANDS, ids=cli.COMMANDS)
class TestHelp:
    def test_teaches_by_example(self, module):
        name = module.__name__.rpartition(".")[2]
        text = program.help_text(module)
        (first, *_) = text.splitlines()
        assert first.endswith(".")
        assert f"  tf-dpsub {name} " in text

    def test_explains_the_flags_of_its_own(self, module):
        text = program.help_text(module)
        for flag in flags.FLAGS.get_flags_for_module(module.__name__):
            assert re.search(rf"^  --{flag.name}(=|,|$)", text, re.M)
            assert " ".join(flag.help.split()) in " ".join(text.split())
        assert text.count("--debug\n") + text.count("--debug=") == 1

    def test_examples_have_flags_that_exist(self, module):
        text = program.help_text(module).partition("\nFlags:\n")
        for name in re.findall(r"--(\w+)", text[0]):
            assert name in flags.FLAGS or name.removeprefix("no") in flags.FLAGS


def test_help_of_a_program():
    out, _ = tf_dpsub("train", "--help")
    assert "--config=configs/digits_dpsgd.py" in out
    assert "\n  --config\n" in out
    assert "\n  --dry_run\n" in out
    assert "\n  --jobs" not in out
