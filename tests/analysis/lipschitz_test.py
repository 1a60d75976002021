"""Coefficients and the bound, against explicit formulas."""

import math

import numpy as np
import pytest

from tf_dpsub import analysis

_random = np.random.default_rng(0)
SETTING = {
    "distance": 2.0,
    "examples": 1000,
    "epsilon": 2.0,
    "delta": 1e-6,
    "dimensions": 8,
}


class TestCoefficients:
    def test_are_norms_outside_of_the_directions(self):
        gradients = _random.normal(size=(30, 10))
        basis = np.linalg.qr(_random.normal(size=(10, 4)))[0]
        result = analysis.restricted_lipschitz(gradients, basis)
        for k in range(5):
            first = basis[:, :k]
            outside = gradients - gradients @ first @ first.T
            expected = np.linalg.norm(outside, axis=1).max()
            assert result[k] == pytest.approx(expected)
        some = analysis.restricted_lipschitz(gradients, basis, [4, 0])
        np.testing.assert_allclose(some, result[[4, 0]])

    def test_nothing_is_left_outside_of_all(self):
        gradients = _random.normal(size=(5, 3))
        result = analysis.restricted_lipschitz(gradients, np.eye(3))
        assert result[-1] < 1e-7

    def test_directions_of_zeros_take_nothing_away(self):
        """A stack of lower rank gives such directions."""
        gradients = np.ones((2, 3))
        basis = np.array([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
        result = analysis.restricted_lipschitz(gradients, basis)
        np.testing.assert_allclose(result**2, [3, 2, 2])

    @pytest.mark.parametrize(
        "arguments, message",
        [
            ((np.ones((2, 3)), np.ones((4, 1))), "got shapes"),
            ((np.ones(3), np.ones((3, 1))), "got shapes"),
            ((np.ones((2, 3)), np.eye(3)[:, :1], [2]), "ranks from 0 to 1"),
        ],
    )
    def test_arguments_that_do_not_fit(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            analysis.restricted_lipschitz(*arguments)


def bound(coefficients, **changes):
    return analysis.excess_loss_bound(coefficients, **SETTING | changes)


class TestBound:
    def test_is_the_theorems(self):
        """Coefficients 3 and, from rank 2 on, 0.1; eight dimensions."""
        coefficients = {0: 3.0, 1: 3.0, 2: 0.1}
        result, k = bound(coefficients)
        noise = math.log(1e6) ** 0.5 / 2000

        def at(k, outside):
            return 2 * (3 / 1000**0.5 + 3 * k**0.5 * noise + math.sqrt(outside))

        # s = 1, 2, 3 have the ranks k, 2 k, 4 k below 8.
        values = {
            1: at(1, 2 * 9 + 16 * 0.01 + 72 * 0.01),
            2: at(2, 2 * 0.01 + 16 * 0.01),
            4: at(4, 2 * 0.01),
            8: at(8, 0.0),
        }
        assert k == min(values, key=values.get)
        assert result == pytest.approx(values[k])

    def test_does_not_depend_on_dimensions_where_gradients_decay(self):
        """They decay as k^-1.5; without decay, the bound depends on them."""
        ranks = [0, *(2**s for s in range(20))]
        decaying = {k: max(k, 1) ** -1.5 for k in ranks}
        constant = dict.fromkeys(ranks, 1.0)
        sizes = (2**8, 2**18)
        first, last = (bound(decaying, dimensions=d)[0] for d in sizes)
        assert last < 1.02 * first
        first, last = (bound(constant, dimensions=d)[0] for d in sizes)
        assert last > 5 * first

    def test_an_array_begins_at_rank_zero(self):
        assert bound([3.0, 2.0]) == bound({0: 3.0, 1: 2.0})

    @pytest.mark.parametrize(
        "coefficients, changes, message",
        [
            ({1: 1.0}, {}, "from rank 0 on"),
            ([1.0, 2.0], {}, "none larger"),
            ([], {}, "from rank 0 on"),
            ([1.0], {"distance": 0}, "distance > 0"),
            ([1.0], {"epsilon": -1}, "epsilon > 0"),
            ([1.0], {"delta": 1}, "0 < delta < 1"),
            ([1.0], {"examples": 0}, "examples >= 1"),
        ],
    )
    def test_arguments_out_of_range(self, coefficients, changes, message):
        with pytest.raises(ValueError, match=message):
            bound(coefficients, **changes)
