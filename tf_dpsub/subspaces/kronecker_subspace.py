"""Pairs of directions of inputs and outputs, for large models."""

import functools
import math
import re
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dpsub.checks import check_count, is_int
from tf_dpsub.gradients import precision
from tf_dpsub.primitives.public_state import assign_if, public_variable
from tf_dpsub.subspaces import linear_algebra
from tf_dpsub.subspaces.basis import MaskedBasis
from tf_dpsub.subspaces.following_subspace import FollowingSubspace, stacked
from tf_dpsub.subspaces.kernel_matrices import check_splits, kernel_matrices
from tf_dpsub.subspaces.kronecker_basis import KroneckerBasis
from tf_dpsub.subspaces.public_gradients import PublicGradients, finite_factors
from tf_dpsub.subspaces.rank_selection import RankSelection
from tf_dpsub.subspaces.subspace import require_orthonormal

# Passes over the public examples at the first refresh, from random directions.
_FIRST_ITERATIONS = 4


@keras.saving.register_keras_serializable("tf_dpsub")
class KroneckerSubspace(FollowingSubspace):
    """Pairs of a direction of a kernel's inputs and one of its outputs.

    Each kernel, as a matrix `[inputs, outputs]`, has two orthonormal bases: U
    of its inputs and V of its outputs, the top eigenvectors of the second
    moments `sum of G_i G_i^T` and `sum of G_i^T G_i` of the gradients `G_i` of
    public examples at the current weights. The coordinates of a gradient G are
    entries of `U^T G V`. Weights that are vectors, such as biases, share one
    ordinary basis. Of all these coordinates, those `rank` are chosen in which
    public gradients have most energy.

    A basis of k directions takes `k p d` numbers for a kernel of p inputs and
    d outputs; these take `(p + d) r`. Of dense layers, einsums, convolutions
    and embeddings, neither private nor public examples have their gradients
    formed: coordinates follow from two thin products.

    At a refresh, public examples are worked through `iterations` times for the
    bases, each a step of subspace iteration from the last ones, and once for
    the energies.

    Formal guarantees: bases and choice depend on public examples, on public
    randomness and on the weights, which are released. At every refresh
    `||U^T U - I||_F` and `||V^T V - I||_F` of each kernel are at most `2^-15`,
    and that of the vectors' basis at most `2^-13`; bases that are not raise.
    Between refreshes all are measured at each step: those of a file that are
    further off are made anew.
    The chosen pairs W are columns of the Kronecker product of U and V, so that
    `||W^T W - I|| <= (1 + 2^-15)^2 - 1 < 2^-13` in the spectral norm:
    coordinates of a vector have at most its norm, up to the margin that
    mechanisms keep when they clip. The float32 coordinates of an example, with
    their rounding, are the very numbers that are clipped and added up.

    Args:
        x_public: array, or structure of arrays, inputs of public examples.
        y_public: the same for targets. Defaults to `None`: labels are drawn at
            random, anew at each refresh.
        rank: int, number of coordinates of all weights; or `"auto"`, as for
            `PublicSubspace`.
        max_rank: int, the most that `rank="auto"` may take. Defaults to `None`.
        side_rank: int, directions of each side of a kernel: of a side that is
            narrower, all of it; and directions of all vectors together.
            Defaults to `32`.
        side_ranks: dict from regular expressions, which the path of a kernel
            matches somewhere, to pairs of int, the directions of its inputs
            and of its outputs. Defaults to `None`: `side_rank` for all.
        splits: dict from regular expressions, which the path of a weight
            matches somewhere, to the number of its first axes that are those
            of its inputs, or to 0 for a vector. Defaults to `None`. Dense,
            recurrent and convolutional kernels, those of `EinsumDense` and
            embeddings need none.
        iterations: int, number of subspace iterations at a refresh. Defaults
            to `1`.
        update_every: int, number of steps from one refresh to the next.
            Defaults to `10`.
        held_out: int, as for `PublicSubspace`.
        horizon: int, as for `PublicSubspace`.
        allow_private: bool, whether public examples may be private ones as
            well. The statement then says so. Defaults to `False`.
        seed: int, of what is drawn: random labels, which examples are held
            out, the first bases. Defaults to `None`, fresh entropy.

    Raises:
        ValueError: if an argument is out of range; or, before a model is
            trained, if a weight of it has no split that is known, a rank is
            above a side, or there are not as many coordinates.

    Example:

    ```python
    subspace = tf_dpsub.subspaces.KroneckerSubspace(
        x_public, y_public, rank=2000
    )
    ```

    Reference:
        - [Yu et al., 2021](https://arxiv.org/abs/2102.12677), on public
          subspaces
        - [Martens and Grosse, 2015](https://arxiv.org/abs/1503.05671), on
          second moments of both sides of a kernel
    """

    def __init__(
        self,
        x_public,
        y_public=None,
        *,
        rank: int | str,
        max_rank: int | None = None,
        side_rank: int = 32,
        side_ranks: Mapping | None = None,
        splits: Mapping | None = None,
        iterations: int = 1,
        update_every: int = 10,
        held_out: int | None = None,
        horizon: int | None = None,
        allow_private: bool = False,
        seed: int | None = None,
    ):
        super().__init__(
            x_public,
            y_public,
            groups=1,
            rank=rank,
            max_rank=max_rank,
            iterations=iterations,
            update_every=update_every,
            held_out=held_out,
            horizon=horizon,
            allow_private=allow_private,
            seed=seed,
        )
        check_count("side_rank", side_rank)
        check_side_ranks(side_ranks)
        check_splits(splits)
        self.side_rank = int(side_rank)
        self._side_ranks = side_ranks
        self._splits = splits
        self._basis: Any = None
        self._pairs: Any = None

    def find(self, model):
        if self._pairs is not None:
            return
        variables = model.trainable_variables
        matrices = kernel_matrices(model.model, variables, self._splits)
        ranks = self._ranks_of_sides(model, matrices)
        vectors = [v for v, m in zip(variables, matrices) if m is None]
        size = sum(math.prod(v.shape) for v in vectors)
        pairs = KroneckerBasis(
            [tuple(v.shape) for v in variables],
            matrices,
            ranks,
            min(self.side_rank, size),
        )
        if self.largest_rank > pairs.candidates:
            name = "max_rank" if self.chooses_rank else "rank"
            raise ValueError(
                f"Expected {name} <= {pairs.candidates}, the pairs of "
                f"directions of all kernels of '{model.name}' and the "
                f"directions of its vectors, got {self.largest_rank}. Raise "
                "side_rank for more."
            )
        self._pairs = pairs

    def _ranks_of_sides(self, model, matrices):
        """Pairs of the ranks of both sides of each kernel, None for a vector.

        Raises:
            ValueError: if one is above its side.
        """
        variables = model.trainable_variables
        sides = [(m.inputs, m.outputs) for m in matrices if m is not None]
        widest = max(map(max, sides), default=math.inf)
        if self.side_rank > widest:
            raise ValueError(
                f"Expected side_rank <= {widest}, the widest side of a kernel "
                f"of '{model.name}', got {self.side_rank}."
            )
        given = {}
        for pattern, pair in (self._side_ranks or {}).items():
            matched = [
                k
                for k, v in enumerate(variables)
                if matrices[k] is not None and re.search(pattern, v.path)
            ]
            if not matched:
                raise ValueError(
                    "Expected patterns of side_ranks that match a kernel of "
                    f"'{model.name}', got {pattern!r}."
                )
            for k in matched:
                given.setdefault(k, tuple(pair))
        ranks: list = []
        for k, matrix in enumerate(matrices):
            if matrix is None:
                ranks.append(None)
                continue
            side = (matrix.inputs, matrix.outputs)
            pair = given.get(k, tuple(min(self.side_rank, n) for n in side))
            if pair[0] > side[0] or pair[1] > side[1]:
                raise ValueError(
                    f"Expected side_ranks <= {side} of {variables[k].path}, "
                    f"its inputs and outputs, got {pair}."
                )
            ranks.append(pair)
        return ranks

    def build(self, optimizer):
        super().build(optimizer)
        if self._pairs is None:
            raise RuntimeError(
                "A KroneckerSubspace was built without a model, whose kernels "
                "it has bases of. Compile a private model with it."
            )

        def add_variable(shape, dtype):
            return optimizer.add_variable(
                shape,
                initializer="zeros",
                dtype=dtype,
                aggregation="only_first_replica",
                name="kronecker_basis",
            )

        self._pairs.build(self.largest_rank, add_variable)
        self._refreshes = add_variable((), "int64")
        self._start()

    def _shared_ranks(self):
        return [self.largest_rank]

    def _create(self, model):
        self._basis = self._pairs
        # Whether the bases are those of this loss and data.
        self._is_made = public_variable([], tf.bool)
        self._is_restored = int(self._refreshes.numpy()) > 0
        if self.chooses_rank:
            self.selection = RankSelection(
                self.groups, self.ranks, self._horizon
            )
            self._basis = MaskedBasis(self._pairs, self.selection.mask)

    def _start(self):
        """Random bases, from which the first iterations start."""
        random = np.random.default_rng(int(self._seed_variable.numpy()))
        sides, blocks = tf.nest.map_structure(
            lambda v: random.standard_normal(v.shape, np.float32),
            (self._pairs.sides, self._pairs.blocks),
        )
        zeros = tf.nest.map_structure(np.zeros_like, (sides, blocks))
        made, *_ = self._pairs.orthonormal((sides, blocks), zeros)
        for variable, value in zip(
            tf.nest.flatten((self._pairs.sides, self._pairs.blocks)),
            tf.nest.flatten(made),
            strict=True,
        ):
            variable.assign(value)

    def _follow(self, model):
        step = model.training_step
        self._gradients = PublicGradients(
            model, self._public.x, self._public.y, step.spec["real"].shape[0]
        )
        if self.selection is not None:
            self.selection.optimizer = model.optimizer
        # A rank that was chosen is not saved.
        self._is_made.assign(self._is_restored and not self.chooses_rank)
        self._is_restored = False
        self._compute = tf.function(
            self._refreshed, autograph=False, jit_compile=step.is_compiled
        )

    def prepare(self, iterations, is_used=True):
        iterations = tf.cast(iterations, tf.int64)
        due = tf.convert_to_tensor(is_used)
        if self.update_every > 1:
            is_kept = self._is_made & self._pairs.is_sound()
            due &= (iterations % self.update_every == 0) | ~is_kept
        assign_if(
            due,
            [*self._state(), self._is_made],
            lambda: [*self._checked(iterations), tf.constant(True)],
        )
        # A step of a transformer and a refresh each take all memory and cores.
        return [tf.convert_to_tensor(self._pairs.chosen)]

    def _state(self):
        """All variables that a refresh writes."""
        pairs = self._pairs
        chosen = self.selection.variables if self.selection else []
        return [
            *tf.nest.flatten((pairs.sides, pairs.blocks)),
            pairs.chosen,
            self._refreshes,
            *chosen,
        ]

    def _checked(self, iterations):
        """New values of `_state`, after the check that privacy rests on."""
        *values, of_sides, of_vectors = self._compute(iterations)
        checks = [
            require_orthonormal(
                of_sides, linear_algebra.ORTHONORMALITY_OF_SIDES
            ),
            require_orthonormal(of_vectors),
        ]
        with tf.control_dependencies(checks):
            values = [tf.identity(v) for v in values]
        if self.selection is not None:
            count = len(self.selection.variables)
            self.selection.log(iterations, values[-count:])
        return values

    def _refreshed(self, iterations):
        batch, held_out = self._drawn(iterations)
        fold = self._folded(batch)
        bases, errors = self._iterated(fold)
        chosen = self._chosen(fold, bases)
        selected = []
        if self.selection is not None:
            selected = self.selection.updated(
                *self._project(held_out, bases, chosen)
            )
        refreshes = tf.convert_to_tensor(self._refreshes) + 1
        return [
            *tf.nest.flatten(bases),
            chosen,
            refreshes,
            *selected,
            *errors,
        ]

    def _folded(self, batch):
        """A function that folds all chunks; of one alone, computed once."""
        if batch["real"].shape[0] > 1:
            return functools.partial(self._gradients.fold_gradients, batch)
        only = self._gradients.chunk(batch, 0)
        return lambda function, state: function(tf.constant(0), only, state)

    def _iterated(self, fold):
        """Bases after subspace iteration, and the two errors of them."""
        first = max(_FIRST_ITERATIONS, self.iterations)
        is_first = tf.equal(tf.convert_to_tensor(self._refreshes), 0)
        count = tf.where(is_first, first, self.iterations)

        def moments(bases):
            def add(_, gradients, totals):
                weights = tf.square(finite_factors(gradients))
                return tf.nest.map_structure(
                    tf.add,
                    totals,
                    self._pairs.moment_products(gradients, *bases, weights),
                )

            return fold(add, tf.nest.map_structure(tf.zeros_like, bases))

        def body(i, bases, *_):
            bases, *errors = self._pairs.orthonormal(moments(bases), bases)
            return i + 1, bases, *errors

        _, bases, *errors = tf.while_loop(
            lambda i, *_: i < count,
            body,
            (tf.constant(0), self._pairs.values, *[tf.constant(0.0)] * 2),
            parallel_iterations=1,
        )
        return bases, errors

    def _chosen(self, fold, bases):
        """The candidates of most energy, those of most energy first."""

        def add(_, gradients, energies):
            products = self._pairs.products(gradients, *bases)
            weights = tf.square(finite_factors(gradients))
            return energies + precision.matvec(
                tf.square(products), weights, transpose_a=True
            )

        # Gradients would be computed beside those of the last iteration.
        with tf.control_dependencies(tf.nest.flatten(bases)):
            energies = fold(add, tf.zeros([self._pairs.candidates]))
        best = tf.math.top_k(energies, self.largest_rank).indices
        return tf.cast(best, tf.int64)

    def _project(self, batch, bases, chosen):
        """Coordinates of held-out gradients, and their squared norms."""

        def project(gradients):
            factors = finite_factors(gradients)
            products = self._pairs.products(gradients, *bases)
            return (
                factors[:, None] * tf.gather(products, chosen, axis=1),
                tf.square(factors) * gradients.sq_norms(),
            )

        return stacked(
            self._gradients.fold_gradients,
            batch,
            project,
            [[self.rank], []],
            self.held_out,
        )

    def get_config(self):
        return {
            **super().get_config(),
            "side_rank": self.side_rank,
            "side_ranks": self._side_ranks,
            "splits": self._splits,
        }


def check_side_ranks(side_ranks):
    """Raises `ValueError` unless `side_ranks` has patterns and pairs."""
    if side_ranks is None:
        return
    is_whole = isinstance(side_ranks, Mapping) and all(
        isinstance(pattern, str)
        and isinstance(pair, (list, tuple))
        and len(pair) == 2
        and all(is_int(n) and n >= 1 for n in pair)
        for pattern, pair in side_ranks.items()
    )
    if not is_whole:
        raise ValueError(
            "Expected side_ranks from regular expressions to pairs of int >= "
            f"1, got {side_ranks!r}."
        )
