"""The flag `--config`, and the start of all programs that have it."""

import difflib
import os
import pathlib
import re
import traceback

import ml_collections
from absl import flags
from ml_collections import config_flags

from tf_dpsub.configs import default
from tf_dpsub.launchers.terminal import program, quiet
from tf_dpsub.launchers.training import config_checks

CONFIG = config_flags.DEFINE_config_file(
    "config", None, "File of the config, such as configs/digits_dpsgd.py."
)
_CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


def begin():
    """Checks the config of the flags, and loads TensorFlow quietly.

    Returns:
        The `ml_collections.ConfigDict` of the flags.
    """
    config = CONFIG.value
    note = let_flags_decide(config, flags.FLAGS["config"].override_values)
    config_checks.check(config)
    config_checks.check_data(config)
    if note is not None:
        print(f"{'note':<10} {note}", flush=True)
    quiet.load_tensorflow()
    return config


def let_flags_decide(config, overridden):
    """Resolves flags that replace the config's epsilon or noise multiplier.

    Args:
        config: `ml_collections.ConfigDict`, changed in place.
        overridden: collection of strings, fields given on the command line.

    Returns:
        string, a note on the replaced field; None if none was replaced.
    """
    changed_fields = {"noise_multiplier", "epsilon"}.intersection(overridden)
    epsilon, noise_multiplier = config.epsilon, config.noise_multiplier
    if changed_fields == {"noise_multiplier"} and epsilon is not None:
        config.epsilon = None
        return (
            f"no budget is kept: --config.noise_multiplier="
            f"{noise_multiplier:g} takes the place of the config's epsilon = "
            f"{epsilon:g}; --config.epsilon={epsilon:g} beside it keeps it"
        )
    if changed_fields == {"epsilon"} and noise_multiplier is not None:
        config.noise_multiplier = None
        return (
            f"noise is calibrated for --config.epsilon={epsilon:g}, which "
            "takes the place of the config's noise_multiplier = "
            f"{noise_multiplier:g}"
        )
    return None


def run(main):
    """Runs a program with a config, as `program.run`.

    Args:
        main: function without arguments that returns the exit code, or None.
    """
    program.run(main, _parse)


def _parse(argv):
    """Parses flags, and loads the config."""
    try:
        positional = flags.FLAGS(with_own_configs(argv))
        for holder, example in (
            (CONFIG, "configs/digits_dpsgd.py"),
            (program.WORKDIR, "out/digits"),
        ):
            if holder.value is None:
                raise ValueError(
                    f"Expected --{holder.name}, such as "
                    f"--{holder.name}={example}, got none; see --help."
                )
        # A config that could not be read raises its error on first access.
        lock = getattr(CONFIG.value, "lock", None)
        if not isinstance(CONFIG.value, ml_collections.ConfigDict):
            raise ValueError(
                "Expected get_config() of the config to return that of "
                "configs/default.py, with changes, got "
                f"{type(CONFIG.value).__name__}."
            )
        lock()
    except AttributeError as error:
        raise ValueError(unknown_field(error)) from error
    except OSError as error:
        reason = str(error).rpartition("]")[2].strip()
        raise ValueError(
            f"Expected the file of a config, got none: {reason}."
            f"{_close_config(reason)}"
        ) from error
    except (
        SyntaxError,
        ImportError,
        NameError,
        TypeError,
        KeyError,
    ) as error:
        raise ValueError(
            f"Expected a config that Python can run, got {_place(error)}"
            f"{type(error).__name__}: {getattr(error, 'msg', error)}."
        ) from error
    except flags.UnrecognizedFlagError as error:
        if error.flagname in default.get_config():
            raise ValueError(
                f"Expected a flag of the program, got --{error.flagname}, a "
                f"field of the config: --config.{error.flagname}."
            ) from error
        raise
    return positional


def _place(error):
    """Line and file of an error in a config, followed by a colon."""
    if isinstance(error, SyntaxError):
        return f"line {error.lineno} of {error.filename}: "
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"line {frame.lineno} of {frame.filename}: "


def with_own_configs(argv):
    """Completes paths of configs that the package has and this folder lacks.

    Args:
        argv: list of strings, a command line.

    Returns:
        List of strings: the same, but `--config=configs/NAME.py` names the
        file that was installed, unless there is one at this path.
    """
    config_path = re.compile(r"(--?config=)?(configs/[\w./-]+\.py)")
    result = []
    for text in argv:
        match = config_path.fullmatch(text)
        if match and not os.path.exists(match[2]):
            installed = _CONFIGS.parent / match[2]
            if installed.is_file():
                text = f"{match[1] or ''}{installed}"
        result.append(text)
    return result


def _close_config(named):
    """Hint that names the config of the package with the most similar name."""
    names = [path.stem for path in _CONFIGS.rglob("[!_]*.py")]
    stem = pathlib.Path(named.strip("'")).stem
    close = difflib.get_close_matches(stem, names, n=1)
    return f" Did you mean configs/{close[0]}.py?" if close else ""


def unknown_field(error):
    """One-line message for an `AttributeError` of a config."""
    field = re.match(r"""'(?:\\'|Key ")?(\w+)(?:\\'|"|'$)""", str(error))
    if field is None:
        return f"The config file is wrong: {error}."
    fields = list(default.get_config())
    close = difflib.get_close_matches(field[1], fields, n=2)
    if close:
        cure = f"Did you mean {' or '.join(close)}?"
    else:
        cure = f"There are {', '.join(fields)}, and the kwargs of the file."
    return f"Expected a field of the config, got {field[1]!r}. {cure}"
