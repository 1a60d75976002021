"""The matrix of per-example gradients, as mechanisms use it."""

import abc

import keras
import tensorflow as tf

from tf_dpsub.gradients import precision
from tf_dpsub.gradients.matrices import KernelMatrix
from tf_dpsub.gradients.rows import combine_rows, scale_rows

# PRIVACY: a squared norm is computed with a relative error far below this
# share of the squared sum of magnitudes that went into it.
ROUNDING_MARGIN = 2.0**-18

# Products that are added up in float32 in the coordinates of a row, which then
# round by less than 2^-11 of its norm.
LONGEST_COORDINATE = 2**12


class PerExampleGradients(abc.ABC):
    """The matrix of per-example gradients, batch x parameters, never stored.

    Row i is the gradient of the loss of example i with respect to
    `variables`. All results are float32, whatever the model computes in, unless
    they are asked for in float64.

    Formal guarantees: row i depends on example i, on the weights and on
    public randomness, and on nothing else. Rows of examples that are not
    `valid` are exactly zero. For every c in [0, 1]^batch, row i changes what
    `weighted_sum(c)` returns by a vector whose norm is at most
    `c[i] * sqrt(sq_norm_bounds()[i])`, rounding included up to the margin of
    2^-10 that mechanisms keep when they clip: norm and sum are computed from
    the same float32 numbers. The same holds of the rows of some variables
    alone.

    Attributes:
        variables: list of the variables, in the order of all results.
        batch_size: int, number of rows.
        merged_terms: int, the most terms of a row that `weighted_sum` adds up
            in float32 together with those of other rows; 1 where rows are
            formed before.
        merged_length: float, of how many clips what is added up of a row in
            float32 may be long: more than 1 where it is several sums, of uses
            of a tied weight, whose lengths add up.
        valid: bool tensor of shape `[batch]`, false where a row is not finite
            or too large to be squared in float32.
    """

    merged_terms = 1
    merged_length = 1

    def __init__(self, variables, batch_size):
        self.variables = list(variables)
        self.batch_size = batch_size

    @abc.abstractmethod
    def sq_norms(self, variables: list | None = None):
        """Squared norms of the rows.

        Args:
            variables: list, the variables that count. Defaults to all.

        Returns:
            Float32 tensor of shape `[batch]`.
        """

    @abc.abstractmethod
    def sq_norm_bounds(self, variables: list | None = None):
        """Upper bounds of the squared norms, rounding errors included.

        Args:
            variables: list, the variables that count. Defaults to all.

        Returns:
            Float32 tensor of shape `[batch]`, finite, zero where not `valid`.
        """

    def sq_levels(self, variables: list | None = None):
        """Bounds of squared norms of sums of some terms of a row, of any.

        What is added up of a row is no longer than `merged_length` clips if
        these are no more than `4 * merged_terms` squared clips.

        Args:
            variables: list, the variables that count. Defaults to all.

        Returns:
            Float32 tensor of shape `[batch]`, of terms that are added up with
            those of other rows: where there are fewer than `merged_terms`, in
            proportion to the square of their number.
        """
        return tf.zeros([self.batch_size])

    @abc.abstractmethod
    def nonzero(self):
        """Which rows may have an entry that is not zero.

        Bounds of squared norms are above zero for rows of zeros, too.

        Returns:
            Bool tensor of shape `[batch]`: false for an example whose loss has
            weight zero, and for one that is not `valid`. Where it is false, the
            row is zero, up to numbers that are flushed to zero.
        """

    @abc.abstractmethod
    def rows(self, variable):
        """Rows of one variable: the only call that stores them.

        Returns:
            Float32 tensor of shape `[batch, *variable.shape]`.
        """

    def factors(self, variable, matrix: KernelMatrix):
        """Vectors whose outer products add up to the rows of a variable.

        Args:
            variable: one of `variables`.
            matrix: `KernelMatrix`, how it is one.

        Returns:
            Float32 tensors of shapes `[batch, t, inputs]` and
            `[batch, t, outputs]`; None where rows are not known as such sums.
        """
        return None

    def two_sided_products(self, variable, matrix: KernelMatrix, left, right):
        """`left^T G_i right`, with row i of a variable as a matrix `G_i`.

        Rows that are known as sums of outer products are not formed.

        Args:
            variable: one of `variables`.
            matrix: `KernelMatrix`, how it is one.
            left: float32 tensor of shape `[inputs, r]`.
            right: float32 tensor of shape `[outputs, s]`.

        Returns:
            Float32 tensor of shape `[batch, r, s]`.
        """
        rows = matrix.matrices(self.rows(variable))
        by_right = precision.matmul_in_parts(rows, right)
        products = precision.matmul_in_parts(by_right, left, transpose_a=True)
        return tf.linalg.matrix_transpose(products)

    def second_moment_products(
        self, variable, matrix: KernelMatrix, left, right, weights
    ) -> list:
        """`M left` and `N right`, of the second moments M and N of `G_i`.

        `M` is the sum of `weights[i] * G_i G_i^T`, and `N` that of
        `weights[i] * G_i^T G_i`.

        Args:
            variable, matrix, left, right: as for `two_sided_products`.
            weights: float32 tensor of shape `[batch]`.

        Returns:
            List of two float32 tensors, of the shapes of `left` and `right`.
        """
        rows = matrix.matrices(self.rows(variable))
        by_left = precision.einsum("npd,pr->ndr", rows, left)
        by_right = precision.einsum("npd,ds->nps", rows, right)
        by_left, by_right = (
            scale_rows(weights, part) for part in (by_left, by_right)
        )
        return [
            precision.einsum("npd,ndr->pr", rows, by_left),
            precision.einsum("npd,nps->ds", rows, by_right),
        ]

    @abc.abstractmethod
    def weighted_sum(self, c, variables: list | None = None) -> list:
        """Sum of `c[i]` times row i.

        Args:
            c: float32 tensor of shape `[batch]`; or float64, for a sum that is
                taken in float64.
            variables: list, the variables whose sums are returned. Defaults to
                all.

        Returns:
            List of tensors, one of each variable's shape, of the type of `c`,
            or of float64 where they were added up in it.
        """

    @abc.abstractmethod
    def gram(self, variables: list | None = None):
        """Inner products of the rows.

        Args:
            variables: list, the variables that count. Defaults to all.

        Returns:
            Float32 tensor of shape `[batch, batch]`.
        """

    def project(self, basis, variables: list | None = None):
        """Coordinates of the rows in a basis.

        Rows are formed for one variable at a time.

        Args:
            basis: list aligned with `variables` of float32 tensors of shape
                `[size of the variable, k]`.
            variables: list, the variables that the basis is for. Defaults to
                all.

        Returns:
            Float32 tensor of shape `[batch, k]`.
        """
        variables = self.variables if variables is None else variables
        total = tf.zeros([self.batch_size, basis[0].shape[1]], tf.float64)
        for variable, block in zip(variables, basis, strict=True):
            with tf.control_dependencies([total]):
                rows = tf.reshape(self.rows(variable), [self.batch_size, -1])
                total += precision.matmul_in_parts(
                    rows, block, longest=LONGEST_COORDINATE, dtype=tf.float64
                )
        return tf.cast(total, tf.float32)

    def combinations(self, weights, variables: list | None = None) -> list:
        """Linear combinations of the rows, several at once.

        Args:
            weights: float32 tensor of shape `[batch, k]`.
            variables: list, the variables that count. Defaults to all.

        Returns:
            List of float32 tensors of shape `[size of the variable, k]`.
        """
        variables = self.variables if variables is None else variables
        return [
            combine_rows(weights, self.rows(variable)) for variable in variables
        ]


def tf_variable(variable):
    """The `tf.Variable` of a Keras variable, or the variable itself."""
    if isinstance(variable, keras.Variable):
        return variable.value
    return variable
