"""The command `tf-dpsub`: one for all programs.

    tf-dpsub train --config=configs/digits_dpsgd.py --workdir=out/digits
    tf-dpsub account --noise_multiplier=4 --batch_size=250 --examples=10000 \\
        --epochs=30 --delta=1e-5
    tf-dpsub COMMAND --help

The commands; the help of each has examples:
"""

import ast
import difflib
import importlib
import inspect
import pathlib
import sys

import tf_dpsub

COMMANDS = (
    "train",
    "account",
    "plan",
    "audit",
    "spectrum",
    "reproduce",
    "report",
)


def run():
    """Runs the program that the first argument names."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("--help", "-h", "help"):
        print(overview())
        return
    if name == "--version":
        print(f"tf-dpsub {tf_dpsub.__version__}")
        return
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        cure = f" Did you mean {close[0]}?" if close else ""
        print(
            f"error: Expected one of {', '.join(COMMANDS)}, got {name!r}."
            f"{cure}",
            file=sys.stderr,
        )
        sys.exit(2)
    sys.argv = [f"tf-dpsub {name}", *arguments]
    importlib.import_module(f"tf_dpsub.launchers.{name}").run()


def overview():
    """Lists all commands with their descriptions, without importing them."""
    lines = [inspect.cleandoc(__doc__), ""]
    for name in COMMANDS:
        file = pathlib.Path(__file__).with_name(f"{name}.py")
        docstring = ast.get_docstring(ast.parse(file.read_text("utf-8")))
        lines.append(f"  {name:<10} {docstring.splitlines()[0]}")
    return "\n".join(lines)


if __name__ == "__main__":
    run()
