"""Privacy accounting of sampled Gaussian mechanisms, by RDP and by PLD.

A mechanism is described by dp-accounting's events and interpreted by its
accountants; this module chooses their settings in one place, composes lists of
events, and solves for the noise or for the number of steps.

Formal guarantees: every epsilon and delta is an upper bound for the release of
the result of *every* step, under the relation in which two data sets are
neighbours when one example of one is missing from (or replaced by an empty one
in) the other; or all of one person, of which there are at most
`rows_per_person`. `"rdp"` bounds the Rényi divergence at each of `RDP_ORDERS`;
`"pld"` rounds the privacy loss up on a grid, and is nearly exact. Both bound
the same quantity, so `"pld"` answers with the smaller of the two, and with that
of RDP alone where it has no grid: beyond a million steps or an epsilon of a
million, where it would not fit into memory, and with an event that
`loss_distributions` does not know.

Reference:
  - [Rényi Differential Privacy of the Sampled Gaussian Mechanism](
    https://arxiv.org/abs/1908.10530)
  - [The Discrete Gaussian for Differential Privacy, Proposition 12](
    https://arxiv.org/abs/2004.00010)
  - [Connect the Dots: Tighter Discrete Approximations of Privacy Loss
    Distributions](https://arxiv.org/abs/2207.04380)
"""

import collections
import contextlib
import functools
import logging
import math
import operator
from collections.abc import Callable

import dp_accounting
import numpy as np
from dp_accounting import dp_event
from dp_accounting.rdp import rdp_privacy_accountant
from scipy import special

from tf_dpsub.accounting import (
    gaussian_mixtures,
    loss_distributions,
    random_allocation,
    sampled_gaussians,
    selection,
)
from tf_dpsub.checks import (
    check_choice,
    check_count,
    check_delta,
    check_epsilon,
    check_noise_multiplier,
)

ACCOUNTANTS = ("rdp", "pld")
SAMPLINGS = ("poisson", "once_per_epoch")

RDP_ORDERS = tuple(
    float(order)
    for order in sorted(
        {*rdp_privacy_accountant.DEFAULT_RDP_ORDERS, *range(64, 257)}
    )
)

PLD_INTERVAL = 1e-4

# Beyond it the series of all orders would not fit into memory.
_LARGEST_ORDER_AT_ONCE = 2.0**14

# Less noise is accounted as none: its epsilon is beyond any use, and beyond the
# range of the accountants' arithmetic.
_LEAST_NOISE = 1e-6

# A search ends at the last whole number, or with epsilon this close (relative)
# to the budget; and where more than this many steps would fit.
_TIGHT = 5e-5
_SEARCH_CEILING = 2**40

# It runs with few orders and the cheap accountant first, then on from there
# with all orders and the dear one: so it takes half of the time of
# dp-accounting's own calibration by PLD. The last stage alone decides.
_FEW_ORDERS = RDP_ORDERS[::8]
_Stage = collections.namedtuple("_Stage", "accountant orders interval stride")
_STAGES = {
    "rdp": (
        _Stage("rdp", _FEW_ORDERS, PLD_INTERVAL, 2),
        _Stage("rdp", RDP_ORDERS, PLD_INTERVAL, 1.001),
    ),
    "pld": (
        _Stage("rdp", _FEW_ORDERS, PLD_INTERVAL, 2),
        _Stage("pld", _FEW_ORDERS, 10 * PLD_INTERVAL, 1.1),
        _Stage("pld", RDP_ORDERS, PLD_INTERVAL, 1.001),
    ),
}


