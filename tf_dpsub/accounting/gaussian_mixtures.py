"""Steps that may draw several rows of one person: mixtures of Gaussians.

A person has up to k rows, and a Poisson step draws each with rate q: a number
of them that is binomial. Each moves the sum by at most the clip, so that the
person moves it by at most as many clips as rows were drawn.

Formal guarantees: the pair of N(0, σ²) and of N(j, σ²), with j rows drawn, in
both directions, dominates the step for neighbours of which one lacks all rows
of a person: whatever the gradients of the rows are, no hockey-stick divergence,
hence no Rényi divergence, is larger.

Reference:
  - [Tight Group-Level DP Guarantees for DP-SGD with Sampling via Mixture of
    Gaussians Mechanisms](https://arxiv.org/abs/2401.10294)
  - [Privacy Amplification for Matrix Mechanisms, corollary 4.7](
    https://arxiv.org/abs/2310.15526)
"""

import functools
import math

import numpy as np
from dp_accounting import dp_event
from dp_accounting.pld import privacy_loss_mechanism
from scipy import special, stats

# Numbers on a grid, times components, that are worked on at a time.
_CHUNK = 2**20
# Components of a mixture whose losses are inverted: it takes as many times as
# long.
_MOST_COMPONENTS = 257
# Points of the integral for a Rényi order, and these times the components:
# orders that need more are left out, which loosens the bound only.
_MOST_POINTS = 2**18
_MOST_TERMS = 2**24
# Standard deviations beyond which nothing of the integral is left.
_TAIL = 12
# More than what rounding loses of an integral, for each row.
_ROUNDING = 1e-13


@functools.lru_cache(maxsize=256)
def event(noise_multiplier: float, sampling_rate: float, rows: int):
    """The dp-accounting event of a step, for a person with so many rows.

    Args:
        noise_multiplier: float, > 0, for a sensitivity of one row.
        sampling_rate: float in (0, 1), with which a row is drawn.
        rows: int, > 0, of the person.

    Returns:
        A `MixtureOfGaussiansDpEvent`.
    """
    drawn = np.arange(rows + 1)
    shares = stats.binom.pmf(drawn, rows, sampling_rate)
    # Tuples: events are counted, hence hashed.
    return dp_event.MixtureOfGaussiansDpEvent(
        float(noise_multiplier),
        tuple(map(float, drawn)),
        tuple(map(float, shares)),
    )


def is_mixture(event) -> bool:
    """Tells whether an event is a mixture of Gaussians.

    Args:
        event: `dp_accounting.DpEvent`.
    """
    return isinstance(event, dp_event.MixtureOfGaussiansDpEvent)


def has_losses(event) -> bool:
    """Tells whether `privacy_loss` takes no more than seconds.

    Args:
        event: `MixtureOfGaussiansDpEvent`.
    """
    return len(event.sensitivities) <= _MOST_COMPONENTS


def renyi_divergences(event, orders):
    """Rényi divergences of one step, the larger of both directions.

    Args:
        event: `MixtureOfGaussiansDpEvent`.
        orders: sequence of floats, > 1.

    Returns:
        Array of floats, [orders]; infinite for orders that are left out.
    """
    return _Mixture(event).renyi_divergences(orders)


def privacy_loss(event, adjacency_type):
    """Privacy loss of one step, as dp-accounting discretises it.

    Args:
        event: `MixtureOfGaussiansDpEvent`.
        adjacency_type: `REMOVE` or `ADD`, of `privacy_loss_mechanism`.

    Returns:
        A `MixtureGaussianPrivacyLoss` of dp-accounting.
    """
    return _Loss(
        event.standard_deviation,
        event.sensitivities,
        event.sampling_probs,
        adjacency_type=adjacency_type,
    )


