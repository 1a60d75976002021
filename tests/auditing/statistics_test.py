"""Each test of normal numbers finds what it is for, and only that."""

import numpy as np
import pytest

from tf_dpsub.auditing import statistics

TESTS = {
    "variance": statistics.variance,
    "distribution": statistics.distribution,
    "independence": statistics.independence,
}


def failed(z):
    return {name for name, test in TESTS.items() if not test(z).passed}


@pytest.fixture(name="z")
def _z():
    return np.random.default_rng(0).normal(size=(2000, 8))


def test_normal_numbers_pass(z):
    assert not failed(z)


def test_a_number_with_more_noise_is_named(z):
    z[:, 3] *= 1.2
    assert "variance" in failed(z)
    finding = statistics.variance(z)
    assert "the noise in number 3" in finding.detail
    assert finding.value == pytest.approx(1.44, rel=0.1)


def test_other_distributions_of_variance_1():
    uniform = np.random.default_rng(0).uniform(size=(2000, 8))
    assert failed((uniform - 0.5) * 12**0.5) == {"distribution"}


@pytest.mark.parametrize("lag", [0, 1, 2, 3])
def test_correlated_numbers(lag, z):
    z[:, 1] = (z[:, 1] + np.roll(z[:, 0], lag)) / 2**0.5
    assert failed(z) == {"independence"}


def test_correlation(z):
    assert statistics.correlation(z, -2 * z) == pytest.approx(-1)
    assert statistics.correlation(z, np.zeros_like(z)) == 0


def test_the_largest_of_many_correlations_may_be_larger():
    assert not statistics.is_likely(0.2, 1000, 1)
    assert statistics.is_likely(0.2, 1000, 10**5)


def test_the_best_threshold_proves_most():
    """Of scores around 0 and 4, some threshold between proves most."""
    threshold = statistics.best_threshold(4.0, 1000, 1e-5, 0.95)
    assert 0 < threshold < 4
