"""Banded matrix factorization: noise of which later steps take a part back.

With clipped sums `G_t`, what is released is `C G + Z` for a public matrix C of
lower triangular shape, with `bands` diagonals that are not zero and the same
coefficients `c` in each column, and independent Gaussian noise Z. That is
`G + C^-1 Z`: each step has the noise of DP-SGD, of which later steps subtract a
part again, so that less is left in the sum of all steps.

Reference:
  - [(Amplified) Banded Matrix Factorization](
    https://arxiv.org/abs/2306.08153), theorem 4 on sampling
  - [Constant Matters: Fine-grained Error Bound on Differentially Private
    Continual Observation](https://arxiv.org/abs/2202.11205), the coefficients
    that the search starts from
"""

import functools
import math

import numpy as np
from scipy import optimize, signal, special

from tf_dpsub.accounting import accountants
from tf_dpsub.checks import check_count, check_delta, check_epsilon

# Numbers of bands that "auto" compares.
CHOICES = (1, 2, 4, 8, 16, 32, 64)
# Coefficients are optimal for at most so many steps: at 20,000, 64 of them are
# within 3 % of the least noise, and fewer closer.
_STEPS = 4096
# Noise falls with the bands, then it grows.
_ENOUGH = 1.02
# Of the logits that the search starts from.
_SHIFTS = (-1.0, 0.0, 1.0)


def coefficients(
    bands: int, steps: int, momentum: float = 0.0
) -> tuple[float, ...]:
    """Coefficients with the least error of the weights, over all steps.

    They minimize the mean of `squared_errors`. The search is over products of
    numbers between 0 and 1: for these noise cannot grow without bound, while a
    search over the coefficients themselves stalls.

    Args:
        bands: int, how many there are.
        steps: int, number of steps of the run.
        momentum: float in [0, 1), that of the inner optimizer. Defaults to `0`.

    Returns:
        Tuple of floats, positive and falling, whose squares add up to 1.

    Raises:
        ValueError: If an argument is out of its range.
    """
    check_count("bands", bands)
    check_count("steps", steps)
    if not 0 <= momentum < 1:
        raise ValueError(f"Expected 0 <= momentum < 1, got {momentum}.")
    return _optimum(min(bands, steps), min(steps, _STEPS), float(momentum)) + (
        0.0,
    ) * max(0, bands - steps)


def first_coefficients(count: int) -> np.ndarray:
    """Coefficients of the square root of the matrix of prefix sums.

    Args:
        count: int, how many.

    Returns:
        Array of floats, `[count]`, of which the first is 1.
    """
    k = np.arange(1, count)
    return np.concatenate([[1.0], np.cumprod((2 * k - 1) / (2 * k))])


def squared_errors(
    coefficients, steps: int, momentum: float = 0.0
) -> np.ndarray:
    """Variance of what noise leaves in the weights, after each step.

    It is that of one weight, with a learning rate of 1 and noise that has a
    multiplier of 1 over the sensitivity of the whole run: DP-SGD has `t` after
    `t` steps.

    Args:
        coefficients: sequence of floats, of a column of C.
        steps: int.
        momentum: float in [0, 1), that of the inner optimizer. Defaults to `0`.

    Returns:
        Array of floats, `[steps]`.
    """
    c = np.asarray(coefficients, float)
    of_steps = signal.lfilter([1.0], c, _workload(steps, momentum))
    return np.cumsum(of_steps**2) * np.sum(c**2)


def best_bands(
    examples: int, batch_size: int, steps: int, epsilon: float, delta: float
) -> int:
    """Number of bands with the least noise in the weights, without any data.

    It weighs what bands take out of the noise of a run against what they cost:
    they sample from a part of the data at a time, which amplifies less. The
    noise is that which keeps (epsilon, delta), by RDP.

    Args:
        examples: int, number of private examples.
        batch_size: int, the expected one.
        steps: int, number of steps.
        epsilon: float, > 0.
        delta: float in (0, 1).

    Returns:
        int, one of 1, 2, 4, ..., 64, of which `bands * batch_size` is at most
        `examples`.

    Raises:
        ValueError: If an argument is out of its range.

    Example:

    ```python
    tf_dpsub.accounting.best_bands(
        examples=60_000, batch_size=600, steps=300, epsilon=8.0, delta=1e-5
    )  # 32
    ```
    """
    noise = noise_of_bands(examples, batch_size, steps, epsilon, delta)
    return min(noise, key=noise.__getitem__)


def noise_of_bands(
    examples: int, batch_size: int, steps: int, epsilon: float, delta: float
) -> dict[int, float]:
    """Noise in the weights of a run, for each number of bands to compare.

    Args: as `best_bands`.

    Returns:
        dict from numbers of bands to standard deviations, relative to the clip
        and the learning rate, of one weight: the root of the mean variance over
        all steps. It ends where more bands leave more noise.
    """
    for name, value in (
        ("examples", examples),
        ("batch_size", batch_size),
        ("steps", steps),
    ):
        check_count(name, value)
    check_epsilon(epsilon)
    check_delta(delta)
    if batch_size > examples:
        raise ValueError(
            f"Expected batch_size <= examples, got {batch_size} and {examples}."
        )
    noise: dict[int, float] = {}
    for bands in CHOICES:
        if bands > 1 and (bands * batch_size > examples or bands > steps):
            break
        multiplier = accountants.noise_multiplier(
            epsilon=epsilon,
            delta=delta,
            sampling_rate=bands * batch_size / examples,
            steps=-(-steps // bands),
            accountant="rdp",
        )
        errors = squared_errors(coefficients(bands, steps), steps)
        noise[bands] = multiplier * math.sqrt(np.mean(errors))
        if noise[bands] > _ENOUGH * min(noise.values()):
            break
    return noise


def _workload(steps, momentum):
    """Weights with which the noise of a step enters those of later steps."""
    if momentum == 0:
        return np.ones(steps)
    return (1 - momentum ** np.arange(1, steps + 1)) / (1 - momentum)


@functools.lru_cache(maxsize=256)
def _optimum(bands, steps, momentum):
    if bands == 1:
        return (1.0,)
    first = first_coefficients(bands)
    logits = special.logit(first[1:] / first[:-1])
    best = min(
        (
            optimize.minimize(
                _loss,
                logits + shift,
                args=(_workload(steps, momentum),),
                jac=True,
                method="L-BFGS-B",
                options={"maxiter": 1000, "ftol": 1e-9},
            )
            for shift in _SHIFTS
        ),
        key=lambda result: result.fun,
    )
    c = _of_logits(best.x)
    return tuple(float(v) for v in c / np.linalg.norm(c))


def _of_logits(logits):
    return np.concatenate([[1.0], np.cumprod(special.expit(logits))])


def _loss(logits, workload):
    """Logarithm of the mean squared error, and its gradient."""
    c = _of_logits(logits)
    steps = len(workload)
    noise = signal.lfilter([1.0], c, workload)
    # A step's noise is in the weights of all steps from then on.
    shares = np.arange(steps, 0, -1) / steps
    error, norm = np.sum(shares * noise**2), np.sum(c**2)
    # The derivative of C^-1 a is -C^-1 dC C^-1 a.
    adjoint = signal.lfilter([1.0], c, (2 * shares * noise)[::-1])[::-1]
    of_error = [-float(adjoint[k:] @ noise[: steps - k]) for k in range(len(c))]
    by_c = np.asarray(of_error) / error + 2 * c / norm
    # c_k is a product of the factors up to k.
    sums = np.cumsum((by_c * c)[::-1])[::-1][1:]
    return math.log(error * norm), sums * (1 - special.expit(logits))
