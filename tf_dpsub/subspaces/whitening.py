"""Scales of coordinates that make a public spectrum flatter."""

import numbers
from typing import Any

import tensorflow as tf
from absl import logging

# Share of the largest eigenvalue that is added to all of them.
FLOOR = 1e-3
# Exponents that "auto" chooses from, and how much better than without scales
# one has to be.
EXPONENTS = (0.0, 0.5, 1.0)
_LEAST_GAIN = 1.1
_NOT_CHOSEN = -1
# A choice needs two examples that made the basis, and two that did not.
LEAST_EXAMPLES = 4


def checked_whiten(whiten):
    """The exponent of scales: a float, or `"auto"`.

    Raises:
        ValueError: if it is neither `"auto"` nor a number in [0, 1].
    """
    if isinstance(whiten, str) and whiten == "auto":
        return whiten
    is_number = isinstance(whiten, numbers.Real)
    if is_number and not isinstance(whiten, bool) and 0 <= whiten <= 1:
        return float(whiten)
    raise ValueError(f"Expected whiten in [0, 1] or 'auto', got {whiten!r}.")


class Whitening:
    """Scales of the coordinates in a public subspace, and their exponent.

    With `lambda_j` the mean square of public gradients along direction j of a
    group, and `lambda_1` the largest of the group, the scale is
    `s_j = (lambda_j / lambda_1 + 1e-3)^(-exponent / 2)`, divided by the root
    mean square of all scales in use.

    The exponent `"auto"` is 0, 1/2 or 1, whichever promises the largest
    decrease of the loss by one private step of the best length: the square of
    the product of the expected step with the mean gradient, over the curvature
    along the step, of which noise and sampling are a part. The curvature is
    taken as the second moment of gradients, as in natural gradient descent.
    All means are over public examples that did not make the basis: each half
    shows what the basis of the other one is worth. The exponent stays 0 unless
    another one promises a tenth more.

    Formal guarantees: only public data are read.

    Args:
        exponent: float in (0, 1], or `"auto"`.

    Attributes:
        optimizer: `SubspaceOptimizer`, whose noise and clips count; to be set.
    """

    def __init__(self, exponent: float | str):
        self._given = exponent
        self._choice: Any = None
        self.optimizer: Any = None

    @property
    def is_chosen(self) -> bool:
        """Whether the exponent is chosen, and not given."""
        return self._given == "auto"

    def build(self, optimizer):
        """Creates the variable with the choice, which is saved.

        Args:
            optimizer: Keras optimizer, to `add_variable` to.
        """
        if self.is_chosen:
            self._choice = optimizer.add_variable(
                (),
                initializer=lambda shape, dtype: tf.constant(
                    _NOT_CHOSEN, tf.int64
                ),
                dtype="int64",
                aggregation="only_first_replica",
                name="whitening_choice",
            )

    @property
    def choice(self):
        """The position of the chosen exponent, an int64 variable."""
        return self._choice.value

    @property
    def is_due(self):
        """Whether an exponent has yet to be chosen, a bool tensor."""
        return tf.equal(self.choice, _NOT_CHOSEN)

    @property
    def exponent(self):
        """The exponent in use, a float32 tensor; 0 until one is chosen."""
        if not self.is_chosen:
            return tf.constant(self._given, tf.float32)
        if self._choice is None:
            return tf.constant(0.0)
        return tf.gather(tf.constant(EXPONENTS), tf.maximum(self.choice, 0))

    def scales(self, energies: list, in_use=None):
        """Scales for the exponent in use.

        Args:
            energies: list over groups of `[k]`, sums of squares of public
                gradients along each direction.
            in_use: `[rank]`, 1 for directions in use. Defaults to `None`, all.

        Returns:
            Float32 tensor `[rank]`.
        """
        return _scales(energies, self.exponent, in_use)

    def evidence(self, energies: list, coordinates, sq_norms):
        """Sums that show what each exponent is worth.

        Args:
            energies: as for `scales`.
            coordinates: `[m, rank]`, of public gradients that did not make the
                basis.
            sq_norms: `[m]`, their squared norms.

        Returns:
            Float64 tensor `[exponents, 2]`, to be added over bases: products
            of the expected step with the mean gradient, and curvatures.
        """
        pairs = []
        for exponent in EXPONENTS:
            scales = _scales(energies, tf.constant(exponent), None)
            clipped, _ = self.optimizer.preview(coordinates, sq_norms, scales)
            pairs.append(self._of_step(scales * clipped, coordinates, scales))
        return tf.stack(pairs)

    def _of_step(self, steps, gradients, scales):
        """A product and a curvature, of `[m, rank]` contributions of rows."""
        # Squares of squares of large gradients.
        steps, gradients, scales = (
            tf.cast(t, tf.float64) for t in (steps, gradients, scales)
        )
        count = gradients.shape[0]

        def of_different_rows(left, right):
            """Products of two means, by direction, without a row's own."""
            whole = tf.reduce_sum(left, 0) * tf.reduce_sum(right, 0)
            of_same_row = tf.reduce_sum(left * right, 0)
            return (whole - of_same_row) / (count * (count - 1))

        curvature = tf.reduce_mean(tf.square(gradients), 0)  # [rank]
        signal = of_different_rows(steps, steps)
        sampling = tf.reduce_mean(tf.square(steps), 0)
        sampling /= self.optimizer.batch_size
        noise = tf.square(self.optimizer.coordinate_stddev * scales)
        return tf.stack(
            [
                tf.reduce_sum(of_different_rows(steps, gradients)),
                tf.maximum(tf.reduce_sum(curvature * signal), 0.0)
                + tf.reduce_sum(curvature * (sampling + noise)),
            ]
        )

    def best(self, evidence) -> tuple:
        """The exponent with the most evidence.

        Args:
            evidence: what `evidence` returned, added over bases.

        Returns:
            Its position, an int64 tensor, and what each exponent promises.
        """
        products, curvatures = tf.unstack(evidence, axis=1)
        promised = tf.math.divide_no_nan(
            tf.square(tf.maximum(products, 0.0)), curvatures
        )
        handicaps = [1.0] + [_LEAST_GAIN] * (len(EXPONENTS) - 1)
        return tf.argmax(promised / handicaps), promised

    def log(self, best, promised):
        """Logs a choice, and why.

        Args: as `best` returns them.
        """
        tf.numpy_function(_log, [best, promised], [])


def _scales(energies, exponent, in_use):
    parts = []
    for energy in energies:
        largest = tf.reduce_max(energy)
        # Where there is no gradient at all, no direction is louder.
        shares = tf.where(largest > 0, energy / largest, 1.0)
        parts.append((shares + FLOOR) ** (-exponent / 2))
    scales = tf.concat(parts, 0)
    in_use = tf.ones_like(scales) if in_use is None else in_use
    squares = tf.reduce_sum(in_use * tf.square(scales))
    return scales / tf.sqrt(squares / tf.reduce_sum(in_use))


def _log(best, promised):
    logging.info(
        "whiten='auto' takes %g: exponents %s promise %s.",
        EXPONENTS[best],
        ", ".join(f"{e:g}" for e in EXPONENTS),
        ", ".join(f"{p:.3g}" for p in promised),
    )
