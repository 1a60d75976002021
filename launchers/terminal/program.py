"""Common parts of all programs: flags, help, one-line errors, exit codes.

The exit code is 0 for success; 1 if a trial failed or an audited claim does not
hold; 2 if the program cannot do what it was asked for, after one line that says
why and what would help; and 130 if it was interrupted.
"""

import inspect
import os
import shlex
import sys
import textwrap

from absl import app, flags, logging

from tf_dpsub import interruptions

WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder for the files that the program writes."
)
DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "Say what would be done, and do nothing."
)
DEBUG = flags.DEFINE_bool("debug", False, "Show an error with its traceback.")

REFUSED, INTERRUPTED = 2, 130


def run(main, parse_flags=None):
    """Runs a program to its end.

    Args:
        main: function without arguments that returns the exit code, or None.
        parse_flags: function that parses the command line, a list of strings,
            and returns the arguments that are not flags, the program first. It
            raises `ValueError` or `flags.Error`. Defaults to `None`.
    """
    module = inspect.getmodule(main)
    if {"--help", "-help", "-h"}.intersection(sys.argv[1:]):
        print(help_text(module))
        sys.exit(0)

    def parse(argv):
        try:
            positional = (parse_flags or flags.FLAGS)(argv)
            if len(positional) > 1:
                raise ValueError(f"Expected flags only, got {positional[1]!r}.")
        except (flags.Error, ValueError) as error:
            if "--debug" in argv:
                raise
            _print_error(error)
            sys.exit(REFUSED)
        return positional

    def main_with_umask(_):
        # Only the user may read the files that a program writes.
        os.umask(0o077)
        return exit_code_of(main)

    app.run(main_with_umask, flags_parser=parse)


def exit_code_of(main):
    """Runs a function; prints an error that it raises in one line.

    Args:
        main: function without arguments that returns an exit code, or None.

    Returns:
        int, the exit code.
    """
    try:
        with interruptions.kept():
            return main() or 0
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if DEBUG.value:
            raise
        _print_error(error)
        return REFUSED


def _print_error(error):
    """Writes an error to standard error, in one line."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    text = lines[0].strip() if lines else ""
    expected = isinstance(
        error, (flags.Error, ValueError, OSError, MemoryError, ImportError)
    )
    if not expected or not text:
        text = f"{type(error).__name__}: {text}"
    if not expected or len(lines) != 1:
        text += " (--debug shows all of it)"
    logging.flush()
    print(f"error: {text}", file=sys.stderr)


def command(name):
    """The command line of this run, as `tf-dpsub` takes it."""
    return shlex.join(["tf-dpsub", name, *sys.argv[1:]])


def help_text(module):
    """The help of a program: its docstring and its flags.

    Args:
        module: the program's module.
    """
    lines = [inspect.cleandoc(module.__doc__), "", "Flags:", ""]
    for holder in _flags_of(module):
        flag = flags.FLAGS[holder.name]
        lines += [
            f"  --{flag.name}{_default(flag)}",
            textwrap.indent(textwrap.fill(flag.help, 72), " " * 6),
        ]
    return "\n".join(lines)


def _default(flag):
    if flag.default is None:
        return ""
    if flag.boolean:
        return f", or --no{flag.name}" if flag.default else ""
    return f"={flag.default_as_str[1:-1]}"


def _flags_of(module):
    """The flags that a module defines or imports, `--debug` last."""
    contents = [*vars(module).values()]
    contents += [
        v for part in contents if inspect.ismodule(part) for v in _shared(part)
    ]
    holders = {v.name: v for v in contents if isinstance(v, flags.FlagHolder)}
    holders[DEBUG.name] = DEBUG
    return holders.values()


def _shared(module):
    """Contents of a module of flags that programs with a config share."""
    return vars(module).values() if module.__name__.endswith("_flag") else ()
