"""Noise on a grid has a known distribution, that of a Gaussian."""

import math

import mpmath
import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from tf_dpsub.primitives import grid
from tf_dpsub.primitives.grid import GridNoise

# Standard deviations in spacings: the ends of the range of an entry, with two
# blocks of random words and with three.
SCALES = [2.0**16, 1.37 * 2**20, 2.0**25 - 1, 2.0**25, 1.9 * 2**39]


def words_of(noise, count, seed=0):
    generator = np.random.default_rng(seed)
    bits = generator.integers(
        0, 2**32, (noise.blocks, 2, count), np.uint32, endpoint=False
    )
    return [tuple(tf.constant(word) for word in pair) for pair in bits]


def numbers(noise, words):
    table = [tf.constant(t) for t in grid.table(noise)]
    return noise.numbers(words, table).numpy()


class TestSpacing:
    @pytest.mark.parametrize("clip", [1e-7, 0.3, 1.0, 1000.0])
    @pytest.mark.parametrize("count", [1, 26_010, 124_000_000])
    def test_rounding_takes_no_more_than_the_margin(self, clip, count):
        result = grid.spacing(1.3 * clip, clip, count)
        assert math.frexp(result)[0] == 0.5
        assert math.sqrt(count) * result <= grid.MARGIN * clip

    def test_of_little_noise_is_finer(self):
        assert grid.spacing(1e-3, 1.0, 1) <= 1e-3 / 2**16

    @pytest.mark.parametrize("scale", [2.0**16 - 1, 2.0**40])
    def test_out_of_range(self, scale):
        with pytest.raises(ValueError, match="Expected a standard deviation"):
            GridNoise(scale, 1.0)


class TestRounded:
    def test_to_the_nearest_point(self):
        result = grid.rounded(tf.constant([0.3, -0.4, 0.125, 7.0]), 0.25)
        np.testing.assert_array_equal(result, [0.25, -0.5, 0.0, 7.0])
        assert result.dtype == tf.float64

    def test_of_huge_sums_is_exact_with_noise(self):
        result = grid.rounded(tf.constant([1e30, -1e30], tf.float64), 2.0**-20)
        np.testing.assert_array_equal(result, [2.0**31, -(2.0**31)])
        assert (result + 2.0**-20).numpy()[0] > result.numpy()[0]


class TestTable:
    @pytest.mark.parametrize("scale", SCALES)
    def test_a_standard_deviation_spans_512_to_1024_entries(self, scale):
        noise = GridNoise(scale, 1.0)
        assert 2**9 <= scale / 2**noise.low_bits < 2**10
        assert noise.blocks == (2 if scale < 2**25 else 3)

    @pytest.mark.parametrize("scale", SCALES[:3])
    def test_draws_the_probabilities(self, scale):
        """Probabilities are exact, but for rounding to multiples of 2^-67."""
        noise = GridNoise(scale, 1.0)
        thresholds, aliases = grid.table(noise)
        share = 2**53
        result = [int(t) for t in thresholds]
        for t, alias in zip(thresholds, aliases):
            result[alias] += share - int(t)
        assert sum(result) == 2**67 and min(thresholds) >= 0

        mp = mpmath.mp.clone()
        mp.prec = 200
        variance = mp.mpf(scale) ** 2 + mp.mpf(1) / 12
        step = mp.mpf(2**noise.low_bits) ** 2 / (2 * variance)
        exact = [mp.exp(-((i + mp.mpf(0.5)) ** 2) * step) for i in range(2**14)]
        unit = 2**67 / mp.fsum(exact)
        distance = mp.fsum(abs(f - unit * p) for f, p in zip(result, exact))
        distance /= 2**68
        # The rest lies beyond the table.
        assert float(distance) + 2 * stats.norm.sf(16) < 2.0**-56
        reached = max(k for k, f in enumerate(result) if f) + 0.5
        assert reached * 2**noise.low_bits > 8.9 * scale


