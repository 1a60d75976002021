"""Arithmetic on tensors whose axis 0 is the batch."""

import math

import tensorflow as tf

from tf_dpsub.gradients import precision, summation


def reshape(x, shape: list):
    """`x` in a static shape: itself, where it has that one already."""
    return x if x.shape == tf.TensorShape(shape) else tf.reshape(x, shape)


def sum_squares(x):
    """Squared norms of the rows of `x`, of shape `[batch, ...]`."""
    return tf.reduce_sum(tf.square(x), axis=list(range(1, x.shape.rank)))


def add_in_order(tensors):
    """Sum of a few small tensors, in one order whatever else runs.

    AddN begins with any of its inputs whose memory is free by then: which ones
    are depends on when their other readers ran, and the last bit on that.
    """
    if len(tensors) == 1:
        return tensors[0]
    return tf.reduce_sum(tf.stack(tensors), axis=0)


def any_nonzero(tensors):
    """Which rows have an entry that is not zero in one of the tensors."""
    axes = [list(range(1, t.shape.rank)) for t in tensors]
    flags = [tf.reduce_any(t != 0, axis=a) for t, a in zip(tensors, axes)]
    return tf.reduce_any(tf.stack(flags), axis=0)


# Rows of more terms are formed before they are added up in float32: sums of all
# terms of all rows would round too much. So are all rows where terms are not
# added up one after another.
MOST_MERGED_TERMS = 128
# So are those of narrower outer products: for them, a product of matrices adds
# up everything one after another.
_NARROW = 8


def merged_terms(left, right) -> int:
    """Terms of a row that `weighted_products` adds up with those of others.

    That is in float32; of rows that are formed first, it is 1.

    Args:
        left, right: tensors, as for `weighted_products`.
    """
    batch_size, *groups, terms, _ = left.shape
    sides = left.shape[-1], right.shape[-1]
    if terms > MOST_MERGED_TERMS or min(sides) < _NARROW:
        return 1
    rows = min(batch_size, precision.rows_at_a_time(terms))
    is_in_order = summation.is_in_order(rows * terms, sides, math.prod(groups))
    return terms if is_in_order else 1


def weighted_products(c, left, right):
    """Sum of `c[i]` times the outer products of row i.

    Formal guarantees: in float32, terms of a row are added up with those of
    others only as `merged_terms` says: for these, clipping leaves room.

    Args:
        c: float32 or float64 tensor of shape `[batch]`.
        left: tensor of shape `[batch, ..., t, k]`.
        right: tensor of shape `[batch, ..., t, n]`: of each row, t products
            `left[i, ..., t] outer right[i, ..., t]` are added up.

    Returns:
        Tensor of shape `[..., k, n]`, of the type of `c`, or float64.
    """
    is_formed = merged_terms(left, right) < left.shape[-2]
    if c.dtype == tf.float32 and is_formed:
        return _sum_of_formed_rows(c, left, right)
    return _sum_of_products(c, left, right)


def _sum_of_products(c, left, right):
    """As `weighted_products`, of all terms of all rows together.

    Formal guarantees: no more products are added up in float32 than
    `precision.rows_at_a_time` says; from there on sums are float64.
    """
    left, right = (tf.cast(f, c.dtype) for f in (left, right))
    scales_left = left.shape[-1] < right.shape[-1]
    if scales_left:
        left = scale_rows(c, left)
    else:
        right = scale_rows(c, right)
    short = (not scales_left, scales_left)
    batch_size, rows = left.shape[0], left.shape[0]
    if c.dtype == tf.float32:
        rows = min(rows, precision.rows_at_a_time(left.shape[-2]))
    if rows == batch_size:
        return _sum_of_all(left, right, short)
    shape = [*left.shape[1:-2], left.shape[-1], right.shape[-1]]
    return tf.foldl(
        lambda total, part: (
            total + tf.cast(_sum_of_all(*part, short), tf.float64)
        ),
        tuple(_in_parts(f, rows) for f in (left, right)),
        tf.zeros(shape, tf.float64),
        parallel_iterations=1,
    )


# Numbers of rows that are formed at a time.
_FORMED_AT_A_TIME = 2**23


