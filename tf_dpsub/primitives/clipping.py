"""Clipping of per-example gradients."""

import dataclasses
import math
import numbers

import tensorflow as tf

from tf_dpsub.checks import check_choice, check_count
from tf_dpsub.primitives import grid
from tf_dpsub.primitives.release import SMALLEST_NORM

# Share of the clip that is left for float32 rounding, in norms and in sums of
# `_ROWS` rows: one row more changes how the others are rounded. In sums of n
# rows at a time, that is up to 2^-26 n for each row of the batch.
_MARGIN = 2.0**-10
_ROWS = 128
# So many take seven eighths of it; the rest is for rows that are rounded
# otherwise at another place.
LARGEST_MICROBATCH = 448
# Larger batches are summed in float64.
_LARGEST_FLOAT32_BATCH = 4096
# So are rows of so many terms that more of the clip would be left for these.
_LARGEST_ROOM = 2.0**-5

RULES = ("flat", "automatic", "unit_norm")
_STABILITY = 0.01
# Of rules that scale rows up: sums stay far from what float32 holds.
_LARGEST_CLIP = 1e20


def check_microbatch_size(microbatch_size: int | None):
    """Checks a number of rows that are added up at a time.

    Args:
        microbatch_size: int, or None for the default.

    Raises:
        ValueError: if it is out of range.
    """
    check_count("microbatch_size", microbatch_size, optional=True)
    if (microbatch_size or 0) > LARGEST_MICROBATCH:
        raise ValueError(
            f"Expected microbatch_size <= {LARGEST_MICROBATCH}, got "
            f"{microbatch_size}: rounding in longer sums would exceed the clip."
        )


def largest_draw(batch_size):
    """Number of rows that hardly any Poisson batch exceeds, a float."""
    return batch_size + 6 * math.sqrt(batch_size)


def largest_batch(batch_size: int):
    """The largest batch for whose rounding clipping leaves room, an int.

    Args:
        batch_size: int, the expected number of rows.
    """
    if batch_size > _LARGEST_FLOAT32_BATCH:
        return 2**31
    return int(max(_ROWS, largest_draw(batch_size)))


@dataclasses.dataclass(frozen=True)
class Clipping:
    """A rule that scales a row g to a norm of at most C.

    | rule | factor |
    |---|---|
    | `"flat"` | `min(1, C / ||g||)` |
    | `"automatic"` | `C / (||g|| + stability)` |
    | `"unit_norm"` | `C / max(||g||, 1e-12)` |

    The last two scale short rows up. A row of zeros stays one.

    Formal guarantees: of each rule, a row of norm n times its factor has a norm
    of at most C, also where the factor is that of an upper bound of n. Norms
    below 1e-12, whose squares may be flushed to zero, count as that.

    Args:
        rule: string. Defaults to `"flat"`.
        stability: float, what automatic clipping adds to a norm. Defaults to
            `None`: 0.01.

    Raises:
        ValueError: if an argument is out of range.

    Reference:
        - [Bu et al., 2023](https://arxiv.org/abs/2206.07136), on automatic
          clipping
    """

    rule: str = "flat"
    stability: float | None = None

    def __post_init__(self):
        check_choice("clipping", self.rule, RULES)
        if self.stability is None:
            return
        if self.rule != "automatic":
            raise ValueError(
                "Expected stability with clipping='automatic' alone, got "
                f"stability={self.stability} with clipping={self.rule!r}. "
                "Leave it out."
            )
        if (
            not isinstance(self.stability, numbers.Real)
            or not SMALLEST_NORM <= self.stability < math.inf
        ):
            raise ValueError(
                f"Expected finite stability >= {SMALLEST_NORM}, got "
                f"{self.stability!r}. For none, pass clipping='unit_norm'."
            )

    @property
    def description(self) -> str:
        """Words for the ledger, which follow the name of a mechanism."""
        return {
            "flat": "",
            "automatic": f", with automatic clipping (stability {self._gamma})",
            "unit_norm": ", with gradients scaled to the norm C",
        }[self.rule]

    @property
    def _gamma(self):
        return _STABILITY if self.stability is None else self.stability

    def check_clip(self, l2_norm_clip: float, name: str = "l2_norm_clip"):
        """Raises `ValueError` if rows cannot be scaled to a clip.

        Args:
            l2_norm_clip: float.
            name: string, for the message. Defaults to `"l2_norm_clip"`.
        """
        if self.rule != "flat" and not l2_norm_clip <= _LARGEST_CLIP:
            raise ValueError(
                f"Expected {name} <= {_LARGEST_CLIP:g} with "
                f"clipping={self.rule!r}, got {l2_norm_clip}: short gradients "
                "are scaled up to it. 1 is usual."
            )

    def factors(self, norms, l2_norm_clip):
        """Factors of rows.

        Args:
            norms: float32 tensor, upper bounds of their norms.
            l2_norm_clip: float or float32 tensor, finite.

        Returns:
            Float32 tensor of the shape of `norms`.
        """
        if self.rule == "flat":
            return tf.minimum(1.0, l2_norm_clip / norms)
        if self.rule == "automatic":
            return l2_norm_clip / (norms + self._gamma)
        return l2_norm_clip / tf.maximum(norms, SMALLEST_NORM)

    def unit(self, l2_norm_clip) -> float:
        """A power of two that no factor exceeds, at least 1."""
        if self.rule == "flat":
            return 1.0
        shortest = self._gamma if self.rule == "automatic" else SMALLEST_NORM
        largest = max(1.0, l2_norm_clip / shortest)
        return 2.0 ** math.ceil(math.log2(largest))


