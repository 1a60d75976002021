"""Computes the ε of a private run, or the noise or steps for a given ε.

Give two of epsilon, noise multiplier and number of steps: the third is printed,
by both accountants, with Poisson sampling, with each example once in an epoch
at a random step, and without amplification by sampling:

  tf-dpsub account --noise_multiplier=1.1 --batch_size=256 \\
      --examples=60000 --epochs=15 --delta=1e-5
  tf-dpsub account --epsilon=2 --sampling_rate=0.004 --steps=3500 \\
      --delta=1e-5 --json

`--rows_per_person=8` counts all rows of one person together, of which there are
at most so many. Where persons are drawn, by `person_ids` of `fit`, `--examples`
and `--batch_size` are of persons. `--bands=8` is for noise of which later steps
take back a part, by `bands` of the optimizer. `--json` prints one object with
the same figures; an infinite one is "inf".
"""

import json
import math
import sys
from collections.abc import Callable

from absl import flags

from tf_dpsub import accounting
from tf_dpsub.accounting import accountants
from tf_dpsub.accounting.statement import round_up
from tf_dpsub.launchers.terminal import program

_EPSILON = flags.DEFINE_float("epsilon", None, "The budget.")
_DELTA = flags.DEFINE_float(
    "delta", None, "In (0, 1), well below 1 / (number of examples). Required."
)
_NOISE_MULTIPLIER = flags.DEFINE_float(
    "noise_multiplier",
    None,
    "Standard deviation of the noise, divided by the clip.",
)
_STEPS = flags.DEFINE_integer("steps", None, "Number of steps.")
_EPOCHS = flags.DEFINE_integer(
    "epochs",
    None,
    "Number of epochs, instead of --steps. An epoch has examples / batch size "
    "steps, rounded up.",
)
_SAMPLING_RATE = flags.DEFINE_float(
    "sampling_rate", None, "Probability with which a step draws an example."
)
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size",
    None,
    "With --examples, instead of --sampling_rate: expected size of a batch.",
)
_EXAMPLES = flags.DEFINE_integer(
    "examples", None, "Number of examples in the data set."
)
_ROWS_PER_PERSON = flags.DEFINE_integer(
    "rows_per_person",
    1,
    "The most examples of one person: figures are for all of them together.",
    lower_bound=1,
)
_BANDS = flags.DEFINE_integer(
    "bands",
    1,
    "Number of steps that share their noise, and of groups that they draw from "
    "in turn.",
    lower_bound=1,
)
_JSON = flags.DEFINE_bool("json", False, "Print JSON instead of a table.")

_SOLVERS: dict[str, Callable] = {
    "epsilon": accounting.epsilon,
    "noise_multiplier": accounting.noise_multiplier,
    "steps": accounting.steps,
}
_LABELS = {
    "epsilon": "epsilon",
    "noise_multiplier": "noise multiplier",
    "steps": "steps",
    "delta": "delta",
}


