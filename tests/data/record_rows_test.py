"""Rows of TFRecord files."""

import os
import stat

import numpy as np
import pytest
import tensorflow as tf

from tf_dpsub.data import PoissonBatches, TFRecordRows, record_rows

# Of each length up to 29, also none, and with zeros at the end.
RECORDS = [bytes([k]) * (k % 30 - k % 3) + bytes(k % 3) for k in range(1, 200)]


def written(path, records):
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)
    return path


@pytest.fixture(name="files")
def _files(tmp_path):
    parts = (RECORDS[:50], [], RECORDS[50:51], RECORDS[51:])
    return [
        written(tmp_path / f"{k}.tfrecord", part)
        for k, part in enumerate(parts)
    ]


@pytest.mark.parametrize("chunk, records", [(2**18, 2**20), (64, 7)])
def test_rows_are_the_records(files, chunk, records, monkeypatch):
    monkeypatch.setattr(record_rows, "_CHUNK", chunk)
    monkeypatch.setattr(record_rows, "_RECORDS", records)
    rows = TFRecordRows(files)
    assert len(rows) == len(RECORDS)
    for indices in (range(199), [0, 49, 50, 51, 198], [], [3]):
        read = rows[np.array(indices, np.int64)]
        assert read.dtype == object
        assert read.tolist() == [RECORDS[k] for k in indices]


def test_the_index_is_built_once_and_private(files, monkeypatch, tmp_path):
    TFRecordRows(files)
    path = tmp_path / "0.tfrecord.tf_dpsub_index"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    elsewhere = tmp_path / "index"
    TFRecordRows(files, index=elsewhere)
    assert elsewhere.read_bytes() == path.read_bytes()

    def build(*_):
        raise AssertionError

    monkeypatch.setattr(record_rows, "_ends_of", build)
    assert len(TFRecordRows(files)) == len(RECORDS)
    for others in (files[:2], files[::-1]):
        with pytest.raises(AssertionError):
            TFRecordRows(others, index=path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-8],
        lambda content: content[:8],
        lambda content: b"",
        lambda content: content[:-1],
        lambda content: b"other" + content,
    ],
    ids=["cut", "begun", "empty", "within_a_number", "not_an_index"],
)
def test_a_damaged_index_is_built_anew(files, damage, tmp_path):
    index = tmp_path / "index"
    TFRecordRows(files, index)
    whole = index.read_bytes()
    index.write_bytes(damage(whole))
    rows = TFRecordRows(files, index)
    assert rows[np.array([198])].tolist() == RECORDS[198:]
    assert index.read_bytes() == whole


def test_an_index_of_earlier_files_is_built_anew(files):
    TFRecordRows(files)
    written(files[1], [b"more"])
    assert len(TFRecordRows(files)) == len(RECORDS) + 1
    # Of the same size.
    written(files[1], [b"less"])
    os.utime(files[1], ns=(0, 1))
    assert TFRecordRows(files)[np.array([50])].tolist() == [b"less"]


@pytest.mark.parametrize("by", [1, 4, 30])
def test_a_file_that_was_cut(files, by):
    size = os.path.getsize(files[0])
    os.truncate(files[0], size - by)
    with pytest.raises(ValueError, match=r"0.tfrecord.*cut.*Write it anew"):
        TFRecordRows(files)
    assert not [name for name in os.listdir(files[0].parent) if "ind" in name]


def test_a_compressed_file(tmp_path):
    path = str(tmp_path / "zipped")
    with tf.io.TFRecordWriter(path, "GZIP") as writer:
        writer.write(b"content")
    with pytest.raises(ValueError, match="without compression, got .*zipped"):
        TFRecordRows(path)


def test_a_file_that_changes_while_batches_are_drawn(files):
    rows = TFRecordRows(files)
    batches = PoissonBatches(rows, batch_size=100, seed=0)
    batches.require_unchanged()
    os.utime(files[3], ns=(0, 1))
    for read in (
        batches.require_unchanged,
        lambda: rows[np.array([150])],
        lambda: list(batches.dataset().take(1)),
    ):
        with pytest.raises(Exception, match="3.tfrecord as it was when"):
            read()


def test_content_that_moved_within_a_file(files):
    rows = TFRecordRows(files)
    state = os.stat(files[0])
    content = bytearray(files[0].read_bytes())
    content[0] += 1
    files[0].write_bytes(content)
    os.utime(files[0], ns=(state.st_atime_ns, state.st_mtime_ns))
    with pytest.raises(ValueError, match="record 0 as it was indexed"):
        rows[np.array([0])]


def test_no_other_rows(files):
    rows = TFRecordRows(files)
    for index in (-1, 199):
        with pytest.raises(IndexError, match="from 0 to 198"):
            rows[np.array([index])]


@pytest.mark.parametrize(
    "choose, message",
    [
        (lambda files: [], "at least one file"),
        (lambda files: [files[0], files[0]], "twice"),
        (lambda files: [files[0], "missing"], "missing of rows, got none"),
    ],
    ids=["none", "twice", "missing"],
)
def test_files_that_are_refused(files, choose, message):
    with pytest.raises(ValueError, match=message):
        TFRecordRows(choose(files))


def test_batches_of_parsed_records(tmp_path):
    examples = [
        tf.train.Example(
            features=tf.train.Features(
                feature={
                    "k": tf.train.Feature(
                        int64_list=tf.train.Int64List(value=[k])
                    )
                }
            )
        ).SerializeToString()
        for k in range(60)
    ]
    rows = TFRecordRows(written(tmp_path / "examples", examples))

    def parse(record):
        spec = {"k": tf.io.FixedLenFeature([], tf.int64)}
        k = tf.io.parse_single_example(record, spec)["k"]
        return tf.cast(k, tf.float32), k

    batches = [
        PoissonBatches(
            source, batch_size=20, map=parse, seed=0, read_ahead=read_ahead
        )
        for source, read_ahead in ((rows, 1), (rows, 3))
    ]
    assert batches[0].assumptions == ()
    # Several threads change nothing about the order.
    for one, other in zip(*(b.dataset().take(5) for b in batches)):
        drawn = one["y"][one["real"] == 1]
        assert len(drawn) > 5
        np.testing.assert_array_equal(one["y"], other["y"])
        np.testing.assert_array_equal(one["x"][one["real"] == 1], drawn)
