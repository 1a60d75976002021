"""Orthonormal bases of pairs of directions: between weights and coordinates.

A pair of a direction u of a kernel's inputs and v of its outputs is the
direction `u v^T` in the space of the kernel.
"""

import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_dpsub.gradients import precision
from tf_dpsub.subspaces import linear_algebra
from tf_dpsub.subspaces.carrier_bases import orthonormal
from tf_dpsub.subspaces.residuals import KroneckerResiduals, Residuals


class KroneckerBasis:
    """The pairs of directions that are chosen, of all kernels and the vectors.

    The candidates are all pairs of each kernel, one kernel after another, row
    by row, and the directions of all weights that are vectors, together.

    Args:
        shapes: list of tuple of int, those of the variables.
        matrices: list of `KernelMatrix`, or None for a vector, one for each.
        side_ranks: list of pairs of int, the directions of the inputs and of
            the outputs; None for a vector.
        vector_rank: int, the directions of all vectors together; 0 if there are
            none.

    Attributes:
        kernels: list of int, positions of the kernels among the variables.
        vectors: list of int, those of the vectors.
        candidates: int, how many there are.
        sides: for each kernel, a list of variables U `[inputs, r]` and
            V `[outputs, s]`; empty before `build`.
        blocks: for each vector, a variable `[size, vector_rank]`.
        chosen: int64 variable of shape `[rank]`, positions of candidates.
    """

    def __init__(
        self, shapes: list, matrices: list, side_ranks: list, vector_rank: int
    ):
        self._shapes = shapes
        self._matrices = matrices
        self.kernels = [k for k, m in enumerate(matrices) if m is not None]
        self.vectors = [k for k, m in enumerate(matrices) if m is None]
        self._core_shapes = [side_ranks[k] for k in self.kernels]
        self._sizes = [r * s for r, s in self._core_shapes]
        self._vector_rank = vector_rank
        if self.vectors:
            self._sizes.append(vector_rank)
        self.candidates = sum(self._sizes)
        self.sides: list = []
        self.blocks: list = []
        self.chosen: Any = None

    def build(self, rank: int, add_variable: Callable):
        """Creates the variables.

        Args:
            rank: int, the number of candidates that are chosen.
            add_variable: function of a shape and a type that creates one.
        """
        self.sides, self.blocks = [], []
        for k, (r, s) in zip(self.kernels, self._core_shapes):
            matrix = self._matrices[k]
            self.sides.append(
                [
                    add_variable([matrix.inputs, r], "float32"),
                    add_variable([matrix.outputs, s], "float32"),
                ]
            )
        for k in self.vectors:
            size = math.prod(self._shapes[k])
            self.blocks.append(
                add_variable([size, self._vector_rank], "float32")
            )
        self.chosen = add_variable([rank], "int64")

    @property
    def values(self):
        """The bases of all sides, and those of the vectors, as tensors."""
        return tf.nest.map_structure(
            tf.convert_to_tensor, (self.sides, self.blocks)
        )

    def products(self, gradients, sides, blocks):
        """Coordinates of per-example gradients along all candidates.

        No row of a kernel is formed that is known by its factors.

        Args:
            gradients: `tf_dpsub.gradients.PerExampleGradients`.
            sides, blocks: as the attributes, tensors or variables.

        Returns:
            Float32 tensor of shape `[batch, candidates]`.
        """
        variables = gradients.variables
        parts = [
            tf.reshape(
                gradients.two_sided_products(
                    variables[k], self._matrices[k], *pair
                ),
                [gradients.batch_size, -1],
            )
            for k, pair in zip(self.kernels, sides)
        ]
        if self.vectors:
            vectors = [variables[k] for k in self.vectors]
            parts.append(gradients.project(blocks, vectors))
        return tf.concat(parts, 1)

    def moment_products(self, gradients, sides, blocks, weights):
        """The second moments of gradients, times the bases of all sides.

        Args:
            gradients, sides, blocks: as for `products`.
            weights: float32 tensor of shape `[batch]`, of the gradients.

        Returns:
            Tensors as `sides` and as `blocks`.
        """
        variables = gradients.variables
        of_sides: list = []
        for k, pair in zip(self.kernels, sides):
            # What one kernel needs after that of another.
            with tf.control_dependencies(of_sides[-1] if of_sides else []):
                of_sides.append(
                    gradients.second_moment_products(
                        variables[k], self._matrices[k], *pair, weights
                    )
                )
        if not self.vectors:
            return of_sides, []
        vectors = [variables[k] for k in self.vectors]
        coordinates = gradients.project(blocks, vectors)
        return of_sides, gradients.combinations(
            weights[:, None] * coordinates, vectors
        )

    def orthonormal(self, matrices, fills):
        """Orthonormal bases of the columns of all sides and of the vectors.

        Args:
            matrices: pair of tensors as `sides` and as `blocks`.
            fills: the same, orthonormal, for what has no direction.

        Returns:
            The bases; the largest `||U^T U - I||_F` of a side; and that of the
            vectors.
        """
        sides, errors = [], [tf.constant(0.0)]
        for pair, fill in zip(matrices[0], fills[0]):
            # By reflections: a side may need more directions than gradients
            # have, down to the last one of all that there are.
            sides.append([orthonormal(m, f) for m, f in zip(pair, fill)])
            errors += [
                linear_algebra.orthonormality_error([b]) for b in sides[-1]
            ]
        blocks, error = [], tf.constant(0.0)
        if self.vectors:
            blocks, error = linear_algebra.orthonormalize(matrices[1], fills[1])
        return (sides, blocks), tf.reduce_max(errors), error

    def is_sound(self):
        """Whether the variables hold distinct pairs of orthonormal bases.

        They may have been read from any file.

        Returns:
            Bool tensor.
        """
        sides, blocks = self.values
        errors = [
            linear_algebra.orthonormality_error([basis])
            for pair in sides
            for basis in pair
        ]
        sound = [e <= linear_algebra.ORTHONORMALITY_OF_SIDES for e in errors]
        if blocks:
            error = linear_algebra.orthonormality_error(blocks)
            sound.append(error <= linear_algebra.ORTHONORMALITY)
        ends = [[-1], tf.sort(self.chosen), [self.candidates]]
        order = tf.concat([tf.cast(e, tf.int64) for e in ends], 0)
        sound.append(tf.reduce_all(order[1:] > order[:-1]))
        return tf.reduce_all(tf.stack(sound))

    def project(self, gradients):
        products = self.products(gradients, *self.values)
        return tf.gather(products, self.chosen, axis=1)

    def residuals(self, gradients, coordinates, mask=None):
        """Residuals, those of kernels with known vectors free of the basis.

        Args:
            gradients, coordinates: as for `residuals.Residuals`.
            mask: float32 tensor of shape `[rank]`, 1 for directions in use.
                Defaults to `None`, all.
        """
        factors = {}
        if not precision.narrowed():
            for k in self.kernels:
                found = gradients.factors(
                    gradients.variables[k], self._matrices[k]
                )
                if found is not None:
                    factors[k] = found
        if not factors:
            return Residuals(gradients, coordinates)
        used = tf.ones_like(self.chosen, tf.float32) if mask is None else mask
        chosen = tf.split(
            tf.scatter_nd(
                self.chosen[:, None],
                tf.cast(used, tf.float32),
                tf.constant([self.candidates], tf.int64),
            ),
            self._sizes,
        )
        sides, _ = self.values
        kernels = {
            k: (*factors[k], *pair, tf.reshape(part, shape))
            for k, shape, pair, part in zip(
                self.kernels, self._core_shapes, sides, chosen
            )
            if k in factors
        }
        # All vectors have one part, the last.
        of_others = [float(k not in kernels) for k in self.kernels] + [1.0]
        is_other = [
            tf.fill([size], value)
            for size, value in zip(self._sizes, of_others)
        ]
        return KroneckerResiduals(
            gradients,
            coordinates,
            kernels,
            self._matrices,
            tf.gather(tf.concat(is_other, 0), self.chosen),
        )

    def coordinates(self, tensors):
        dtype = tensors[0].dtype
        parts = []
        sides, all_blocks = self.values
        for k, (left, right) in zip(self.kernels, sides):
            matrix = self._matrices[k].matrix(tensors[k])
            products = precision.matmul(matrix, tf.cast(right, dtype))
            products = precision.matmul(
                tf.cast(left, dtype), products, transpose_a=True
            )
            parts.append(tf.reshape(products, [-1]))
        if self.vectors:
            parts.append(
                linear_algebra.multiply(
                    [tf.reshape(tensors[k], [1, -1]) for k in self.vectors],
                    [tf.cast(b, dtype) for b in all_blocks],
                )[0]
            )
        return tf.gather(tf.concat(parts, 0), self.chosen)

    def lift(self, coordinates):
        dtype = coordinates.dtype
        cores = tf.split(
            tf.scatter_nd(
                self.chosen[:, None],
                coordinates,
                tf.constant([self.candidates], tf.int64),
            ),
            self._sizes,
        )
        sides, blocks = self.values
        tensors = [None] * len(self._shapes)
        for k, core, shape, (left, right) in zip(
            self.kernels, cores, self._core_shapes, sides
        ):
            products = precision.matmul(
                tf.reshape(core, shape), tf.cast(right, dtype), transpose_b=True
            )
            tensors[k] = self._matrices[k].like_kernel(
                precision.matmul(tf.cast(left, dtype), products)
            )
        for k, block in zip(self.vectors, blocks):
            vector = precision.matvec(tf.cast(block, dtype), cores[-1])
            tensors[k] = tf.reshape(vector, self._shapes[k])
        return tensors