def epsilon(
    *,
    noise_multiplier: float,
    sampling_rate: float,
    steps: int,
    delta: float,
    accountant: str = "pld",
    rows_per_person: int = 1,
    sampling: str = "poisson",
) -> float:
    """Epsilon that identical steps of a sampled Gaussian mechanism spend.

    Args:
        noise_multiplier: float, standard deviation of the noise divided by the
            sensitivity. 0 means no noise: epsilon is then infinite.
        sampling_rate: float in (0, 1], probability with which a step draws each
            example, independently of all others (Poisson sampling). 1 means
            that every step may see every example, hence no amplification.
        steps: int, number of steps.
        delta: float in (0, 1).
        accountant: str, `"rdp"` or `"pld"`. Defaults to `"pld"`.
        rows_per_person: int, the most examples of one person: the epsilon is
            that of all of them together. Defaults to `1`, of one example.
        sampling: str, `"poisson"`, or `"once_per_epoch"`: in each epoch of
            `1 / sampling_rate` steps, rounded up, each example is drawn at one
            of them, chosen uniformly at random. An epoch that has begun counts
            whole. Defaults to `"poisson"`.

    Returns:
        A float, the epsilon at `delta`.

    Raises:
        ValueError: If an argument is out of its range.

    Example:

    ```python
    tf_dpsub.accounting.epsilon(
        noise_multiplier=1.3, sampling_rate=150 / 60000, steps=6000, delta=1e-5
    )  # 0.640
    ```
    """
    return composed_epsilon(
        [
            _run_of(
                noise_multiplier,
                sampling_rate,
                steps,
                sampling,
                rows_per_person,
            )
        ],
        delta=delta,
        accountant=accountant,
    )


def delta(
    *,
    noise_multiplier: float,
    sampling_rate: float,
    steps: int,
    epsilon: float,
    accountant: str = "pld",
    rows_per_person: int = 1,
    sampling: str = "poisson",
) -> float:
    """Delta that identical steps of a sampled Gaussian mechanism spend.

    Args:
        noise_multiplier: float, as in `epsilon`.
        sampling_rate: float in (0, 1], as in `epsilon`.
        steps: int, number of steps.
        epsilon: float, > 0.
        accountant: str, `"rdp"` or `"pld"`. Defaults to `"pld"`.
        rows_per_person: int, as in `epsilon`. Defaults to `1`.
        sampling: str, as in `epsilon`. Defaults to `"poisson"`.

    Returns:
        A float, the delta at `epsilon`.

    Raises:
        ValueError: If an argument is out of its range.
    """
    return composed_delta(
        [
            _run_of(
                noise_multiplier,
                sampling_rate,
                steps,
                sampling,
                rows_per_person,
            )
        ],
        epsilon=epsilon,
        accountant=accountant,
    )


def noise_multiplier(
    *,
    epsilon: float,
    delta: float,
    sampling_rate: float,
    steps: int,
    accountant: str = "pld",
    rows_per_person: int = 1,
    sampling: str = "poisson",
) -> float:
    """Smallest noise multiplier with which the steps keep the budget.

    Args:
        epsilon: float, > 0, the budget.
        delta: float in (0, 1).
        sampling_rate: float in (0, 1], as in `epsilon`.
        steps: int, > 0, number of steps.
        accountant: str, `"rdp"` or `"pld"`. Defaults to `"pld"`.
        rows_per_person: int, as in `epsilon`. Defaults to `1`.
        sampling: str, as in `epsilon`. Defaults to `"poisson"`.

    Returns:
        A float. The epsilon that it spends never exceeds the budget, and is
        within a relative 1e-4 of it, unless the budget is below what the
        accountant can resolve.

    Raises:
        ValueError: If an argument is out of its range, or if no noise keeps
            the budget.
    """
    check_epsilon(epsilon)
    check_delta(delta)
    check_accountant(accountant)
    if _check_steps(steps) == 0:
        raise ValueError(
            "Expected steps > 0, got 0. Without a step any noise multiplier "
            "keeps the budget."
        )

    def event(multiplier):
        return _run_of(
            multiplier, sampling_rate, steps, sampling, rows_per_person
        )

    least = least_noise(
        event, epsilon=epsilon, delta=delta, accountant=accountant
    )
    if least is None:
        raise ValueError(
            f"Expected a budget that some noise can keep, got epsilon="
            f"{epsilon}, delta={delta} over {steps} steps at sampling rate "
            f"{sampling_rate}. Raise epsilon or delta, or take fewer steps."
        )
    return least


