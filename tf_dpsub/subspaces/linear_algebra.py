"""Tall matrices that are given as a list of blocks of rows.

A block holds the rows that belong to one variable, `[size, k]`; the matrix of
a group is never put together. Everything compiles under XLA.
"""

import tensorflow as tf

from tf_dpsub.gradients import precision

# What mechanisms rest on: the squared norm of a residual is computed as a
# difference, and noise in coordinates has the clip of the gradients.
ORTHONORMALITY = 2.0**-13
# Of each of two bases whose Kronecker product is one: the norms of what both
# lack add up, and (1 + 2^-15)^2 is less than 1 + 2^-13.
ORTHONORMALITY_OF_SIDES = 2.0**-15

# Passes of Cholesky QR go on until no inner product is further off than this.
_TARGET = 2.0**-18
_PASSES = 8
# Share of the last basis in each normalised column: it takes the place of what
# has no direction, and is lost in rounding errors elsewhere.
_FILL = 2.0**-20
_ROUNDING = 2.0**-22
# Products that are added up in float32. A column of equal numbers rounds all in
# one direction: by 2^-14 of its squared norm, in a sum of four times as many.
_LONGEST_PRODUCT = 2**11
# Squared norms of columns below this may have been flushed to zero.
_SMALLEST_SQUARE = 1e-20


def multiply(left, right):
    """Sum over blocks of `left_v @ right_v`: `[n, size]` and `[size, k]`."""
    return tf.add_n(
        [precision.matmul(a, b) for a, b in zip(left, right, strict=True)]
    )


def normalized(blocks):
    """Any structure of tensors, scaled so that the largest entry is 1."""
    largest = tf.reduce_max(
        [tf.reduce_max(tf.abs(b)) for b in tf.nest.flatten(blocks)]
    )
    scale = tf.where(largest > 1e-37, 1 / largest, 1.0)
    return tf.nest.map_structure(lambda b: b * scale, blocks)


def gram(blocks, others=None):
    """`A^T B` of two matrices, `[k, n]`; `B` defaults to `A`."""
    others = blocks if others is None else others
    return tf.add_n(
        [
            precision.matmul_in_parts(
                a,
                b,
                transpose_a=True,
                longest=_LONGEST_PRODUCT,
                dtype=blocks[0].dtype,
            )
            for a, b in zip(blocks, others, strict=True)
        ]
    )


def right_multiply(blocks, matrix):
    """Blocks of `A @ matrix`."""
    return [precision.matmul(b, matrix) for b in blocks]


def orthonormality_error(blocks):
    """Frobenius norm of `V^T V - I`, a scalar; infinite if not finite."""
    return distance_to_identity(gram(blocks))


def orthonormalize(blocks: list, fill: list) -> tuple:
    """An orthonormal basis of the columns, finite for any finite input.

    Cholesky QR, repeated until the columns are orthonormal: it is made of large
    matrix products alone. Leading columns span the same as before. Where
    columns are zero, or depend on each other, those of `fill` take their place.

    Args:
        blocks: list of float32 `[size, k]`.
        fill: list of the same shapes, orthonormal, such as the last basis.

    Returns:
        List of float32 `[size, k]`, and its `orthonormality_error`.

    Reference:
        - [Fukaya et al., 2020](https://arxiv.org/abs/1809.11085), shifted
          Cholesky QR
    """
    products = gram(blocks)
    blocks, products = tf.cond(
        _is_regular(products),
        lambda: (blocks, products),
        lambda: _filled(blocks, fill),
    )

    def body(passes, products, blocks):
        blocks = right_multiply(blocks, inverse_factor(products))
        return passes + 1, gram(blocks), blocks

    _, products, blocks = tf.while_loop(
        lambda passes, products, _: (
            (passes < _PASSES)
            & (tf.reduce_max(tf.abs(products - _identity(products))) > _TARGET)
        ),
        body,
        (tf.constant(0), products, blocks),
    )
    return blocks, distance_to_identity(products)


def inverse_factor(products):
    """R^-1 for `A^T A = R^T R`, of which A R^-1 is nearer to orthonormal."""
    products = tf.cast(products, tf.float64)
    scale = tf.math.rsqrt(tf.linalg.diag_part(products))  # of unit columns
    lower = _factor(scale[:, None] * products * scale)
    inverse = tf.linalg.triangular_solve(lower, _identity(products))
    return tf.cast(scale[:, None] * tf.transpose(inverse), tf.float32)


def _factor(products):
    """Cholesky factor of the products of unit columns, shifted if need be."""
    eye = _identity(products)
    # Close to the identity it is positive definite, rounding errors included.
    is_close = tf.norm(products - eye) < 0.5
    shift = tf.where(
        is_close, tf.cast(0, tf.float64), _ROUNDING * products.shape[0]
    )
    return tf.linalg.cholesky(products + shift * eye)


def _is_regular(products):
    """Whether a matrix of these products has full rank, as far as they tell."""
    products = tf.cast(products, tf.float64)
    sq_norms = tf.linalg.diag_part(products)
    is_normal = tf.reduce_all(tf.math.is_finite(products)) & tf.reduce_all(
        sq_norms > _SMALLEST_SQUARE
    )
    scale = tf.math.rsqrt(sq_norms)
    unit = tf.where(
        is_normal, scale[:, None] * products * scale, _identity(products)
    )
    smallest = tf.reduce_min(tf.linalg.diag_part(_factor(unit)))
    noise = _ROUNDING * products.shape[0]
    return is_normal & (tf.square(smallest) > 16 * noise)


def _filled(blocks, fill):
    """Unit columns with a little of `fill` in each, and their products."""
    # In two steps: squares of what is scaled first neither overflow nor
    # underflow.
    blocks = normalized(blocks)
    norms = tf.sqrt(
        tf.add_n([tf.reduce_sum(tf.square(b), axis=0) for b in blocks])
    )
    inverse = tf.where(norms > 0, 1 / norms, 0.0)
    blocks = [b * inverse + _FILL * f for b, f in zip(blocks, fill)]
    return blocks, gram(blocks)


def distance_to_identity(products):
    """Frobenius norm of `products - I`; infinite if not finite."""
    error = tf.norm(products - _identity(products))
    return tf.where(tf.math.is_finite(error), error, float("inf"))


def _identity(products):
    return tf.eye(products.shape[0], dtype=products.dtype)
