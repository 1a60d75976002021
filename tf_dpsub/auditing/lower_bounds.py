"""Lower bounds on epsilon from what an attacker gets right.

A bound is a statement about the mechanism that was attacked: if it had a
smaller epsilon, guesses as good as these would have been seen with a
probability of at most `1 - confidence`. A weak attack gives a low bound, never
a wrong one.
"""

import math

import numpy as np
from scipy import optimize, stats

from tf_dpsub.checks import is_int

# Where no bound can be told from infinity.
_LARGEST = 200.0


def clopper_pearson(successes: int, trials: int, confidence: float = 0.95):
    """The exact interval for the probability of a success.

    Args:
        successes: int in [0, trials].
        trials: int, >= 1.
        confidence: float in (0, 1), with which the interval holds it. Defaults
            to `0.95`.

    Returns:
        Two floats, the ends of the interval.

    Raises:
        ValueError: if an argument is out of range.

    Reference:
        - [Clopper, Pearson, 1934](https://doi.org/10.1093/biomet/26.4.404)
    """
    _check_counts(successes, trials)
    _check_confidence(confidence)
    tail = (1 - confidence) / 2
    low = high = None
    if successes == 0:
        low = 0.0
    if successes == trials:
        high = 1.0
    if low is None:
        low = float(stats.beta.ppf(tail, successes, trials - successes + 1))
    if high is None:
        high = float(stats.beta.isf(tail, successes + 1, trials - successes))
    return low, high


def epsilon_of_rates(
    true_positives: int,
    positives: int,
    false_positives: int,
    negatives: int,
    *,
    delta: float,
    confidence: float = 0.95,
) -> float:
    """A lower bound on epsilon from many runs, with and without an example.

    An attacker says of each run whether the example was there. With (epsilon,
    delta) privacy `TPR <= exp(epsilon) FPR + delta`, and the same of the true
    and false negatives.

    Args:
        true_positives: int, runs with the example that it says it of.
        positives: int, runs with the example.
        false_positives: int, runs without it that it says it of.
        negatives: int, runs without it.
        delta: float in [0, 1).
        confidence: float, of the bound. Defaults to `0.95`.

    Returns:
        float, >= 0.

    Raises:
        ValueError: if an argument is out of range.

    Reference:
        - [Nasr et al., 2021](https://arxiv.org/abs/2101.04535), section III
    """
    _check_delta(delta)
    _check_confidence(confidence)
    # Four ends of intervals are used, each of which may be wrong.
    each = (1 + confidence) / 2
    tpr = clopper_pearson(true_positives, positives, each)
    fpr = clopper_pearson(false_positives, negatives, each)
    bounds = [0.0]
    for above, below in ((tpr[0], fpr[1]), (1 - fpr[1], 1 - tpr[0])):
        if above > delta:
            bounds.append(
                math.log((above - delta) / below) if below else math.inf
            )
    return max(bounds)


def epsilon_of_one_run(
    correct: int,
    guesses: int,
    canaries: int,
    *,
    delta: float,
    confidence: float = 0.95,
) -> float:
    """A lower bound on epsilon from many canaries in one run.

    Each canary was in the training set or not, by a fair coin of its own. An
    attacker guesses of some which, and abstains from others. With (epsilon,
    delta) privacy the number of right guesses is not larger than a binomial
    one, of probability `1 / (1 + exp(-epsilon))`, but for what delta allows.

    Args:
        correct: int, right guesses.
        guesses: int, guesses that were made.
        canaries: int, all of them, guessed or not.
        delta: float in [0, 1).
        confidence: float, of the bound. Defaults to `0.95`.

    Returns:
        float, >= 0.

    Raises:
        ValueError: if an argument is out of range.

    Reference:
        - [Steinke, Nasr, Jagielski, 2023](https://arxiv.org/abs/2305.08846),
          Theorem 5.2
    """
    _check_counts(correct, guesses)
    _check_counts(guesses, canaries)
    _check_delta(delta)
    _check_confidence(confidence)

    def excess(epsilon):
        p = _one_run_p_value(correct, guesses, canaries, epsilon, delta)
        return p - (1 - confidence)

    if excess(0.0) >= 0:
        return 0.0
    if excess(_LARGEST) < 0:
        return math.inf
    epsilon = optimize.brentq(excess, 0.0, _LARGEST, xtol=1e-9)
    # Downwards: what is said is never above what was shown.
    return max(0.0, epsilon - 2e-9)


def _one_run_p_value(correct, guesses, canaries, epsilon, delta):
    """How likely so many right guesses are at most, at an epsilon."""
    q = 1 / (1 + math.exp(-epsilon))
    beta = float(stats.binom.sf(correct - 1, guesses, q))
    if delta == 0 or correct == 0:
        return min(beta, 1.0)
    # Of i more right guesses, what delta allows costs 1 / i each.
    counts = np.arange(1, correct + 1)
    sums = np.cumsum(stats.binom.pmf(correct - counts, guesses, q))
    alpha = float(np.max(sums / counts))
    return min(beta + 2 * canaries * delta * alpha, 1.0)


def _check_counts(part, whole):
    if not (is_int(part) and is_int(whole) and 0 <= part <= whole >= 1):
        raise ValueError(
            f"Expected counts with 0 <= part <= whole and whole >= 1 (int), "
            f"got {part!r} of {whole!r}."
        )


def _check_delta(delta):
    if not 0 <= delta < 1:
        raise ValueError(f"Expected 0 <= delta < 1, got {delta}.")


def _check_confidence(confidence):
    if not 0 < confidence < 1:
        raise ValueError(f"Expected 0 < confidence < 1, got {confidence}.")
