"""Noise that later steps take back: its law, its grid, and its secrecy."""

import copy
import math
import pickle

import numpy as np
import pytest
import tensorflow as tf
from scipy import linalg

from tf_dpsub.primitives import carried_noise, grid, noise
from tf_dpsub.primitives.carried_noise import CarriedNoise

RATIOS = (1.0, 0.6, 0.4)
STDDEV, CLIP = 2.0, 0.5


def noise_of_steps(carried, fresh, steps, secure=False):
    """The noise of so many steps, `[steps, count]`, by a traced function."""

    @tf.function(autograph=False)
    def step(key):
        return carried.advance(key, RATIOS, fresh, secure)

    return np.array([step(tf.constant([7, k], tf.int64)) for k in range(steps)])


def mixed(values):
    """The fresh noise that is in the noise of steps: C times it."""
    column = np.zeros(len(values))
    column[: len(RATIOS)] = RATIOS
    return linalg.toeplitz(column, np.zeros(len(values))) @ values


@pytest.mark.parametrize("secure", [False, True])
def test_covariance_is_that_of_the_matrix(secure):
    count, steps = 4000, 8
    fresh = carried_noise.grid_noise(STDDEV, CLIP, count, RATIOS)
    assert fresh.stddev == pytest.approx(STDDEV * math.sqrt(1.52))
    released = noise_of_steps(CarriedNoise(3, count), fresh, steps, secure)
    # Nine deviations: some system entropy cannot be seeded.
    limit = 9 / math.sqrt(count)
    whitened = mixed(released) / fresh.stddev
    assert np.allclose(
        whitened @ whitened.T / count, np.eye(steps), atol=1.5 * limit
    )
    # Taken alone, steps are correlated: the second one takes 0.6 back.
    first, second = released[:2]
    correlation = np.corrcoef(first, second)[0, 1]
    assert correlation == pytest.approx(-0.6 / math.sqrt(1.36), abs=limit)


def test_rounding_moves_no_step_by_more_than_half_a_spacing():
    count, steps = 50, 9
    fresh = carried_noise.grid_noise(STDDEV, CLIP, count, RATIOS)
    carried = CarriedNoise(3, count)
    released = noise_of_steps(carried, fresh, steps)
    spacings = released / fresh.spacing
    assert np.array_equal(spacings, np.round(spacings))
    for k in range(steps):
        # The same draw, of nothing that is taken back.
        (drawn,) = noise.noisy(
            tf.constant([7, k], tf.int64),
            [tf.zeros([count], tf.float64)],
            [fresh],
            dtype="float64",
        )
        rest = (mixed(released)[k] - drawn.numpy()) / fresh.spacing
        assert np.max(np.abs(rest)) <= 0.5 + 1e-6
        assert (k == 0) == (np.max(np.abs(rest)) == 0)


def test_the_grid_leaves_room_for_all_roundings():
    """An adversary's: a step is off by a spacing, those after it by two."""
    count, bands = 1000, 8
    ratios = (1.0, *(0.9**k for k in range(1, bands)))
    fresh = carried_noise.grid_noise(1e4, CLIP, count, ratios)
    spacing, norm = fresh.spacing, carried_noise.sensitivity(ratios)
    of_sum = norm * math.sqrt(count) * spacing
    of_others = 2 * math.sqrt((bands - 1) * count) * spacing
    assert of_sum + of_others <= grid.MARGIN * norm * CLIP
    # Not needlessly fine, and as for a single band where there is one.
    assert 4 * (of_sum + of_others) > grid.MARGIN * norm * CLIP
    single = carried_noise.grid_noise(3.0, CLIP, count, (1.0,))
    assert single == grid.GridNoise(3.0, grid.spacing(3.0, CLIP, count))


def test_to_forget_begins_anew():
    fresh = carried_noise.grid_noise(STDDEV, CLIP, 5, RATIOS)
    carried = CarriedNoise(3, 5)
    before = noise_of_steps(carried, fresh, 4)
    assert not np.array_equal(noise_of_steps(carried, fresh, 1)[0], before[0])
    carried.forget()
    assert np.array_equal(noise_of_steps(carried, fresh, 4), before)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))]
)
def test_no_copy_has_the_noise(copied):
    fresh = carried_noise.grid_noise(STDDEV, CLIP, 5, RATIOS)
    carried = CarriedNoise(3, 5)
    first = noise_of_steps(carried, fresh, 1)
    other = copied(carried)
    assert other.bands == 3
    assert np.array_equal(noise_of_steps(other, fresh, 1), first)
