"""Accounting of steps that see one uniformly drawn example each."""

import functools
import math

import dp_accounting
from dp_accounting.rdp import rdp_privacy_accountant
from scipy import optimize

from tf_dpsub.accounting.accountants import RDP_ORDERS
from tf_dpsub.checks import (
    check_count,
    check_delta,
    check_epsilon,
    check_noise_multiplier,
)

# Less noise is accounted for as none.
_LEAST_NOISE = 1e-2

# Of so many orders one is looked at first; as many of those in a row that are
# no better end the search.
_STRIDE = 8
_NO_BETTER = 4


def uniform_epsilon(
    *, noise_multiplier: float, examples: int, steps: int, delta: float
) -> float:
    """Epsilon of steps that draw one example uniformly, by RDP.

    Formal guarantees: data sets are neighbours if one example is replaced by
    any other one. That moves a step's gradient by at most twice its bound: with
    noise of `noise_multiplier` times the bound, a step is the Gaussian
    mechanism of half that multiplier, on a sample of one example without
    replacement. The relation differs from that of Poisson sampling: the result
    is not to be composed with that of other steps.

    Args:
        noise_multiplier: float, standard deviation of the noise divided by the
            bound on the norm of a gradient.
        examples: int, number of examples that are drawn from.
        steps: int.
        delta: float in (0, 1).

    Returns:
        float, an upper bound; infinite without noise.

    Raises:
        ValueError: if an argument is out of range.

    Reference:
        - [Wang, Balle, Kasiviswanathan, 2019](
          https://arxiv.org/abs/1808.00087), Theorem 9
    """
    check_noise_multiplier(noise_multiplier)
    check_count("examples", examples)
    check_count("steps", steps)
    check_delta(delta)
    return _epsilon(noise_multiplier, examples, steps, delta)


def uniform_noise_multiplier(
    *, epsilon: float, delta: float, examples: int, steps: int
) -> float:
    """Smallest noise multiplier with which such steps keep a budget.

    Args:
        epsilon: float, > 0, the budget.
        delta: float in (0, 1).
        examples: int, as `uniform_epsilon`.
        steps: int.

    Returns:
        float. What it spends is at most the budget, and within a relative 1e-3
        of it.

    Raises:
        ValueError: if an argument is out of range.
    """
    check_epsilon(epsilon)

    @functools.cache
    def excess(logarithm):
        spent = _epsilon(math.exp(logarithm), examples, steps, delta)
        return math.log(min(spent, 1e300) / epsilon)

    low, high = -1.0, 0.0
    while excess(high) > 0:
        low, high = high, high + 1.0
    while excess(low) <= 0:
        low, high = low - 1.0, low
    log_multiplier = optimize.brentq(excess, low, high, xtol=1e-4)
    while excess(log_multiplier) > 0:
        log_multiplier += 1e-4
    return math.exp(log_multiplier)


def _epsilon(noise_multiplier, examples, steps, delta):
    """Epsilon by the best order that is looked at.

    Each order bounds epsilon, so that any few of them are enough. Large ones
    take long: some are looked at from the smallest on until they get no better,
    then all around the best.
    """
    if noise_multiplier < _LEAST_NOISE:
        return math.inf
    event = dp_accounting.SampledWithoutReplacementDpEvent(
        examples, 1, dp_accounting.GaussianDpEvent(noise_multiplier / 2)
    )

    def by_orders(orders):
        accountant = rdp_privacy_accountant.RdpAccountant(
            orders, dp_accounting.NeighboringRelation.REPLACE_ONE
        )
        return accountant.compose(event, steps).get_epsilon(delta)

    least, best = math.inf, 0
    for place in range(0, len(RDP_ORDERS), _STRIDE):
        spent = by_orders(RDP_ORDERS[place : place + 1])
        if spent < least:
            least, best = spent, place
        elif place >= best + _NO_BETTER * _STRIDE:
            break
    around = RDP_ORDERS[max(best - _STRIDE, 0) : best + _STRIDE + 1]
    return min(least, by_orders(around))
