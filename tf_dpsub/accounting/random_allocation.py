"""Accounting of epochs in which each example takes part in one random step.

An epoch of t steps lets each example choose one of them, uniformly and
independently of all others (random allocation, or balls in bins). One epoch is
one event, `RandomAllocationDpEvent`. Its Rényi divergences and its privacy loss
distribution follow from the law of one number, the likelihood ratio.

Formal guarantees: data sets are neighbours if one example of one of them is
replaced in the other by an empty one, which adds nothing to any sum
(`REPLACE_SPECIAL` of dp-accounting); their size and t are public. Let P be the
distribution of all outputs of an epoch with the example, and Q that without it.
Every bound here is one of E_Q[f(dP/dQ)] for convex f; hockey-stick and Rényi
divergences are of this form in both directions, P from Q and Q from P.

*The pair that dominates.* Fix the steps that all other examples chose and all
randomness but the noise. Step i releases a vector m_i + N(0, s² I), and, if the
example chose it, m_i + g_i + N(0, s² I), with ‖g_i‖ ≤ C and s the standard
deviation of the noise, C times the noise multiplier. Both m_i and g_i may
depend on all outputs before step i. As the example chooses uniformly, dP/dQ is
the mean of

    X_i = exp(⟨g_i, z_i⟩ / s² - ‖g_i‖² / (2 s²)),   z_i = output i - m_i

over the t steps. Under Q, given the outputs before it, z_i is N(0, s² I), so
that X_i = exp(r w - r² / 2) with w standard normal and r = ‖g_i‖ / s, a number
known before step i and at most 1 / noise_multiplier. In r, X_i is a geometric
Brownian motion at the time r²: a martingale, so that E[f(c + X_i)] grows with r
for each convex f and constant c. Replace r by its bound in the last step: given
the outputs before it, the expectation grows, and becomes a convex function of
the sum of the other X_i alone. Hence the same holds for the last but one, and
so on:

    E_Q[f(dP/dQ)] ≤ E[f((X_1 + ... + X_t) / t)]

with independent X_i = exp(w_i / σ - 1 / (2 σ²)), σ = noise_multiplier. That is
the pair (1/t) Σ N(e_i, σ² I) and N(0, σ² I), which is reached. The divergences
are jointly convex, so that the bound also holds on average over what was fixed.
Epochs draw their allocations anew, and the pairs of epochs compose adaptively,
each direction for itself: in all epochs it is the same side that lacks the
example. An epoch that ends early releases less than a whole one.

*The grid.* The law of the sum is computed on grids. Moving probability from a
value to its two neighbours on a grid, so that the mean stays, makes E[f] larger
for every convex f, and so does adding independent sums of such numbers. What
lies above a grid goes to its end, and the rest of its mean to an outcome of P
that Q never has; what lies below goes to an outcome of Q that P never has.
Both directions are therefore bounded from above by one law, and no distribution
is convolved by a Fourier transform within an epoch.

*Epochs.* They are composed by dp-accounting, which raises the Fourier transform
A of the probabilities of one epoch to the power of E epochs. What it truncates
goes to infinite loss. Its rounding errors are bounded here, and go there too: δ
includes them. Those of joining the epochs with other entries are left to
dp-accounting, as for all other events. A transform of n numbers whose sum is at
most 1 has an error of at most

    γ = 8 u log2(n),   u = 2^-53,

in each output, which is a sum of the inputs times products of log2(n) rounded
roots of unity. Hence the error of a power is at most E γ (|A_k| + γ)^(E - 1),
and that of computing it at most 8 E u (1 + |log |A_k||) |A_k|^E. The transform
back takes the mean over k of both, and adds γ times that of |A_k|^E. So much in
each of the losses adds up to all that any δ may miss: 4e-12 for the 30 epochs
of the running example, 2e-10 for a thousand of them.

Reference:
  - [Privacy Amplification by Random Allocation](
    https://arxiv.org/abs/2502.08202)
  - [Efficient Privacy Loss Accounting for Subsampling and Random Allocation](
    https://arxiv.org/abs/2602.17284)
  - [Balls-and-Bins Sampling for DP-SGD](https://arxiv.org/abs/2412.16802)
  - [Optimal Accounting of Differential Privacy via Characteristic Function](
    https://arxiv.org/abs/2106.08567), of pairs that dominate
  - Higham, Accuracy and Stability of Numerical Algorithms, 2002, theorem 24.2,
    of Fourier transforms
"""

