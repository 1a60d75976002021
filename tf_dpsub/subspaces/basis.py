"""Orthonormal bases at work: between weights and coordinates.

How a basis is found, and when, is the subspace's: here it is applied. A basis
has four methods: `project` gives the coordinates of per-example gradients,
`[batch, rank]`, `coordinates` those of one vector in the space of weights,
`lift` the vector that has given coordinates, and `residuals` what of gradients
that is not.
"""

import math

import tensorflow as tf

from tf_dpsub.gradients import precision
from tf_dpsub.primitives.public_state import public_variable
from tf_dpsub.subspaces import linear_algebra
from tf_dpsub.subspaces.residuals import Residuals


class StoredBasis:
    """A basis that is kept, as one matrix for each variable.

    Args:
        groups: list of `Group`.
        ranks: list of int, the number of directions in each.
        shapes: list of tuple of int, those of the variables.

    Attributes:
        blocks: for each group, a list of `[size, k]` float32 variables.
    """

    def __init__(self, groups: list, ranks: list, shapes: list):
        self.groups, self.ranks, self.shapes = groups, ranks, shapes
        self.blocks = [
            [public_variable([math.prod(shapes[k]), r]) for k in group.indices]
            for group, r in zip(groups, ranks)
        ]

    def project(self, gradients):
        return tf.concat(
            [
                gradients.project(
                    blocks, [gradients.variables[k] for k in group.indices]
                )
                for group, blocks in zip(self.groups, self.blocks)
            ],
            1,
        )

    def coordinates(self, tensors: list):
        parts = [
            linear_algebra.multiply(
                [tf.reshape(tensors[k], [1, -1]) for k in group.indices],
                [tf.cast(b, tensors[0].dtype) for b in blocks],
            )
            for group, blocks in zip(self.groups, self.blocks)
        ]
        return tf.concat(parts, 1)[0]

    def residuals(self, gradients, coordinates, mask=None):
        return Residuals(gradients, coordinates)

    def lift(self, coordinates) -> list:
        tensors = [None] * len(self.shapes)
        parts = tf.split(coordinates, self.ranks)
        for group, part, blocks in zip(self.groups, parts, self.blocks):
            for k, block in zip(group.indices, blocks):
                block = tf.cast(block, part.dtype)
                tensors[k] = tf.reshape(
                    precision.matvec(block, part), self.shapes[k]
                )
        return tensors


class MaskedBasis:
    """A basis of which not all directions are in use.

    Args:
        basis: `StoredBasis`.
        mask: float32 variable of shape `[rank]`, 1 for directions in use.
    """

    def __init__(self, basis: StoredBasis, mask):
        self._basis, self._mask = basis, mask

    def project(self, gradients):
        return self._basis.project(gradients) * self._mask

    def residuals(self, gradients, coordinates):
        return self._basis.residuals(gradients, coordinates, self._mask)

    def coordinates(self, tensors):
        coordinates = self._basis.coordinates(tensors)
        return coordinates * tf.cast(self._mask, coordinates.dtype)

    def lift(self, coordinates):
        mask = tf.cast(self._mask, coordinates.dtype)
        return self._basis.lift(coordinates * mask)