def _sum_of_formed_rows(c, left, right):
    """As `weighted_products`, of rows that are formed before they are added up.

    Formal guarantees: how a row is rounded does not depend on others.
    """
    size = math.prod(left.shape[1:-2]) * left.shape[-1] * right.shape[-1]
    batch_size = left.shape[0]
    rows = max(1, min(batch_size, _FORMED_AT_A_TIME // size))

    def total(c, left, right):
        formed = tf.cast(outer_sums(left, right), tf.float32)
        formed = reshape(formed, [formed.shape[0], size])
        sums = precision.matmul(c[None], formed, short=(False, False))
        return tf.reshape(sums, [*left.shape[1:-2], left.shape[-1], -1])

    if rows == batch_size:
        return total(c, left, right)
    parts = tuple(_in_parts(f, rows) for f in (c, left, right))
    shape = [*left.shape[1:-2], left.shape[-1], right.shape[-1]]
    return tf.foldl(
        lambda sums, part: sums + tf.cast(total(*part), tf.float64),
        parts,
        tf.zeros(shape, tf.float64),
        parallel_iterations=1,
    )


# Terms of a row that are added up in float32.
_LONGEST_ROW = 2**10


def outer_sums(left, right, short: tuple = (True, True)):
    """Sums of outer products, of each row apart.

    Formal guarantees: an entry rounds by at most 2^-14 of the magnitudes of its
    products, in whatever order they are added up. Norms leave room for that.

    Args:
        left: float32 or bfloat16 tensor of shape `[batch, ..., t, k]`.
        right: the same, of shape `[batch, ..., t, n]`.
        short: as for `precision.bilinear`. Defaults to both.

    Returns:
        Tensor of shape `[batch, ..., k, n]`, of their type, or float32.
    """
    if left.shape[-2] <= _LONGEST_ROW:
        return precision.matmul(left, right, transpose_a=True, short=short)
    left, right = (tf.cast(f, tf.float32) for f in (left, right))
    return precision.matmul_in_parts(
        left,
        right,
        transpose_a=True,
        short=short,
        longest=_LONGEST_ROW,
    )


def _sum_of_all(left, right, short):
    left, right = map(_merge_terms, (left, right))
    return precision.matmul(left, right, transpose_a=True, short=short)


def _merge_terms(factor):
    """`[..., rows and terms, k]` of `[rows, ..., terms, k]`."""
    rows, *groups, count, size = factor.shape
    if math.prod(groups) > 1:
        last = factor.shape.rank - 1
        factor = tf.transpose(factor, [*range(1, last - 1), 0, last - 1, last])
    return reshape(factor, [*groups, rows * count, size])


def _in_parts(factor, rows):
    """`[parts, rows, ...]` of `[batch, ...]`; the last part ends in zeros."""
    missing = -factor.shape[0] % rows
    if missing:
        paddings = [[0, missing]] + [[0, 0]] * (factor.shape.rank - 1)
        factor = tf.pad(factor, paddings)
    return tf.reshape(factor, [-1, rows, *factor.shape[1:]])


def inner_products(x, others=None):
    """Inner products of the rows of `x`, of shape `[n, ...]`, and of others.

    Args:
        x: tensor of shape `[n, ...]`.
        others: tensor of shape `[m, ...]`. Defaults to `None`, `x`.

    Returns:
        Tensor of shape `[n, m]`.
    """
    x, others = (
        tf.reshape(t, [1, t.shape[0], -1])
        for t in (x, x if others is None else others)
    )
    # As a batch of one: on a CPU TensorFlow's MatMul takes twice as long for
    # few, long rows.
    return precision.matmul(x, others, transpose_b=True)[0]


def scale_rows(c, x):
    """`c[i] * x[i]` for `c` of shape `[batch]`, `x` of shape `[batch, ...]`.

    The result has the type of `c`.
    """
    c = tf.reshape(c, [-1] + [1] * (x.shape.rank - 1))
    return c * tf.cast(x, c.dtype)


def combine_rows(weights, x):
    """`[size, k]`, from weights `[batch, k]` and rows `[batch, ...]`."""
    return precision.matmul(
        tf.reshape(x, [x.shape[0], -1]), weights, transpose_a=True
    )


def mask_rows(valid, tensors: list) -> list:
    """`tensors` with zeros in the rows that are not valid, even where NaN."""
    ranks = dict.fromkeys(x.shape.rank for x in tensors)
    masks = {r: tf.reshape(valid, [-1] + [1] * (r - 1)) for r in ranks}
    types = dict.fromkeys(x.dtype for x in tensors)
    zeros = {dtype: tf.zeros([], dtype) for dtype in types}
    return [tf.where(masks[x.shape.rank], x, zeros[x.dtype]) for x in tensors]