import functools
import math

import attr
import dp_accounting
import numpy as np
from dp_accounting.pld import common, pld_pmf, privacy_loss_distribution
from scipy import fft, special

from tf_dpsub.checks import check_count, check_noise_multiplier

# With less noise, ratios are beyond the range of floats.
_LEAST_NOISE = 0.05
# More is accounted as this: differences of ratios are then rounding errors.
_MOST_NOISE = 1e5
# Points of a grid for the law of a sum: errors fall with their square.
POINTS = 400
# Probability, or share of the mean, that a grid leaves out at each end.
_TAIL = 1e-20
# The same of a composition of epochs; and the relative error of a rounding.
_TRUNCATED = 1e-15
_ROUNDING = 2.0**-53
# Rényi orders beyond are bounded more coarsely.
_LARGEST_ORDER = 256
# Of the trapezoidal rule in log u: fine enough for all these orders.
_STRIDE = 0.03
# Largest shift of log dP/dQ that orders of Q from P may weigh.
_REACH = 20.0


@attr.frozen
class RandomAllocationDpEvent(dp_accounting.DpEvent):
    """An epoch in which each example takes part in one random step.

    Attributes:
        noise_multiplier: float, > 0, of the Gaussian that a step is.
        steps: int, >= 2, number of steps of the epoch.
    """

    noise_multiplier: float
    steps: int


def event(noise_multiplier: float, steps: int):
    """The dp-accounting event of one epoch.

    Args:
        noise_multiplier: float, >= 0, standard deviation of the noise divided
            by the sensitivity.
        steps: int, >= 1, number of steps of the epoch.

    Returns:
        A `dp_accounting.DpEvent`: for a single step, and for hardly any noise,
        that of a Gaussian; without noise one that is not private.

    Raises:
        ValueError: If an argument is out of its range.
    """
    check_noise_multiplier(noise_multiplier)
    check_count("steps", steps)
    if noise_multiplier == 0:
        return dp_accounting.NonPrivateDpEvent()
    if steps == 1 or noise_multiplier < _LEAST_NOISE:
        # A mixture of Gaussians of one shift each is no worse than one of them.
        return dp_accounting.GaussianDpEvent(float(noise_multiplier))
    return RandomAllocationDpEvent(
        min(float(noise_multiplier), _MOST_NOISE), int(steps)
    )


def losses(
    noise_multiplier: float,
    steps: int,
    interval: float,
    points: int = POINTS,
    epochs: int = 1,
):
    """Distribution of the privacy loss of epochs, in both directions.

    Args:
        noise_multiplier: float, > 0, as in `RandomAllocationDpEvent`.
        steps: int, >= 1.
        interval: float, spacing of the grid of losses.
        points: int, number of points of the grids within an epoch: more of
            them bound it more closely. Defaults to `POINTS`.
        epochs: int, >= 1, that are composed. Defaults to `1`.

    Returns:
        A `PrivacyLossDistribution` of dp-accounting.
    """
    law = _law(noise_multiplier, steps, points)
    logarithms = np.log(law.values / steps)
    first = math.floor(logarithms[0] / interval)
    last = math.ceil(logarithms[-1] / interval) + 1
    grid = np.exp(np.arange(first, last + 1) * interval)
    masses = _spread(
        law.values / steps, law.masses, grid, logarithms / interval - first
    )
    removed, added = (
        _composed(interval, lowest, probabilities, infinity, epochs)
        for lowest, probabilities, infinity in (
            (first, masses * grid, law.beyond / steps),
            (-last, masses[::-1].copy(), law.zero),
        )
    )
    return privacy_loss_distribution.PrivacyLossDistribution(removed, added)


