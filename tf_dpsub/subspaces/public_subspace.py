"""The top eigenspace of gradients of public examples."""

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tf_dpsub.checks import check_choice
from tf_dpsub.gradients.rows import sum_squares
from tf_dpsub.primitives.public_state import assign_if, public_variable
from tf_dpsub.subspaces import eigenspaces, linear_algebra
from tf_dpsub.subspaces import groups as parameter_groups
from tf_dpsub.subspaces.basis import MaskedBasis
from tf_dpsub.subspaces.following_subspace import FollowingSubspace, stacked
from tf_dpsub.subspaces.public_gradients import PublicGradients
from tf_dpsub.subspaces.rank_selection import RankSelection
from tf_dpsub.subspaces.subspace import require_orthonormal
from tf_dpsub.subspaces.whitening import (
    EXPONENTS,
    LEAST_EXAMPLES,
    Whitening,
    checked_whiten,
)

_METHODS = {
    "power": eigenspaces.power,
    "gram": eigenspaces.gram,
    "lanczos": eigenspaces.lanczos,
}
# Rows of public gradients at a time, unless the rank allows for more.
_CHUNK = 256
# Passes of the methods that start from random directions, before an exponent is
# chosen by what they found.
_FIRST_ITERATIONS = 4


@keras.saving.register_keras_serializable("tf_dpsub")
class PublicSubspace(FollowingSubspace):
    """Top eigenspace of public per-example gradients at the current weights.

    At a refresh the gradients of m public examples, `[m, parameters]`, are
    computed anew, and the basis of each parameter group spans the top right
    singular vectors of its columns. They are worked through in chunks of rows:
    memory follows the rank, not m.

    - `"power"`: `iterations` of subspace iteration from the last basis. Best
      for many public examples.
    - `"gram"`: the exact eigenspace, by an eigendecomposition of `[m, m]`. Best
      for m up to some hundred.
    - `"lanczos"`: `iterations` cycles of block Lanczos from the last basis, for
      many public examples whose spectrum decays slowly.

    With `whiten`, mechanisms work in scaled coordinates: those of directions in
    which public gradients are large are scaled down, on the way to the clip and
    on the way back alike, so that they neither use up the clip nor take the
    largest steps. See `Whitening`.

    Formal guarantees: the basis depends on public examples, on public
    randomness and on the weights, which are released, and so do the scales of
    its coordinates. Nothing private is touched, so a refresh costs no privacy.
    Public examples that are private ones as well are not covered by the
    guarantee: they raise, or are stated.

    Args:
        x_public: array, or structure of arrays, inputs of public examples.
        y_public: the same for targets. Defaults to `None`: labels are drawn at
            random, anew at each refresh.
        rank: int, number of directions of all groups; or `"auto"`: as many as
            the public examples that did not make the basis show to be worth
            their noise, chosen again at each refresh: see `RankSelection`.
        max_rank: int, the most that `rank="auto"` may take. Defaults to `None`.
        groups: int, so many groups of consecutive layers; lists of layer
            names; or `"layers"`, one for each. Ranks follow the square roots
            of their sizes. Defaults to `1`.
        method: string, see above. Defaults to `"power"`.
        iterations: int, number of power iterations or Lanczos cycles. Defaults
            to `1`.
        refresh_dtype: string, `"float32"` or `"bfloat16"`, in which a refresh
            multiplies public gradients by the last basis, with the methods
            `"power"` and `"lanczos"`. Processors that have products of bfloat16
            take about half of the time for these, others several times as long.
            The next basis is orthonormal to float32's precision either way.
            Defaults to `"float32"`.
        update_every: int, number of steps from one refresh to the next.
            Defaults to `1`.
        held_out: int, for `rank="auto"`, number of public examples, drawn anew
            at each refresh, that do not make the basis but show what it
            misses. Defaults to `None`, a fifth of them.
        horizon: int, for `rank="auto"`, number of steps over which the noise is
            expected to average out. Defaults to `None`, those of the run.
        whiten: float from 0 (no scales) to 1 (public gradients have the same
            energy along each direction), the exponent of the scales; or
            `"auto"`: 0, 1/2 or 1, as public examples show at the first refresh
            for the noise, clip and batch size of the optimizer. Labels that are
            random show little; where the noise drowns the gradients, chance
            decides. Defaults to `0.0`.
        allow_private: bool, whether public examples may be private ones as
            well. The statement then says so. Defaults to `False`.
        seed: int, of what is drawn: random labels, which examples are held
            out, the first basis. Defaults to `None`, fresh entropy.

    Raises:
        ValueError: if an argument is out of range.

    Example:

    ```python
    subspace = tf_dpsub.subspaces.PublicSubspace(
        x_public, y_public, rank=50, method="gram"
    )
    ```

    Reference:
        - [Zhou et al., 2021](https://arxiv.org/abs/2007.03813)
        - [Yu et al., 2021](https://arxiv.org/abs/2102.12677)
    """

    def __init__(
        self,
        x_public,
        y_public=None,
        *,
        rank: int | str,
        max_rank: int | None = None,
        groups: int | str | Sequence = 1,
        method: str = "power",
        iterations: int = 1,
        refresh_dtype: str = "float32",
        update_every: int = 1,
        held_out: int | None = None,
        horizon: int | None = None,
        whiten: float | str = 0.0,
        allow_private: bool = False,
        seed: int | None = None,
    ):
        super().__init__(
            x_public,
            y_public,
            groups=groups,
            rank=rank,
            max_rank=max_rank,
            iterations=iterations,
            update_every=update_every,
            held_out=held_out,
            horizon=horizon,
            allow_private=allow_private,
            seed=seed,
        )
        check_choice("method", method, _METHODS)
        whiten = self._checked_whiten(whiten)
        check_choice("refresh_dtype", refresh_dtype, ("float32", "bfloat16"))
        if method == "gram" and refresh_dtype != "float32":
            raise ValueError(
                "Expected refresh_dtype='float32' with method='gram', got "
                f"{refresh_dtype!r}: what is left of its eigenvectors would be "
                "rounding. Choose method='power'."
            )
        self.method = method
        self.refresh_dtype = refresh_dtype
        self._whiten = whiten
        self._whitening = Whitening(whiten) if whiten != 0 else None

    def _checked_whiten(self, whiten):
        whiten = checked_whiten(whiten)
        if whiten == "auto" and self._examples < LEAST_EXAMPLES:
            raise ValueError(
                f"Expected {LEAST_EXAMPLES} public examples at least with "
                f"whiten='auto', got {self._examples}: each half of them has "
                "to show what the basis of the other one is worth."
            )
        return whiten

    @property
    def is_whitened(self):
        return self._whitening is not None

    @property
    def exponent(self):
        """The exponent of the scales in use, a float: that of `whiten`.

        With `whiten="auto"` it is 0 until it is chosen, at the first refresh.
        """
        if self._whitening is None:
            return 0.0
        return float(self._whitening.exponent)

    @property
    def scales(self):
        return None if self._whitening is None else self._scales

    def build(self, optimizer):
        super().build(optimizer)
        if self._whitening is not None:
            self._whitening.build(optimizer)

    @property
    def notes(self):
        (note,) = super().notes
        scale = " and scale its coordinates" if self.is_whitened else ""
        return (f"{note}{scale}",)

    def _shared_ranks(self):
        return parameter_groups.apportion(
            self.largest_rank, self.groups, self._examples - self.held_out
        )

    def _create(self, model):
        super()._create(model)
        if self.chooses_rank:
            self.selection = RankSelection(
                self.groups, self.ranks, self._horizon
            )
            self._basis = MaskedBasis(self._basis, self.selection.mask)
        if self._whitening is not None:
            self._scales = public_variable([self.rank])
            self._scales.assign(tf.ones([self.rank]))
        self._is_made = public_variable([], tf.bool)
        keys = np.random.default_rng(int(self._seed_variable.numpy()))
        for blocks in self._blocks:
            start = [keys.standard_normal(b.shape, np.float32) for b in blocks]
            zeros = [np.zeros_like(b) for b in start]
            made, _ = linear_algebra.orthonormalize(start, zeros)
            for variable, block in zip(blocks, made):
                variable.assign(block)

    def _follow(self, model):
        limit = _CHUNK
        if self.method == "gram":
            # Pairs of chunks meet: fewer, larger ones, within the rank.
            limit = max(limit, 2 * self.rank)
        self._gradients = PublicGradients(
            model, self._public.x, self._public.y, limit
        )
        if self.selection is not None:
            self.selection.optimizer = model.optimizer
        if self._whitening is not None:
            self._whitening.optimizer = model.optimizer
        self._is_made.assign(False)
        self._compute, self._compute_exponent = (
            tf.function(
                function,
                autograph=False,
                jit_compile=model.training_step.is_compiled,
            )
            for function in (self._refreshed, self._best_exponent)
        )

    def prepare(self, iterations, is_used=True):
        iterations = tf.cast(iterations, tf.int64)
        due = tf.convert_to_tensor(is_used)
        if self.update_every > 1:
            due &= (iterations % self.update_every == 0) | ~self._is_made
        if self._whitening is not None and self._whitening.is_chosen:
            assign_if(
                due & self._whitening.is_due,
                [self._whitening.choice],
                lambda: [self._chosen_exponent(iterations)],
            )
        assign_if(
            due,
            [*self._state(), self._is_made],
            lambda: [*self._checked(iterations), tf.constant(True)],
        )

    def _state(self):
        """All variables that a refresh writes."""
        blocks = [v for blocks in self._blocks for v in blocks]
        scales = [self._scales] if self.is_whitened else []
        chosen = self.selection.variables if self.selection else []
        return blocks + scales + chosen

    def _checked(self, iterations):
        """New values of `_state`, after the check that privacy rests on."""
        *values, error = self._compute(iterations)
        with tf.control_dependencies([require_orthonormal(error)]):
            values = [tf.identity(v) for v in values]
        if self.selection is not None:
            count = len(self.selection.variables)
            self.selection.log(iterations, values[-count:])
        return values

    def _refreshed(self, iterations):
        batch, held_out = self._drawn(iterations)
        moments = eigenspaces.SecondMoments(
            self._gradients, batch, self.groups, self.refresh_dtype
        )
        bases = [[tf.identity(b) for b in blocks] for blocks in self._blocks]
        bases, error = _METHODS[self.method](moments, bases, self.iterations)
        scales, selected = None, []
        if self._whitening is not None:
            energies = moments.energies(bases)
            scales = self._whitening.scales(energies)
        if self.selection is not None:
            selected = self.selection.updated(
                *self._project(held_out, bases, self.held_out), scales
            )
            if scales is not None:
                # Of the directions in use alone.
                scales = self._whitening.scales(energies, selected[0])
        values = [b for blocks in bases for b in blocks]
        values += [] if scales is None else [scales]
        return [*values, *selected, error]

    def _chosen_exponent(self, iterations):
        """The position of the exponent that public examples choose."""
        best, promised = self._compute_exponent(iterations)
        self._whitening.log(best, promised)
        return best

    def _best_exponent(self, iterations):
        """As `Whitening.best`, of bases of either half of the examples."""
        labels, shuffled = (
            self._key(iterations, 0),
            self._shuffled(iterations, 2),
        )
        sizes = [self._examples // 2, self._examples - self._examples // 2]
        halves = tf.split(shuffled, sizes)
        evidence = tf.zeros([len(EXPONENTS), 2], tf.float64)
        for mine, others, count in zip(halves, halves[::-1], sizes[::-1]):
            moments = eigenspaces.SecondMoments(
                self._gradients,
                self._gradients.draw(labels, mine),
                self.groups,
                self.refresh_dtype,
            )
            bases = [
                [tf.identity(b) for b in blocks] for blocks in self._blocks
            ]
            bases, _ = _METHODS[self.method](
                moments, bases, max(self.iterations, _FIRST_ITERATIONS)
            )
            batch = self._gradients.draw(labels, others)
            evidence += self._whitening.evidence(
                moments.energies(bases), *self._project(batch, bases, count)
            )
        return self._whitening.best(evidence)

    def _project(self, batch, bases, count):
        """Coordinates `[count, rank]` and squared norms `[count]`."""

        def project(rows):
            blocks = [rows.of(group) for group in self.groups]
            coordinates = map(linear_algebra.multiply, blocks, bases)
            sq_norms = tf.add_n(
                [sum_squares(r) for of_group in blocks for r in of_group]
            )
            return tf.concat([*coordinates], 1), sq_norms

        return stacked(
            self._gradients.fold, batch, project, [[self.rank], []], count
        )

    def get_config(self):
        return {
            **super().get_config(),
            "groups": self._groups,
            "method": self.method,
            "refresh_dtype": self.refresh_dtype,
            "whiten": self._whiten,
        }
