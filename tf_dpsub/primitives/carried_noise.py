"""Noise of steps that later steps take back in part."""

import math
from collections.abc import Sequence

import tensorflow as tf

from tf_dpsub.primitives import grid, noise


class CarriedNoise:
    """Noise `w_t = z_t - sum_j r_j w_(t-j)`, with fresh Gaussian noise `z_t`.

    The sum is over the noise of the last `bands - 1` steps, with public ratios
    `r_j = c_j / c_0` of the coefficients of a banded matrix C: `w = C^-1 z`.

    Formal guarantees: what is released at a step is `y_t = S_t + w_t`, where
    S_t is the sum over the batch, rounded to a public grid on which z_t and w_t
    lie, too. All is added exactly. Let an example be in at most one of any
    `bands` steps that follow each other. Then its part in step i and in the
    `bands - 1` following ones is one Gaussian mechanism, chosen adaptively, of
    sensitivity `sensitivity(ratios) C`, C being the most by which it moves S_i,
    and of the standard deviation of z. For what was released tells whoever
    knows the sums the noise of earlier steps, `w_s = y_s - S_s`, so that

        y_t = z_t + (S_t - R(sum_j r_j (y_(t-j) - S_(t-j)))),

    with R the rounding to the grid. All but z_t is a query that is answered
    with fresh noise, on the grid. If one example moves S_i by D, this query
    moves by `r_j D` at step i + j (r_0 = 1).

    *Sampling.* Let a public rule put the example into one of `bands` groups, of
    which steps take one after the other, and let a step draw each example of
    its group independently with probability q (cyclic Poisson sampling). An
    example of group g can be drawn at the steps g, g + bands, ... alone. Cut
    the run there: the first part releases nothing of it. In each other part,
    its coin falls once, at the first step, with probability q whatever was
    released before, and without it the part is one of a run that lacks the
    example. With it, the queries of the part move by a vector that follows from
    D and the ratios, of which the norm is at most the sensitivity. A part is
    therefore one Poisson-sampled Gaussian, and the run composes
    `ceil(steps / bands)` of them, adaptively: one event for each cycle,
    whichever group the example is in, and not one for each step.

    *Rounding.* The noise z is that of a Gaussian mechanism on the grid, as
    `grid.GridNoise` says: its queries have to lie on it, and what rounding adds
    to their sensitivity is all that it costs. S_i is rounded once, which the
    ratios pass on like D itself. R moves a query by at most two spacings more
    in each number: one as it rounds, and one for errors of float64 in the sum,
    which are smaller while noise is below 2^40 spacings, that is, for less than
    10^9 numbers and multipliers up to 16. `grid_noise` makes the grid so fine
    that all roundings together move the `bands` queries by at most `2^-12` of
    their sensitivity, which clipping leaves for it: nothing is left to add to
    the event.

    The noise of past steps is as secret as a `noise.NoiseKey`: it lives in
    memory only, in variables that neither Keras nor TensorFlow tracks. A copy
    or a pickle begins with none. To begin anew is always private: C is then
    made of blocks, each of which is banded, and no column has a larger norm.

    Args:
        bands: int, >= 2.
        count: int, the number of numbers that a step releases.
    """

    def __init__(self, bands: int, count: int):
        self._arguments = bands, count
        with tf.init_scope():
            self._past = _local_variable(tf.zeros([bands - 1, count], "double"))
            self._steps = _local_variable(tf.zeros([], tf.int64))

    def __reduce__(self):
        return type(self), self._arguments

    @property
    def bands(self) -> int:
        """The number of bands."""
        return self._arguments[0]

    def forget(self):
        """Begins anew, as before the first step."""
        first = _on_first_replica(self._past)
        first.assign(tf.zeros_like(first))
        _on_first_replica(self._steps).assign(0)

    def advance(
        self,
        key,
        ratios: Sequence[float],
        fresh: grid.GridNoise,
        secure: bool = False,
    ):
        """Draws the noise of the next step; on the first replica alone.

        Args:
            key: int64 tensor of shape `[2]`, used for this call alone.
            ratios: sequence of `bands` floats, of which the first is 1.
            fresh: `grid.GridNoise`, that of z.
            secure: bool, as for `noise.noisy`. Defaults to `False`.

        Returns:
            Float64 tensor `[count]` of multiples of the spacing of `fresh`.
        """
        past = _on_first_replica(self._past)  # [bands - 1, count]
        steps = _on_first_replica(self._steps)
        slots = self.bands - 1
        now = tf.convert_to_tensor(steps)
        # Step s is in row s modulo the number of rows.
        ages = tf.math.floormod(now - 1 - tf.range(slots, dtype="int64"), slots)
        shares = tf.gather(tf.constant(ratios[1:], tf.float64), ages)
        taken_back = tf.linalg.matvec(past, -shares, transpose_a=True)
        (drawn,) = noise.noisy(key, [taken_back], [fresh], secure, "float64")
        slot = tf.math.floormod(now, slots)
        past.scatter_update(
            tf.IndexedSlices(drawn[tf.newaxis], slot[tf.newaxis])
        )
        steps.assign_add(1)
        return drawn


def sensitivity(ratios: Sequence[float]) -> float:
    """The norm by which an example of norm 1 moves all steps that it is in.

    Args:
        ratios: sequence of floats, of which the first is 1.

    Returns:
        float, at least 1.
    """
    return math.hypot(*ratios)


def grid_noise(
    stddev: float, l2_norm_clip: float, count: int, ratios: Sequence[float]
) -> grid.GridNoise:
    """The fresh noise of steps, and the grid that all of it lies on.

    Formal guarantees: as of `CarriedNoise`. A sum is rounded once, which the
    ratios pass on like the example itself: `sqrt(count)` spacings of the clip.
    The noise that is taken back is rounded at `bands - 1` steps more:
    `2 sqrt((bands - 1) count)` spacings, of a sensitivity that is at least the
    clip.

    Args:
        stddev: float, above 0: what the noise of a single band would have.
        l2_norm_clip: float, the most that one example moves a sum.
        count: int, the number of numbers that a step releases.
        ratios: sequence of floats, of which the first is 1.

    Returns:
        A `grid.GridNoise`.
    """
    roundings = math.ceil(count * (1 + 2 * math.sqrt(len(ratios) - 1)) ** 2)
    fresh = stddev * sensitivity(ratios)
    return grid.GridNoise(fresh, grid.spacing(fresh, l2_norm_clip, roundings))


def _local_variable(value):
    # Of several replicas, the first one alone reads and writes its own.
    return tf.Variable(
        value,
        trainable=False,
        name="carried_noise",
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )


def _on_first_replica(variable):
    return getattr(variable, "values", (variable,))[0]
