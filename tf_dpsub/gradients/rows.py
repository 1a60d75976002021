"""Arithmetic on tensors whose axis 0 is the batch."""

import tensorflow as tf

from tf_dpsub.gradients import precision


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
