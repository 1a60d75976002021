"""Rows of TFRecord files, found by an index."""

import hashlib
import os
import pathlib

import numpy as np

from tf_dpsub import files as package_files
from tf_dpsub.data.stored_rows import FileStates, StoredRows

# A record is its length (8 bytes), a checksum of it (4), its content, and a
# checksum of that (4): https://www.tensorflow.org/tutorials/load_data/tfrecord
_HEADER, _FOOTER = 12, 4
# An index begins with this number, which says of what version it is.
_VERSION = 0x7466_6470_0001
# Bytes that are read at a time while an index is built, and records whose
# places are written at a time.
_CHUNK, _RECORDS = 2**18, 2**20
_NUMBER = np.dtype("<i8")
_ENDING = ".tf_dpsub_index"


class TFRecordRows(StoredRows):
    """Rows of TFRecord files, as a source for `PoissonBatches`.

    A TFRecord file has no table of its records. All files are read once, and
    the places of the records kept in a file beside them, the index: 8 bytes for
    each. Where there is one already, of files with these sizes and times of
    modification, it is used. It stays on the disk: a row takes no memory.

    A row is the content of a record, bytes, mostly a `tf.train.Example`. The
    `map` of `PoissonBatches` parses it.

    Formal guarantees: nothing is released. The index tells lengths of private
    records: its owner alone can read it. Of records the checksums of the
    lengths are compared, not those of the contents.

    Args:
        files: path of a file, or a sequence of paths: rows are numbered in
            their order. Compressed files cannot be read.
        index: path of the index. Defaults to `None`, beside the first file:
            its path and `.tf_dpsub_index`.

    Raises:
        ValueError: if a file is missing, given twice, cut within a record, or
            none of TFRecord.
        OSError: if the index cannot be written.

    Example:

    ```python
    features = {
        "x": tf.io.FixedLenFeature([100], tf.float32),
        "label": tf.io.FixedLenFeature([], tf.int64),
    }

    def parse(record):
        row = tf.io.parse_single_example(record, features)
        return row["x"], row["label"]

    rows = tf_dpsub.data.TFRecordRows(sorted(glob.glob("train-*.tfrecord")))
    batches = tf_dpsub.data.PoissonBatches(rows, batch_size=4096, map=parse)
    ```
    """

    def __init__(self, files, index=None):
        self._files = FileStates(files)
        self._index = pathlib.Path(
            self._files.paths[0] + _ENDING if index is None else index
        )
        # Where files begin, if they are laid one after another: [files + 1]
        self._begins = np.cumsum([0, *self._files.sizes])
        self._ends = self._kept_ends()
        if self._ends is None:
            package_files.replace(self._index, self._write)
            self._ends = self._kept_ends()

    def __len__(self):
        return len(self._ends) - 1

    def __getitem__(self, indices):
        """Reads records.

        Args:
            indices: int64 array, ascending.

        Returns:
            Object array `[len(indices)]` of bytes.

        Raises:
            IndexError: if there are not so many records.
            ValueError: if a file was changed since it was indexed.
        """
        indices = np.asarray(indices, np.int64)
        self.require_range(indices)
        begins, ends = self._ends[indices], self._ends[indices + 1]
        numbers = np.searchsorted(self._begins, begins, "right") - 1
        records = np.empty(len(indices), object)
        for number in np.unique(numbers).tolist():
            path = self._files.paths[number]
            self._files.require_unchanged(path)
            file = os.open(path, os.O_RDONLY)
            try:
                for k in np.flatnonzero(numbers == number).tolist():
                    place = int(begins[k] - self._begins[number])
                    size = int(ends[k] - begins[k])
                    record = os.pread(file, size, place)
                    content = record[_HEADER:-_FOOTER]
                    if len(record) != size or len(content) != int.from_bytes(
                        record[:8], "little"
                    ):
                        raise ValueError(
                            f"Expected record {indices[k]} as it was indexed, "
                            f"got another one at byte {place} of {path}."
                        )
                    records[k] = content
            finally:
                os.close(file)
        return records

    def require_unchanged(self):
        """Refuses files that were changed since the source was made.

        Raises:
            ValueError: if one was.
        """
        self._files.require_all_unchanged()

    def _header(self):
        """What an index of these files begins with."""
        names = "\0".join(os.path.basename(path) for path in self._files.paths)
        digest = int.from_bytes(
            hashlib.sha256(names.encode()).digest()[:7], "big"
        )
        return np.concatenate(
            [
                np.array([_VERSION, len(self._files.paths), digest], np.int64),
                self._files.sizes,
                self._files.times,
            ]
        ).astype(_NUMBER)

    def _kept_ends(self):
        """Memory map `[records + 1]` of where records begin and end, or None.

        Places are those in all files, laid one after another.
        """
        header = self._header()
        if not self._index.exists():
            return None
        size = self._index.stat().st_size
        if size % _NUMBER.itemsize or size < header.nbytes + _NUMBER.itemsize:
            return None
        numbers = np.memmap(self._index, _NUMBER, "r")
        if not np.array_equal(numbers[: len(header)], header):
            return None
        if numbers[-1] != self._begins[-1]:
            return None
        return numbers[len(header) :]

    def _write(self, path):
        with open(path, "wb") as index:
            index.write(self._header().tobytes())
            index.write(np.zeros(1, _NUMBER).tobytes())
            for name, begin, size in zip(
                self._files.paths, self._begins.tolist(), self._files.sizes
            ):
                for ends in _ends_of(name, int(size)):
                    index.write((ends + begin).astype(_NUMBER).tobytes())