class _Mixture:
    """The density of a mixture of N(j, σ²), relative to that of N(0, σ²).

    Args:
        event: `MixtureOfGaussiansDpEvent`.
    """

    def __init__(self, event):
        shares = np.asarray(event.sampling_probs)
        self._shifts = np.asarray(event.sensitivities)[shares > 0]
        self._log_shares = np.log(shares[shares > 0])
        self._stddev = event.standard_deviation
        self._most = float(self._shifts[-1])
        self._most_points = min(_MOST_POINTS, _MOST_TERMS // len(self._shifts))

    def renyi_divergences(self, orders):
        orders = np.asarray(orders, float)
        removal = self._log_moments(
            orders, self._range_of_removal, np.ones_like(orders)
        )
        # Few widths for many orders.
        widths_of = 4.0 ** np.ceil(np.log(orders) / math.log(4))
        addition = self._log_moments(
            1 - orders, self._range_of_addition, widths_of
        )
        margin = _ROUNDING * len(self._shifts)
        moments = np.maximum(np.maximum(removal, addition), 0.0)
        return (moments + margin) / (orders - 1) + margin

    def _range_of_removal(self, exponent):
        # The integrand grows up to 0 and falls from `exponent * most` on, in
        # both directions as a Gaussian at least.
        tail = _TAIL * self._stddev
        return -tail, exponent * self._most + tail

    def _range_of_addition(self, exponent):
        # Left of 0 the mean shift is at most that at 0.
        weights = self._log_shares - self._shifts**2 / (2 * self._stddev**2)
        mean = self._shifts @ special.softmax(weights)
        tail = _TAIL * self._stddev
        return exponent * mean - tail, tail

    def _width(self, order):
        """Distance of points at which the trapezoidal rule is exact.

        Up to an imaginary part of π σ² / k no sum of the components is zero,
        and up to 1 / √order of that none is much smaller than on the real axis:
        the integrand is analytic there, and the error falls exponentially.
        """
        analytic = math.pi * self._stddev**2 / self._most / math.sqrt(order)
        return min(self._stddev, analytic) / 8

    def _log_moments(self, exponents, range_of, widths_of):
        """log E[(mixture / Gaussian) ** exponent] under the Gaussian.

        Args:
            exponents: array of floats, [orders].
            range_of: function of an exponent, where the integrand is not small.
            widths_of: array of floats, [orders]: the width of which order does.

        Returns:
            Array of floats, [orders]; infinite where it takes too many points.
        """
        moments = np.full_like(exponents, math.inf)
        for order in np.unique(widths_of):
            width = self._width(order)
            ranges = {}
            for k in np.flatnonzero(widths_of == order):
                lowest, highest = range_of(exponents[k])
                bounds = math.floor(lowest / width), math.ceil(highest / width)
                if bounds[1] - bounds[0] < self._most_points:
                    ranges[k] = bounds
            if not ranges:
                continue
            first = min(lowest for lowest, _ in ranges.values())
            last = max(highest for _, highest in ranges.values())
            x = np.arange(first, last + 1) * width
            log_ratio = self._log_ratio(x)
            log_density = stats.norm.logpdf(x, scale=self._stddev)
            for k, (lowest, highest) in ranges.items():
                part = slice(lowest - first, highest - first + 1)
                terms = exponents[k] * log_ratio[part] + log_density[part]
                most = terms.max()
                total = np.exp(terms - most).sum()
                moments[k] = most + math.log(width * total)
        return moments

    def _log_ratio(self, x):
        ratio = np.empty_like(x)
        chunk = max(1, _CHUNK // len(self._shifts))
        for start in range(0, len(x), chunk):
            part = slice(start, start + chunk)
            exponents = self._log_shares + (
                (2 * x[part, None] - self._shifts)
                * self._shifts
                / (2 * self._stddev**2)
            )  # [points, components]
            most = exponents.max(1)
            total = np.exp(exponents - most[:, None]).sum(1)
            ratio[part] = most + np.log(total)
        return ratio


class _Loss(privacy_loss_mechanism.MixtureGaussianPrivacyLoss):
    """Privacy loss of one step, whose deltas are computed all at once.

    Args:
        standard_deviation: float, > 0, of the noise.
        sensitivities: sequence of floats, >= 0.
        sampling_probs: sequence of floats, the probability of each.
        adjacency_type: `REMOVE` or `ADD`, of `privacy_loss_mechanism`.
    """

    def get_delta_for_epsilon(self, epsilon):
        """Hockey-stick divergences.

        Args:
            epsilon: array of floats, [points].

        Returns:
            Array of floats in [0, 1], of that shape.
        """
        chunk = max(1, _CHUNK // len(self.sensitivities))
        chunks = np.split(epsilon, range(chunk, len(epsilon), chunk))
        return np.concatenate([self._deltas(chunk) for chunk in chunks])

    def _deltas(self, epsilon):
        removes = (
            self.adjacency_type == privacy_loss_mechanism.AdjacencyType.REMOVE
        )
        sign = 1 if removes else -1
        positive = self.sensitivities > 0
        # The ratio of the components that shift nothing is 1: that of the
        # others is exp(loss) - 1 + P(shift).
        losses = sign * epsilon
        with np.errstate(divide="ignore", invalid="ignore"):
            others = np.log(
                np.expm1(np.minimum(losses, 1)) + self._sampling_prob
            )
        # Where exp may overflow.
        large = losses > 1
        others[large] = losses[large] + np.log1p(
            (self._sampling_prob - 1) * np.exp(-losses[large])
        )
        # Beyond the least loss nothing exceeds it when a person is added; and
        # all does when one is removed.
        inside = np.isfinite(others)
        x = -sign * self._solved(
            others[inside],
            self.sensitivities[positive],
            self._log_sampling_probs[positive],
        )
        deltas = -np.expm1(np.minimum(epsilon, 0)) if removes else 0 * epsilon
        deltas[inside] = self.mu_upper_cdf(x) - np.exp(
            epsilon[inside] + self.mu_lower_log_cdf(x)
        )
        return np.clip(deltas, 0, 1)

    def _solved(self, values, shifts, log_shares):
        """Points t at which log Σ p exp((2 t s - s²) / 2 σ²) has some values.

        That function is convex and increasing: Newton's method, begun on its
        right, comes closer with each step, and never crosses the solution.
        """
        variance = self._standard_deviation**2
        # Where a single component has the value, the sum has more.
        t = np.min(
            (values[:, None] - log_shares) * variance / shifts + shifts / 2, 1
        )
        for _ in range(100):
            exponents = log_shares + (
                (2 * t[:, None] - shifts) * shifts / (2 * variance)
            )  # [points, components]
            most = exponents.max(1, initial=-np.inf)
            weights = np.exp(exponents - most[:, None])
            total = weights.sum(1)
            excess = most + np.log(total) - values
            move = excess * variance * total / (weights @ shifts)
            t = t - move
            if np.all(
                np.abs(move) <= 1e-12 * (self._standard_deviation + t**2)
            ):
                break
        return t
