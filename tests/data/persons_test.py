import numpy as np
import pytest

from tf_dpsub.data import limit_rows
from tf_dpsub.data.persons import PersonRows

IDS = np.array([7, 3, 7, 7, 3, 9, 7])


class TestPersonRows:
    @pytest.mark.parametrize(
        "ids",
        [
            IDS,
            IDS.tolist(),
            IDS.astype("uint8"),
            IDS.astype(str),
            IDS.astype("S"),
            np.array([f"p{i}" for i in IDS], object),
            np.array(IDS.tolist(), object),
        ],
        ids=[
            "int64",
            "list",
            "uint8",
            "str",
            "bytes",
            "objects",
            "object ints",
        ],
    )
    def test_groups_rows_by_their_persons(self, ids):
        rows = PersonRows.of(ids, 7)
        assert rows.persons == 3
        groups = np.split(rows.order, rows.starts[1:])
        assert [sorted(group) for group in groups] == [
            [1, 4],
            [0, 2, 3, 6],
            [5],
        ]
        assert rows.counts.tolist() == [2, 4, 1]

    def test_the_order_of_rows_is_random_for_each_person(self):
        ids = np.repeat([0, 1], 50)
        orders = [PersonRows.of(ids, 100).order for _ in range(2)]
        assert np.any(orders[0] != orders[1])
        assert np.any(orders[0][:50] + 50 != orders[0][50:])
        seeded = [PersonRows.of(ids, 100, seed=1).order for _ in range(2)]
        np.testing.assert_array_equal(*seeded)

    @pytest.mark.parametrize(
        "ids, message",
        [
            (IDS[:6], "one id for each of 7 rows, got 6. Select them"),
            (IDS[:, None], r"one id for each row, got shape \[7, 1\]"),
            ([], r"got shape \[0\]"),
            (3, r"got shape \[\]"),
            (IDS / 2, "whole numbers or strings, got dtype float64"),
            (np.where(IDS == 9, np.nan, IDS), "got dtype float64"),
            ([None, *IDS[1:].tolist()], "got dtype object"),
            ([True, *[False] * 6], "got dtype bool"),
            (np.where(IDS == 9, -1, IDS), "got 1 rows with a negative number"),
            (["", *IDS[1:].astype(str)], "got 1 rows with"),
        ],
    )
    def test_bad_ids(self, ids, message):
        with pytest.raises(ValueError, match=message):
            PersonRows.of(ids, 7)


class TestLimitRows:
    @pytest.mark.parametrize("most", [1, 2, 3, 10])
    def test_keeps_at_most_so_many_of_each(self, most):
        kept = limit_rows(IDS, most)
        assert np.all(np.diff(kept) > 0)
        ids, counts = np.unique(IDS[kept], return_counts=True)
        expected = {3: 2, 7: 4, 9: 1}
        assert dict(zip(ids.tolist(), counts.tolist())) == {
            person: min(most, count) for person, count in expected.items()
        }

    def test_rows_are_drawn(self):
        """Each of 100 with 1/2, alike in all places."""
        ids = np.zeros(100, int)
        counts = np.zeros(100)
        for seed in range(200):
            counts[limit_rows(ids, 50, seed=seed)] += 1
        assert 60 < counts.min() and counts.max() < 140
        np.testing.assert_array_equal(
            limit_rows(ids, 50, seed=1), limit_rows(ids, 50, seed=1)
        )
        assert np.any(limit_rows(ids, 50) != limit_rows(ids, 50))

    @pytest.mark.parametrize("most", [0, -2, 1.5, None])
    def test_bad_number(self, most):
        with pytest.raises(ValueError, match="rows_per_person >= 1"):
            limit_rows(IDS, most)

    def test_bad_ids(self):
        with pytest.raises(ValueError, match="numpy.unique"):
            limit_rows([1.5, 2.0], 1)
