"""Steps that share noise, as an audit expects it: claimed here once more."""

import math

import keras
import numpy as np

from tf_dpsub.data import PoissonBatches
from tf_dpsub.training import banded_runs

# Batches in a group.
_BATCHES = 4


def ratios_of(optimizer) -> tuple:
    """The public ratios by which steps take noise back, the first of them 1.

    Args:
        optimizer: private optimizer.
    """
    if optimizer.bands == 1:
        return (1.0,)
    return optimizer.banded_noise.ratios


def begin(optimizer):
    """Begins a run of steps: its first one takes nothing back.

    Args:
        optimizer: private optimizer.
    """
    if optimizer.bands > 1:
        optimizer.banded_noise.forget()


def fresh(values, ratios):
    """The part of released numbers that no earlier step has a share of.

    With the matrix C of the ratios, it is `C values`, over the norm of a column
    of C: the claim is that noise then is independent, with the standard
    deviation of a step that shares none.

    Args:
        values: float array `[steps, numbers]`, from the first step of a run on.
        ratios: tuple of floats.

    Returns:
        Float array of that shape.
    """
    mixed = np.zeros_like(values)
    for j, ratio in enumerate(ratios[: len(values)]):
        mixed[j:] += ratio * values[: len(values) - j]
    return mixed / math.hypot(*ratios)


def matched(noisy: list, ratios: tuple):
    """The best that an attacker makes of the steps that an example is in.

    An example of the first step adds the ratios times itself to what `fresh`
    makes of all of them: this is the sum with these weights, in which noise has
    the standard deviation of a step that shares none, and the example counts as
    in such a step.

    Args:
        noisy: list of tensors, what so many steps in succession release.
        ratios: tuple of floats.

    Returns:
        Tensor.
    """
    norm = math.hypot(*ratios)
    total = 0.0
    for step, ratio in enumerate(ratios):
        mixed = sum(ratios[j] * noisy[step - j] for j in range(step + 1))
        total += ratio / norm**2 * mixed
    return total


def drawn(optimizer, cycles: int):
    """Draws batches as `fit` does for an optimizer.

    Args:
        optimizer: private optimizer.
        cycles: int, of so many steps as there are bands.

    Returns:
        Bool array `[steps, examples]`.
    """
    steps = cycles * optimizer.bands
    examples = _BATCHES * optimizer.bands * optimizer.batch_size
    numbers = np.arange(examples)
    batches = banded_runs.in_groups(
        optimizer,
        PoissonBatches(numbers, batch_size=optimizer.batch_size),
        steps,
        1,
    )
    is_drawn = np.zeros((steps, examples), bool)
    for step, batch in enumerate(batches.dataset().take(steps)):
        rows = keras.ops.convert_to_numpy(batch["x"])
        is_drawn[step, rows[batch["real"].numpy() > 0]] = True
    return is_drawn
