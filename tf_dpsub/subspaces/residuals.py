"""Sums of residuals: of what gradients are outside of a subspace."""

import tensorflow as tf

from tf_dpsub.gradients import precision
from tf_dpsub.gradients.rows import sum_squares, weighted_products
from tf_dpsub.primitives.clipping import weighted_row_sum

# Of the magnitudes of a kernel's gradient: rounding of its vectors, as they
# lose what lies in the subspace, moves a row by less than 2^-19 of these.
_MARGIN = 2.0**-14


class Residuals:
    """Residuals as differences of sums: of gradients, and of coordinates.

    Formal guarantees: for every c in [0, 1]^batch, example i changes the sum
    of gradients, less the vector that has the sum of coordinates, by a vector
    of norm at most `c[i]` times that of its residual. Both sums are float64:
    each may be 32 times as long as the difference.

    Args:
        gradients: `tf_dpsub.gradients.PerExampleGradients`.
        coordinates: float32 tensor of shape `[batch, rank]`.

    Attributes:
        adds_in_float32: bool, whether sums round as those of gradients do.
    """

    adds_in_float32 = False

    def __init__(self, gradients, coordinates):
        self._gradients, self._coordinates = gradients, coordinates

    def weighted_sum(self, c, variables: list | None = None) -> list:
        """Sums of `c[i]` times what is of example i.

        Args:
            c: float32 tensor of shape `[batch]`, or float64.
            variables: None, all.

        Returns:
            List of float64 tensors: the sum of coordinates, `[rank]`, and sums
            of all variables' shapes, from which the vector of these coordinates
            is to be subtracted.
        """
        inside = weighted_row_sum(c, self._coordinates)
        c = tf.cast(c, tf.float64)
        return [inside, *self._gradients.weighted_sum(c, variables)]


class KroneckerResiduals:
    """Residuals of a `KroneckerBasis`, free of it before they are added up.

    With `G = sum over t of x_t d_t^T` the gradient of a kernel, U and V the
    bases of its sides, and w the coordinates that are chosen of `U^T G V`, the
    residual is

    `G - U w V^T = (I - U U^T) G + U (U^T G (I - V V^T) + (U^T G V - w) V^T)`.

    Its three parts are orthogonal to each other, so that none is longer than
    the residual. The first is a sum of products of `x_t - U U^T x_t` and `d_t`,
    as long as that of the gradient itself; the others are short.

    Formal guarantees: those of `Residuals`, with sums of the first two parts as
    those of `PerExampleGradients` in float32. The equation holds for any U and
    V, orthonormal or not, and for what rounding makes of `U^T x_t` and of
    `V^T d_t`.

    Args:
        gradients, coordinates: as for `Residuals`.
        kernels: dict from positions of variables to `(x, d, U, V, w)`: vectors
            `[batch, t, inputs]` and `[batch, t, outputs]`, bases
            `[inputs, r]` and `[outputs, s]`, and which coordinates `[r, s]` are
            chosen, 1 or 0.
        matrices: list of `KernelMatrix` or None, one for each variable.
        is_other: float32 tensor of shape `[rank]`, 1 for the coordinates of
            other variables than `kernels`, and else 0.

    Attributes:
        adds_in_float32: bool, as of `Residuals`.
        parts: int, of how many orthogonal parts, each a sum in float32,
            residuals are.
        sq_margins: float32 tensor of shape `[batch]`, what squared norms of
            residuals have to grow by.
    """

    adds_in_float32 = True
    parts = 2

    def __init__(self, gradients, coordinates, kernels, matrices, is_other):
        variables = gradients.variables
        self._kernels, self._matrices = kernels, matrices
        self._others = [k for k, _ in enumerate(variables) if k not in kernels]
        self._rest = Residuals(gradients, coordinates * is_other)
        self._variables = [variables[k] for k in self._others]
        self.sq_margins = _MARGIN * tf.add_n(
            [sum_squares(x) * sum_squares(d) for x, d, *_ in kernels.values()]
        )

    def weighted_sum(self, c, variables=None):
        """As `Residuals.weighted_sum`."""
        inside, *others = self._rest.weighted_sum(c, self._variables)
        sums = dict(zip(self._others, others, strict=True))
        for k, kernel in self._kernels.items():
            # What one kernel needs after that of another.
            with tf.control_dependencies([*sums.values()][-1:]):
                total = _sum_of_kernel(c, *kernel)
            sums[k] = self._matrices[k].like_kernel(total)
        return [inside, *(sums[k] for k in sorted(sums))]


def _sum_of_kernel(c, x, d, left, right, chosen):
    """Sum of `c[i]` times residual i, float64 `[inputs, outputs]`."""
    inner = _dot(x, left), _dot(d, right)  # [batch, t, r], [batch, t, s]
    outside = weighted_products(c, x - _dot(inner[0], left, True), d)
    beside = weighted_products(c, inner[0], d - _dot(inner[1], right, True))
    cores = precision.matmul(*inner, transpose_a=True)  # [batch, r, s]
    core = weighted_row_sum(c, tf.reshape(cores, [x.shape[0], -1]))
    core = tf.reshape(core, chosen.shape) * tf.cast(1 - chosen, tf.float64)
    left, right = tf.cast(left, tf.float64), tf.cast(right, tf.float64)
    inside = tf.cast(beside, tf.float64)
    inside += precision.matmul(core, right, transpose_b=True)
    return tf.cast(outside, tf.float64) + precision.matmul(left, inside)


def _dot(vectors, basis, transpose_b=False):
    """Products of vectors `[batch, t, n]` and a matrix of n rows or columns."""
    products = precision.matmul(
        tf.reshape(vectors, [-1, vectors.shape[2]]),
        basis,
        transpose_b=transpose_b,
    )
    return tf.reshape(products, [*vectors.shape[:2], -1])
