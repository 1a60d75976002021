"""Algorithm 1, against explicit sums."""

import numpy as np
import pytest

from tf_dpsub.analysis import averaged_sgd
from tf_dpsub.analysis.convex import _BLOCK

SETTING = {
    "examples": 5,
    "initial": np.zeros(3),
    "steps": 200,
    "learning_rate": 0.1,
    "noise_multiplier": 0.0,
    "lipschitz": 10.0,
    "seed": 0,
}
POINTS = np.random.default_rng(0).normal(size=(5, 3))


def to_points(x, i):
    return x - POINTS[i]


def test_is_the_mean_of_iterates_without_noise():
    mean = averaged_sgd(
        to_points, **SETTING | {"examples": 1, "regularization": 0.5}
    )
    x, iterates = np.zeros(3), []
    for _ in range(200):
        x = x - 0.1 * (x - POINTS[0] + 0.5 * x)
        iterates.append(x)
    np.testing.assert_allclose(mean, np.mean(iterates, 0))


def test_examples_are_drawn_uniformly():
    counts = np.zeros(5)

    def counted(x, i):
        counts[i] += 1
        return to_points(x, i)

    averaged_sgd(counted, **SETTING | {"steps": 10_000})
    # 2,000 each, give or take five standard deviations.
    assert counts.sum() == 10_000
    assert np.abs(counts - 2000).max() < 200


def test_noise_is_a_multiple_of_the_bound():
    """Without gradients, iterates are a random walk of known variance."""
    dimensions, steps = 20_000, 60
    mean = averaged_sgd(
        lambda x, i: np.zeros(dimensions),
        **SETTING
        | {
            "initial": np.zeros(dimensions),
            "steps": steps,
            "noise_multiplier": 3.0,
        },
    )
    # Of step t, all iterates from t on hold its noise.
    weights = (steps - np.arange(steps)) / steps
    expected = 0.1 * 3.0 * 10.0 * np.sqrt(np.sum(weights**2))
    assert mean.std() == pytest.approx(expected, rel=0.03)
    assert dimensions * steps > _BLOCK


def test_a_gradient_above_the_bound_is_scaled_down():
    mean = averaged_sgd(
        lambda x, i: np.array([30.0, 40.0, 0.0]), **SETTING | {"steps": 1}
    )
    np.testing.assert_allclose(mean, [-0.6, -0.8, 0.0])


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e200])
def test_no_gradient_moves_an_iterate_by_more_than_the_bound(value):
    mean = averaged_sgd(
        lambda x, i: np.array([value, 1.0, 0.0]), **SETTING | {"steps": 1}
    )
    assert np.linalg.norm(mean) <= 0.1 * 10.0 * (1 + 1e-12)


def test_the_seed_fixes_the_draws():
    changes = {"noise_multiplier": 1.0}
    first, same = (
        averaged_sgd(to_points, **SETTING | changes) for _ in range(2)
    )
    np.testing.assert_array_equal(first, same)
    fresh = averaged_sgd(to_points, **SETTING | changes | {"seed": None})
    assert np.abs(fresh - first).max() > 0


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"examples": 0}, "examples >= 1"),
        ({"steps": 0}, "steps >= 1"),
        ({"learning_rate": 0}, "learning_rate > 0"),
        ({"lipschitz": -1.0}, "lipschitz > 0"),
        ({"noise_multiplier": -1.0}, "noise_multiplier >= 0"),
        ({"regularization": -1.0}, "regularization >= 0"),
    ],
)
def test_arguments_out_of_range(changes, message):
    with pytest.raises(ValueError, match=message):
        averaged_sgd(to_points, **SETTING | changes)
