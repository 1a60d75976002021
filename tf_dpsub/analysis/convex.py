"""Private convex optimisation, one example a step.

Implementation of Algorithm 1 of "When Does Differentially Private Learning Not
Suffer in High Dimensions?" (Li, Liu, Hashimoto, Inan, Kulkarni, Lee, Guha
Thakurta, NeurIPS 2022).
"""

from collections.abc import Callable

import numpy as np

from tf_dpsub.checks import check_count, check_positive

# Number of noise values that are drawn at a time.
_BLOCK = 2**20


def averaged_sgd(
    gradient: Callable,
    examples: int,
    initial,
    *,
    steps: int,
    learning_rate: float,
    noise_multiplier: float,
    lipschitz: float,
    regularization: float = 0.0,
    seed: int | None = None,
):
    """Minimises a convex loss by noisy gradients of one example each.

    `x <- x - eta (grad f(x; s) + alpha (x - x_0) + sigma G z)`, with `s` drawn
    uniformly at each step, and `z` of the standard normal distribution. The
    result is the mean of all iterates.

    Formal guarantees: what is released is every iterate, and so their mean. A
    gradient is at most G, so that replacing one example moves it by at most 2 G
    at the steps that draw it: `accounting.uniform_epsilon` is the epsilon of
    these steps. That G bounds gradients is for the caller to know; a gradient
    that is larger is scaled down to it, and one that is not finite is left out.
    With a `seed` noise can be predicted: no guarantee holds against who knows
    it. It is for studies: the guarantee is that of real numbers, and not of
    NumPy's float64 noise, whose low bits may tell what it was added to.

    Args:
        gradient: function of an iterate `[d]` and the number of an example,
            which returns the gradient of its loss, `[d]`.
        examples: int, number of examples.
        initial: array `[d]`, `x_0`.
        steps: int.
        learning_rate: float, `eta`.
        noise_multiplier: float, `sigma`.
        lipschitz: float, `G`, a bound of gradients.
        regularization: float, `alpha`. Defaults to `0`.
        seed: int, of examples and noise. Defaults to `None`: fresh entropy of
            the operating system.

    Returns:
        Float array `[d]`.

    Raises:
        ValueError: if an argument is out of range.

    Reference:
        - [Li et al., 2022](https://arxiv.org/abs/2207.00160), Algorithm 1
    """
    check_count("examples", examples)
    check_count("steps", steps)
    for name, value in (
        ("learning_rate", learning_rate),
        ("lipschitz", lipschitz),
    ):
        check_positive(name, value)
    for name, value in (
        ("noise_multiplier", noise_multiplier),
        ("regularization", regularization),
    ):
        if not value >= 0:
            raise ValueError(f"Expected {name} >= 0, got {value}.")
    initial = np.asarray(initial, np.float64)
    generator = np.random.default_rng(seed)
    drawn = generator.integers(examples, size=steps)
    iterate, total = initial.copy(), np.zeros_like(initial)
    block = max(1, _BLOCK // len(initial))
    for first in range(0, steps, block):
        chosen = drawn[first : first + block]
        noise = generator.standard_normal((len(chosen), len(initial)))
        noise *= noise_multiplier * lipschitz
        for example, update in zip(chosen, noise):
            # The noise becomes the update, with gradient and pull to the start.
            update += _bounded(gradient(iterate, example), lipschitz)
            if regularization:
                update += regularization * (iterate - initial)
            update *= learning_rate
            iterate -= update
            total += iterate
    return total / steps


def _bounded(gradient, most):
    with np.errstate(over="ignore", invalid="ignore"):
        norm = np.linalg.norm(gradient)
    if norm <= most:
        return gradient
    # An example whose gradient is not finite contributes nothing.
    return gradient * (most / norm) if np.isfinite(norm) else 0.0