def _composed(interval, lowest, probabilities, infinity, epochs):
    """Losses of so many epochs, with a bound on rounding in the last one."""
    single = pld_pmf.DensePLDPmf(
        interval, lowest, probabilities, infinity, True
    )
    if epochs == 1:
        return single
    # Composed with a single number, which takes no Fourier transform.
    missed = pld_pmf.DensePLDPmf(
        interval, 0, np.ones(1), _rounding(probabilities, epochs), True
    )
    return single.self_compose(epochs, _TRUNCATED).compose(missed)


def _rounding(probabilities, epochs):
    """What rounding may take from any delta of so many epochs."""
    low, high = common.compute_self_convolve_bounds(
        probabilities, epochs, _TRUNCATED
    )
    size = fft.next_fast_len(max(high - low + 1, len(probabilities)))
    transform = 8 * _ROUNDING * math.log2(size)
    at = np.abs(fft.fft(probabilities, size)) + transform
    powers = at ** (epochs - 1)
    of_power = 8 * epochs * _ROUNDING * (1 + np.abs(np.log(at)))
    errors = powers * (epochs * transform + at * (of_power + transform))
    return float((high - low + 1) * np.mean(errors))


def divergences(noise_multiplier: float, steps: int, orders) -> np.ndarray:
    """Rényi divergences of one epoch, in both directions.

    That of P from Q is exact at whole orders:

        E_Q[(dP/dQ)^k] = k! / t^k [z^k] (Σ_j z^j exp(j (j - 1) / (2 σ²)) / j!)^t

    That of Q from P is an integral over Laplace transforms φ of one ratio,

        E_Q[(dP/dQ)^-a] = t^a / Γ(a) ∫ u^(a-1) φ(u)^t du,   a = k - 1,

    taken by the trapezoidal rule in log u, whose error falls exponentially.
    Between whole orders (order - 1) times the divergence is convex, hence at
    most its chord. Beyond order 256, and at large ones of little noise, the
    divergence of the Gaussian of one step bounds it.

    Args:
        noise_multiplier: float, > 0, as in `RandomAllocationDpEvent`.
        steps: int, >= 1.
        orders: sequence of float, > 1.

    Returns:
        array of float, [2, orders]: of P from Q, and of Q from P.
    """
    orders = np.asarray(orders, np.float64)
    bound = orders / (2 * noise_multiplier**2)
    # Beyond, the integrals of Q from P are long, and the bound is close.
    largest = min(
        _LARGEST_ORDER,
        math.ceil(orders.max()),
        1 + int(_REACH * steps * noise_multiplier**2),
    )
    if largest < 2 or noise_multiplier < 0.25:
        return np.stack([bound, bound])
    exponents = np.arange(1.0, largest)
    # Sums of logarithms take that of one step so many times.
    rounding = 1e-13 + 1e-14 * steps
    at_whole = (
        _log_moments(noise_multiplier, steps, largest),
        _log_inverse_moments(noise_multiplier, steps, exponents),
    )
    chords = [
        # 0 at order 1.
        np.interp(
            orders, np.arange(1, largest + 1), [0, *(logarithms + rounding)]
        )
        for logarithms in at_whole
    ]
    exact = np.minimum(np.stack(chords) / (orders - 1), bound)
    return np.where(orders <= largest, exact, bound)


def _log_moments(noise_multiplier, steps, largest):
    """Logarithms of E_Q[(dP/dQ)^k], [largest - 1], for k from 2 on."""
    k = np.arange(largest + 1)
    factorials = special.gammaln(k + 1)
    single = k * (k - 1) / (2 * noise_multiplier**2) - factorials
    power = single
    for bit in bin(steps)[3:]:
        power = _log_product(power, power)
        if bit == "1":
            power = _log_product(power, single)
    return (power + factorials - k * math.log(steps))[2:]


def _log_product(left, right):
    """Logarithms of the product of two power series with such coefficients."""
    padded = np.concatenate([np.full(len(right) - 1, -np.inf), right])
    # [k, j]: the coefficient k - j of the right one.
    windows = np.lib.stride_tricks.sliding_window_view(padded, len(right))
    return special.logsumexp(windows[:, ::-1] + left, axis=1)


