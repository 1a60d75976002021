import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import pld_pmf, privacy_loss_distribution

from tf_dpsub.accounting import loss_distributions


def poisson(rate, noise_multiplier):
    gaussian = dp_accounting.GaussianDpEvent(noise_multiplier)
    return dp_accounting.PoissonSampledDpEvent(rate, gaussian)


@pytest.mark.parametrize(
    "event, count, interval",
    [
        (poisson(0.025, 4.0), 1200, 1e-4),
        (poisson(0.99, 163.0), 100, 1e-4),
        # Few examples, and losses at which exp overflows.
        (poisson(1e-4, 0.7), 1000, 1e-3),
        (poisson(0.9, 0.03), 1, 1e-2),
        (dp_accounting.GaussianDpEvent(2.0), 9, 1e-4),
    ],
    ids=str,
)
def test_is_that_of_dp_accounting(event, count, interval):
    accountant = dp_accounting.pld.PLDAccountant(
        value_discretization_interval=interval
    )
    accountant.compose(event, count)
    losses = loss_distributions.composed([(event, count)], interval)
    for delta in (1e-7, 1e-5, 0.01, 0.9):
        assert loss_distributions.least_epsilon(losses, delta) == pytest.approx(
            accountant.get_epsilon(delta), rel=1e-6
        )
    for epsilon in (0.1, 1.0, 10.0):
        assert losses.get_delta_for_epsilon(epsilon) == pytest.approx(
            accountant.get_delta(epsilon), rel=1e-6, abs=1e-11
        )


def test_composes_different_events():
    events = [(poisson(0.1, 2.0), 10), (poisson(0.2, 3.0), 20)]
    accountant = dp_accounting.pld.PLDAccountant()
    for event, count in events:
        accountant.compose(event, count)
    losses = loss_distributions.composed(events, 1e-4)
    assert loss_distributions.least_epsilon(losses, 1e-5) == pytest.approx(
        accountant.get_epsilon(1e-5), rel=1e-7
    )


@pytest.mark.parametrize(
    "masses, infinite, delta",
    [
        ({0: 0.5, 1: 0.5}, 0.0, 1e-3),
        ({-2: 0.5, 1: 0.25, 2: 0.25}, 0.0, 0.3),
        # Epsilon is 0, or infinite.
        ({-1: 0.9, 1: 0.1}, 0.0, 0.2),
        ({0: 0.9}, 0.1, 0.01),
        # An exponential without an inverse, below and at delta.
        ({0: 0.5, 800: 0.5}, 0.0, 0.1),
        ({0: 0.9, 800: 0.1}, 0.0, 0.2),
        # Rounding of Fourier transforms leaves masses below zero.
        ({0: 0.5, 1: -1e-17, 3: 0.5}, 0.0, 1e-12),
    ],
)
def test_least_epsilon_of_some_masses(masses, infinite, delta):
    lowest, highest = min(masses), max(masses)
    dense = [masses.get(k, 0.0) for k in range(lowest, highest + 1)]
    pmf = pld_pmf.DensePLDPmf(1.0, lowest, np.array(dense), infinite, True)
    losses = privacy_loss_distribution.PrivacyLossDistribution(pmf)
    assert loss_distributions.least_epsilon(losses, delta) == pytest.approx(
        losses.get_epsilon_for_delta(delta), rel=1e-12
    )


@pytest.mark.parametrize(
    "event, supported",
    [
        (dp_accounting.GaussianDpEvent(1.0), True),
        (poisson(0.1, 1.0), True),
        (dp_accounting.ZCDpEvent(1.0), False),
        (
            dp_accounting.PoissonSampledDpEvent(
                0.1, dp_accounting.LaplaceDpEvent(1.0)
            ),
            False,
        ),
    ],
)
def test_names_the_events_that_it_knows(event, supported):
    assert loss_distributions.is_supported(event) == supported
