import numpy as np
import pytest

from tf_dpsub.pate import disjoint_parts


def test_each_example_is_in_one_part():
    parts = disjoint_parts(103, 10, seed=3)
    assert sorted(map(len, parts)) == [10] * 7 + [11] * 3
    np.testing.assert_array_equal(
        np.sort(np.concatenate(parts)), np.arange(103)
    )


def test_places_are_shuffled_by_the_seed():
    first, again, other = (disjoint_parts(100, 4, seed=s) for s in (0, 0, 1))
    assert all(map(np.array_equal, first, again))
    assert not np.array_equal(first[0], other[0])
    assert not np.array_equal(first[0], np.arange(25))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((3, 4), "an example for each teacher, got 3 examples and 4"),
        ((0, 1), "examples"),
        ((10, 0), "teachers"),
        ((10, 2, -1), "seed"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        disjoint_parts(*arguments)