def _log_inverse_moments(noise_multiplier, steps, exponents):
    """Logarithms of E_Q[(dP/dQ)^-a], [exponents]."""
    scale = 1 / noise_multiplier
    most = exponents.max()
    # How far the smallest ratios that count lie below the usual ones.
    shift = scale**2 * (0.5 + most / steps)
    reach = 12 * scale
    width = min(scale, 1) / 4
    # [points]: the logarithm of one ratio, with its density.
    ratios = np.arange(-shift - reach, reach + width, width)
    density = -((ratios / scale + scale / 2) ** 2) / 2
    density += math.log(width / (scale * math.sqrt(2 * math.pi)))
    # [points]: log u.
    height = math.log(most) + shift + reach + 4
    places = np.arange(-45.0 - math.log(steps), height, _STRIDE)
    transforms = np.concatenate(
        [
            special.logsumexp(
                # What exp would overflow for weighs nothing.
                density - np.exp(np.minimum(part[:, None] + ratios, 600)),
                axis=1,
            )
            for part in np.array_split(places, math.ceil(len(places) / 256))
        ]
    )
    # [exponents, points]
    integrand = np.outer(exponents, places) + steps * transforms
    return (
        special.logsumexp(integrand, axis=1)
        + math.log(_STRIDE)
        + exponents * math.log(steps)
        - special.gammaln(exponents)
    )


class _Law:
    """Law of a sum of ratios under Q, on a grid.

    Attributes:
        values: array, [points], increasing and > 0.
        masses: array, [points], probabilities.
        zero: float, probability of outcomes of Q that P never has.
        beyond: float, part of the mean on outcomes that Q never has.
    """

    def __init__(self, values, masses, zero, beyond):
        self.values = values
        self.masses = masses
        self.zero = zero
        self.beyond = beyond

    def plus(self, other):
        """Law of the sum of two independent numbers, on as many points."""
        if other is self:
            # Both orders of a pair have the same sum.
            left, right = _pairs(len(self.values))
            values = self.values[left] + self.values[right]
            masses = self.masses[left] * self.masses[right]
            masses *= np.where(left == right, 1.0, 2.0)
        else:
            values = np.add.outer(self.values, other.values).ravel()
            masses = np.multiply.outer(self.masses, other.masses).ravel()
        # What either part lacks, the sum lacks as well, whatever the other is.
        beyond = (
            self.beyond
            + other.beyond
            + self.zero * (other.values @ other.masses)
            + other.zero * (self.values @ self.masses)
        )
        return _on_grid(
            values, masses, self.zero + other.zero, beyond, len(self.values)
        )


@functools.lru_cache(maxsize=2)
def _pairs(points):
    return np.triu_indices(points)


@functools.lru_cache(maxsize=16)
def _law(noise_multiplier, steps, points):
    """Law of the sum of all ratios of an epoch, by repeated doubling."""
    single = _single(1 / noise_multiplier, points)
    law = single
    for bit in bin(steps)[3:]:
        law = law.plus(law)
        if bit == "1":
            law = law.plus(single)
    return law


def _single(scale, points):
    """Law of exp(scale w - scale² / 2), w standard normal, on a grid."""
    # The ends leave out no more than _TAIL of Q below, and of P above.
    end = scale * -special.ndtri(_TAIL)
    middle = -(scale**2) / 2
    axis = _Axis(middle - end, end - middle, middle, scale, points)
    # Under Q, and weighted by the ratio, that is under P.
    under_q, under_p = (
        _between((axis.logarithms + shift) / scale)
        for shift in (-middle, middle)
    )
    # [points - 1], between neighbours: what goes to the right one of them.
    to_right = under_p[1:-1] - axis.values[:-1] * under_q[1:-1]
    to_right = np.clip(to_right / np.diff(axis.values), 0, under_q[1:-1])
    masses = np.append(under_q[1:-1] - to_right, under_q[-1])
    masses[1:] += to_right
    excess = under_p[-1] - axis.values[-1] * under_q[-1]
    return _Law(axis.values, masses, under_q[0], under_p[0] + max(excess, 0.0))


