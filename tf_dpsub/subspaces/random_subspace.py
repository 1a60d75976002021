"""A random subspace, which needs no public data."""

import math

import keras
import tensorflow as tf

from tf_dpsub.checks import check_count
from tf_dpsub.primitives.public_state import (
    assign_if,
    public_variable,
    seed_variable,
)
from tf_dpsub.subspaces import groups as parameter_groups
from tf_dpsub.subspaces.random_bases import DrawnBasis, RedrawnBasis
from tf_dpsub.subspaces.subspace import (
    Subspace,
    require_orthonormal,
)

# A basis with more numbers than this is drawn again whenever it is used.
_STORED = 2**25


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
        check_count("rank", rank)
        check_count("update_every", update_every, optional=True)
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
        # The seed and the refresh that the basis was drawn for.
        self._drawn_for = public_variable([2], tf.int64)
        self._drawn_for.assign([-1, -1])
        shapes = [tuple(v.shape) for v in model.trainable_variables]
        arguments = (self.groups, self.ranks, shapes)
        if self._is_stored:
            self._basis = DrawnBasis(*arguments)
        else:
            self._basis = RedrawnBasis(*arguments, self._drawn_for)
        self._blocks = self._basis.blocks

    def prepare(self, iterations, is_used=True):
        refresh = tf.zeros([], tf.int64)
        if self.update_every is not None:
            refresh = tf.cast(iterations, tf.int64) // self.update_every
        seed = tf.convert_to_tensor(self._seed_variable.value)
        key = tf.stack([seed, refresh])
        due = is_used & tf.reduce_any(key != self._drawn_for)
        variables = [v for blocks in self._blocks for v in blocks]
        assign_if(
            due,
            [*variables, self._drawn_for],
            lambda: [*self._checked(key), key],
        )

    def _checked(self, key):
        """New values of the blocks, after the check that privacy rests on."""
        values, error = self._basis.drawn(key)
        with tf.control_dependencies([require_orthonormal(error)]):
            return [tf.identity(v) for v in values]

    def get_config(self):
        return {
            "rank": self._rank,
            "groups": self._groups,
            "update_every": self.update_every,
            "seed": self._seed,
        }