def selection_epsilon(
    *,
    noise_multiplier: float,
    sampling_rate: float,
    steps: int,
    mean_trials: float,
    delta: float,
    distribution: str = "logarithmic",
) -> float:
    """Epsilon of the best of a random number of trials of private training.

    Args:
        noise_multiplier: float, of each step, as for `epsilon`.
        sampling_rate: float in (0, 1], as for `epsilon`.
        steps: int, of one trial.
        mean_trials: float, > 1, the expected number of trials.
        delta: float in (0, 1).
        distribution: str, of the number of trials: `"logarithmic"`, which is
            the cheapest from a few trials on, or `"geometric"`. Defaults to
            `"logarithmic"`.

    Returns:
        A float, by RDP.

    Raises:
        ValueError: If an argument is out of its range.

    Example:

    ```python
    tf_dpsub.accounting.selection_epsilon(
        noise_multiplier=4.0, sampling_rate=0.025, steps=1200,
        mean_trials=30, delta=1e-5,
    )  # 1.746
    ```
    """
    step = sampled_gaussian(noise_multiplier, sampling_rate)
    trial = dp_accounting.SelfComposedDpEvent(step, _check_steps(steps))
    event = selection.selection_event(
        [trial], mean_trials, selection.shape_of(distribution)
    )
    return composed_epsilon([event], delta=delta, accountant="rdp")


def least_noise(
    event_of: Callable,
    *,
    epsilon: float,
    delta: float,
    accountant: str = "pld",
    spent=(),
) -> float | None:
    """Smallest noise multiplier with which a run keeps a budget.

    Args:
        event_of: function of a noise multiplier, the `dp_accounting.DpEvent` of
            the run, of which more noise is never dearer.
        epsilon: float, > 0, the whole budget.
        delta: float in (0, 1).
        accountant: str, `"rdp"` or `"pld"`. Defaults to `"pld"`.
        spent: iterable of `dp_accounting.DpEvent`, what ran before. Defaults
            to nothing.

    Returns:
        A float, as `noise_multiplier` says; None if no noise keeps the budget.
    """
    spent = tuple(spent)
    *cheap_stages, last_stage = _STAGES[accountant]

    @functools.cache
    def excess(inverse, stage):
        events = [*spent, event_of(1 / inverse)]
        return _excess(events, epsilon, delta, stage)

    inverse = 1.0
    for stage in (*cheap_stages, last_stage):
        if _excess(spent, epsilon, delta, stage) > 0:
            # No noise is enough. Of a cheap bound, which is looser, that tells
            # nothing.
            if stage is last_stage:
                return None
            continue
        inverse = _largest(
            functools.partial(excess, stage=stage),
            max(inverse, 2 / _SEARCH_CEILING),
            stage.stride,
        )
    # At the floor of the search no noise is enough.
    return 1 / inverse if inverse > 4 / _SEARCH_CEILING else None


def steps(
    *,
    epsilon: float,
    delta: float,
    noise_multiplier: float,
    sampling_rate: float,
    accountant: str = "pld",
    rows_per_person: int = 1,
    sampling: str = "poisson",
) -> int:
    """Largest number of steps that keeps the budget.

    Args:
        epsilon: float, > 0, the budget.
        delta: float in (0, 1).
        noise_multiplier: float, as in `epsilon`.
        sampling_rate: float in (0, 1], as in `epsilon`.
        accountant: str, `"rdp"` or `"pld"`. Defaults to `"pld"`.
        rows_per_person: int, as in `epsilon`. Defaults to `1`.
        sampling: str, as in `epsilon`: with `"once_per_epoch"`, those of whole
            epochs. Defaults to `"poisson"`.

    Returns:
        An int, 0 if not even one step fits; at most 2**40, times the steps of
        an epoch where epochs count.

    Raises:
        ValueError: If an argument is out of its range.
    """
    event, length = _counted(
        noise_multiplier, sampling_rate, sampling, rows_per_person
    )
    return length * further_steps(
        event, epsilon=epsilon, delta=delta, accountant=accountant
    )


