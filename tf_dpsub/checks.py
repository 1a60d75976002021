"""Checks of arguments: each raises a `ValueError` that names the argument."""

import difflib
import math
from collections.abc import Iterable


def is_int(value):
    """Returns whether a value is a whole number; True and False are not."""
    return hasattr(value, "__index__") and not isinstance(value, bool)


def check_count(name: str, value, optional: bool = False):
    """Checks a positive number of something.

    Args:
        name: string, of the argument.
        value: the argument.
        optional: bool, whether None is allowed. Defaults to `False`.

    Raises:
        ValueError: if it is no int, or below 1.
    """
    _check_int(name, value, 1, optional)


def check_nonnegative(name: str, value, optional: bool = False):
    """Checks a number of something that may be 0.

    Args: as `check_count`.

    Raises:
        ValueError: if it is no int, or below 0.
    """
    _check_int(name, value, 0, optional)


def check_seed(seed):
    """Checks a seed, an int from 0 on or None."""
    check_nonnegative("seed", seed, optional=True)


def check_fraction(name: str, value, hint: str = ""):
    """Checks a number strictly between 0 and 1.

    Args:
        name: string, of the argument.
        value: the argument.
        hint: string, a sentence that ends the message. Defaults to none.

    Raises:
        ValueError: if it is not in (0, 1).
    """
    if not 0 < value < 1:
        raise ValueError(f"Expected 0 < {name} < 1, got {value}." + hint)


def check_delta(delta):
    """Checks the δ of a guarantee, a number in (0, 1)."""
    check_fraction(
        "delta",
        delta,
        " It should lie well below 1 / (number of examples).",
    )


def check_epsilon(epsilon):
    """Checks the ε of a guarantee, a positive and finite number."""
    if not 0 < epsilon < math.inf:
        raise ValueError(f"Expected 0 < epsilon < inf, got {epsilon}.")


def check_noise_multiplier(noise_multiplier):
    """Checks a noise multiplier, a finite number from 0 on."""
    if not 0 <= noise_multiplier < math.inf:
        raise ValueError(
            f"Expected 0 <= noise_multiplier < inf, got {noise_multiplier}. It "
            "is the standard deviation of the noise divided by the clip."
        )


def check_positive(name: str, value):
    """Checks a number above 0."""
    if not value > 0:
        raise ValueError(f"Expected {name} > 0, got {value}.")


def check_choice(name: str, value, choices: Iterable[str]):
    """Checks that a value is one of a few names.

    Args:
        name: string, of the argument.
        value: the argument.
        choices: iterable of string.

    Raises:
        ValueError: if it is none of them; the message has the closest one.
    """
    choices = tuple(choices)
    if value not in choices:
        close = difflib.get_close_matches(str(value), choices, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"Expected {name} to be one of {choices}, got {value!r}.{hint}"
        )


def _check_int(name, value, least, optional):
    if optional and value is None:
        return
    if not (is_int(value) and value >= least):
        raise ValueError(
            f"Expected {name} >= {least} (int){' or None' * optional}, got "
            f"{value!r}."
        )