def _between(edges):
    """Probabilities of a standard normal below, between and above edges."""
    below = np.diff(special.ndtr(edges), prepend=0.0, append=1.0)
    above = -np.diff(special.ndtr(-edges), prepend=1.0, append=0.0)
    # Each difference is taken where its terms are small.
    return np.where(np.append(edges, np.inf) <= 0, below, above)


class _Axis:
    """Grid of positive numbers, dense in the middle of their logarithms.

    Distances of logarithms grow in proportion to that from the middle, beyond
    two standard deviations.

    Args:
        low, high: floats, logarithms of the ends.
        middle: float, logarithm of the middle.
        deviation: float, > 0, standard deviation of the logarithms.
        points: int.

    Attributes:
        logarithms: array, [points], increasing.
        values: array, [points], of which these are the logarithms.
    """

    def __init__(self, low, high, middle, deviation, points):
        self._middle = middle
        self._scale = 2 * deviation
        first, last = (
            np.arcsinh((x - middle) / self._scale) for x in (low, high)
        )
        self._first = first
        self._step = (last - first) / (points - 1)
        self.logarithms = middle + self._scale * np.sinh(
            np.linspace(first, last, points)
        )
        self.values = np.exp(self.logarithms)

    def places(self, logarithms):
        """Positions of numbers in the grid, by their logarithms."""
        places = np.arcsinh((logarithms - self._middle) / self._scale)
        return (places - self._first) / self._step


def _on_grid(values, masses, zero, beyond, points):
    """Spreads a law on a new grid, and keeps its mean.

    Args:
        values, masses: arrays, [any].
        zero, beyond: floats, as of `_Law`.
        points: int.

    Returns:
        A `_Law`.
    """
    logarithms = np.log(values)
    middle = logarithms @ masses
    deviation = math.sqrt((logarithms - middle) ** 2 @ masses)
    low, high = _ends(logarithms, values, masses)
    axis = _Axis(low, high, middle, deviation, points)
    below = values < axis.values[0]
    zero += masses @ below
    beyond += (values * below) @ masses
    masses = np.where(below, 0.0, masses)
    beyond += np.maximum(values - axis.values[-1], 0.0) @ masses
    masses = _spread(values, masses, axis.values, axis.places(logarithms))
    return _Law(axis.values, masses, zero, beyond)


def _ends(logarithms, values, masses):
    """Logarithms between which nearly all of a law lies, under P and Q."""
    least, most = logarithms.min(), logarithms.max()
    cells = 4096
    width = (most - least) / cells * (1 + 1e-9)
    cell = ((logarithms - least) / width).astype(np.int64)
    under_q = np.bincount(cell, masses, cells).cumsum()
    under_p = np.bincount(cell, masses * values, cells)[::-1].cumsum()
    first = np.searchsorted(under_q, _TAIL)
    last = cells - np.searchsorted(under_p, _TAIL * under_p[-1])
    return least + first * width, least + last * width


def _spread(values, masses, grid, place):
    """Moves masses to the two points of a grid around them; means stay.

    Args:
        values, masses: arrays, [any]. What is beyond an end goes to it.
        grid: array, [points], increasing.
        place: array, [any], of positions in the grid; rounding may put one into
            the cell next to its own.

    Returns:
        array, [points].
    """
    cell = np.clip(place, 0, len(grid) - 2).astype(np.int64)
    # A value in the next cell would go to points that are not around it.
    cell -= (values < grid[cell]) & (cell > 0)
    cell += (values > grid[cell + 1]) & (cell < len(grid) - 2)
    to_right = (values - grid[cell]) / (grid[cell + 1] - grid[cell])
    to_right = masses * np.clip(to_right, 0.0, 1.0)
    spread = np.bincount(cell, masses - to_right, len(grid))
    return spread + np.bincount(cell + 1, to_right, len(grid))
