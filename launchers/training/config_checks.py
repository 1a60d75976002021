"""Checks of a config that need no TensorFlow."""

import difflib
import math
import os

from tf_dpsub.configs import default


def check(config):
    """Checks fields that the library would check late, or not at all.

    Args:
        config: `ml_collections.ConfigDict`.

    Raises:
        ValueError: names the field.
    """
    fields = set(default.get_config())
    for wrong_fields, problem in (
        (fields - set(config), "lacks"),
        (set(config) - fields, "has unknown"),
    ):
        if wrong_fields:
            raise ValueError(
                "Expected a config with the fields of configs/default.py, got "
                f"one that {problem} {', '.join(sorted(wrong_fields))}."
            )
    for field in ("batch_size", "epochs", "steps_per_execution", "start_epoch"):
        if config[field] < 1:
            raise ValueError(f"Expected {field} >= 1, got {config[field]}.")
    for field in ("public_examples", "ridge_start_examples"):
        if config[field] < 0:
            raise ValueError(f"Expected {field} >= 0, got {config[field]}.")
    if config.seed < 0:
        raise ValueError(f"Expected seed >= 0, got {config.seed}.")
    if not 0 < config.learning_rate < math.inf:
        finite = "a finite " if config.learning_rate > 0 else ""
        raise ValueError(
            f"Expected {finite}learning_rate > 0, got {config.learning_rate}."
        )
    if not 0 < config.delta < 1:
        raise ValueError(
            f"Expected 0 < delta < 1, got {config.delta}. It should lie well "
            "below 1 / (number of examples)."
        )
    if config.epsilon is not None and not config.epsilon > 0:
        raise ValueError(f"Expected epsilon > 0, got {config.epsilon}.")
    if config.noise_multiplier is None and config.epsilon is None:
        raise ValueError(
            "Expected a noise_multiplier, or an epsilon to calibrate it for, "
            "got neither. Set one of them, or both: epsilon is then a budget."
        )
    rows = config.rows_per_person
    if rows is not None and rows < 1:
        raise ValueError(f"Expected rows_per_person >= 1, got {rows}.")
    _check_bands(config)
    choose({"rdp": None, "pld": None}, config.accountant, "an accountant")
    choose(
        {"poisson": None, "once_per_epoch": None},
        config.sampling,
        "a way of sampling",
    )


def _check_bands(config):
    if "bands" in config.optimizer_kwargs:
        raise ValueError(
            "Expected no bands in optimizer_kwargs, got "
            f"{config.optimizer_kwargs.bands!r}. Set the field `bands`."
        )
    if config.bands is None:
        return
    if config.optimizer != "DPSGD" or config.recipe is not None:
        raise ValueError(
            "Expected the optimizer DPSGD, without a recipe, with bands="
            f"{config.bands!r}, got {config.optimizer} and recipe="
            f"{config.recipe!r}. Leave bands out."
        )
    if config.sampling == "once_per_epoch":
        raise ValueError(
            'Expected sampling="poisson" with bands='
            f'{config.bands!r}, got "once_per_epoch". Leave one of them out.'
        )
    if config.bands == "auto":
        if config.epsilon is None:
            raise ValueError(
                'Expected epsilon with bands="auto", got none: the best number '
                "of bands depends on it. Set epsilon, or bands to a number."
            )
        if (config.rows_per_person or 1) > 1:
            raise ValueError(
                'Expected rows_per_person=1 with bands="auto", got '
                f"{config.rows_per_person}: with bands, several rows of a "
                "person have no amplification by sampling. Set bands to a "
                "number, or leave it out."
            )
    elif not isinstance(config.bands, int) or config.bands < 1:
        raise ValueError(
            f'Expected bands >= 1, or "auto", got {config.bands!r}.'
        )


def require_rows(config):
    """Refuses a config whose budget is that of persons.

    Args:
        config: `ml_collections.ConfigDict`.

    Raises:
        ValueError: if it is.
    """
    if (config.rows_per_person or 1) > 1:
        raise ValueError(
            "Expected rows_per_person=1 or none for a plan, which compares "
            f"methods by the ε of one row, got {config.rows_per_person}. Leave "
            "it out here, and set it to train."
        )


def check_data(config):
    """Checks that the file with the data is there, if a config names one.

    Args:
        config: `ml_collections.ConfigDict`.

    Raises:
        ValueError: if it is not.
    """
    if config.dataset.endswith(".npz") and not os.path.isfile(config.dataset):
        raise ValueError(
            "Expected an .npz file with data, got none: there is no "
            f"{config.dataset}."
        )


def choose(choices, name, kind):
    """Looks up a name.

    Args:
        choices: dict.
        name: string.
        kind: string, the kind of thing it names, such as `"a recorder"`.

    Returns:
        The value for `name`.

    Raises:
        ValueError: if there is none.
    """
    if name not in choices:
        close = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"Expected the name of {kind}, one of {', '.join(choices)}, got "
            f"{name!r}.{hint}"
        )
    return choices[name]


def construct(function, kwargs, name, *args, **fixed):
    """Calls a function with further arguments from a config.

    Args:
        function: the function.
        kwargs: `ml_collections.ConfigDict`, the arguments from the config.
        name: string, the name of the function in the config.
        *args: further arguments.
        **fixed: further arguments.

    Returns:
        The result of the function.

    Raises:
        ValueError: if the arguments do not fit the function.
    """
    try:
        return function(*args, **fixed, **kwargs.to_dict())
    except TypeError as error:
        raise ValueError(
            f"Expected arguments of {name} in the config, got "
            f"{kwargs.to_dict()}: {error}."
        ) from error
