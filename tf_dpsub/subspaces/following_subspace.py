"""The base of the subspaces that follow gradients of public examples."""

import abc
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_dpsub.checks import check_count, is_int
from tf_dpsub.primitives.public_state import seed_variable
from tf_dpsub.subspaces.public_examples import PublicExamples
from tf_dpsub.subspaces.rank_selection import RankSelection
from tf_dpsub.subspaces.subspace import Subspace

# Share of the public examples that rank="auto" holds out by default.
_HELD_OUT = 0.2


class FollowingSubspace(Subspace, abc.ABC):
    """A subspace whose basis is made anew from gradients of public examples.

    Formal guarantees: public examples, public randomness and the weights, which
    are released, are all that the basis depends on. Public examples that are
    private ones as well are not covered by the guarantee: they raise, or are
    stated.

    Args: as `PublicSubspace`.

    Raises:
        ValueError: if an argument is out of range.
    """

    # None until it is built; unless rank="auto", for ever.
    selection: RankSelection | None = None

    def __init__(
        self,
        x_public,
        y_public,
        *,
        groups: int | str | Sequence,
        rank: int | str,
        max_rank: int | None,
        iterations: int,
        update_every: int,
        held_out: int | None,
        horizon: int | None,
        allow_private: bool,
        seed: int | None,
    ):
        super().__init__(groups)
        self._public = PublicExamples(x_public, y_public)
        self._examples = self._public.count
        check_count("iterations", iterations)
        check_count("update_every", update_every)
        self._check_rank(rank, max_rank)
        self._check_auto(rank, held_out, horizon)
        if rank == "auto" and held_out is None:
            held_out = max(2, round(_HELD_OUT * self._examples))
        self._rank: Any = rank
        self._max_rank: Any = max_rank
        self.iterations = int(iterations)
        self.update_every = int(update_every)
        self.held_out = int(held_out or 0)
        self._horizon = horizon
        self.allow_private = bool(allow_private)
        self._seed = seed
        self._gradients: Any = None

    @staticmethod
    def _check_rank(rank, max_rank):
        if rank == "auto":
            rank = max_rank
            if max_rank is None:
                raise ValueError(
                    "Expected max_rank with rank='auto', got None. It bounds "
                    "memory and time."
                )
        elif max_rank is not None:
            raise ValueError(
                "Expected max_rank=None unless rank='auto', got "
                f"{max_rank!r} and rank={rank!r}."
            )
        check_count("rank", rank)

    def _check_auto(self, rank, held_out, horizon):
        if rank != "auto":
            if (held_out, horizon) != (None, None):
                raise ValueError(
                    "Expected held_out and horizon with rank='auto' alone, got "
                    f"held_out={held_out!r}, horizon={horizon!r} and "
                    f"rank={rank!r}."
                )
            return
        if held_out is not None and not (
            is_int(held_out) and 2 <= held_out < self._examples
        ):
            raise ValueError(
                f"Expected 2 <= held_out < {self._examples}, the number of "
                f"public examples, got {held_out!r}."
            )
        if self._examples < 3:
            raise ValueError(
                "Expected 3 public examples at least with rank='auto', got "
                f"{self._examples}: two of them have to show what the basis of "
                "the others misses."
            )
        check_count("horizon", horizon, optional=True)

    @property
    def is_public(self):
        return True

    @property
    def chooses_rank(self):
        return self._rank == "auto"

    @property
    def largest_rank(self) -> int:
        """The number of directions, or the most that may be chosen."""
        return int(self._max_rank if self.chooses_rank else self._rank)

    @property
    def public_inputs(self):
        return self._public.x

    @property
    def notes(self):
        return (f"{self._public.note}, whose gradients span the subspace",)

    def build(self, optimizer):
        self._seed_variable = seed_variable(optimizer, self._seed)

    def begin_run(self, steps):
        if self.selection is not None:
            self.selection.begin_run(steps)

    def _key(self, iterations, purpose):
        """Key of what a refresh draws, the same for all replicas."""
        seed = tf.convert_to_tensor(self._seed_variable.value)
        key = tf.stack([seed, tf.constant(purpose, tf.int64)])
        return tf.random.experimental.stateless_fold_in(key, iterations)

    def _shuffled(self, iterations, purpose):
        """The positions of all public examples, in a random order."""
        # Not stateless_shuffle, which does not compile under XLA.
        return tf.argsort(
            tf.random.stateless_uniform(
                [self._examples], self._key(iterations, purpose)
            )
        )

    def _drawn(self, iterations):
        """The examples that make a basis, and those that are held out or None.

        As `PublicGradients.draw` returns them.
        """
        labels = self._key(iterations, 0)
        if not self.held_out:
            return self._gradients.draw(labels), None
        order = self._shuffled(iterations, 1)
        return [
            self._gradients.draw(labels, part)
            for part in (order[self.held_out :], order[: self.held_out])
        ]

    def get_config(self):
        return {
            **self._public.get_config(),
            "rank": self._rank,
            "max_rank": self._max_rank,
            "iterations": self.iterations,
            "update_every": self.update_every,
            "held_out": self.held_out or None,
            "horizon": self._horizon,
            "allow_private": self.allow_private,
            "seed": self._seed,
        }


def stacked(fold, batch, function, shapes: list, count: int) -> list:
    """Results for chunks of public examples, one after another.

    Args:
        fold: `PublicGradients.fold`, or its `fold_gradients`.
        batch: what `PublicGradients.draw` returned.
        function: callable of what `fold` gives for a chunk, which returns
            float32 tensors `[rows of a chunk, ...]`.
        shapes: list of shapes, those of a row.
        count: int, the rows that do not pad a chunk.

    Returns:
        List of tensors `[count, ...]`.
    """
    chunks, size = batch["real"].shape

    def write(i, rows, arrays):
        return [a.write(i, v) for a, v in zip(arrays, function(rows))]

    written = fold(
        batch,
        write,
        [
            tf.TensorArray(tf.float32, chunks, element_shape=[size, *shape])
            for shape in shapes
        ],
    )
    return [
        tf.reshape(array.stack(), [-1, *shape])[:count]
        for array, shape in zip(written, shapes)
    ]
