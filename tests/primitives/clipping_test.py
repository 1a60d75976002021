"""A factor never leaves more than the clip, whatever the bound."""

import math

import numpy as np
import pytest

from tf_dpsub.primitives.clipping import clip_factors

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
