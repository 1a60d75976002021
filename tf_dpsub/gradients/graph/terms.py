"""Terms: the vectors whose outer products add up to a row.

With the numbers of a weight as a matrix, row i of the batch is
`G_i = sum over t of a[i, t] outer b[i, t]`. Each class holds one side of it,
and multiplies it by thin matrices without forming any row.
"""

import abc

import tensorflow as tf

from tf_dpsub.gradients import precision

# Of vectors and what they are multiplied by.
_SHORT = (True, False)


class Terms(abc.ABC):
    """Vectors `[batch, t, size]`.

    Attributes:
        count: int, t, the number of terms of a row.
        size: int.
    """

    def __init__(self, count: int, size: int):
        self.count, self.size = count, size

    @abc.abstractmethod
    def dot(self, basis):
        """Inner products with columns `[size, r]`, `[batch, t, r]`."""

    @abc.abstractmethod
    def combine(self, values):
        """Sum of vectors outer values `[batch, t, r]`, `[size, r]`."""


class Vectors(Terms):
    """Terms that can be added up for each row apart."""

    @abc.abstractmethod
    def combine_each(self, values):
        """As `combine`, of each row apart, `[batch, size, r]`."""

    @abc.abstractmethod
    def dot_each(self, bases):
        """As `dot`, of bases `[batch, size, r]`, one for each row."""


class Dense(Vectors):
    """Vectors that are given.

    Args:
        vectors: float32 `[batch, t, size]`, `precision.rounded`.
    """

    def __init__(self, vectors):
        super().__init__(*vectors.shape[1:])
        self.vectors = vectors

    @property
    def _merged(self):
        return tf.reshape(self.vectors, [-1, self.size])

    def dot(self, basis):
        dots = precision.matmul_in_parts(self._merged, basis, short=_SHORT)
        return tf.reshape(dots, [-1, self.count, basis.shape[1]])

    def combine(self, values):
        values = tf.reshape(values, [-1, values.shape[2]])
        return precision.matmul(
            self._merged, values, transpose_a=True, short=_SHORT
        )

    def combine_each(self, values):
        return precision.matmul(
            self.vectors, values, transpose_a=True, short=_SHORT
        )

    def dot_each(self, bases):
        return precision.matmul(self.vectors, bases, short=_SHORT)


class OneHot(Terms):
    """Unit vectors.

    Args:
        indices: int `[batch, t]`.
        size: int.
    """

    def __init__(self, indices, size: int):
        super().__init__(indices.shape[1], size)
        self.indices = indices

    def dot(self, basis):
        return tf.gather(basis, self.indices)

    def combine(self, values):
        return tf.math.unsorted_segment_sum(
            tf.reshape(values, [-1, values.shape[2]]),
            tf.reshape(self.indices, [-1]),
            self.size,
        )


class Patches(Vectors):
    """The parts of an image that a filter sees.

    Args:
        image: float32 `[batch, extra, *space, channels]`, `precision.rounded`.
        geometry: that of a `convolutions.Convolution`, without groups.
        count: int, number of places.
    """

    def __init__(self, image, geometry, count: int):
        super().__init__(count, geometry.patch_size)
        self._image, self._geometry = image, geometry

    def dot(self, basis):
        dots = self._geometry.convolved(self._image, basis)
        return tf.reshape(dots, [-1, self.count, basis.shape[1]])

    def combine(self, values):
        return self._geometry.combined(self._image, values)

    def combine_each(self, values):
        return self._geometry.combined_each(self._image, values)

    def dot_each(self, bases):
        return self._geometry.convolved_each(self._image, bases)


def inner(a, b):
    """Inner products of all terms of two sides.

    Args:
        a, b: `Dense` or `OneHot`.

    Returns:
        Float64 tensor `[batch, t of a, t of b]`, as precise as
        `precision.matmul_in_parts`.
    """
    if isinstance(a, OneHot) and isinstance(b, OneHot):
        same = a.indices[:, :, None] == b.indices[:, None, :]
        return tf.cast(same, tf.float64)
    if isinstance(b, OneHot):
        gathered = tf.gather(a.vectors, b.indices, axis=2, batch_dims=1)
        return tf.cast(gathered, tf.float64)
    if isinstance(a, OneHot):
        return tf.linalg.matrix_transpose(inner(b, a))
    return precision.matmul_in_parts(
        a.vectors,
        b.vectors,
        transpose_b=True,
        short=(True, True),
        dtype=tf.float64,
    )


def two_sided_products(pairs: list, left, right):
    """`left^T G_i right` of rows that are sums over pairs of terms.

    Args:
        pairs: list of pairs of `Terms`.
        left: float32 `[rows of a matrix, r]`.
        right: float32 `[columns of it, s]`.

    Returns:
        Float32 tensor `[batch, r, s]`.
    """
    return tf.add_n(
        [
            precision.matmul_in_parts(
                a.dot(left), b.dot(right), transpose_a=True
            )
            for a, b in pairs
        ]
    )


def second_moment_product(pairs: list, basis, weights):
    """Sum of `weights[i] * G_i G_i^T basis`.

    Args:
        pairs: as for `two_sided_products`.
        basis: float32 `[rows of a matrix, r]`.
        weights: float32 `[batch]`.

    Returns:
        Float32 tensor of the shape of `basis`.
    """
    # G_i^T basis is the sum over t of b[i, t] outer values[i, t].
    values = [
        weights[:, None, None] * side.dot(basis)
        for side in (a for a, _ in pairs)
    ]
    others = [b for _, b in pairs]
    terms = sum(b.count for b in others)
    if any(isinstance(b, OneHot) for b in others) or (
        all(isinstance(b, Dense) for b in others)
        and terms * terms < others[0].size * basis.shape[1]
    ):
        values = [
            tf.add_n(
                [
                    precision.matmul(tf.cast(inner(k, j), tf.float32), v)
                    for j, v in zip(others, values)
                ]
            )
            for k in others
        ]
    else:
        each = tf.add_n(
            [b.combine_each(v) for b, v in zip(others, values)]
        )  # [batch, columns, r]
        values = [b.dot_each(each) for b in others]
    return tf.add_n([a.combine(v) for (a, _), v in zip(pairs, values)])
