"""Reading rows of sources that fail, change, or give lists."""

import threading

import numpy as np
import pytest
import tensorflow as tf
from array_record.python import array_record_data_source, array_record_module

from tf_dpsub.data import PoissonBatches


class Numbers:
    """A source of numbers, some of which cannot be read."""

    def __init__(self, rows, broken=(), error=OSError(5, "Input/output error")):
        self.rows, self.broken, self.error = rows, set(broken), error

    def __len__(self):
        return self.rows

    def __getitem__(self, indices):
        if self.broken & set(np.ravel(indices).tolist()):
            raise self.error
        return np.asarray(indices, np.float32)


@pytest.mark.parametrize("broken", [[17], [17, 18, 40], [0, 49]])
def test_the_first_row_that_cannot_be_read_is_named(broken):
    source = Numbers(50)
    batches = PoissonBatches(source, batch_size=50, seed=0)
    source.broken = set(broken)
    message = rf"got OSError \(Input/output error\) for row {broken[0]}\."
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        list(batches.dataset().take(1))


def test_no_words_of_the_source_are_in_the_message():
    source = Numbers(50)
    batches = PoissonBatches(source, batch_size=50, seed=0)
    source.broken, source.error = {3}, KeyError("patient 4711")
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        list(batches.dataset().take(1))
    assert "KeyError for row 3." in str(caught.value)
    assert "4711" not in str(caught.value)


def test_rows_that_cannot_be_read_together():
    class Limited(Numbers):
        def __getitem__(self, indices):
            if len(indices) > 9:
                raise MemoryError
            return super().__getitem__(indices)

    batches = PoissonBatches(Limited(50), batch_size=50, seed=0)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="MemoryError for 50 rows together"
    ):
        list(batches.dataset().take(1))


@pytest.mark.parametrize("rows", [49, 51])
def test_sources_that_shrink_or_grow(rows):
    source = Numbers(50)
    batches = PoissonBatches(source, batch_size=5)
    batches.require_unchanged()
    source.rows = rows
    with pytest.raises(ValueError, match=f"source of 50 rows.*got {rows}"):
        batches.require_unchanged()


class Lists:
    """Bytes by lists of ints alone, as the sources of ArrayRecord files."""

    def __init__(self):
        self.asked = []

    def __len__(self):
        return 30

    def __getitem__(self, index):
        return bytes([index.__index__(), 0])

    def __getitems__(self, indices):
        assert all(type(index) is int for index in indices)
        self.asked.append(indices)
        return [self[index] for index in indices]


def test_lists_of_rows():
    source = Lists()
    batches = PoissonBatches(source, batch_size=10, seed=0)
    (batch,) = batches.dataset().take(1).as_numpy_iterator()
    asked = [indices for indices in source.asked if len(indices) > 4]
    # The first of those that are not for comparing rows.
    drawn = asked[0]
    # With the zero at the end, which NumPy's own type of bytes drops.
    assert batch["x"][batch["real"] == 1].tolist() == [source[k] for k in drawn]


def test_lists_whose_rows_depend_on_each_other():
    class Mixed(Lists):
        def __getitems__(self, indices):
            return [bytes([len(indices)])] * len(indices)

    with pytest.raises(ValueError, match="from Mixed for 0 alone than among"):
        PoissonBatches(Mixed(), batch_size=10)
    (assumption,) = PoissonBatches(Lists(), batch_size=10).assumptions
    assert "depends on that example alone" in assumption


def test_array_record_files(tmp_path):
    path = str(tmp_path / "records")
    writer = array_record_module.ArrayRecordWriter(path, "group_size:1")
    records = [bytes([k]) * (k % 3) + b"\0" for k in range(40)]
    for record in records:
        writer.write(record)
    writer.close()
    source = array_record_data_source.ArrayRecordDataSource(path)
    batches = PoissonBatches(source, batch_size=20, seed=0)
    read = batches._reader(np.array([0, 5, 6, 39]))["x"]
    assert read.tolist() == [records[k] for k in (0, 5, 6, 39)]


def test_lists_of_other_numbers_of_rows():
    class Short(Lists):
        def __getitems__(self, indices):
            return super().__getitems__(indices)[:1]

    with pytest.raises(ValueError, match="each of 4 indices of Short"):
        PoissonBatches(Short(), batch_size=30)


@pytest.mark.parametrize("read_ahead", [0, 1.5, None])
def test_batches_that_are_read_ahead(read_ahead):
    with pytest.raises(ValueError, match="Expected read_ahead >= 1"):
        PoissonBatches(np.zeros(3), batch_size=1, read_ahead=read_ahead)


def test_several_batches_are_read_at_the_same_time():
    # The first two wait for each other.
    meeting, waiting = threading.Barrier(2, timeout=60), []

    class Meeting(Numbers):
        def __getitem__(self, indices):
            if waiting:
                waiting.pop()
                meeting.wait()
            return super().__getitem__(indices)

    source = Meeting(50)
    batches = PoissonBatches(source, batch_size=40, seed=0, read_ahead=2)
    waiting += [1, 1]
    drawn = [b["x"].numpy() for b in batches.dataset().take(2)]
    same = PoissonBatches(Numbers(50), batch_size=40, seed=0)
    for one, other in zip(drawn, same.dataset().take(2)):
        np.testing.assert_array_equal(one, other["x"])
