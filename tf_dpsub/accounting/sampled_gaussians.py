"""Rényi divergences of a Poisson-sampled Gaussian, at all orders at once.

dp-accounting sums the same series one term of one order at a time in Python,
which took most of the time of an epsilon by RDP, and of a search for noise.

Reference:
  - [Rényi Differential Privacy of the Sampled Gaussian Mechanism](
    https://arxiv.org/abs/1908.10530), section 3.3
"""

import functools
import math

import numpy as np
from scipy import special

# Terms of the series of an order that is no whole number: some first, which
# suffice most often, and the most. Orders that need more are left out, as
# dp-accounting does; that loosens a bound only.
_TERMS = (128, 1000)
# Terms below exp(-30) of the sum are left out.
_NEGLIGIBLE = 30


def renyi_divergences(noise_multiplier: float, rate: float, orders):
    """Rényi divergences of one step, the larger of both directions.

    Args:
        noise_multiplier: float, > 0.
        rate: float in (0, 1), with which an example is drawn.
        orders: sequence of floats, > 1.

    Returns:
        Array of floats, [orders]; infinite for orders that are left out.
    """
    orders = np.asarray(orders, float)
    log_moments = np.full(len(orders), np.inf)
    whole = orders == np.floor(orders)
    if whole.any():
        log_moments[whole] = _log_moments_of_whole_orders(
            noise_multiplier, rate, tuple(orders[whole])
        )
    for terms in _TERMS:
        unfinished = ~whole & np.isinf(log_moments)
        if unfinished.any():
            log_moments[unfinished] = _log_moments(
                noise_multiplier, rate, tuple(orders[unfinished]), terms
            )
    return log_moments / (orders - 1)


def _log_moments_of_whole_orders(noise_multiplier, rate, orders):
    """log E[(density / that without the example)^order] without it."""
    k = np.arange(1 + int(max(orders)))
    terms = (
        _log_binomials(orders, len(k))
        + k * math.log(rate)
        + (np.array(orders)[:, None] - k) * math.log1p(-rate)
        + (k * k - k) / (2 * noise_multiplier**2)
    )  # [orders, terms]
    return special.logsumexp(terms, axis=1)


def _log_moments(noise_multiplier, rate, orders, terms):
    """The same at any order, by two series; infinite where terms are missing.

    The integral is split where the density with the example overtakes.
    """
    variance = noise_multiplier**2
    z0 = variance * math.log(1 / rate - 1) + 0.5
    log_rate, log_miss = math.log(rate), math.log1p(-rate)
    i = np.arange(terms)
    j = np.array(orders)[:, None] - i
    coefficients = _log_binomials(orders, terms)

    def series(drawn, missed, inside):
        return (
            coefficients
            + drawn * log_rate
            + missed * log_miss
            + (drawn * drawn - drawn) / (2 * variance)
            + special.log_ndtr(inside / noise_multiplier)
        )  # [orders, terms]

    below, above = series(i, j, z0 - i), series(j, i, j - z0)
    sums = special.logsumexp(np.concatenate([below, above], 1), axis=1)
    ends = (
        (below[:, -1] < below[:, -2])
        & (above[:, -1] < above[:, -2])
        & (np.maximum(below, above)[:, -1] < sums - _NEGLIGIBLE)
    )
    return np.where(ends, sums, np.inf)


@functools.lru_cache(maxsize=8)
def _log_binomials(orders, terms):
    """Logs of the absolute values of some binomial coefficients.

    Args:
        orders: tuple of floats.
        terms: int.

    Returns:
        Array of floats, `[orders, terms]`; -inf where they are zero.
    """
    n = np.array(orders)[:, None]
    k = np.arange(terms)
    with np.errstate(divide="ignore"):
        logs = (
            special.gammaln(n + 1)
            - special.gammaln(k + 1)
            - special.gammaln(n - k + 1)
        )
    # No combination of more than all.
    return np.where((k > n) & (n == np.floor(n)), -np.inf, logs)
