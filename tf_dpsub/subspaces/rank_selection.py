"""The rank that public gradients show to be worth its noise."""

from typing import Any

import tensorflow as tf
from absl import logging

from tf_dpsub.primitives.public_state import public_variable

# Share of the past in the running mean of energies over refreshes.
_MEMORY = 0.95
# What is assumed of the coherence, with the weight of so many refreshes: some
# ten examples alone do not even tell its sign.
_COHERENCE = 0.01
_WEIGHT = 100.0


class RankSelection:
    """Chooses how many leading directions of each group a step uses.

    What counts is the expected squared error of the mean of `horizon` gradients
    in a row, which is what an optimizer follows: a direction that is left out
    costs the energy of the mean gradient along it, at every step anew; one
    that is used costs the noise in one coordinate, of variance `nu`, which
    averages out to `nu / horizon`. The rank of a group is where the sum of
    what is gained less what is paid is greatest.

    Energies come from public gradients that did not make the basis, clipped as
    private ones are. Along single directions the mean of few examples is mostly
    noise. The energy of the mean is therefore taken as the energy of the
    examples along the direction, times the coherence: the share of energy that
    the mean has in the whole subspace, from products of different examples.
    Both are means over refreshes, each of which holds out other examples; the
    coherence starts from 1 %, with the weight of 100 refreshes. With a
    residual, what it releases of a direction that is left out is no loss.

    In a whitened subspace, energies and coherence are those of scaled
    coordinates, each of which has the same noise. On the way back to weights,
    energies and noise along direction j are both `s_j^2` times as large, and
    count as such.

    Formal guarantees: only public data are read.

    Args:
        groups: list of `Group`.
        ranks: list of int, the most for each group.
        horizon: int, or None for the steps of a run.

    Attributes:
        optimizer: `SubspaceOptimizer`, whose noise and clips count; to be set.
        mask: float32 variable of shape `[sum of ranks]`, 1 for the directions
            in use.
    """

    def __init__(self, groups: list, ranks: list, horizon: int | None):
        self._groups = groups
        self._ranks = ranks
        self.optimizer: Any = None
        self._given_horizon = horizon
        total = sum(ranks)
        self.mask = public_variable([total])
        self._energies = public_variable([total])  # of examples
        self._coherence = public_variable([])
        self._refreshes = public_variable([])
        self._horizon = public_variable([])
        self._logged = None

    @property
    def variables(self):
        """Variables that a refresh writes."""
        return [
            self.mask,
            self._energies,
            self._coherence,
            self._refreshes,
        ]

    @property
    def ranks(self):
        """List of int: the rank of each group that is in use."""
        parts = tf.split(self.mask, self._ranks)
        return [int(tf.reduce_sum(part)) for part in parts]

    def begin_run(self, steps):
        horizon = self._given_horizon or steps
        if horizon is None:
            raise ValueError(
                "Expected a horizon for rank='auto' where the number of steps "
                "is not known, got None. Pass `horizon` to the subspace, or "
                "`steps_per_epoch` to `fit`."
            )
        self._horizon.assign(horizon)

    def updated(self, coordinates, sq_norms, scales=None) -> list:
        """New values of `variables`.

        Args:
            coordinates: `[m, rank]`, of held-out public gradients.
            sq_norms: `[m]`, their squared norms.
            scales: `[rank]`, of the coordinates. Defaults to `None`, without.

        Returns:
            List of float32 tensors.
        """
        clipped, released = self.optimizer.preview(
            coordinates, sq_norms, scales
        )
        m = coordinates.shape[0]
        squares = tf.reduce_sum(tf.square(clipped), 0)
        products = tf.square(tf.reduce_sum(clipped, 0)) - squares
        lost = tf.square(1 - released)
        is_first = self._refreshes == 0
        memory = tf.where(is_first, 0.0, _MEMORY)
        energies = memory * self._energies + (1 - memory) * lost * squares / m
        measured = (tf.reduce_sum(products) / (m - 1)) / tf.maximum(
            tf.reduce_sum(squares), 1e-30
        )
        weight = _WEIGHT + self._refreshes
        before = tf.where(is_first, _COHERENCE, self._coherence)
        coherence = before + (measured - before) / (weight + 1)
        gained = tf.maximum(coherence, 0.0) * energies - self._cost()
        if scales is not None:
            gained *= tf.square(scales)
        masks = []
        for gains, rank in zip(tf.split(gained, self._ranks), self._ranks):
            best = tf.argmax(tf.cumsum(gains), output_type=tf.int32)
            masks.append(tf.cast(tf.range(rank) <= best, tf.float32))
        refreshes = self._refreshes + 1
        return [tf.concat(masks, 0), energies, coherence, refreshes]

    def _cost(self):
        """Noise energy of a coordinate, averaged over the horizon."""
        return self.optimizer.coordinate_stddev**2 / self._horizon

    def log(self, iterations, values):
        """Logs the choice, and why, where it has changed much."""
        mask, energies, coherence, _ = values
        gains = energies * coherence
        tf.numpy_function(
            self._log, [iterations, mask, gains, self._cost()], []
        )

    def _log(self, iterations, mask, gains, cost):
        chosen, parts, start = [], [], 0
        for rank in self._ranks:
            parts.append(gains[start : start + rank])
            chosen.append(int(mask[start : start + rank].sum()))
            start += rank
        if self._logged is not None and all(
            old / 2 <= new <= 2 * old for old, new in zip(self._logged, chosen)
        ):
            return
        self._logged = chosen
        for group, part, k in zip(self._groups, parts, chosen):
            logging.info(
                "Step %d, group %s: rank %d of at most %d. Directions in use "
                "bring %.3g of energy for %.3g of noise over the run; those "
                "left out would bring %.3g for %.3g.",
                iterations,
                group.name,
                k,
                len(part),
                part[:k].sum(),
                k * cost,
                part[k:].sum(),
                (len(part) - k) * cost,
            )