def solve(
    *,
    delta,
    epsilon=None,
    noise_multiplier=None,
    steps=None,
    epochs=None,
    sampling_rate=None,
    batch_size=None,
    examples=None,
    rows_per_person=1,
    bands=1,
):
    """Computes epsilon, the noise multiplier or the number of steps.

    Of these three, exactly one is left out: the one to compute.

    Args:
        delta: float in (0, 1).
        epsilon: float, the budget. Defaults to `None`: computed.
        noise_multiplier: float. Defaults to `None`: computed.
        steps: int. Defaults to `None`: computed, unless `epochs` is given.
        epochs: int, instead of `steps`. Defaults to `None`.
        sampling_rate: float in (0, 1]. Defaults to `None`: `batch_size /
            examples`.
        batch_size: int. Defaults to `None`.
        examples: int. Defaults to `None`.
        rows_per_person: int, the most examples of one person, which count
            together. Defaults to `1`.
        bands: int, number of steps that share their noise, of which an example
            is in one. Defaults to `1`.

    Returns:
        dict: the arguments, as used; `"solved_for"`, the name of the computed
        value; and under `"poisson_sampling"`, `"once_per_epoch"` (with one band
        alone) and `"without_amplification"` its value by each accountant.

    Raises:
        ValueError: If arguments are missing, contradict each other, or are out
            of their range.
    """
    if delta is None:
        raise ValueError(
            "Expected --delta, got none. It should lie well below 1 / (number "
            "of examples)."
        )
    rate = _rate(sampling_rate, batch_size, examples)
    steps = _step_count(steps, epochs, rate, batch_size, examples)
    given = {
        "epsilon": epsilon,
        "noise_multiplier": noise_multiplier,
        "steps": steps,
    }
    missing = [name for name, value in given.items() if value is None]
    if len(missing) != 1:
        names = ", ".join(f"--{name}" for name in missing) or "none of them"
        raise ValueError(
            "Expected all but one of --epsilon, --noise_multiplier and --steps "
            f"(or --epochs); left out: {names}."
        )
    (solved_for,) = missing
    del given[solved_for]
    result = {**given, "delta": delta, "sampling_rate": rate}
    if examples is not None:
        result["examples"] = examples
    if rows_per_person != 1:
        result["rows_per_person"] = rows_per_person
    result["solved_for"] = solved_for
    ways = [
        ("poisson_sampling", rate, "poisson"),
        ("once_per_epoch", rate, "once_per_epoch"),
        ("without_amplification", 1, "poisson"),
    ]
    if bands != 1:
        result["bands"] = bands
        # Several rows of a person may be in several groups.
        of_group = _rate_of_group(rate, bands) if rows_per_person == 1 else 1
        ways = [("poisson_sampling", of_group, "poisson"), ways[-1]]
        if steps is not None:
            # One event for each cycle.
            given["steps"] = -(-steps // bands)
    for name, taken, sampling in ways:
        result[name] = {
            accountant: _SOLVERS[solved_for](
                **given,
                delta=delta,
                sampling_rate=taken,
                accountant=accountant,
                rows_per_person=rows_per_person,
                sampling=sampling,
            )
            * (bands if solved_for == "steps" else 1)
            for accountant in accountants.ACCOUNTANTS
        }
    return result


def table(result):
    """Formats a result as a table.

    Args:
        result: dict, as `solve` returns it.

    Returns:
        A str of several lines. Bounds are rounded to the safe side.
    """
    solved_for = result["solved_for"]
    lines = [
        f"{label:<36}{result[name]:>12.6g}"
        for name, label in {
            **_LABELS,
            "sampling_rate": "sampling rate",
            "rows_per_person": "rows of a person, at most",
            "bands": "bands",
        }.items()
        if name in result
    ]
    lines += ["", f"{_LABELS[solved_for]:<36}{'RDP':>12}{'PLD':>12}"]
    cyclic = "cyclic " * ("bands" in result)
    for name, label in (
        ("poisson_sampling", f"with {cyclic}Poisson sampling"),
        ("once_per_epoch", "with each example once in an epoch"),
        ("without_amplification", "without amplification by sampling"),
    ):
        if name not in result:
            continue
        cells = (
            str(value) if solved_for == "steps" else round_up(value, digits=5)
            for value in result[name].values()
        )
        lines.append(f"{label:<36}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


def main():
    """Computes and prints the value that the flags leave out."""
    result = solve(
        delta=_DELTA.value,
        epsilon=_EPSILON.value,
        noise_multiplier=_NOISE_MULTIPLIER.value,
        steps=_STEPS.value,
        epochs=_EPOCHS.value,
        sampling_rate=_SAMPLING_RATE.value,
        batch_size=_BATCH_SIZE.value,
        examples=_EXAMPLES.value,
        rows_per_person=_ROWS_PER_PERSON.value,
        bands=_BANDS.value,
    )
    examples = _EXAMPLES.value
    if examples is not None and _DELTA.value >= 1 / examples:
        print(
            f"Warning: delta = {_DELTA.value:g} is not below 1 / examples = "
            f"{1 / examples:.3g}. Publishing one example drawn at random would "
            "satisfy it.",
            file=sys.stderr,
        )
    if _JSON.value:
        print(json.dumps(_json_numbers(result), indent=2, allow_nan=False))
    else:
        print(table(result))


def run():
    """Runs `tf-dpsub account`."""
    program.run(main)


def _rate(sampling_rate, batch_size, examples):
    for name, value in (("batch_size", batch_size), ("examples", examples)):
        if value is not None and value < 1:
            raise ValueError(f"Expected --{name} >= 1, got {value}.")
    if sampling_rate is not None:
        if batch_size is not None:
            raise ValueError(
                "Expected --sampling_rate or --batch_size, got both."
            )
        return sampling_rate
    if batch_size is None or examples is None:
        raise ValueError(
            "Expected --sampling_rate, or --batch_size and --examples, got "
            "neither."
        )
    if batch_size > examples:
        raise ValueError(
            f"Expected --batch_size <= --examples, got {batch_size} and "
            f"{examples}."
        )
    return batch_size / examples


def _rate_of_group(rate, bands):
    # Rounding of a rate must not refuse as many groups as there are batches.
    if bands * rate > 1 + 1e-9:
        raise ValueError(
            "Expected --bands * --sampling_rate <= 1, got "
            f"{bands} * {rate:.6g}: a batch comes from one of so many groups. "
            "Take fewer bands, or smaller batches."
        )
    return min(1.0, bands * rate)


def _step_count(steps, epochs, rate, batch_size, examples):
    if epochs is None:
        return steps
    if steps is not None:
        raise ValueError("Expected --steps or --epochs, got both.")
    if epochs < 0:
        raise ValueError(f"Expected --epochs >= 0, got {epochs}.")
    if not 0 < rate <= 1:
        raise ValueError(f"Expected 0 < --sampling_rate <= 1, got {rate}.")
    if batch_size is not None:
        return epochs * math.ceil(examples / batch_size)
    # Rounding of 1 / rate must not add a step: 0.1 is not exactly 1 / 10.
    return epochs * math.ceil(1 / rate - 1e-9)


def _json_numbers(value):
    """Replaces infinite numbers, which JSON lacks, by "inf"."""
    if isinstance(value, dict):
        return {key: _json_numbers(part) for key, part in value.items()}
    if isinstance(value, float) and math.isinf(value):
        return "inf"
    return value


if __name__ == "__main__":
    run()