FLAT = Clipping()


def clipped_sum(
    gradients,
    keep,
    l2_norm_clip,
    batch_size: int,
    clipping: Clipping = FLAT,
    variables: list | None = None,
) -> list:
    """Sum of the rows of a microbatch, each clipped as a whole.

    Formal guarantees: over a batch of such sums, added up in float64, one
    example more or less moves the total by at most `l2_norm_clip`.

    Args:
        gradients: `tf_dpsub.gradients.PerExampleGradients`.
        keep: float32 tensor of shape `[batch]`, 0 for rows that do not count.
        l2_norm_clip: float, `inf` for no clipping; or float32 tensor.
        batch_size: int, the expected number of rows of a whole batch.
        clipping: `Clipping`. Defaults to `FLAT`.
        variables: list, of whose rows alone norms and sums are. Defaults to
            `None`, all.

    Returns:
        List of float32 or float64 tensors; of float64 ones for a large batch.
    """
    factors = sum_factors(
        gradients,
        gradients.sq_norm_bounds(variables),
        l2_norm_clip,
        batch_size,
        clipping,
        variables,
    )
    factors *= tf.cast(keep, factors.dtype)
    return weighted_sum(gradients, factors, l2_norm_clip, clipping, variables)


def sum_factors(
    gradients,
    sq_norm_bounds,
    l2_norm_clip,
    batch_size: int,
    clipping: Clipping,
    variables: list | None = None,
    parts: int = 1,
):
    """Factors for sums in float32, or in float64 where rounding is too much.

    Formal guarantees: where a row is a sum of t terms, which are added up with
    those of other rows, one row after another, each addition rounds by up to
    2^-24 of what has been added up. Terms that cancel may make that longer than
    the row. By the magnitudes of the terms, in whatever order they are added,
    factors hold it to `2 sqrt(t)` clips, and of n rows `2^-23 n t^(3/2)` of the
    clip is left for it, and `2^-20 n` for other rounding of the same rows.
    Where all terms together may be several clips long, what is left for rows of
    one clip is left as many times. Parts of a row that are orthogonal and added
    up apart, in sums of the same numbers, are so `sqrt(parts)` times as long
    together, in their lengths, by which they round.

    Args:
        gradients: `tf_dpsub.gradients.PerExampleGradients`.
        sq_norm_bounds, l2_norm_clip: as for `clip_factors`.
        batch_size, clipping, variables: as for `clipped_sum`.
        parts: int, of how many such parts rows are. Defaults to `1`.

    Returns:
        Tensor of shape `[batch]`: float32, or float64 for sums in float64.
    """
    terms = gradients.merged_terms
    length = parts**0.5 * gradients.merged_length
    room = (length - 1) * _margin(batch_size)
    if terms > 1:
        each = parts**0.5 * terms**1.5 * 2.0**-23 + length * 2.0**-20
        room += largest_batch(batch_size) * each
    if batch_size > _LARGEST_FLOAT32_BATCH or room > _LARGEST_ROOM:
        factors = clip_factors(sq_norm_bounds, l2_norm_clip, 1, clipping)
        return tf.cast(factors, tf.float64)
    if terms > 1:
        levels = gradients.sq_levels(variables) / (4 * terms)
        sq_norm_bounds = tf.maximum(sq_norm_bounds, levels)
    return clip_factors(
        sq_norm_bounds, l2_norm_clip, batch_size, clipping, room
    )