def sampled_gaussian(
    noise_multiplier: float, sampling_rate: float, rows_per_person: int = 1
):
    """The dp-accounting event of one step.

    Args:
        noise_multiplier: float, >= 0, as in `epsilon`.
        sampling_rate: float in (0, 1], as in `epsilon`.
        rows_per_person: int, as in `epsilon`. Defaults to `1`.

    Returns:
        A `dp_accounting.DpEvent`.

    Raises:
        ValueError: If an argument is out of its range.
    """
    check_noise_multiplier(noise_multiplier)
    if not 0 < sampling_rate <= 1:
        raise ValueError(
            f"Expected 0 < sampling_rate <= 1, got {sampling_rate}. It is the "
            "expected batch size divided by the number of examples."
        )
    check_count("rows_per_person", rows_per_person)
    if noise_multiplier < _LEAST_NOISE * rows_per_person:
        return dp_accounting.NonPrivateDpEvent()
    if sampling_rate == 1:
        # All rows of a person may move the sum, each by the sensitivity.
        return dp_accounting.GaussianDpEvent(
            float(noise_multiplier) / rows_per_person
        )
    if rows_per_person > 1:
        return gaussian_mixtures.event(
            float(noise_multiplier), float(sampling_rate), int(rows_per_person)
        )
    gaussian = dp_accounting.GaussianDpEvent(float(noise_multiplier))
    return dp_accounting.PoissonSampledDpEvent(float(sampling_rate), gaussian)


def _counted(noise_multiplier, sampling_rate, sampling, rows_per_person):
    """What is counted: an event, and the number of steps that it stands for."""
    check_choice("sampling", sampling, SAMPLINGS)
    step = sampled_gaussian(noise_multiplier, sampling_rate, rows_per_person)
    if sampling == "poisson":
        return step, 1
    # Rounding of 1 / rate must not add a step: 0.1 is not exactly 1 / 10.
    length = math.ceil(1 / sampling_rate - 1e-9)
    return allocated_gaussian(noise_multiplier, length, rows_per_person), length


