"""Rows of Parquet files, and of tables in memory maps."""

import os

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from tf_dpsub.data import ParquetRows, PoissonBatches

ROWS = 23
TABLE = pyarrow.table(
    {
        "number": pyarrow.array(range(ROWS), pyarrow.int64()),
        "fixed": pyarrow.array(
            [[k, k / 2] for k in range(ROWS)],
            pyarrow.list_(pyarrow.float32(), 2),
        ),
        "listed": [[[k, 1], [2, 3]] for k in range(ROWS)],
        "text": [f"row {k}" for k in range(ROWS)],
        "bytes": [bytes([k, 0]) for k in range(ROWS)],
        "flag": [k % 2 == 0 for k in range(ROWS)],
        "class": pyarrow.array(
            [k % 3 for k in range(ROWS)]
        ).dictionary_encode(),
    }
)


def check(rows, indices):
    assert rows["number"].tolist() == indices
    assert rows["fixed"].dtype == np.float32
    assert rows["fixed"].tolist() == [[k, k / 2] for k in indices]
    assert rows["listed"].tolist() == [[[k, 1], [2, 3]] for k in indices]
    assert rows["text"].tolist() == [f"row {k}" for k in indices]
    assert rows["bytes"].tolist() == [bytes([k, 0]) for k in indices]
    assert rows["flag"].tolist() == [k % 2 == 0 for k in indices]
    assert rows["class"].tolist() == [k % 3 for k in indices]


@pytest.fixture(name="files")
def _files(tmp_path):
    files = []
    for k, (begin, end, size) in enumerate([(0, 10, 4), (10, 23, 5)]):
        files.append(tmp_path / f"{k}.parquet")
        parquet.write_table(
            TABLE.slice(begin, end - begin), files[-1], row_group_size=size
        )
    return files


@pytest.mark.parametrize(
    "indices", [list(range(ROWS)), [0, 9, 10, 22], [3, 4], [15]]
)
def test_rows_of_parquet_files(files, indices):
    rows = ParquetRows(files)
    assert len(rows) == ROWS
    check(rows[np.array(indices)], indices)


def test_row_groups_without_a_drawn_row_and_other_columns_are_not_read(
    files, monkeypatch
):
    rows = ParquetRows(files, columns=["text"])
    read = []
    read_row_group = parquet.ParquetFile.read_row_group

    def counted(self, number, columns):
        read.append((number, columns))
        return read_row_group(self, number, columns)

    monkeypatch.setattr(parquet.ParquetFile, "read_row_group", counted)
    assert rows[np.array([0, 2, 9, 14])]["text"].tolist() == [
        "row 0",
        "row 2",
        "row 9",
        "row 14",
    ]
    assert read == [(0, ["text"]), (2, ["text"]), (0, ["text"])]


def test_batches_of_an_arrow_file_in_a_memory_map(tmp_path):
    path = str(tmp_path / "rows.arrow")
    with (
        pyarrow.OSFile(path, "wb") as sink,
        pyarrow.ipc.new_file(sink, TABLE.schema) as writer,
    ):
        writer.write_table(TABLE, max_chunksize=4)
    table = pyarrow.ipc.open_file(pyarrow.memory_map(path)).read_all()
    batches = PoissonBatches(
        table,
        batch_size=8,
        map=lambda row: (row["fixed"], row["number"]),
        seed=0,
    )
    check(batches._reader(np.array([1, 7, 20]))["x"], [1, 7, 20])
    (batch,) = batches.dataset().take(1)
    drawn = batch["y"].numpy()[batch["real"] == 1]
    assert len(drawn) > 2
    np.testing.assert_array_equal(batch["x"][: len(drawn), 0], drawn)


@pytest.mark.parametrize(
    "column, message",
    [
        ([1, None], "'a', got rows without one"),
        ([[1], [1, 2]], "one length in the column 'a', got several"),
        ([{"b": 1}] * 2, "in the column 'a', got struct"),
    ],
    ids=["missing", "lengths", "type"],
)
def test_columns_that_are_no_arrays(column, message):
    table = pyarrow.table({"a": column})
    with pytest.raises(ValueError, match=message):
        PoissonBatches(table, batch_size=1)._reader(np.array([0, 1]))


def test_columns_that_are_missing(files):
    with pytest.raises(ValueError, match=r"without \['b'\]"):
        ParquetRows(files, columns=["text", "b"])


def test_files_that_are_refused(files, tmp_path):
    rows = ParquetRows(files)
    os.utime(files[0], ns=(0, 1))
    for read in (rows.require_unchanged, lambda: rows[np.array([0])]):
        with pytest.raises(ValueError, match="0.parquet as it was when"):
            read()
    path = tmp_path / "text"
    path.write_text("no parquet")
    with pytest.raises(ValueError, match="Expected a Parquet file, got .*text"):
        ParquetRows(path)
    with pytest.raises(IndexError, match="from 0 to 22"):
        rows[np.array([23])]