class TestShortfall:
    @pytest.mark.parametrize("phase", [0.0, 0.25, 0.5])
    @pytest.mark.parametrize("position", [0.0, 1.2, 3.0])
    def test_gaps_are_filled(self, phase, position):
        """Cubic splines at the entries are as good as a smooth Gaussian.

        For 2^9 entries in a standard deviation, in the limit of fine grids.
        """
        mp = mpmath.mp.clone()
        mp.prec = 200
        s = mp.mpf(512)

        def spline(x):
            x = abs(mp.mpf(x))
            if x >= 2:
                return mp.mpf(0)
            inner = (4 - 6 * x**2 + 3 * x**3) / 6
            return inner if x < 1 else (2 - x) ** 3 / 6

        x = mp.floor(position * s) + mp.mpf(phase)
        near = [mp.floor(x) + k + mp.mpf(1) / 2 for k in range(-3, 4)]
        stepped = mp.fsum(mp.npdf(a, 0, s) * spline(x - a) for a in near)
        smooth = mp.quad(
            lambda t: mp.npdf(x - t, 0, s) * spline(t), [-2, -1, 0, 1, 2]
        )
        # The first alias of the sum over entries (Poisson), 3 - 6x^2 + x^4.
        z = x / s
        alias = 2 * (1 / (2 * mp.pi * s)) ** 4
        polynomial = abs(3 - 6 * z**2 + z**4)
        error = abs(stepped / smooth - 1)
        assert error < 1.1 * alias * max(polynomial, mp.mpf("0.01")) * mp.zeta(
            4
        )

    def test_of_a_divergence_and_a_distance(self):
        bound = 48 * 1.00408 * (1 / (2 * math.pi * 512)) ** 8
        assert bound < 2.0**-87
        assert grid.shortfall(1) == pytest.approx(2.0**-44, rel=1e-3)
        # A BERT, of which 10.6 million weights are trained.
        assert grid.shortfall(10_600_000) < 5e-10
        assert grid.shortfall(10_600_000, 10_000) < 2e-6
        assert grid.shortfall(10**30) == 1.0


class TestNumbers:
    @pytest.mark.parametrize("scale", SCALES)
    def test_are_gaussian_integers(self, scale):
        noise = GridNoise(scale, 1.0)
        result = numbers(noise, words_of(noise, 100_000))
        np.testing.assert_array_equal(result, np.round(result))
        assert stats.kstest(result / scale, "norm").pvalue > 1e-4
        assert abs(stats.kurtosis(result)) < 5 * np.sqrt(24 / result.size)
        for modulus in (2, 3, 64, 4096):
            counts = np.bincount((result % modulus).astype(int))
            assert stats.chisquare(counts).pvalue > 1e-4

    @pytest.mark.parametrize("scale", SCALES)
    def test_use_every_random_bit(self, scale):
        """They are low bits, the sign, bits of the entry, and compared bits."""
        noise = GridNoise(scale, 1.0)
        words = words_of(noise, 4000)
        before = numbers(noise, words)
        used = []
        for block in range(noise.blocks):
            for half in range(2):
                for bit in range(32):
                    changed = [list(pair) for pair in words]
                    changed[block][half] = tf.bitwise.bitwise_xor(
                        changed[block][half], tf.constant(1 << bit, tf.uint32)
                    )
                    used.append((numbers(noise, changed) != before).any())
        # Bits that are compared seldom decide; those of the second word and
        # the upper ones of the first are all among them.
        low = used[64:]
        assert sum(low) >= 4 * noise.low_bits + 1
        assert all(used[:14]) and sum(used[32:64]) > 5

    @pytest.mark.parametrize("scale", SCALES)
    def test_fields_are_disjoint(self, scale):
        """The four uniform numbers, the sign and the entry share no bit."""
        noise = GridNoise(scale, 1.0)
        zero = [[0, 0] for _ in range(noise.blocks)]

        def number(bits):
            words = [[int(w) for w in pair] for pair in bits]
            return numbers(
                noise,
                [tuple(tf.constant([w], tf.uint32) for w in p) for p in words],
            )[0]

        start = number(zero)
        moved = []
        for block in range(1, noise.blocks):
            for half in range(2):
                for bit in range(32):
                    bits = [list(pair) for pair in zero]
                    bits[block][half] = 1 << bit
                    moved.append(number(bits) - start)
        raised = sorted(m for m in moved if m > 0)
        expected = sorted(2.0**k for k in range(noise.low_bits)) * 4
        assert raised == sorted(expected)
        # The sign turns 1/2 w into -1/2 w.
        assert [m for m in moved if m < 0] == [-(2.0**noise.low_bits)]

    def test_every_residue_is_reached_near_any_value(self):
        noise = GridNoise(2.0**16, 1.0)
        result = numbers(noise, words_of(noise, 2_000_000))
        for centre in (0, 2**15, -(2**15)):
            near = result[np.abs(result - centre) <= 64]
            assert np.unique(near).size == 129