def weighted_sum(
    gradients,
    factors,
    l2_norm_clip,
    clipping: Clipping = FLAT,
    variables: list | None = None,
) -> list:
    """Sum of rows times the factors of a rule, which may exceed 1.

    Formal guarantees: those of `tf_dpsub.gradients.PerExampleGradients` are for
    factors in [0, 1]. Larger ones are divided by a power of two before, and
    the sums multiplied by it, both of which are exact.

    Args:
        gradients: `tf_dpsub.gradients.PerExampleGradients`.
        factors: float32 or float64 tensor of shape `[batch]`.
        l2_norm_clip, clipping: those of the factors.
        variables: list, whose rows are added up. Defaults to `None`, all.

    Returns:
        List of tensors of the type of `factors`, or of float64.
    """
    unit = clipping.unit(l2_norm_clip)
    if unit == 1:
        return gradients.weighted_sum(factors, variables)
    sums = gradients.weighted_sum(factors / unit, variables)
    return [unit * s for s in sums]


def clipped_row_sum(rows, keep, l2_norm_clip: float, clipping: Clipping = FLAT):
    """Sum of given rows in float64, each clipped by its norm.

    Formal guarantees: over a batch of such sums, added up in float64, one
    example more or less moves the total by at most `l2_norm_clip`: the norm is
    computed from the very float32 numbers that are added up. A row whose square
    overflows contributes zero.

    Args:
        rows: float32 tensor of shape `[batch, k]`, finite.
        keep: float32 tensor of shape `[batch]`, 0 for rows that do not count.
        l2_norm_clip: float, `inf` for no clipping.
        clipping: `Clipping`, the rule. Defaults to `FLAT`.

    Returns:
        Float64 tensor of shape `[k]`.
    """
    sq_norms = tf.reduce_sum(tf.square(rows), 1)
    factors = clip_factors(sq_norms, l2_norm_clip, clipping=clipping)
    return weighted_row_sum(factors * keep, rows)


def weighted_row_sum(factors, rows):
    """Weighted sum of rows `[batch, k]` in float64."""
    rows, factors = (tf.cast(t, tf.float64) for t in (rows, factors))
    return tf.linalg.matvec(rows, factors, transpose_a=True)


def _margin(batch_size):
    """Share of the clip that is left for rounding, of rows of one clip."""
    return _MARGIN * max(_ROWS, largest_draw(batch_size)) / _ROWS


def clip_factors(
    sq_norm_bounds,
    l2_norm_clip,
    batch_size: int = 1,
    clipping: Clipping = FLAT,
    room: float = 0.0,
):
    """Factors that scale rows to a norm of at most `l2_norm_clip`.

    Formal guarantees: a row times its factor changes a sum by a vector of norm
    at most `l2_norm_clip`, rounding included, if `sq_norm_bounds` are those of
    `tf_dpsub.gradients.PerExampleGradients`. What is kept for rounding is
    2^-10 of the clip, and in proportion more from 128 rows on; and 2^-12 for
    rounding the sum to the grid of the noise.

    Args:
        sq_norm_bounds: float32 tensor of shape `[batch]`.
        l2_norm_clip: float, `inf` for no clipping; or float32 tensor, a public
            number.
        batch_size: int, the expected number of rows of a whole batch, if they
            are summed in float32. Defaults to `1`, for sums in float64.
        clipping: `Clipping`. Defaults to `FLAT`.
        room: float, the share of the clip that is left for more rounding.
            Defaults to `0.0`.

    Returns:
        Float32 tensor of shape `[batch]`, at most `clipping.unit(...)`.
    """
    if not tf.is_tensor(l2_norm_clip) and math.isinf(l2_norm_clip):
        return tf.ones_like(sq_norm_bounds)
    share = 1 - _margin(batch_size) - grid.MARGIN - room
    clip = l2_norm_clip * share
    factors = clipping.factors(tf.sqrt(sq_norm_bounds), clip)
    # No norm is NaN, as no row is. If one were, all would be lost.
    return tf.where(tf.math.is_nan(factors), 0.0, factors)
