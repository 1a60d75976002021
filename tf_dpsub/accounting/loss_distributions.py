"""Privacy loss distributions of dp-accounting's events, and their composition.

dp-accounting's own accountant inverts the privacy loss of a sampled Gaussian
one number of the grid at a time in Python, which takes most of its time. Here
the whole grid is inverted at once; what is made of it is dp-accounting's.

Reference:
  - [Connect the Dots: Tighter Discrete Approximations of Privacy Loss
    Distributions](https://arxiv.org/abs/2207.04380)
"""

import functools
import math

import dp_accounting
import numpy as np
from dp_accounting.pld import (
    pld_pmf,
    privacy_loss_distribution,
    privacy_loss_mechanism,
)

from tf_dpsub.accounting import gaussian_mixtures, random_allocation


def is_supported(event) -> bool:
    """Tells whether an elementary event has a privacy loss distribution here.

    Args:
        event: `dp_accounting.DpEvent`.
    """
    if gaussian_mixtures.is_mixture(event):
        return gaussian_mixtures.has_losses(event)
    if isinstance(event, random_allocation.RandomAllocationDpEvent):
        return True
    if isinstance(event, dp_accounting.PoissonSampledDpEvent):
        event = event.event
    return isinstance(event, dp_accounting.GaussianDpEvent)


def composed(counts, interval: float):
    """Distribution of the privacy loss of a composition.

    Args:
        counts: iterable of pairs: a supported `dp_accounting.DpEvent`, and the
            number of times that it ran.
        interval: float, spacing of the grid on which losses are rounded up.

    Returns:
        A `PrivacyLossDistribution` of dp-accounting, for neighbours of which
        one lacks an example.
    """
    whole = privacy_loss_distribution.identity(interval)
    for event, count in counts:
        whole = whole.compose(_repeated(event, count, interval))
    return whole


def least_epsilon(losses, delta: float) -> float:
    """Smallest epsilon at a delta.

    It is what `get_epsilon_for_delta` of dp-accounting says, which walks over
    the grid in Python.

    Args:
        losses: `PrivacyLossDistribution` of dp-accounting.
        delta: float in (0, 1).

    Returns:
        A float, infinite where the mass of infinite losses is beyond `delta`.
    """
    return max(
        _least_epsilon(pmf, delta)
        for pmf in (losses._pmf_remove, losses._pmf_add)
    )


def _least_epsilon(pmf, delta):
    if not isinstance(pmf, pld_pmf.DensePLDPmf):
        return pmf.get_epsilon_for_delta(delta)
    if pmf._infinity_mass > delta:
        return math.inf
    losses, above, others, divergences = _cumulated(pmf)
    # A loss so large that its exponential has no inverse.
    beyond = (above[1:] >= delta) & (others[1:] == 0)
    reached = divergences >= delta
    first = int(np.argmax(beyond | reached))
    if beyond[first] and not reached[first]:
        return max(0.0, float(losses[first]))
    k = first if reached[first] else len(losses)
    if above[k] <= others[k] + delta:
        return 0.0
    return math.log((above[k] - delta) / others[k])


# Both directions of one distribution.
@functools.lru_cache(maxsize=2)
def _cumulated(pmf):
    """What the epsilons of all deltas follow from; kept, as deltas vary.

    Returns:
        Tuple of arrays: losses, falling; the sums `[losses + 1]` of the masses
        before each loss, and of those of the other distribution; and the
        hockey-stick divergence at each loss.
    """
    masses = pmf._probs[::-1]
    highest = pmf._lower_loss + len(masses) - 1
    losses = (highest - np.arange(len(masses))) * pmf._discretization
    above = _sums_before(masses, pmf._infinity_mass)
    with np.errstate(over="ignore", invalid="ignore"):
        others = _sums_before(
            np.where(masses == 0, 0.0, np.exp(-losses) * masses)
        )
        divergences = above[:-1] - others[:-1] * np.exp(losses)
    divergences[~(others[:-1] > 0)] = -np.inf
    return losses, above, others, divergences


def _sums_before(values, first=0.0):
    """Sums of `first` and of the values before each one, and of all."""
    return np.cumsum(np.concatenate([[first], values]))


