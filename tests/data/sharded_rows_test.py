"""Several sources as one."""

import numpy as np
import pytest

from tests.data.mixing import Mixing
from tf_dpsub.data import PoissonBatches, ShardedRows

X = np.arange(60.0).reshape(20, 3)


@pytest.fixture(name="shards")
def _shards(tmp_path):
    mapped = np.memmap(tmp_path / "x", "float64", "w+", shape=(7, 3))
    mapped[:] = X[:7]
    rows = list(zip(X[7:12], np.arange(7, 12)))
    return [(mapped, np.arange(7)), rows, (X[12:], np.arange(12, 20))]


def test_rows_are_those_of_all_sources(shards):
    rows = ShardedRows(shards)
    for indices in (range(20), [0, 6, 7, 12, 19], [8]):
        x, y = rows[np.array(indices)]
        assert y.tolist() == list(indices)
        np.testing.assert_array_equal(x, X[list(indices)])
    batches = PoissonBatches(rows, batch_size=10, seed=0)
    assert batches.examples == 20
    (batch,) = batches.dataset().take(1).as_numpy_iterator()
    drawn = batch["y"][batch["real"] == 1]
    np.testing.assert_array_equal(batch["x"][: len(drawn)], X[drawn])


def test_assumptions_are_those_of_all_sources():
    sources = [Mixing(lambda rows: rows), X]
    (assumption,) = PoissonBatches(
        ShardedRows(sources), batch_size=2
    ).assumptions
    assert Mixing.assumed in assumption


def test_a_source_that_changes(shards):
    batches = PoissonBatches(ShardedRows(shards), batch_size=10)
    batches.require_unchanged()
    shards[1].append(shards[1][0])
    with pytest.raises(ValueError, match="of 5 rows.* got 6"):
        batches.require_unchanged()


@pytest.mark.parametrize(
    "sources, message",
    [
        ([], "got 0 sources"),
        ([X, X[:0]], "0 rows in the smallest"),
        ([X, X[:, :2]], "from the first and .*2.* from number 1"),
        ([X, X.astype("float32")], "float32.* from number 1"),
        ([(X, X[:3])], r"lengths \[3, 20\]"),
    ],
    ids=["none", "empty", "shape", "dtype", "lengths"],
)
def test_sources_that_are_refused(sources, message):
    with pytest.raises(ValueError, match=message):
        ShardedRows(sources)


@pytest.mark.parametrize("index", [-1, 20])
def test_no_other_rows(shards, index):
    with pytest.raises(IndexError, match="from 0 to 19"):
        ShardedRows(shards)[np.array([index])]
