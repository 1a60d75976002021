"""Batches that come from groups of the examples in turn."""

import numpy as np
import pytest
from scipy import stats

from tests.data.drawn_batches import batches_of, drawn_indices

EXAMPLES, BATCH, GROUPS, STEPS = 62, 6, 4, 2000


def grouped(seed=0):
    _, batches = batches_of(EXAMPLES, BATCH, seed)
    return batches.in_groups(GROUPS)


@pytest.fixture(scope="module")
def included():
    """Mask of the examples (columns) drawn at each step (rows)."""
    mask = np.zeros((STEPS, EXAMPLES), bool)
    for step, drawn in enumerate(drawn_indices(grouped().dataset(), STEPS)):
        assert drawn == sorted(set(drawn))
        mask[step, drawn] = True
    return mask


def test_groups_split_the_examples(included):
    of_groups = [included[g::GROUPS].any(0) for g in range(GROUPS)]
    assert np.all(np.sum(of_groups, 0) == 1)
    assert sorted(np.sum(of_groups, 1)) == [15, 15, 16, 16]


def test_every_example_has_the_rate_of_its_group(included):
    rate, times = GROUPS * BATCH / EXAMPLES, STEPS / GROUPS
    counts = included.sum(0)
    statistic = np.sum((counts - times * rate) ** 2)
    statistic /= times * rate * (1 - rate)
    low, high = stats.chi2.ppf([1e-4, 1 - 1e-4], EXAMPLES)
    assert low < statistic < high


def test_examples_of_a_group_are_independent(included):
    for g in range(GROUPS):
        of_group = included[g::GROUPS]
        of_group = of_group[:, of_group.any(0)]
        correlations = np.corrcoef(of_group.T)
        np.fill_diagonal(correlations, 0)
        assert np.abs(correlations).max() < 5 / np.sqrt(STEPS / GROUPS)


def test_the_split_is_public_and_the_draws_are_not():
    first, second = (
        drawn_indices(grouped(seed=None).dataset(), 40) for _ in range(2)
    )
    assert first != second
    groups = [
        {i for drawn in draws[::GROUPS] for i in drawn}
        for draws in (first, second)
    ]
    assert groups[0] & groups[1]
    others = {i for drawn in second[1::GROUPS] for i in drawn}
    assert not groups[0] & others


def test_replicas_share_a_group():
    shards = [
        drawn_indices(grouped().dataset(shard=(r, 3)), 60) for r in range(3)
    ]
    whole = drawn_indices(grouped().dataset(), 60)
    for g in range(GROUPS):
        parts = [{i for d in s[g::GROUPS] for i in d} for s in shards]
        assert sum(map(len, parts)) == len(set().union(*parts))
        assert set().union(*parts) == {i for d in whole[g::GROUPS] for i in d}


def test_as_many_groups_as_batches_draw_all():
    _, batches = batches_of(24, 6)
    drawn = drawn_indices(batches.in_groups(4).dataset(), 8)
    assert drawn[:4] == drawn[4:]
    assert sorted(sum(drawn[:4], [])) == list(range(24))


def test_one_group_is_as_before():
    _, batches = batches_of()
    again = batches.in_groups(1)
    assert drawn_indices(again.dataset(), 5) == drawn_indices(
        batches_of()[1].dataset(), 5
    )


def test_other_inputs_keep_the_groups():
    other = grouped().with_inputs(np.zeros((EXAMPLES, 1), np.float32))
    assert other.groups == GROUPS
    assert drawn_indices(other.dataset(), 9) == drawn_indices(
        grouped().dataset(), 9
    )


@pytest.mark.parametrize("groups", [0, 1.5, 11])
def test_errors(groups):
    _, batches = batches_of(EXAMPLES, BATCH)
    with pytest.raises(ValueError, match="Expected"):
        batches.in_groups(groups)
