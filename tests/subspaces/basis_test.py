"""Bases at work: each way of keeping one gives the same coordinates."""

import numpy as np
import pytest
import tensorflow as tf

from tests.subspaces.linear_models import (
    PARAMETERS,
    SIZES,
    flat,
    make_private,
    projected,
    stored,
)
from tf_dpsub.subspaces import RandomSubspace, random_bases
from tf_dpsub.subspaces.basis import MaskedBasis, StoredBasis
from tf_dpsub.subspaces.groups import Group

# The second of two variables comes first.
GROUPS = [
    Group(name="second", indices=(1,), size=SIZES[1]),
    Group(name="first", indices=(0,), size=SIZES[0]),
]
RANKS = [3, 2]
SHAPES = [(size, 1) for size in SIZES]
_random = np.random.default_rng(0)
VECTOR = _random.normal(size=PARAMETERS).astype("float32")


def tensors():
    parts = np.split(VECTOR, [SIZES[0]])
    return [tf.constant(p[:, None]) for p in parts]


def filled():
    """A stored basis with any numbers, and it as a matrix."""
    basis = StoredBasis(GROUPS, RANKS, SHAPES)
    for (block,) in basis.blocks:
        block.assign(_random.normal(size=block.shape))
    second, first = (block.numpy() for (block,) in basis.blocks)
    matrix = np.zeros((PARAMETERS, sum(RANKS)))
    matrix[SIZES[0] :, : RANKS[0]] = second
    matrix[: SIZES[0], RANKS[0] :] = first
    return basis, matrix


def gradients():
    model = make_private(projected(RandomSubspace(2)))
    return stored(model, VECTOR[None])


@pytest.mark.parametrize("used", [(1, 1, 1, 1, 1), (1, 0, 0, 1, 0)])
def test_masked_directions_are_not_used(used):
    basis, matrix = filled()
    if not all(used):
        basis = MaskedBasis(basis, tf.Variable(np.float32(used)))
        matrix = matrix * used
    expected = matrix.T @ VECTOR
    np.testing.assert_allclose(
        basis.coordinates(tensors()), expected, atol=1e-5
    )
    np.testing.assert_allclose(
        basis.project(gradients())[0], expected, atol=1e-5
    )
    coordinates = _random.normal(size=5).astype("float32")
    np.testing.assert_allclose(
        flat(basis.lift(tf.constant(coordinates))),
        matrix @ coordinates,
        atol=1e-5,
    )


def test_what_is_drawn_again_is_the_same_basis(monkeypatch):
    """A few rows at a time, whichever of the three methods draws them."""
    monkeypatch.setattr(random_bases, "_DRAWN", 3 * 2)
    key = tf.Variable([5, 1], dtype=tf.int64)
    basis = random_bases.RedrawnBasis(GROUPS, RANKS, SHAPES, key)
    values, error = basis.drawn(key)
    assert error < 2.0**-13
    for (block,), value in zip(basis.blocks, values):
        block.assign(value)
    units = np.eye(sum(RANKS), dtype="float32")
    matrix = np.stack([flat(basis.lift(u)) for u in tf.constant(units)], 1)
    np.testing.assert_allclose(matrix.T @ matrix, units, atol=1e-4)
    expected = matrix.T @ VECTOR
    for coordinates in (
        basis.coordinates(tensors()),
        basis.project(gradients())[0],
    ):
        np.testing.assert_allclose(coordinates, expected, atol=1e-5)
