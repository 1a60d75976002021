"""A random subspace, which needs no public data."""

import math
from collections.abc import Callable

import keras
import tensorflow as tf

from tf_dpsub.checks import is_int
from tf_dpsub.primitives.public_state import (
    assign_if,
    public_variable,
    seed_variable,
)
from tf_dpsub.subspaces import groups as parameter_groups
from tf_dpsub.subspaces import linear_algebra
from tf_dpsub.subspaces.subspace import (
    Subspace,
    require_orthonormal,
    variable_sizes,
)

# A basis with more numbers than this is drawn again whenever it is used.
_STORED = 2**25
# Numbers drawn at a time.
_DRAWN = 2**22


@keras.saving.register_keras_serializable("tf_dpsub")
class RandomSubspace(Subspace):
    """The span of Gaussian directions, orthonormalised.

    A large basis is not stored: V = Omega R^-1, where Omega is drawn again,
    some rows at a time, from a seed whenever V is used, and R^-1, of shape
    `[k, k]`, is all that is kept.

    Formal guarantees: the basis is public randomness, and independent of all
    data. Its seed is no secret: it is saved with the optimizer, so that
    training goes on in the same subspace.

    Args:
        rank: int, number of directions of all groups.
        groups: as for `PublicSubspace`. Defaults to `1`.
        update_every: int, number of steps until the basis is drawn anew.
            Defaults to `None`, never.
        seed: int. Defaults to `None`, fresh entropy.

    Raises:
        ValueError: if an argument is out of range.

    Reference:
        - [Zhou et al., 2021](https://arxiv.org/abs/2007.03813), RPDP-SGD
    """

    def __init__(
        self,
        rank: int,
        *,
        groups=1,
        update_every: int | None = None,
        seed: int | None = None,
    ):
        super().__init__(groups)
        if not (is_int(rank) and rank >= 1):
            raise ValueError(f"Expected rank >= 1 (int), got {rank!r}.")
        if update_every is not None and not (
            is_int(update_every) and update_every >= 1
        ):
            raise ValueError(
                f"Expected update_every >= 1 (int) or None, got "
                f"{update_every!r}."
            )
        self._rank = int(rank)
        self.update_every = update_every
        self._seed = seed

    def build(self, optimizer):
        self._seed_variable = seed_variable(optimizer, self._seed)
        parameters = sum(
            math.prod(v.shape) for v in optimizer._trainable_variables
        )
        self._is_stored = parameters * self._rank <= _STORED

    @property
    def is_public(self):
        return True

    @property
    def is_compilable(self):
        # XLA draws other numbers from the same key.
        return self._is_stored

    def _shared_ranks(self):
        return parameter_groups.apportion(self._rank, self.groups, float("inf"))

    def _create(self, model):
        self._sizes = variable_sizes(model)
        if self._is_stored:
            super()._create(model)
        else:
            self._shapes = [tuple(v.shape) for v in model.trainable_variables]
            # R^-1 of each group alone.
            self._blocks = [[public_variable([r, r])] for r in self.ranks]
        # The seed and the refresh that the basis was drawn for.
        self._drawn_for = public_variable([2], tf.int64)
        self._drawn_for.assign([-1, -1])

    def prepare(self, iterations, is_used=True):
        refresh = tf.zeros([], tf.int64)
        if self.update_every is not None:
            refresh = tf.cast(iterations, tf.int64) // self.update_every
        seed = tf.convert_to_tensor(self._seed_variable.value)
        wanted = tf.stack([seed, refresh])
        due = is_used & tf.reduce_any(wanted != self._drawn_for)
        variables = [v for blocks in self._blocks for v in blocks]
        assign_if(
            due,
            [*variables, self._drawn_for],
            lambda: [*self._draw(wanted), wanted],
        )

    def _draw(self, key):
        """The basis, or, where that is not stored, R^-1, of each group."""
        values, errors = [], []
        for group, rank in zip(self.groups, self.ranks):
            if self._is_stored:
                omega = [
                    _normal([self._sizes[k], rank], key, k, 0)
                    for k in group.indices
                ]
                zeros = [tf.zeros_like(b) for b in omega]
                made, error = linear_algebra.orthonormalize(omega, zeros)
            else:
                products = self._gram(group, rank, key, tf.eye(rank))
                made = [linear_algebra.inverse_factor(products)]
                error = linear_algebra.distance_to_identity(
                    self._gram(group, rank, key, made[0])
                )
            values += made
            errors.append(error)
        with tf.control_dependencies(
            [require_orthonormal(tf.reduce_max(errors))]
        ):
            return [tf.identity(v) for v in values]

    # Without storing the basis.

    def _gram(self, group, rank, key, inverse):
        """`(Omega R^-1)^T (Omega R^-1)`."""

        def add(rows, _, total):
            rows = tf.matmul(rows, inverse)
            return total + tf.matmul(rows, rows, transpose_a=True)

        total = tf.zeros([rank, rank])
        for k in group.indices:
            total = self._fold(k, rank, key, add, total)
        return total

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

    def _coordinates_of(self, matrix_of):
        """Coordinates of rows that `matrix_of(k)` gives, `[n, size of k]`."""
        parts = []
        for group, rank, (inverse,) in zip(
            self.groups, self.ranks, self._blocks
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
                    self._drawn_for,
                    lambda rows, i, sums: (
                        sums
                        + tf.matmul(matrix[:, i], tf.cast(rows, matrix.dtype))
                    ),
                    tf.zeros([matrix.shape[0], rank], matrix.dtype),
                )
                totals.append(sums)
            total = tf.add_n(totals)
            parts.append(tf.matmul(total, tf.cast(inverse, total.dtype)))
        return tf.concat(parts, 1)

    def project(self, gradients):
        if self._is_stored:
            return super().project(gradients)
        return self._coordinates_of(
            lambda k: tf.reshape(
                gradients.rows(gradients.variables[k]),
                [gradients.batch_size, -1],
            )
        )

    def coordinates(self, tensors):
        if self._is_stored:
            return super().coordinates(tensors)
        return self._coordinates_of(lambda k: tf.reshape(tensors[k], [1, -1]))[
            0
        ]

    def lift(self, coordinates):
        if self._is_stored:
            return super().lift(coordinates)
        tensors = [None] * len(self._shapes)
        for group, rank, part, (inverse,) in zip(
            self.groups,
            self.ranks,
            tf.split(coordinates, self.ranks),
            self._blocks,
        ):
            inverse = tf.cast(inverse, part.dtype)
            weights = tf.linalg.matvec(inverse, part)
            for k in group.indices:
                drawn, pieces = self._pieces(k, rank)
                written = self._fold(
                    k,
                    rank,
                    self._drawn_for,
                    lambda rows, i, array: array.write(
                        i,
                        tf.linalg.matvec(tf.cast(rows, part.dtype), weights),
                    ),
                    tf.TensorArray(part.dtype, pieces, element_shape=[drawn]),
                )
                flat = tf.reshape(written.stack(), [-1])[: self._sizes[k]]
                tensors[k] = tf.reshape(flat, self._shapes[k])
        return tensors

    def get_config(self):
        return {
            "rank": self._rank,
            "groups": self._groups,
            "update_every": self.update_every,
            "seed": self._seed,
        }


def _normal(shape, key, variable, piece):
    """Normal numbers, independent for each piece of each variable."""
    for position in (variable, piece):
        key = tf.random.experimental.stateless_fold_in(key, position)
    return tf.random.stateless_normal(shape, key)