@functools.lru_cache(maxsize=8)
def _repeated(event, count, interval):
    """Distribution of one event that ran several times; kept, as others vary.

    What a ledger holds of earlier runs stays, while a search looks for the
    noise of the next one.
    """
    if isinstance(event, random_allocation.RandomAllocationDpEvent):
        return _allocated(event, interval, count)
    if isinstance(event, dp_accounting.GaussianDpEvent):
        # A composition of Gaussians is one Gaussian.
        return _sampled_gaussian(
            event.noise_multiplier / math.sqrt(count), 1.0, interval
        )
    if gaussian_mixtures.is_mixture(event):
        return _mixture(event, interval).self_compose(count)
    return _sampled_gaussian(
        event.event.noise_multiplier, event.sampling_probability, interval
    ).self_compose(count)


def _allocated(event, interval, epochs):
    # A search begins on a wide interval, and then needs few points as well.
    points = random_allocation.POINTS // (1 if interval < 1e-3 else 2)
    return random_allocation.losses(
        event.noise_multiplier, event.steps, interval, points, epochs
    )


@functools.lru_cache(maxsize=8)
def _sampled_gaussian(noise_multiplier, rate, interval):
    """Distribution of one step, in both directions; kept, as counts vary."""
    removed, added = (
        _discretised(_Loss(noise_multiplier, 1, rate, direction), interval)
        for direction in (
            privacy_loss_mechanism.AdjacencyType.REMOVE,
            privacy_loss_mechanism.AdjacencyType.ADD,
        )
    )
    if rate == 1:
        return privacy_loss_distribution.PrivacyLossDistribution(removed)
    return privacy_loss_distribution.PrivacyLossDistribution(removed, added)


@functools.lru_cache(maxsize=8)
def _mixture(event, interval):
    """Distribution of one step that may draw several rows of a person."""
    return privacy_loss_distribution.PrivacyLossDistribution(
        *(
            _discretised(
                gaussian_mixtures.privacy_loss(event, direction), interval
            )
            for direction in (
                privacy_loss_mechanism.AdjacencyType.REMOVE,
                privacy_loss_mechanism.AdjacencyType.ADD,
            )
        )
    )


def _discretised(loss, interval):
    bounds = loss.connect_dots_bounds()
    lowest = math.floor(bounds.epsilon_lower / interval)
    highest = math.ceil(bounds.epsilon_upper / interval)
    epsilons = np.arange(lowest, highest + 1) * interval
    return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(
        interval, lowest, highest, loss.get_delta_for_epsilon(epsilons)
    )


class _Loss(privacy_loss_mechanism.GaussianPrivacyLoss):
    """Privacy loss of one step, whose deltas are computed all at once.

    Args:
        noise_multiplier: float, > 0.
        sensitivity: float.
        sampling_prob: float in (0, 1].
        adjacency_type: `REMOVE` or `ADD`, of `privacy_loss_mechanism`.
    """

    def __init__(
        self, noise_multiplier, sensitivity, sampling_prob, adjacency_type
    ):
        super().__init__(
            noise_multiplier,
            sensitivity,
            sampling_prob=sampling_prob,
            adjacency_type=adjacency_type,
        )
        removes = adjacency_type == privacy_loss_mechanism.AdjacencyType.REMOVE
        self._sign = 1 if removes else -1

    def get_delta_for_epsilon(self, epsilon):
        """Hockey-stick divergences.

        Args:
            epsilon: array of floats, [points].

        Returns:
            Array of floats in [0, 1], of that shape.
        """
        unsampled = self._sign * _unsampled(
            self._sign * epsilon, self.sampling_prob
        )
        # Beyond the largest loss that sampling allows, nothing exceeds it when
        # an example is added; and all does when one is removed.
        inside = np.isfinite(unsampled)
        x = self._inverse_privacy_loss_without_subsampling_remove(
            unsampled[inside]
        )
        if self._sign < 0:
            x = x + self.sensitivity
        if self._sign > 0:
            deltas = -np.expm1(np.minimum(epsilon, 0))
        else:
            deltas = np.zeros_like(epsilon)
        deltas[inside] = self.mu_upper_cdf(x) - np.exp(
            epsilon[inside] + self.mu_lower_log_cdf(x)
        )
        return np.clip(deltas, 0, 1)


def _unsampled(losses, rate):
    """log(1 + (exp(loss) - 1) / rate), -inf or NaN where that has no log."""
    if rate == 1:
        return losses
    with np.errstate(divide="ignore", invalid="ignore"):
        # Exact near 0, and where exp would overflow.
        small = np.log1p(np.expm1(np.minimum(losses, 1)) / rate)
    large = np.maximum(losses, 1)
    large = large - math.log(rate) + np.log1p((rate - 1) * np.exp(-large))
    return np.where(losses < 1, small, large)