def _run_of(noise_multiplier, sampling_rate, steps, sampling, rows_per_person):
    """The event of so many steps."""
    event, length = _counted(
        noise_multiplier, sampling_rate, sampling, rows_per_person
    )
    return dp_accounting.SelfComposedDpEvent(
        event, -(-_check_steps(steps) // length)
    )


def allocated_gaussian(
    noise_multiplier: float, epoch_steps: int, rows_per_person: int = 1
):
    """The dp-accounting event of an epoch in which each row takes one step.

    Formal guarantees: for a row, it is random allocation. Several rows of a
    person may move the sums of the epoch by `rows_per_person` sensitivities at
    most, whichever steps they took: this is a Gaussian, without amplification.

    Args:
        noise_multiplier: float, >= 0, as in `epsilon`.
        epoch_steps: int, number of steps of an epoch.
        rows_per_person: int, as in `epsilon`. Defaults to `1`.

    Returns:
        A `dp_accounting.DpEvent`.
    """
    if rows_per_person > 1:
        return sampled_gaussian(noise_multiplier, 1, rows_per_person)
    return random_allocation.event(noise_multiplier, epoch_steps)


def composed_epsilon(
    events,
    *,
    delta: float,
    accountant: str = "pld",
    orders: tuple = RDP_ORDERS,
    interval: float = PLD_INTERVAL,
) -> float:
    """Epsilon of mechanisms that ran one after another on the same data.

    Args:
        events: iterable of `dp_accounting.DpEvent`. Self-composed and composed
            events may be nested.
        delta: float in (0, 1).
        accountant: str, `"rdp"` or `"pld"`. Defaults to `"pld"`.
        orders: tuple of floats, the Rényi orders that `"rdp"` tries. Defaults
            to `RDP_ORDERS`.
        interval: float, spacing of the grid on which `"pld"` rounds privacy
            losses up. Defaults to `PLD_INTERVAL`.

    Returns:
        A float, 0.0 for no events, infinite if one event is not private.

    Raises:
        ValueError: If `delta` or `accountant` is out of its range.
        dp_accounting.UnsupportedEventError: If the accountant has no bound for
            one of the events.
    """
    check_delta(delta)
    check_accountant(accountant)
    totals = _totals(events)
    if not totals:
        return 0.0
    spent, _ = dp_accounting.rdp.compute_epsilon(
        orders, _composed_curve(totals, orders), delta
    )
    if math.isnan(spent):
        return math.inf
    if accountant == "pld" and _grid_fits(totals, spent):
        counts = tuple(totals.items())
        spent = min(spent, _pld_epsilon(counts, delta, spent, interval))
    return float(spent)


def bounding_accountant(events, *, delta: float, accountant: str) -> str:
    """The accountant by whose bound `composed_epsilon` gives its figure.

    Args:
        events: iterable of `dp_accounting.DpEvent`, as in `composed_epsilon`.
        delta: float in (0, 1).
        accountant: str, the one that was asked for.

    Returns:
        A str: `"rdp"` where it was asked for, or where no grid fits.
    """
    totals = _totals(events)
    scale = composed_epsilon(events, delta=delta, accountant="rdp")
    fits = not totals or _grid_fits(totals, scale)
    return accountant if fits else "rdp"


def composed_delta(events, *, epsilon: float, accountant: str = "pld") -> float:
    """Delta of mechanisms that ran one after another on the same data.

    Args:
        events: iterable of `dp_accounting.DpEvent`, as in `composed_epsilon`.
        epsilon: float, > 0.
        accountant: str, `"rdp"` or `"pld"`. Defaults to `"pld"`.

    Returns:
        A float, 0.0 for no events, 1.0 if one event is not private.

    Raises:
        ValueError: If `epsilon` or `accountant` is out of its range.
        dp_accounting.UnsupportedEventError: If the accountant has no bound for
            one of the events.
    """
    check_epsilon(epsilon)
    check_accountant(accountant)
    totals = _totals(events)
    if not totals:
        return 0.0
    curve = _composed_curve(totals, RDP_ORDERS)
    scale, _ = dp_accounting.rdp.compute_epsilon(RDP_ORDERS, curve, 1e-5)
    spent, _ = rdp_privacy_accountant.compute_delta(RDP_ORDERS, curve, epsilon)
    if math.isnan(spent):
        return 1.0
    if accountant == "pld" and _grid_fits(totals, scale):
        with np.errstate(over="ignore"):
            counts = tuple(totals.items())
            losses = _losses(counts, scale)
            spent = min(spent, losses.get_delta_for_epsilon(epsilon))
    return float(spent)


def true_positive_rate(events, *, false_positive_rate: float) -> float:
    """Largest true positive rate of any attack that decides on membership.

    The attack knows all but one example, and decides from all releases whether
    that one took part.

    Formal guarantees: every (ε, δ) that `composed_epsilon` gives for the events
    bounds the rate, of which the smallest bound is returned: with f false
    positives, at most min(exp(ε) f + δ, 1 - exp(-ε) (1 - δ - f)) true ones.

    Args:
        events: iterable of `dp_accounting.DpEvent`, as in `composed_epsilon`.
        false_positive_rate: float in (0, 1), how often the attack may take an
            example for a member that is none.

    Returns:
        A float, at most 1.

    Raises:
        ValueError: If `false_positive_rate` is out of its range.

    Reference:
      - [The Composition Theorem for Differential Privacy](
        https://arxiv.org/abs/1311.0776), theorem 2.1
    """
    if not 0 < false_positive_rate < 1:
        raise ValueError(
            f"Expected 0 < false_positive_rate < 1, got {false_positive_rate}."
        )
    events = tuple(events)
    bounds = [1.0]
    # Larger deltas come with an epsilon of 0.
    for log_odds in np.arange(-28, 29, 0.5):
        tolerated = float(special.expit(log_odds))
        spent = composed_epsilon(events, delta=tolerated)
        if spent < 700:
            missed = max(0.0, 1 - tolerated - false_positive_rate)
            bounds.append(math.exp(spent) * false_positive_rate + tolerated)
            bounds.append(1 - math.exp(-spent) * missed)
        if spent == 0:
            break
    return min(bounds)


def further_steps(
    event, *, epsilon: float, delta: float, accountant: str = "pld", spent=()
) -> int:
    """Largest number of steps that still fits into a budget.

    Args:
        event: `dp_accounting.DpEvent` of one step.
        epsilon: float, > 0, the whole budget.
        delta: float in (0, 1).
        accountant: str, `"rdp"` or `"pld"`. Defaults to `"pld"`.
        spent: iterable of `dp_accounting.DpEvent`, what ran before. Defaults
            to nothing.

    Returns:
        An int, 0 if not even one step fits; at most 2**40.

    Raises:
        ValueError: If an argument is out of its range.
    """
    check_epsilon(epsilon)
    check_accountant(accountant)
    spent = tuple(spent)

    @functools.cache
    def excess(count, stage):
        further = dp_accounting.SelfComposedDpEvent(event, count)
        return _excess([*spent, further], epsilon, delta, stage)

    fits = 1
    for stage in _STAGES[accountant]:
        fits = _largest(
            functools.partial(excess, stage=stage),
            max(fits, 1),
            stage.stride,
            whole=True,
        )
    return fits


def check_accountant(accountant):
    """Checks the name of an accountant, one of `ACCOUNTANTS`."""
    check_choice("accountant", accountant, ACCOUNTANTS)


def _totals(events):
    """Maps each elementary event to the number of times that it ran."""
    totals = collections.Counter()

    def add(event, count):
        if isinstance(event, dp_accounting.SelfComposedDpEvent):
            add(event.event, count * event.count)
        elif isinstance(event, dp_accounting.ComposedDpEvent):
            for part in event.events:
                add(part, count)
        elif count and not isinstance(event, dp_accounting.NoOpDpEvent):
            totals[event] += count

    for event in events:
        add(event, 1)
    return totals


def _composed_curve(totals, orders):
    orders = tuple(orders)
    curve = np.zeros(len(orders))  # [orders]
    for event, count in totals.items():
        curve += count * _curve(event, orders)
    return curve


@functools.lru_cache(maxsize=256)
def _curve(event, orders):
    """Rényi divergence of one event at each order: the costly part, so kept."""
    if gaussian_mixtures.is_mixture(event):
        return gaussian_mixtures.renyi_divergences(event, orders)
    if isinstance(event, random_allocation.RandomAllocationDpEvent):
        return random_allocation.divergences(
            event.noise_multiplier, event.steps, orders
        ).max(axis=0)
    if isinstance(event, dp_event.RepeatAndSelectDpEvent):
        return selection.renyi_divergences(
            _composed_curve(_totals([event.event]), orders),
            orders,
            event.mean,
            event.shape,
        )
    if _is_sampled_gaussian(event) and max(orders) <= _LARGEST_ORDER_AT_ONCE:
        curve = sampled_gaussians.renyi_divergences(
            event.event.noise_multiplier, event.sampling_probability, orders
        )
    else:
        accountant = dp_accounting.rdp.RdpAccountant(orders)
        with _without_order_warnings():
            accountant.compose(event)
        curve = accountant.rdp
    # What lies below float64's rounding can come out as 0 or negative, which
    # would be read as "free".
    return np.maximum(curve, 1e-14)


def _is_sampled_gaussian(event):
    return (
        isinstance(event, dp_accounting.PoissonSampledDpEvent)
        and isinstance(event.event, dp_accounting.GaussianDpEvent)
        and 0 < event.sampling_probability < 1
        and event.event.noise_multiplier > 0
    )


def _grid_fits(totals, scale):
    return (
        0 < scale < 1e6
        and max(totals.values()) <= 10**6
        and all(loss_distributions.is_supported(event) for event in totals)
    )


@functools.lru_cache(maxsize=256)
def _pld_epsilon(counts, delta, scale, interval):
    """Epsilon of pairs of an event and its count: kept, as reports repeat."""
    if all(isinstance(e, dp_accounting.GaussianDpEvent) for e, _ in counts):
        # A composition of Gaussians is one Gaussian, whose privacy loss
        # distribution needs no grid.
        precision = sum(
            count / event.noise_multiplier**2 for event, count in counts
        )
        # Deltas that are far too small for float64 come out as 0.
        with np.errstate(divide="ignore"):
            return dp_accounting.get_epsilon_gaussian(precision**-0.5, delta)
    # Losses beyond the range of exp become infinite, hence are rounded up.
    with np.errstate(over="ignore"):
        return loss_distributions.least_epsilon(
            _losses(counts, scale, interval), delta
        )


def _losses(counts, scale, interval=PLD_INTERVAL):
    """Distribution of the privacy loss, for epsilons up to about `scale`.

    The grid spans several times `scale`. Above 100 its interval widens, which
    keeps time and memory small and the result an upper bound.
    """
    if scale > 100:
        interval = max(interval, scale * 1e-5)
    return _composed_losses(counts, interval)


# For several deltas of one composition.
_composed_losses = functools.lru_cache(maxsize=4)(loss_distributions.composed)


@contextlib.contextmanager
def _without_order_warnings():
    """Silences one warning for each Rényi order that cannot be evaluated.

    Leaving an order out only loosens the bound, and for little noise it happens
    at several orders of every evaluation.
    """

    def keep(record):
        return not str(record.msg).startswith("_compute_log_a_frac failed")

    logger = logging.getLogger("absl")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def _largest(excess: Callable, guess, stride: float, whole: bool = False):
    """Largest x that keeps a budget.

    Args:
        excess: callable, increasing: log of the epsilon spent at x over the
            budget.
        guess: number, > 0, where the search starts.
        stride: float, > 1, factor by which it first leaves the guess.
        whole: bool, whether x is a whole number. Defaults to `False`.

    Returns:
        A number with `excess <= 0`: the last one if `whole`, else within
        `_TIGHT` of the budget. 0 if there is none, and at most
        `_SEARCH_CEILING`.
    """
    inside = outside = guess
    if not whole and -_TIGHT < excess(guess) <= 0:
        return guess
    while excess(inside) > 0:
        inside, outside = inside / stride, inside
        if whole:
            inside = int(inside)
        if inside < 1 / _SEARCH_CEILING:
            return 0
        stride = min(stride**2, 2)
    while excess(outside) <= 0:
        if outside > _SEARCH_CEILING:
            return _SEARCH_CEILING
        inside, outside = outside, outside * stride
        if whole:
            outside = math.ceil(outside)
        stride = min(stride**2, 2)
    return _narrow(excess, inside, outside, whole)


def _narrow(excess, inside, outside, whole):
    """Narrows a bracket down to what `_largest` returns.

    False position on log-log axes, on which epsilon is nearly a straight line,
    aimed at the middle of what counts as the budget; halving the end that is
    kept (Illinois) makes it converge from both sides.
    """
    aim = 0.0 if whole else -_TIGHT / 2
    at_inside = excess(inside)
    low, high = at_inside - aim, excess(outside) - aim
    while True:
        if whole and outside - inside <= 1:
            return inside
        if not whole and (
            at_inside > -_TIGHT or outside - inside <= 1e-9 * inside
        ):
            return inside
        share = min(max(low / (low - high), 0.01), 0.99)
        point = inside * (outside / inside) ** share
        if whole:
            point = min(max(round(point), inside + 1), outside - 1)
        value = excess(point)
        if value <= 0:
            inside, at_inside, low, high = point, value, value - aim, high / 2
        else:
            outside, low, high = point, low / 2, value - aim


def _excess(events, epsilon, delta, stage):
    """log(epsilon spent / budget), finite where nothing or all is spent."""
    spent = composed_epsilon(
        events,
        delta=delta,
        accountant=stage.accountant,
        orders=stage.orders,
        interval=stage.interval,
    )
    if spent == 0:
        return -700.0
    return min(math.log(spent) - math.log(epsilon), 700.0)


def _check_steps(steps):
    try:
        count = operator.index(steps)
    except TypeError:
        count = -1
    if count < 0:
        raise ValueError(
            f"Expected steps to be a whole number >= 0, got {steps!r}."
        )
    return count
