"""Bounds on the loss of private learning in high dimensions."""

import math

import numpy as np

from tf_dpsub.checks import check_positive


def restricted_lipschitz(gradients, directions, ranks=None):
    """Estimates the size of gradients outside of a few directions.

    `G_k` is the largest norm of a gradient outside of the first k directions.
    A loss is restricted Lipschitz with coefficients `G_k` if that holds for all
    its gradients, with the best k directions. Here, directions are given, and
    gradients are a sample: coefficients are too large for the former, too small
    for the latter, and an estimate for both.

    Args:
        gradients: array `[examples, p]`, of one example each.
        directions: array `[p, k]`, orthonormal, most important first, such as
            those of `top_singular_values`. The last ones may be zero.
        ranks: sequence of int in [0, k]. Defaults to `None`: 0, 1, ..., k.

    Returns:
        Float array, one coefficient for each rank: `G_0` is the largest norm.

    Raises:
        ValueError: if the shapes do not fit, or a rank is out of range.

    Reference:
        - [Li et al., 2022](https://arxiv.org/abs/2207.00160), Definition 3.2
    """
    gradients = np.asarray(gradients, np.float64)
    directions = np.asarray(directions, np.float64)
    if gradients.ndim != 2 or directions.shape[:1] != gradients.shape[1:]:
        raise ValueError(
            "Expected gradients [examples, p] and directions [p, k], got "
            f"shapes {list(gradients.shape)} and {list(directions.shape)}."
        )
    most = directions.shape[1]
    ranks = list(range(most + 1)) if ranks is None else list(ranks)
    if any(not 0 <= k <= most for k in ranks):
        raise ValueError(
            f"Expected ranks from 0 to {most}, the number of directions, got "
            f"{ranks}."
        )
    inside = np.cumsum((gradients @ directions) ** 2, axis=1)
    inside = np.pad(inside, ((0, 0), (1, 0)))[:, ranks]
    whole = np.sum(gradients**2, axis=1, keepdims=True)
    return np.sqrt(np.maximum(whole - inside, 0.0).max(axis=0))


def excess_loss_bound(
    coefficients,
    *,
    distance: float,
    examples: int,
    epsilon: float,
    delta: float,
    dimensions: int,
) -> tuple:
    """Estimates the loss that DP-SGD of a convex loss leaves, by Theorem 3.3.

    With `G_k` the restricted Lipschitz coefficients and D the distance from the
    initial weights to the best ones, the bound is, for the best k,

    `D (G_0 / sqrt(n) + G_0 sqrt(k log(1 / delta)) / (epsilon n)
    + sqrt(sum over s of s^2 2^s G_{2^(s-1) k}^2))`,

    s from 1 to the largest with `2^(s-1) k < dimensions`. Numerical constants
    are left out, as in the theorem, and coefficients are estimates: the result
    shows how the loss depends on them, not how large it is.

    Args:
        coefficients: dict from ranks to coefficients, or array of those of
            ranks 0, 1, 2, ... Between the ranks that are given, the next lower
            one counts; beyond the last one, the coefficient is the last.
        distance: float, D.
        examples: int, n.
        epsilon: float.
        delta: float.
        dimensions: int, the number of weights.

    Returns:
        Tuple of the bound, a float, and the k at which it is reached.

    Raises:
        ValueError: if an argument is out of range, or coefficients grow.

    Reference:
        - [Li et al., 2022](https://arxiv.org/abs/2207.00160), Theorem 3.3
    """
    if not isinstance(coefficients, dict):
        coefficients = dict(enumerate(coefficients))
    ranks = sorted(coefficients)
    values = np.array([coefficients[k] for k in ranks], np.float64)
    if not ranks or ranks[0] != 0 or np.any(np.diff(values) > 0):
        raise ValueError(
            "Expected coefficients from rank 0 on, none larger than those of "
            f"lower ranks, got {coefficients}."
        )
    check_positive("distance", distance)
    check_positive("epsilon", epsilon)
    if not 0 < delta < 1 or examples < 1 or dimensions < 1:
        raise ValueError(
            "Expected 0 < delta < 1, examples >= 1 and dimensions >= 1, got "
            f"{delta}, {examples} and {dimensions}."
        )

    def coefficient(k):
        if k >= dimensions:
            return 0.0
        return values[np.searchsorted(ranks, k, side="right") - 1]

    def bound(k):
        sampled = values[0] / math.sqrt(examples)
        noise = values[0] * math.sqrt(k * math.log(1 / delta))
        outside = sum(
            s**2 * 2**s * coefficient(2 ** (s - 1) * k) ** 2
            for s in range(1, math.ceil(math.log2(dimensions / k)) + 1)
        )
        return distance * (
            sampled + noise / (epsilon * examples) + math.sqrt(outside)
        )

    candidates = sorted({*ranks[1:], *_powers_of_two(dimensions), dimensions})
    best = min((k for k in candidates if k <= dimensions), key=bound)
    return float(bound(best)), best


def _powers_of_two(most):
    return [2**s for s in range(most.bit_length()) if 2**s <= most]
