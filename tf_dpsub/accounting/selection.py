"""Privacy of the best of a random, secret number of trials.

Trials run the same private mechanism, each with settings of its own that do not
depend on the data, and with a score. The best of K trials is released, where K
is drawn anew and stays secret. With a fixed number of trials, or a known one,
the choice would cost as much as all trials together.

Formal guarantees: with K of the truncated negative binomial distribution, what
`renyi_divergences` gives bounds the release of the best trial, its score and
settings included (Papernot and Steinke, theorem 2). It holds for trials that
are independent and alike, for scores that a trial computes privately or from
public data, and for ties that are broken by chance.

Reference:
  - [Hyperparameter Tuning with Renyi Differential Privacy](
    https://arxiv.org/abs/2110.03620)
  - [Private Selection from Private Candidates](
    https://arxiv.org/abs/1811.07971)
"""

import math
import secrets
from collections.abc import Callable

import dp_accounting
import numpy as np
from dp_accounting import dp_event
from scipy import optimize

from tf_dpsub.checks import check_choice

# Shapes of the distribution of the number of trials, by its names.
DISTRIBUTIONS = {"logarithmic": 0.0, "geometric": 1.0}


def shape_of(distribution: str) -> float:
    """The shape of a distribution of `DISTRIBUTIONS`."""
    check_choice("distribution", distribution, DISTRIBUTIONS)
    return DISTRIBUTIONS[distribution]


def selection_event(trial, mean_trials: float, shape: float):
    """The dp-accounting event of the best of a random number of trials.

    Args:
        trial: iterable of `dp_accounting.DpEvent`, what one trial composes.
        mean_trials: float, > 1, the expected number of trials.
        shape: float, >= 0, of the truncated negative binomial distribution.

    Returns:
        A `dp_accounting.DpEvent`, which has a bound by RDP.

    Raises:
        ValueError: If an argument is out of its range.
    """
    check_trials(mean_trials, shape)
    events = tuple(trial)
    if any(isinstance(e, dp_accounting.NonPrivateDpEvent) for e in events):
        return dp_accounting.NonPrivateDpEvent()
    # A tuple, as events are looked up by their hashes.
    return dp_event.RepeatAndSelectDpEvent(
        dp_accounting.ComposedDpEvent(events), float(mean_trials), float(shape)
    )


def renyi_divergences(of_trial, orders, mean_trials: float, shape: float):
    """Bounds the Rényi divergence of the best of a random number of trials.

    Args:
        of_trial: array of floats, `[orders]`, that of one trial.
        orders: sequence of floats, > 1 and rising.
        mean_trials: float, > 1, the expected number of trials.
        shape: float, >= 0, of the truncated negative binomial distribution.

    Returns:
        Array of floats, `[orders]`.

    Reference:
      - [Hyperparameter Tuning with Renyi Differential Privacy](
        https://arxiv.org/abs/2110.03620), theorem 2
    """
    orders, of_trial = np.asarray(orders), np.asarray(of_trial)
    log_gamma = math.log(_gamma(mean_trials, shape))
    beside = float(np.min((1 - 1 / orders) * of_trial - log_gamma / orders))
    bounds = (
        of_trial + math.log(mean_trials) / (orders - 1) + (1 + shape) * beside
    )
    # A divergence rises with its order: each bounds those before.
    return np.minimum.accumulate(bounds[::-1])[::-1]


def check_trials(mean_trials: float, shape: float):
    """Checks the distribution of the number of trials.

    Args: as `selection_event`.

    Raises:
        ValueError: If an argument is out of its range.
    """
    if not 1 < mean_trials < math.inf:
        raise ValueError(
            f"Expected 1 < mean_trials < inf, got {mean_trials}. It is the "
            "expected number of trials; a single one needs no selection."
        )
    if not 0 <= shape < math.inf:
        raise ValueError(f"Expected 0 <= shape < inf, got {shape}.")


def draw_trials(
    mean_trials: float, shape: float, uniform: Callable | None = None
) -> int:
    """Draws the number of trials, which has to stay secret.

    It is `k` with a probability in proportion to
    `(1 - gamma)^k Γ(k + shape) / k!`, for k from 1 on.

    Args:
        mean_trials: float, > 1, its expectation.
        shape: float, >= 0: 0 is the logarithmic distribution, 1 the geometric
            one.
        uniform: function that gives a float in [0, 1). Defaults to `None`, by
            the system's cryptographic generator.

    Returns:
        An int, >= 1.

    Raises:
        ValueError: If an argument is out of its range.
    """
    check_trials(mean_trials, shape)
    gamma = _gamma(mean_trials, shape)
    rest = (uniform or secrets.SystemRandom().random)()
    if shape == 0:
        probability = (1 - gamma) / -math.log(gamma)
    else:
        probability = shape * (1 - gamma) / math.expm1(-shape * math.log(gamma))
    count = 1
    # Where the probabilities that are left vanish, so does the share of draws.
    while rest >= probability > 0:
        rest -= probability
        probability *= (1 - gamma) * (count + shape) / (count + 1)
        count += 1
    return count


def probability_of_none_above(
    level: float, mean_trials: float, shape: float
) -> float:
    """The probability that no trial's score is above a quantile of one trial's.

    Args:
        level: float in [0, 1], at which the quantile is.
        mean_trials: float, > 1, the expected number of trials K.
        shape: float, >= 0, of the truncated negative binomial distribution.

    Returns:
        A float in [0, 1], `E[level^K]`.

    Raises:
        ValueError: If an argument is out of its range.
    """
    check_trials(mean_trials, shape)
    if not 0 <= level <= 1:
        raise ValueError(f"Expected 0 <= level <= 1, got {level}.")
    gamma = _gamma(mean_trials, shape)
    log_rest = math.log1p((gamma - 1) * level)
    if shape == 0:
        return log_rest / math.log(gamma)
    return math.expm1(-shape * log_rest) / math.expm1(-shape * math.log(gamma))


def _gamma(mean, shape):
    """The parameter with which the distribution has an expectation."""

    def excess(log_gamma):
        odds = math.expm1(-log_gamma)
        if shape == 0:
            expected = odds / -log_gamma
        else:
            expected = shape * odds / -math.expm1(shape * log_gamma)
        return math.log(expected) - math.log(mean)

    lowest = -1.0
    while excess(lowest) < 0:
        lowest *= 2
    return math.exp(optimize.brentq(excess, lowest, -1e-12, xtol=1e-14))
