"""Steps that may draw several rows of a person, by other computations."""

import dp_accounting
import numpy as np
import pytest
from scipy import integrate, special, stats

from tf_dpsub.accounting import gaussian_mixtures, loss_distributions
from tf_dpsub.accounting.accountants import RDP_ORDERS, composed_epsilon

DELTAS = (1e-7, 1e-5, 0.01)


@pytest.mark.parametrize(
    "noise_multiplier, rate, rows, count, interval",
    [
        (4.0, 0.025, 3, 1200, 1e-3),
        (0.7, 1e-3, 5, 50, 1e-2),
        (5.0, 0.9, 2, 3, 1e-2),
        # Losses at which exp overflows.
        (0.1, 0.5, 4, 1, 1.0),
    ],
)
def test_losses_are_those_of_dp_accounting(
    noise_multiplier, rate, rows, count, interval
):
    event = gaussian_mixtures.event(noise_multiplier, rate, rows)
    accountant = dp_accounting.pld.PLDAccountant(
        value_discretization_interval=interval
    )
    accountant.compose(event, count)
    losses = loss_distributions.composed([(event, count)], interval)
    for delta in DELTAS:
        assert losses.get_epsilon_for_delta(delta) == pytest.approx(
            accountant.get_epsilon(delta), rel=1e-6
        )


def test_one_row_is_a_sampled_gaussian():
    """By both accountants: dp-accounting sums series for whole orders."""
    events = (
        gaussian_mixtures.event(1.3, 0.01, 1),
        dp_accounting.PoissonSampledDpEvent(
            0.01, dp_accounting.GaussianDpEvent(1.3)
        ),
    )
    mixture, sampled = (
        loss_distributions.composed([(event, 100)], 1e-3) for event in events
    )
    for delta in DELTAS:
        assert mixture.get_epsilon_for_delta(delta) == pytest.approx(
            sampled.get_epsilon_for_delta(delta), rel=1e-6
        )
    orders = [2.0, 3.0, 16.0, 128.0, 1024.0]
    accountant = dp_accounting.rdp.RdpAccountant(orders)
    accountant.compose(events[1])
    np.testing.assert_allclose(
        gaussian_mixtures.renyi_divergences(events[0], orders),
        accountant.rdp,
        rtol=1e-8,
    )


@pytest.mark.parametrize(
    "noise_multiplier, rate, rows, order",
    [(2.0, 0.1, 3, 1.5), (0.8, 0.02, 6, 4.25), (1.0, 0.6, 2, 8.0)],
)
def test_renyi_divergences_are_integrals(noise_multiplier, rate, rows, order):
    drawn = np.arange(rows + 1)
    shares = stats.binom.pmf(drawn, rows, rate)

    def log_densities(x):
        return (
            stats.norm.logpdf(x, scale=noise_multiplier),
            special.logsumexp(
                stats.norm.logpdf(x, drawn, noise_multiplier), b=shares
            ),
        )

    def divergence(upper, lower):
        def integrand(x):
            logs = log_densities(x)
            return np.exp(order * logs[upper] + (1 - order) * logs[lower])

        moment = sum(
            integrate.quad(integrand, left, left + 10, epsabs=0, epsrel=1e-9)[0]
            for left in range(-30, 50, 10)
        )
        return np.log(moment) / (order - 1)

    event = gaussian_mixtures.event(noise_multiplier, rate, rows)
    (found,) = gaussian_mixtures.renyi_divergences(event, [order])
    expected = max(divergence(0, 1), divergence(1, 0))
    assert found == pytest.approx(expected, rel=1e-7)
    assert found >= expected * (1 - 1e-9)


def test_is_dominating_for_rows_in_any_directions():
    """Monte Carlo: rows that do not point alike tell less.

    Both rows are drawn with rate 1/2 and move two numbers, one each; the
    largest loss that a composition of two such steps allows is counted.
    """
    random = np.random.default_rng(0)
    samples, sigma, threshold = 400_000, 1.5, 1.0
    losses = np.zeros(samples)
    for _ in range(2):
        z = sigma * random.normal(size=(samples, 2))
        z += random.random((samples, 2)) < 0.5
        ratios = 0.5 + 0.5 * np.exp((2 * z - 1) / (2 * sigma**2))
        losses += np.log(ratios).sum(1)
    # Each sample is in [0, 1]: a deviation of 5 standard ones.
    excess = np.maximum(0, 1 - np.exp(threshold - losses))
    least = excess.mean() - 5 * excess.std() / np.sqrt(samples)
    event = gaussian_mixtures.event(sigma, 0.5, 2)
    bound = loss_distributions.composed([(event, 2)], 1e-3)
    assert 0.01 < least < bound.get_delta_for_epsilon(threshold)


def test_orders_that_cost_too_much_are_left_out():
    event = gaussian_mixtures.event(0.05, 0.9, 8)
    divergences = gaussian_mixtures.renyi_divergences(event, RDP_ORDERS)
    assert np.isfinite(divergences[0]) and np.isinf(divergences[-1])
    assert np.all(np.diff(divergences[np.isfinite(divergences)]) > 0)
    # A bound is left.
    spent = composed_epsilon([event], delta=1e-5, accountant="rdp")
    assert 10_000 < spent < np.inf


def test_many_rows_are_bounded_by_rdp_alone():
    few, many = (
        gaussian_mixtures.event(500.0, 0.01, rows) for rows in (256, 1000)
    )
    assert loss_distributions.is_supported(few)
    assert not loss_distributions.is_supported(many)
    spent = composed_epsilon([many], delta=1e-5)
    assert spent == composed_epsilon([many], delta=1e-5, accountant="rdp")
    # Hardly more than 40 rows are drawn, of about 10.
    least, most = (
        dp_accounting.get_epsilon_gaussian(500.0 / drawn, 1e-5)
        for drawn in (10, 40)
    )
    assert least < spent < most
