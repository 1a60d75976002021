"""Gaussian noise of integers, whose distribution is known exactly.

What is released lies on a public grid: a clipped sum is rounded to it, and
noise is a random number of grid spacings, drawn by comparing random bits with
tables of integers. No floating-point function of a random number is involved,
so that nothing of a sum can be read from the low bits of what is released.
"""

import dataclasses
import decimal
import functools
import math

import numpy as np
import tensorflow as tf

# The share of the clip that clipping leaves for rounding to the grid.
MARGIN = 2.0**-12
# A standard deviation spans at least this many spacings.
_FINEST = 2.0**16
# Random bits that choose an entry of the table, and that are compared there.
_INDEX_BITS = 14
_COMPARED_BITS = 53
# A standard deviation spans between 2^9 and 2^10 entries of the table.
_ENTRIES_BITS = 9
# Fields of random bits whose sum is the low part of the noise.
_FIELDS = 4
# Two random blocks of 64 bits suffice for this many low bits, three for more.
_LOW_BITS_OF_TWO = 15
_LOW_BITS_OF_THREE = 30
# Sums are limited to this many spacings: with noise, float64 is exact.
_LARGEST = 2.0**51


def spacing(stddev: float, l2_norm_clip: float, count: int) -> float:
    """The spacing of the grid for a release, a power of two.

    Formal guarantees: rounding each of `count` numbers to a multiple of it
    moves their difference by at most `2^-12 l2_norm_clip` in Euclidean norm.

    Args:
        stddev: float, standard deviation of the noise, above 0.
        l2_norm_clip: float, the most that one example moves the release.
        count: int, the number of values that are released together.

    Returns:
        float.
    """
    most = min(
        MARGIN * l2_norm_clip / math.sqrt(max(1, count)), stddev / _FINEST
    )
    return 2.0 ** math.floor(math.log2(most))


@dataclasses.dataclass(frozen=True)
class GridNoise:
    """Gaussian noise on a grid: an entry of a table plus random bits.

    With `s = stddev / spacing`, a number of spacings is
    `K = w A + U1 + U2 + U3 + U4 - 2 (w - 1)`. Here `w` is the power of two with
    `2^9 <= s / w < 2^10`, the `U` are uniform in `{0, ..., w - 1}`, and `A` is
    one of `+-1/2, +-3/2, ...`, with probabilities in proportion to
    `exp(-(w A)^2 / (2 (s^2 + 1/12)))`. `A` is drawn by the alias method
    (Walker, 1977) from integers: its law is a table of multiples of 2^-68.

    Formal guarantees: let G be Gaussian with standard deviation `s`. `K` is
    distributed as `round(G) + U1 + ... + U4 - 2 (w - 1)`, but for a total
    variation distance of `shortfall(1)`. If a sum X is an integer, X plus that
    is a function of X + G and of random bits alone: releasing X + K is
    post-processing of the Gaussian mechanism, which alone has to be accounted
    for. Every integer up to 8.9 standard deviations is reached.

    Args:
        stddev: float, standard deviation of the noise.
        spacing: float, a power of two, at most `2^-16 stddev`.

    Raises:
        ValueError: if the spacing is out of range.

    Reference:
        - [Mironov, 2012](https://doi.org/10.1145/2382196.2382264)
        - [Canonne, Kamath, Steinke, 2020](https://arxiv.org/abs/2004.00010),
          on noise of integers
    """

    stddev: float
    spacing: float

    def __post_init__(self):
        largest = 2.0 ** (_LOW_BITS_OF_THREE + _ENTRIES_BITS + 1)
        if not _FINEST <= self.stddev / self.spacing < largest:
            raise ValueError(
                f"Expected a standard deviation of {_FINEST:g} to "
                f"{largest:g} spacings, got {self.stddev / self.spacing:g}. "
                "Lower the noise multiplier."
            )

    @property
    def low_bits(self) -> int:
        """Binary logarithm of w."""
        _, exponent = math.frexp(self.stddev / self.spacing)
        return exponent - 1 - _ENTRIES_BITS

    @property
    def blocks(self) -> int:
        """Number of pairs of random words for one value."""
        return 2 if self.low_bits <= _LOW_BITS_OF_TWO else 3

    def noisy(self, sums, numbers):
        """Rounds sums to the grid, and adds noise to them, exactly.

        Args:
            sums: float64 tensor, as of `rounded`.
            numbers: `self.numbers` of their shape, which serve once.

        Returns:
            Float64 tensor of multiples of `spacing`.
        """
        return (_whole(sums, self.spacing) + numbers) * self.spacing

    def numbers(self, words: list, table: tuple):
        """K, numbers of spacings.

        Args:
            words: list of `blocks` pairs of uint32 tensors of random bits.
            table: pair of tensors, `table(self)`.

        Returns:
            Float64 tensor of integers, of the shape of each word.
        """
        (first, second), *rest = words
        low = [word for pair in rest for word in pair]
        thresholds, aliases = table
        entry = tf.cast(_bits_of(first, 0, _INDEX_BITS), tf.int32)
        # 32 + 18 + 3 bits to compare.
        compared = tf.cast(second, tf.int64)
        taken = 32 - _INDEX_BITS
        compared = _shifted(compared, taken) + tf.cast(
            _bits_of(first, _INDEX_BITS, taken), tf.int64
        )
        fields, spare = self._fields(low)
        compared = _shifted(compared, _COMPARED_BITS - 32 - taken) + tf.cast(
            spare, tf.int64
        )
        magnitude = tf.where(
            compared < tf.gather(thresholds, entry),
            entry,
            tf.gather(aliases, entry),
        )
        is_negative = _bits_of(low[0], 31, 1)
        sign = 1.0 - 2.0 * tf.cast(is_negative, tf.float64)
        high = sign * tf.cast(2 * magnitude + 1, tf.float64)
        half = 2.0 ** (self.low_bits - 1)
        centre = 2.0 * (2.0**self.low_bits - 1)
        return high * half + (tf.cast(fields, tf.float64) - centre)

    def _fields(self, low):
        """The sum of four uniform numbers, and three more random bits."""
        bits = self.low_bits
        if self.blocks == 2:
            parts = [
                _bits_of(word, shift, bits)
                for word in low
                for shift in (0, bits)
            ]
            # Bit 31 of the first word is the sign.
            spare = _bits_of(low[0], 30, 1), _bits_of(low[1], 30, 2)
            return _added(parts), spare[0] + spare[1] * _word(2)
        parts = [tf.cast(_bits_of(w, 0, bits), tf.int64) for w in low]
        spare = _bits_of(low[1], 30, 2), _bits_of(low[2], 31, 1)
        return _added(parts), spare[0] + spare[1] * _word(4)


