"""Tests of what should be independent standard normal numbers."""

import dataclasses
import math

import numpy as np
from scipy import stats

from tf_dpsub.auditing.lower_bounds import epsilon_of_rates

# False-alarm probability of one check: of all its tests together.
SIGNIFICANCE = 1e-6
_LAGS = (1, 2, 3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of a check.

    Attributes:
        check: string.
        passed: bool.
        value: float, what was measured: a share of what is claimed, a
            distance, a correlation, or a lower bound on epsilon.
        detail: string, a sentence.
    """

    check: str
    passed: bool
    value: float
    detail: str


def variance(z):
    """Compares the variance of each column with 1.

    Args:
        z: float array of shape `[steps, numbers]`.

    Returns:
        `Finding`.
    """
    steps, numbers = z.shape
    sums = np.sum(z**2, 0)
    tails = np.minimum(stats.chi2.cdf(sums, steps), stats.chi2.sf(sums, steps))
    worst = int(np.argmin(tails))
    return Finding(
        check="variance",
        passed=bool(tails[worst] > SIGNIFICANCE / (2 * numbers)),
        value=float(sums[worst] / steps),
        detail=f"Of {numbers} numbers, the noise in number {worst} has "
        f"{sums[worst] / steps:.3f} times the claimed variance; those of all "
        f"are {sums.min() / steps:.3f} to {sums.max() / steps:.3f}.",
    )


def distribution(z):
    """Compares the distribution of all numbers with the normal one.

    Args: as `variance`.

    Returns:
        `Finding`.
    """
    statistic, p_value = stats.kstest(z.ravel(), "norm")
    return Finding(
        check="distribution",
        passed=bool(p_value > SIGNIFICANCE),
        value=float(statistic),
        detail=f"Kolmogorov–Smirnov distance {statistic:.4f}, p = "
        f"{p_value:.2g}.",
    )


def independence(z):
    """Correlates numbers of a step, and with those of later steps.

    Args: as `variance`.

    Returns:
        `Finding`.
    """
    steps, numbers = z.shape
    scaled = z / np.maximum(np.sqrt(np.mean(z**2, 0)), 1e-30)
    largest, tests = 0.0, 0
    for lag in (0, *_LAGS):
        products = scaled[lag:].T @ scaled[: steps - lag] / (steps - lag)
        if lag == 0:
            np.fill_diagonal(products, 0.0)
        largest = max(largest, float(np.abs(products).max()))
        tests += products.size
    return Finding(
        check="independence",
        passed=is_likely(largest, steps, tests),
        value=largest,
        detail=f"Among {tests:,} pairs of numbers, of one step and of up to "
        f"{max(_LAGS)} steps later, the largest correlation is {largest:.3f}.",
    )


def correlation(first, second):
    """Correlation of two arrays of one shape, whose means are 0.

    Args:
        first: float array.
        second: float array.
    """
    products = np.sum(first * second)
    sizes = math.sqrt(np.sum(first**2) * np.sum(second**2))
    return float(products / sizes) if sizes else 0.0


def is_likely(largest: float, samples: int, tests: int) -> bool:
    """Whether the largest of some correlations may be due to chance.

    Args:
        largest: float.
        samples: int, numbers that each correlation is of.
        tests: int, number of correlations.
    """
    limit = stats.norm.isf(SIGNIFICANCE / (2 * tests))
    # A little more: of products of normal numbers, not of normal ones.
    return bool(abs(largest) * math.sqrt(samples) < 1.2 * limit)


def best_threshold(
    shift: float, runs: int, delta: float, confidence: float
) -> float:
    """The threshold between two normal scores that should prove most.

    Args:
        shift: float, by how many standard deviations their means differ.
        runs: int, scores of each kind.
        delta: float, of the bound on epsilon.
        confidence: float, of that bound.
    """

    def expected(threshold):
        counts = [
            round(runs * stats.norm.sf(threshold - mean)) for mean in (shift, 0)
        ]
        return epsilon_of_rates(
            counts[0], runs, counts[1], runs, delta=delta, confidence=confidence
        )

    return max(np.linspace(-3, shift + 3, 121), key=expected)
