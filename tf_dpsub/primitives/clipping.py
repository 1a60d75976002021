"""Clipping of per-example gradients."""

import math

import tensorflow as tf

from tf_dpsub.primitives import grid

# Share of the clip that is left for float32 rounding, in norms and in sums of
# `_ROWS` rows: one row more changes how the others are rounded. In sums of n
# rows at a time, that is up to 2^-26 n for each row of the batch.
_MARGIN = 2.0**-10
_ROWS = 128
LARGEST_MICROBATCH = 512
# Larger batches are summed in float64.
_LARGEST_FLOAT32_BATCH = 4096


def largest_draw(batch_size):
    """Number of rows that hardly any Poisson batch exceeds, a float."""
    return batch_size + 6 * math.sqrt(batch_size)


def largest_batch(batch_size: int, microbatch_size: int):
    """The largest batch for whose rounding clipping leaves room, an int.

    Args:
        batch_size: int, the expected number of rows.
        microbatch_size: int, the number of rows added up at a time.
    """
    if batch_size > _LARGEST_FLOAT32_BATCH:
        return 2**31
    rows = max(_ROWS, largest_draw(batch_size))
    return int(rows * LARGEST_MICROBATCH // microbatch_size)


def clipped_sum(gradients, keep, l2_norm_clip: float, batch_size: int) -> list:
    """Sum of the rows of a microbatch, each clipped as a whole.

    Formal guarantees: over a batch of such sums, added up in float64, one
    example more or less moves the total by at most `l2_norm_clip`.

    Args:
        gradients: `tf_dpsub.gradients.PerExampleGradients`.
        keep: float32 tensor of shape `[batch]`, 0 for rows that do not count.
        l2_norm_clip: float, `inf` for no clipping.
        batch_size: int, the expected number of rows of a whole batch.

    Returns:
        List of float32 tensors; of float64 ones for a large batch.
    """
    is_large = batch_size > _LARGEST_FLOAT32_BATCH
    factors = keep * clip_factors(
        gradients.sq_norm_bounds(), l2_norm_clip, 1 if is_large else batch_size
    )
    if is_large:
        factors = tf.cast(factors, tf.float64)
    return gradients.weighted_sum(factors)


def clip_factors(sq_norm_bounds, l2_norm_clip: float, batch_size: int = 1):
    """Factors that scale rows down to a norm of at most `l2_norm_clip`.

    Formal guarantees: a row times its factor changes a sum by a vector of norm
    at most `l2_norm_clip`, rounding included, if `sq_norm_bounds` are those of
    `tf_dpsub.gradients.PerExampleGradients`. What is kept for rounding is
    2^-10 of the clip, and in proportion more from 128 rows on; and 2^-12 for
    rounding the sum to the grid of the noise.

    Args:
        sq_norm_bounds: float32 tensor of shape `[batch]`.
        l2_norm_clip: float, `inf` for no clipping.
        batch_size: int, the expected number of rows of a whole batch, if they
            are summed in float32. Defaults to `1`, for sums in float64.

    Returns:
        Float32 tensor of shape `[batch]`, at most 1.
    """
    if math.isinf(l2_norm_clip):
        return tf.ones_like(sq_norm_bounds)
    rows = max(_ROWS, largest_draw(batch_size))
    clip = l2_norm_clip * (1 - _MARGIN * rows / _ROWS - grid.MARGIN)
    return tf.minimum(1.0, clip / tf.sqrt(sq_norm_bounds))
