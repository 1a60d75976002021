"""A factor never leaves more than the clip, whatever the bound."""

import math
import types

import numpy as np
import pytest

from tf_dpsub.primitives.clipping import (
    FLAT,
    Clipping,
    clip_factors,
    sum_factors,
)

TINY = np.finfo("float32").tiny
BOUNDS = np.concatenate(
    [
        np.geomspace(TINY, 1e37, 1001),
        # Consecutive floats around the clips below.
        *(np.square(c) * np.linspace(0.999, 1.001, 101) for c in (0.1, 1, 30)),
    ]
).astype("float32")


@pytest.mark.parametrize("clip", [1e-6, 0.1, 1.0, 30.0, 1e6])
def test_norm_stays_below_the_clip_by_a_margin(clip):
    factors = clip_factors(BOUNDS, clip).numpy()
    assert factors.dtype == np.float32
    norms = np.sqrt(BOUNDS, dtype="float64") * factors
    assert norms.max() <= clip * (1 - 2.0**-11)
    assert 0 < factors.min() and factors.max() == 1.0


@pytest.mark.parametrize("clip", [1e-6, 0.1, 1.0, 30.0, 1e6])
def test_clips_no_more_than_the_margin_needs(clip):
    factors = clip_factors(BOUNDS, clip).numpy()
    norms = np.sqrt(BOUNDS, dtype="float64")
    expected = np.minimum(1.0, clip * (1 - 1.25 * 2.0**-10) / norms)
    np.testing.assert_allclose(factors, expected, rtol=1e-6)
    assert (factors[norms < 0.99 * clip] == 1.0).all()


def test_parts_that_are_added_up_apart_round_by_their_lengths():
    rows = types.SimpleNamespace(merged_terms=1, merged_length=1)
    whole, parts = (
        sum_factors(rows, np.array([4.0], "f"), 1.0, 128, FLAT, parts=n)
        for n in (1, 2)
    )
    margin = 2.0**-10 * (128 + 6 * 128**0.5) / 128
    np.testing.assert_allclose(
        2 * (whole - parts), (2**0.5 - 1) * margin, rtol=1e-3
    )


def test_row_of_norm_zero_is_kept_finite():
    np.testing.assert_array_equal(clip_factors(np.zeros(2, "f"), 1.0), [1, 1])


def test_infinite_clip_changes_nothing():
    factors = clip_factors(BOUNDS, math.inf).numpy()
    np.testing.assert_array_equal(factors, np.ones_like(BOUNDS))


@pytest.mark.parametrize(
    "batch_size, rows", [(1, 128), (64, 128), (1024, 1216)]
)
def test_margin_grows_with_the_rows_summed_in_float32(batch_size, rows):
    factors = clip_factors(BOUNDS, 1.0, batch_size).numpy()
    clipped = np.sqrt(BOUNDS, dtype="float64") > 1.0
    expected = (1 - (rows / 128 + 0.25) * 2.0**-10) / np.sqrt(BOUNDS[clipped])
    np.testing.assert_allclose(factors[clipped], expected, rtol=1e-6)


class TestRules:
    @pytest.mark.parametrize("rule", ["automatic", "unit_norm"])
    @pytest.mark.parametrize("clip", [1e-12, 0.1, 1.0, 30.0, 1e6])
    def test_norm_stays_below_the_clip_by_a_margin(self, rule, clip):
        factors = clip_factors(BOUNDS, clip, 1, Clipping(rule)).numpy()
        norms = np.sqrt(BOUNDS, dtype="float64")
        assert (norms * factors).max() <= clip * (1 - 2.0**-11)
        assert factors.min() > 0
        largest = norms.argmax()
        np.testing.assert_allclose(
            norms[largest] * factors[largest],
            clip * (1 - 1.25 * 2.0**-10),
            rtol=1e-6,
        )

    @pytest.mark.parametrize("rule", ["flat", "automatic", "unit_norm"])
    @pytest.mark.parametrize("clip", [1e-12, 1.0, 1e20])
    def test_unit_is_a_power_of_two_above_all_factors(self, rule, clip):
        bounds = np.append(BOUNDS, np.float32(0))
        unit = Clipping(rule).unit(clip)
        factors = clip_factors(bounds, clip, 1, Clipping(rule)).numpy()
        assert factors.max() <= unit
        assert unit >= 1 and math.log2(unit).is_integer()

    @pytest.mark.parametrize("rule", ["automatic", "unit_norm"])
    def test_row_of_norm_zero_is_kept_finite(self, rule):
        factors = clip_factors(np.zeros(2, "f"), 1e20, 1, Clipping(rule))
        assert np.isfinite(factors).all()

    @pytest.mark.parametrize(
        ("rule", "stability", "told"),
        [
            ("automatc", None, "Did you mean 'automatic'"),
            (None, None, "Expected clipping to be one of"),
            ("automatic", 0.0, "stability >= 1e-12.*clipping='unit_norm'"),
            ("automatic", math.nan, "stability >= 1e-12, got nan"),
            ("automatic", math.inf, "Expected finite stability"),
            ("automatic", "much", "got 'much'"),
            ("flat", 0.01, "stability with clipping='automatic' alone"),
            ("unit_norm", 0.01, "stability with clipping='automatic' alone"),
        ],
    )
    def test_out_of_range(self, rule, stability, told):
        with pytest.raises(ValueError, match=told):
            Clipping(rule, stability)

    @pytest.mark.parametrize("clip", [1e21, math.inf])
    def test_clip_to_scale_up_to_is_bounded(self, clip):
        Clipping("flat").check_clip(clip)
        with pytest.raises(ValueError, match="my_clip <= 1e.20 with clipping"):
            Clipping("unit_norm").check_clip(clip, "my_clip")
