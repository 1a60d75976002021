"""Programs end with a code, and with a line if something is wrong."""

import pytest
from absl import flags
from absl.testing import flagsaver

from tf_dpsub.launchers.terminal import program


@pytest.fixture(autouse=True)
def _parsed():
    flags.FLAGS.mark_as_parsed()


def fails(error):
    def main():
        raise error

    return main


@pytest.mark.parametrize(
    ("returned", "code"), [(None, 0), (0, 0), (1, 1), (130, 130)]
)
def test_codes(returned, code, capsys):
    assert program.exit_code_of(lambda: returned) == code
    assert capsys.readouterr() == ("", "")


def test_interrupt(capsys):
    assert (
        program.exit_code_of(fails(KeyboardInterrupt())) == program.INTERRUPTED
    )
    assert capsys.readouterr().err == "Interrupted.\n"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("Expected a, got b."), "Expected a, got b."),
        (FileNotFoundError(2, "No file", "x"), "[Errno 2] No file: 'x'"),
        (MemoryError("Expected more."), "Expected more."),
        (ImportError("Expected a."), "Expected a."),
        (ValueError("a\nb"), "a (--debug shows all of it)"),
        (MemoryError(), "MemoryError:  (--debug shows all of it)"),
        (KeyError("x"), "KeyError: 'x' (--debug shows all of it)"),
    ],
)
def test_errors_are_told_in_a_line(error, line, capsys):
    assert program.exit_code_of(fails(error)) == program.REFUSED
    assert capsys.readouterr() == ("", f"error: {line}\n")


def test_debug_raises():
    with flagsaver.flagsaver(debug=True):
        with pytest.raises(KeyError):
            program.exit_code_of(fails(KeyError("x")))


def test_command_can_be_run_again(monkeypatch):
    argv = ["tf-dpsub plan", "--config=a b.py", "--most=3"]
    monkeypatch.setattr("sys.argv", argv)
    assert program.command("plan") == "tf-dpsub plan '--config=a b.py' --most=3"
