"""Distances between subspaces, and of gradients from subspaces."""

import numpy as np
from scipy import linalg


def principal_angles(first, second):
    """Principal angles between two subspaces.

    Args:
        first: array `[p, k]`, whose columns span one; not necessarily
            orthonormal.
        second: array `[p, n]`.

    Returns:
        Float array `[min(k, n)]` in [0, pi / 2], largest first.

    Reference:
        - [Björck, Golub, 1973](
          https://doi.org/10.1090/S0025-5718-1973-0348991-3)
    """
    return linalg.subspace_angles(
        np.asarray(first, np.float64), np.asarray(second, np.float64)
    )


def subspace_distance(first, second) -> float:
    """Root mean square of the sines of the principal angles.

    Args:
        first: array `[p, k]`, whose columns span a subspace.
        second: array `[p, k]`.

    Returns:
        float, 0 for the same subspace, 1 for orthogonal ones. With P and Q the
        projections on both, it is `||P - Q||_F / sqrt(2 k)`.

    Raises:
        ValueError: if the dimensions differ.
    """
    if np.shape(first) != np.shape(second):
        raise ValueError(
            "Expected bases of one shape, got "
            f"{list(np.shape(first))} and {list(np.shape(second))}."
        )
    sines = np.sin(principal_angles(first, second))
    return float(np.sqrt(np.mean(sines**2)))


def projection_residual(gradient, followed, rank: int) -> float:
    """Share of a gradient that carriers of another matrix miss.

    With L and R the top left and right singular vectors of `followed`, it is
    `||G - P(G)|| / ||G||`, where `P(G) = G - (I - L L^T) G (I - R R^T)`. A
    gradient that follows itself has its self projection residual, one that
    follows the history of a weight its historical one.

    Args:
        gradient: array `[p, d]`.
        followed: array `[p, d]`.
        rank: int.

    Returns:
        float in [0, 1]; 0 if the gradient is zero.

    Reference:
        - [Yu et al., 2021](https://arxiv.org/abs/2106.09352), section 3.3
    """
    left, _, right = np.linalg.svd(followed, full_matrices=False)
    left, right = left[:, :rank], right[:rank]
    missed = gradient - left @ (left.T @ gradient)
    missed = missed - (missed @ right.T) @ right
    size = np.linalg.norm(gradient)
    return float(np.linalg.norm(missed) / size) if size else 0.0
