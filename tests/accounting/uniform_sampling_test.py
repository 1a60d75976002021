"""Steps of one uniformly drawn example, against what is written out."""

import math

import numpy as np
import pytest

from tf_dpsub import accounting

SETTING = {"examples": 10_000, "steps": 100_000, "delta": 1e-6}


@pytest.mark.slow
def test_the_setting_of_the_geometric_median():
    sigma = accounting.uniform_noise_multiplier(epsilon=2.0, **SETTING)
    assert sigma == pytest.approx(1.275, abs=2e-3)
    spent = accounting.uniform_epsilon(noise_multiplier=sigma, **SETTING)
    assert 2.0 * (1 - 1e-3) < spent <= 2.0


def test_one_example_is_a_gaussian_of_twice_the_sensitivity():
    """Where the only example is drawn in any case, nothing is amplified."""
    found = accounting.uniform_epsilon(
        noise_multiplier=6.0, examples=1, steps=4, delta=1e-5
    )
    multiplier = 6.0 / 2 / math.sqrt(4)
    expected = accounting.epsilon(
        noise_multiplier=multiplier,
        sampling_rate=1.0,
        steps=1,
        delta=1e-5,
        accountant="rdp",
    )
    assert found == pytest.approx(expected, rel=1e-6)


def test_is_above_the_divergence_of_the_distributions():
    """The two mixtures that differ the most, at an order where it is exact."""
    sigma, n, delta = 2.0, 50, 1e-5
    spent = accounting.uniform_epsilon(
        noise_multiplier=sigma, examples=n, steps=1, delta=delta
    )
    # Noise of sigma around gradients of norm 1: others at 1, one at 1 or -1.
    z = np.linspace(-40, 40, 400_001)

    def density(mean):
        return np.exp(-((z - mean) ** 2) / (2 * sigma**2))

    others = (1 - 1 / n) * density(1.0)
    one, other = others + density(1.0) / n, others + density(-1.0) / n
    scale = np.trapezoid(one, z)
    for p, q in ((one, other), (other, one)):
        excess = np.maximum(p - math.exp(spent) * q, 0.0)
        assert np.trapezoid(excess, z) / scale <= delta


def test_without_noise():
    spent = accounting.uniform_epsilon(noise_multiplier=0.0, **SETTING)
    assert spent == math.inf


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"noise_multiplier": -1.0}, "0 <= noise_multiplier"),
        ({"examples": 0}, "examples >= 1"),
        ({"steps": 0}, "steps >= 1"),
        ({"delta": 0.0}, "0 < delta < 1"),
    ],
)
def test_arguments_out_of_range(changes, message):
    with pytest.raises(ValueError, match=message):
        accounting.uniform_epsilon(
            **SETTING | {"noise_multiplier": 1.0} | changes
        )


def test_no_budget():
    with pytest.raises(ValueError, match="0 < epsilon < inf, got 0"):
        accounting.uniform_noise_multiplier(epsilon=0, **SETTING)