def rounded(sums, spacing: float):
    """Rounds sums to the nearest points of a grid.

    Formal guarantees: a difference of two of n numbers each grows by at most
    `sqrt(n) spacing` in Euclidean norm.

    Args:
        sums: tensor of floats. Numbers beyond 2^51 spacings count as that.
        spacing: float, a power of two.

    Returns:
        Float64 tensor of multiples of `spacing`.
    """
    return _whole(tf.cast(sums, tf.float64), spacing) * spacing


def _whole(sums, spacing):
    """Float64 integers, so small that adding noise to them is exact."""
    return tf.round(tf.clip_by_value(sums / spacing, -_LARGEST, _LARGEST))


def _bits_of(word, shift, count):
    if shift:
        word = tf.bitwise.right_shift(word, _word(shift))
    if shift + count == 32:
        return word
    return tf.bitwise.bitwise_and(word, _word(2**count - 1))


def _shifted(number, bits):
    return tf.bitwise.left_shift(number, tf.constant(bits, tf.int64))


def _word(value):
    return tf.constant(value, tf.uint32)


def _added(parts):
    return (parts[0] + parts[1]) + (parts[2] + parts[3])


@functools.lru_cache(maxsize=64)
def table(noise: GridNoise) -> tuple:
    """Thresholds and aliases by which the entry of a number is drawn.

    An index i is uniform, and a number c below 2^53 too: the entry is i where
    `c < thresholds[i]`, else `aliases[i]`.

    Args:
        noise: `GridNoise`.

    Returns:
        Int64 and int32 arrays of shape `[2^14]`.
    """
    size, share = 2**_INDEX_BITS, 2**_COMPARED_BITS
    weights = _whole_probabilities(noise)
    thresholds, aliases = np.full(size, share, np.int64), np.arange(size)
    poor = [i for i in range(size) if weights[i] < share]
    rich = [i for i in range(size) if weights[i] > share]
    while poor:
        i, donor = poor.pop(), rich[-1]
        thresholds[i], aliases[i] = weights[i], donor
        weights[donor] -= share - weights[i]
        if weights[donor] <= share:
            rich.pop()
            if weights[donor] < share:
                poor.append(donor)
    return thresholds, aliases.astype(np.int32)


def _whole_probabilities(noise):
    """Probabilities of the table's entries times 2^67, integers, a list.

    Entry i stands for `|A| = i + 1/2`.
    """
    total = 2 ** (_INDEX_BITS + _COMPARED_BITS)
    with decimal.localcontext(prec=60):
        scale = decimal.Decimal(noise.stddev / noise.spacing)
        variance = (scale**2 + decimal.Decimal(1) / 12) / 4**noise.low_bits
        # From one entry to the next, the logarithm falls by (i + 1) / variance.
        fall = (-1 / variance).exp()
        weight, factor, exact = decimal.Decimal(1), fall, []
        for _ in range(2**_INDEX_BITS):
            exact.append(weight)
            weight *= factor
            factor *= fall
        unit = total / sum(exact)
        weights = [int((unit * e).to_integral_value()) for e in exact]
    weights[0] += total - sum(weights)
    return weights


def shortfall(count: int, steps: int = 1) -> float:
    """Total variation distance of all draws from what is accounted for.

    Formal guarantees: what is (epsilon, delta)-private with exact draws is so
    with `delta + (1 + exp(epsilon)) shortfall(count, steps)`. It holds for
    random bits that are uniform and independent.

    The table's probabilities are rounded to multiples of 2^-67, and are 0 from
    some 9 standard deviations on, which gives each number a distance of at most
    2^-56. That `w A`
    has gaps, which the four uniform numbers fill, gives each a chi-square
    divergence of at most `48 zeta(8) (w / (2 pi s))^8 < 2^-87`; the divergences
    of all numbers and steps add up before the distance is taken (Pinsker).

    Args:
        count: int, numbers released at a step.
        steps: int. Defaults to `1`.

    Returns:
        float.
    """
    draws = count * steps
    return min(1.0, 2.0**-56 * draws + math.sqrt(2.0**-87 * draws / 2))
