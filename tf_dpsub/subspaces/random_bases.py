"""Bases of random directions: kept, or drawn again whenever they are used."""

import math
from collections.abc import Callable

import tensorflow as tf

from tf_dpsub.gradients import per_example, precision
from tf_dpsub.primitives.public_state import public_variable
from tf_dpsub.subspaces import linear_algebra
from tf_dpsub.subspaces.basis import StoredBasis
from tf_dpsub.subspaces.residuals import Residuals

# Numbers drawn at a time.
_DRAWN = 2**22


class DrawnBasis(StoredBasis):
    """Random directions that are drawn once, orthonormalised and kept."""

    def drawn(self, key):
        """New values of all blocks, and how far they are from orthonormal.

        Args:
            key: int64 tensor of shape `[2]`.

        Returns:
            List of float32 tensors, and a scalar.
        """
        values, errors = [], []
        for group, rank in zip(self.groups, self.ranks):
            omega = [
                _normal([math.prod(self.shapes[k]), rank], key, k, 0)
                for k in group.indices
            ]
            zeros = [tf.zeros_like(b) for b in omega]
            blocks, error = linear_algebra.orthonormalize(omega, zeros)
            values += blocks
            errors.append(error)
        return values, tf.reduce_max(errors)


class RedrawnBasis:
    """Random directions that are drawn again whenever they are used.

    V = Omega R^-1, where Omega is drawn some rows at a time, and R^-1, of shape
    `[k, k]`, is all that is kept.

    Args:
        groups: list of `Group`.
        ranks: list of int, the number of directions in each.
        shapes: list of tuple of int, those of the variables.
        key: int64 variable of shape `[2]`, what Omega is drawn from.

    Attributes:
        blocks: for each group, a list of one float32 variable, R^-1.
    """

    def __init__(self, groups: list, ranks: list, shapes: list, key):
        self.groups, self.ranks, self.shapes = groups, ranks, shapes
        self._sizes = [math.prod(shape) for shape in shapes]
        self._key = key
        self.blocks = [[public_variable([r, r])] for r in ranks]

    def drawn(self, key):
        """New values of all blocks, and how far V is from orthonormal.

        Args: as `DrawnBasis.drawn`.
        """
        values, errors = [], []
        for group, rank in zip(self.groups, self.ranks):
            products = self._gram(group, rank, key, tf.eye(rank))
            inverse = linear_algebra.inverse_factor(products)
            values.append(inverse)
            errors.append(
                linear_algebra.distance_to_identity(
                    self._gram(group, rank, key, inverse)
                )
            )
        return values, tf.reduce_max(errors)

    def project(self, gradients):
        return self._coordinates_of(
            lambda k: tf.reshape(
                gradients.rows(gradients.variables[k]),
                [gradients.batch_size, -1],
            )
        )

    def coordinates(self, tensors):
        return self._coordinates_of(lambda k: tf.reshape(tensors[k], [1, -1]))[
            0
        ]

    def residuals(self, gradients, coordinates):
        return Residuals(gradients, coordinates)

    def lift(self, coordinates):
        tensors = [None] * len(self.shapes)
        for group, rank, part, (inverse,) in zip(
            self.groups,
            self.ranks,
            tf.split(coordinates, self.ranks),
            self.blocks,
        ):
            inverse = tf.cast(inverse, part.dtype)
            weights = precision.matvec(inverse, part)
            for k in group.indices:
                drawn, pieces = self._pieces(k, rank)
                written = self._fold(
                    k,
                    rank,
                    self._key,
                    lambda rows, i, array: array.write(
                        i,
                        precision.matvec(tf.cast(rows, part.dtype), weights),
                    ),
                    tf.TensorArray(part.dtype, pieces, element_shape=[drawn]),
                )
                flat = tf.reshape(written.stack(), [-1])[: self._sizes[k]]
                tensors[k] = tf.reshape(flat, self.shapes[k])
        return tensors

    def _coordinates_of(self, matrix_of):
        """Coordinates of rows that `matrix_of(k)` gives, `[n, size of k]`."""
        parts = []
        for group, rank, (inverse,) in zip(
            self.groups, self.ranks, self.blocks
        ):
            totals = []
            for k in group.indices:
                drawn, pieces = self._pieces(k, rank)
                matrix = matrix_of(k)
                missing = drawn * pieces - self._sizes[k]
                matrix = tf.reshape(
                    tf.pad(matrix, [[0, 0], [0, missing]]),
                    [matrix.shape[0], pieces, drawn],
                )
                sums = self._fold(
                    k,
                    rank,
                    self._key,
                    lambda rows, i, sums: (
                        sums
                        + _long_product(
                            matrix[:, i], tf.cast(rows, matrix.dtype)
                        )
                    ),
                    tf.zeros([matrix.shape[0], rank], tf.float64),
                )
                totals.append(sums)
            total = tf.add_n(totals)
            product = precision.matmul(total, tf.cast(inverse, tf.float64))
            parts.append(tf.cast(product, matrix.dtype))
        return tf.concat(parts, 1)

    def _gram(self, group, rank, key, inverse):
        """`(Omega R^-1)^T (Omega R^-1)`."""

        def add(rows, _, total):
            rows = precision.matmul(rows, inverse)
            return total + _long_product(rows, rows, transpose_a=True)

        total = tf.zeros([rank, rank], tf.float64)
        for k in group.indices:
            total = self._fold(k, rank, key, add, total)
        return tf.cast(total, tf.float32)

    def _fold(self, k, rank, key, function: Callable, state):
        """Passes rows of Omega to a function, those of variable `k`.

        Args:
            function: callable of rows `[drawn, rank]` (zero beyond the last),
                their number among its pieces and the state.
        """
        drawn, pieces = self._pieces(k, rank)

        def body(i, state):
            rows = _normal([drawn, rank], key, k, i)
            is_row = i * drawn + tf.range(drawn) < self._sizes[k]
            rows *= tf.cast(is_row, tf.float32)[:, None]
            return i + 1, function(rows, i, state)

        _, state = tf.while_loop(
            lambda i, _: i < pieces,
            body,
            (tf.constant(0), state),
            # Else up to ten pieces are in memory at a time.
            parallel_iterations=1,
        )
        return state

    def _pieces(self, k, rank):
        """Rows of Omega at a time, and how many times, for variable `k`."""
        drawn = min(self._sizes[k], max(1, _DRAWN // rank))
        return drawn, -(-self._sizes[k] // drawn)


def _long_product(a, b, transpose_a=False):
    """A product of long sums, in float64."""
    return precision.matmul_in_parts(
        a,
        b,
        transpose_a,
        longest=per_example.LONGEST_COORDINATE,
        dtype=tf.float64,
    )


def _normal(shape, key, variable, piece):
    """Normal numbers, independent for each piece of each variable."""
    for position in (variable, piece):
        key = tf.random.experimental.stateless_fold_in(key, position)
    return tf.random.stateless_normal(shape, key)
