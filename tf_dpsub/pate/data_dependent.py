"""The privacy loss of PATE on the very votes that were cast.

It is smaller than that of the ledger where teachers agree, and it is computed
from private votes: it is itself private, and must not be published.

Reference:
    - [Papernot, Song, Mironov, Raghunathan, Talwar, Erlingsson, 2018](
      https://arxiv.org/abs/1802.08908), Theorem 6, Propositions 7 and 10
"""

import dataclasses
import math

import numpy as np
from scipy import special, stats

from tf_dpsub.accounting.statement import round_up


@dataclasses.dataclass(frozen=True)
class UnpublishableEpsilon:
    """An ε that was computed from private votes, for its owner's eyes alone.

    Its text says so, that no log or table quotes it as a guarantee by mistake.

    Attributes:
        epsilon: float.
        delta: float.
    """

    epsilon: float
    delta: float

    def __str__(self):
        return (
            f"ε = {round_up(self.epsilon)} at δ = {self.delta:g}, NOT TO BE "
            "PUBLISHED: it was computed from private votes, and covers itself "
            "as little as them"
        )


def answer_rdp(counts, noise: float, orders):
    """Rényi divergence of the answer to each query, for its very votes.

    Formal guarantees: nothing is released, and the result is private. It is at
    most `order / noise**2`, which holds whatever the votes are, and bounds the
    divergence of the noisy argmax of these votes from that of any votes of
    which one has changed.

    Args:
        counts: int array `[queries, classes]`, votes for each class.
        noise: float, standard deviation of the noise on each count.
        orders: sequence of floats above 1, `[orders]`.

    Returns:
        Float array `[queries, orders]`.

    Raises:
        ValueError: if an argument is out of range.
    """
    counts = _checked_counts(counts)
    orders = _checked(noise, orders)
    return _rdp(_log_other_winner(counts, noise), noise, orders)


def check_rdp(counts, threshold: float, noise: float, orders):
    """Rényi divergence of the check of each query, for its very votes.

    Formal guarantees: as `answer_rdp`, of whether the noisy largest count
    reaches the threshold. The result is at most `order / (2 noise**2)`.

    Args:
        counts: int array `[queries, classes]`, votes for each class.
        threshold: float.
        noise: float, standard deviation of the noise on the largest count.
        orders: sequence of floats above 1, `[orders]`.

    Returns:
        Float array `[queries, orders]`.

    Raises:
        ValueError: if an argument is out of range.
    """
    counts = _checked_counts(counts)
    orders = _checked(noise, orders)
    excess = (threshold - counts.max(1)) / noise
    # Of the less likely of the two outcomes.
    rarer = stats.norm.logsf(np.abs(excess))
    return _rdp(rarer, math.sqrt(2) * noise, orders)


def _log_other_winner(counts, noise):
    """Log of a bound on the chance of another winner, `[queries]`."""
    rows, classes = np.arange(len(counts)), counts.shape[1]
    winner = counts.argmax(1)
    gaps = counts[rows, winner][:, None] - counts  # [queries, classes]
    tails = stats.norm.logsf(gaps / (math.sqrt(2) * noise))
    tails[rows, winner] = -np.inf
    log_q = special.logsumexp(tails, axis=1)
    return np.minimum(log_q, math.log(1 - 1 / classes))


def _rdp(log_q, noise, orders):
    """Theorem 6 with the orders of Proposition 10, `[queries, orders]`.

    Args:
        log_q: float array `[queries]`, at least the log of the probability
            that the outcome is not the most likely one.
        noise: float, with which the divergence is at most `order / noise**2`.
        orders: float array `[orders]`.
    """
    log_q, orders = log_q[:, None], orders[None]
    independent = np.broadcast_to(
        orders / noise**2, (len(log_q), orders.shape[1])
    )
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        mu2 = noise * np.sqrt(-log_q)
        mu1 = mu2 + 1
        epsilon1, epsilon2 = mu1 / noise**2, mu2 / noise**2
        largest_log_q = (mu2 - 1) * epsilon2 - mu2 * (
            np.log(mu1 / (mu1 - 1)) + np.log(mu2 / (mu2 - 1))
        )
        applies = (
            (orders < mu1)
            & (mu2 > 1)
            & (log_q <= largest_log_q)
            & (-log_q > epsilon2)
        )
        log_rest = _log_one_minus_exp(log_q)  # log(1 - q)
        log_a = log_rest - _log_one_minus_exp(
            (log_q + epsilon2) * (mu2 - 1) / mu2
        )
        log_b = epsilon1 - log_q / (mu1 - 1)
        dependent = np.logaddexp(
            log_rest + (orders - 1) * log_a, log_q + (orders - 1) * log_b
        ) / (orders - 1)
    # A probability that underflows is taken as what it is bounded by.
    applies &= np.isfinite(dependent)
    return np.where(applies, np.clip(dependent, 0.0, independent), independent)


def _log_one_minus_exp(x):
    """log(1 - exp(x)) for x < 0, without cancellation."""
    return np.where(
        x > -math.log(2), np.log(-np.expm1(x)), np.log1p(-np.exp(x))
    )


def _checked_counts(counts):
    counts = np.asarray(counts)
    if counts.ndim != 2 or counts.shape[1] < 2 or counts.dtype.kind not in "iu":
        raise ValueError(
            "Expected counts of votes [queries, classes], ints of at least two "
            f"classes, got {counts.dtype} of shape {counts.shape}."
        )
    return counts.astype(np.int64)


def _checked(noise, orders):
    if not 0 < noise < math.inf:
        raise ValueError(f"Expected 0 < noise < inf, got {noise}.")
    orders = np.asarray(orders, np.float64)
    if orders.ndim != 1 or not (orders > 1).all():
        raise ValueError("Expected orders above 1, in one dimension.")
    return orders
