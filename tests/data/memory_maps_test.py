"""Rows of memory maps, read from their files."""

import os

import numpy as np
import pytest

from tf_dpsub.data import PoissonBatches, memory_maps


@pytest.fixture(name="mapped")
def _mapped(tmp_path):
    rows = np.memmap(tmp_path / "x", "float32", "w+", shape=(3000, 11))
    rows[:] = np.arange(rows.size).reshape(rows.shape)
    return rows


@pytest.mark.parametrize(
    "view",
    [
        lambda rows: rows,
        lambda rows: rows[:, :10],
        lambda rows: rows[:, 10],
        lambda rows: np.asarray(rows)[1::2, 3:5],
        lambda rows: rows.reshape(1500, 2, 11),
    ],
    ids=["all", "columns", "last_column", "every_second", "images"],
)
@pytest.mark.parametrize(
    "indices",
    [[], [7], [0, 1, 2, 3, 1000, 1499], [1499, 2, 2, 0], range(1500)],
    ids=["none", "one", "near_and_far", "in_any_order", "all"],
)
def test_rows_are_those_of_the_map(mapped, view, indices, monkeypatch):
    # In several pieces each.
    monkeypatch.setattr(memory_maps, "_LARGEST_READ", 5000)
    rows = view(mapped)
    reader = memory_maps.MappedRows.of(np.asarray(rows))
    indices = np.array(indices, np.int64)
    read = reader[indices]
    assert read.dtype == rows.dtype
    np.testing.assert_array_equal(read, rows[indices])


@pytest.mark.parametrize(
    "view",
    [
        lambda rows: rows[::-1],
        lambda rows: rows.T,
        lambda rows: rows[:0],
        lambda rows: rows + 0,
        lambda rows: np.memmap(rows.filename, "float32", "c", shape=(9, 11)),
    ],
    ids=["reversed", "columns", "empty", "copy", "own_changes"],
)
def test_other_arrays_are_left_to_numpy(mapped, view):
    assert memory_maps.MappedRows.of(np.asarray(view(mapped))) is None


def test_a_file_that_took_the_place_of_the_mapped_one_is_not_read(mapped):
    os.rename(mapped.filename, f"{mapped.filename}.old")
    assert memory_maps.MappedRows.of(mapped) is None
    np.zeros_like(mapped).tofile(mapped.filename)
    assert memory_maps.MappedRows.of(mapped) is None


def test_near_rows_are_read_at_once_and_far_ones_alone(mapped, monkeypatch):
    reader = memory_maps.MappedRows.of(mapped)
    places = []
    preadv = os.preadv

    def counted(file, buffers, place):
        places.append((place, sum(map(len, buffers))))
        return preadv(file, buffers, place)

    monkeypatch.setattr(os, "preadv", counted)
    reader[np.array([0, 2, 3, 1000, 2000])]
    assert places == [(0, 4 * 44), (44_000, 44), (88_000, 44)]


def test_a_file_that_was_cut_is_named(mapped):
    batches = PoissonBatches(mapped, batch_size=10)
    batches.require_unchanged()
    os.truncate(mapped.filename, 4 * mapped.size - 1)
    with pytest.raises(ValueError, match="x to have 132,000 bytes.*cut"):
        batches.require_unchanged()
    with pytest.raises(ValueError, match="it was cut"):
        batches._reader(np.array([2999]))


def test_memory_follows_the_batch_not_the_rows_that_were_read(tmp_path):
    # Through the map, all pages that were read would be memory of the process.
    rows = np.memmap(tmp_path / "x", "float32", "w+", shape=(2**16, 1024))
    batches = PoissonBatches(rows, batch_size=256, seed=0)
    before = _resident_bytes()
    for _ in batches.dataset().take(40):
        pass
    assert _resident_bytes() - before < 2**24


def _resident_bytes():
    """Bytes of files that are mapped into this process."""
    with open("/proc/self/status", encoding="utf-8") as status:
        (line,) = (s for s in status if s.startswith("RssFile:"))
    return int(line.split()[1]) * 1024