def _ends_of(path, size):
    """Yields arrays of where the records of a file end, in its order."""
    lengths, checks = bytearray(), bytearray()
    ends: list[int] = []
    with open(path, "rb", buffering=0) as file:
        place, block, begin, length = 0, b"", 0, 0
        while place < size:
            if place + _HEADER > begin + len(block):
                # Of large records the headers alone are read.
                begin = place
                wanted = _CHUNK if length < _CHUNK // 8 else _HEADER
                block = os.pread(file.fileno(), wanted, place)
            header = block[place - begin : place - begin + _HEADER]
            length = int.from_bytes(header[:8], "little")
            end = place + _HEADER + length + _FOOTER
            if len(header) == _HEADER:
                lengths += header[:8]
                checks += header[8:]
            ends.append(end)
            if end > size or len(ends) == _RECORDS:
                _check_lengths(path, lengths, checks, place)
            if end > size:
                raise ValueError(
                    f"Expected whole records in {path}, got a file that was "
                    f"cut: the record at byte {place} ends at byte {end}, "
                    f"the file at {size}. Write it anew."
                )
            if len(ends) == _RECORDS:
                yield np.array(ends, np.int64)
                lengths, checks, ends = bytearray(), bytearray(), []
            place = end
    _check_lengths(path, lengths, checks, place)
    yield np.array(ends, np.int64)


def _check_lengths(path, lengths, checks, place):
    """Refuses lengths that do not fit their checksums."""
    computed = _masked_crc32c(np.frombuffer(lengths, np.uint8).reshape(-1, 8))
    if not np.array_equal(computed, np.frombuffer(checks, "<u4")):
        raise ValueError(
            f"Expected a TFRecord file without compression, got {path}, where "
            f"a length at or before byte {place} does not fit its checksum."
        )


def _masked_crc32c(data):
    """TFRecord checksums, uint32 `[rows]`, of bytes `[rows, count]`."""
    crc = np.full(len(data), 0xFFFFFFFF, np.uint32)
    for byte in data.T:
        crc = _TABLE[(crc ^ byte) & np.uint32(0xFF)] ^ (crc >> np.uint32(8))
    crc = ~crc
    rotated = (crc >> np.uint32(15)) | (crc << np.uint32(17))
    return rotated + np.uint32(0xA282EAD8)


def _table():
    """The checksum of each byte: CRC-32C, by its polynomial reversed."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(
            table & np.uint32(1),
            table >> np.uint32(1) ^ np.uint32(0x82F63B78),
            table >> np.uint32(1),
        ).astype(np.uint32)
    return table


_TABLE = _table()
