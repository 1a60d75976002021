"""Distances of subspaces, against known angles."""

import math

import numpy as np
import pytest

from tf_dpsub.analysis import (
    principal_angles,
    projection_residual,
    subspace_distance,
)

_random = np.random.default_rng(0)


def orthonormal(n, k):
    return np.linalg.qr(_random.normal(size=(n, k)))[0]


def tilted(basis, other, angles):
    """A basis at given angles to another one, in mixed coordinates."""
    turned = basis * np.cos(angles) + other * np.sin(angles)
    return turned @ _random.normal(size=(len(angles),) * 2)


class TestSubspaces:
    def test_angles(self):
        basis = orthonormal(20, 6)
        angles = np.array([0.0, 0.3, 1.2])
        second = tilted(basis[:, :3], basis[:, 3:], angles)
        result = principal_angles(basis[:, :3], second)
        np.testing.assert_allclose(result, [1.2, 0.3, 0.0], atol=1e-7)
        expected = math.sqrt((math.sin(1.2) ** 2 + math.sin(0.3) ** 2) / 3)
        distance = subspace_distance(basis[:, :3], second)
        assert distance == pytest.approx(expected)

    def test_is_that_of_the_projections(self):
        first, second = orthonormal(12, 4), orthonormal(12, 4)
        projections = first @ first.T - second @ second.T
        expected = np.linalg.norm(projections) / math.sqrt(8)
        assert subspace_distance(first, second) == pytest.approx(expected)

    def test_the_same_and_orthogonal_ones(self):
        basis = orthonormal(10, 4)
        assert subspace_distance(basis, basis[:, ::-1]) < 1e-7
        assert subspace_distance(basis[:, :2], basis[:, 2:]) == 1

    def test_dimensions_that_differ(self):
        with pytest.raises(ValueError, match=r"one shape, got \[9, 2\] and"):
            subspace_distance(orthonormal(9, 2), orthonormal(9, 3))


class TestProjectionResidual:
    def test_of_known_singular_values(self):
        u, v = orthonormal(9, 4), orthonormal(7, 4)
        gradient = (u * [4, 3, 2, 1]) @ v.T
        residual = projection_residual(gradient, gradient, 2)
        assert residual == pytest.approx((5 / 30) ** 0.5)
        assert projection_residual(gradient, gradient, 4) < 1e-12

    def test_either_side_is_enough(self):
        """L L^T G + G R^T R - L L^T G R^T R."""
        u, v, w = orthonormal(9, 4), orthonormal(7, 4), orthonormal(7, 4)
        gradient = np.outer(u[:, 0], v[:, 0])
        columns_alone = np.outer(u[:, 0], w[:, 0])
        assert projection_residual(gradient, columns_alone, 1) < 1e-12
        neither = np.outer(u[:, 1], v[:, 1])
        assert projection_residual(gradient, neither, 1) == pytest.approx(1)

    def test_of_nothing(self):
        zeros = np.zeros((4, 3))
        assert projection_residual(zeros, zeros, 2) == 0
        assert projection_residual(np.ones((4, 3)), zeros, 3) < 1e-6
