"""Clipping of per-example gradients."""

import math

import tensorflow as tf

# What float32 rounding in norms and sums may add to a clipped row.
_MARGIN = 1 - 2.0**-10


def clip_factors(sq_norm_bounds, l2_norm_clip):
    """Factors that scale rows down to a norm of at most `l2_norm_clip`.

    Formal guarantees: a row times its factor has norm at most `l2_norm_clip`,
    rounding included, if `sq_norm_bounds` are those of
    `tf_dpsub.gradients.PerExampleGradients`.

    Args:
        sq_norm_bounds: float32 tensor of shape `[batch]`.
        l2_norm_clip: float, `inf` for no clipping.

    Returns:
        Float32 tensor of shape `[batch]`, at most 1.
    """
    if math.isinf(l2_norm_clip):
        return tf.ones_like(sq_norm_bounds)
    return tf.minimum(1.0, l2_norm_clip * _MARGIN / tf.sqrt(sq_norm_bounds))
