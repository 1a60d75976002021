"""Rows of NumPy memory maps, read from their files."""

import mmap
import os
import weakref

import numpy as np

# Rows closer than a page are read together: the disk reads whole pages.
_PAGE = 4096
# The most bytes that are read at once beside the result.
_LARGEST_READ = 2**24
# Number of rows by which a file is recognised.
_COMPARED = 4


def is_memory_map(array) -> bool:
    """Tells whether an array is a NumPy memory map, or a view of one."""
    while array is not None:
        if isinstance(array, np.memmap):
            return True
        array = getattr(array, "base", None)
    return False


class MappedRows:
    """Reads rows of a memory map from its file, beside the map.

    A map reads 128 KiB around each row where few rows are drawn, counts all
    that it has read as memory of the process, and kills the process where the
    file has become shorter. Reading does neither: the pages of the drawn rows
    are read in the order of the file, and stay in the cache of the system
    alone.

    Args:
        array: NumPy array `[rows, ...]` whose rows lie in the file one after
            another: as a whole, or a slice of some columns.
        root: `numpy.memmap` of the whole file.

    Raises:
        OSError: if the file cannot be opened, or is no longer that of the map.
    """

    def __init__(self, array, root):
        self._path = root.filename
        self._shape, self._dtype = array.shape[1:], array.dtype
        # Bytes of a row, and from one row to the next.
        self._bytes = self._dtype.itemsize * int(np.prod(self._shape))
        self._pitch = array.strides[0]
        self._begin = root.offset + _address(array) - _address(root)
        self._end = self._begin + (len(array) - 1) * self._pitch + self._bytes
        self._file = os.open(self._path, os.O_RDONLY)
        # Threads of TensorFlow may read until the process ends.
        weakref.finalize(self, os.close, self._file).atexit = False
        places = np.linspace(0, len(array) - 1, _COMPARED, dtype=np.int64)
        rows = self[np.unique(places)]
        if rows.tobytes() != array[np.unique(places)].tobytes():
            raise OSError(f"{self._path} is not the file of the memory map.")

    @classmethod
    def of(cls, array):
        """The reader of a memory map.

        Args:
            array: NumPy array, a memory map or a view of one.

        Returns:
            A `MappedRows`; None where rows have to be read through the map: it
            has changes of its own, its file is gone, or the rows of a view do
            not follow each other in it.
        """
        root = _root_of(array)
        row = array[:1]
        if (
            root is None
            or root.mode == "c"
            or root.filename is None
            or not array.size
            or array.strides[0] <= 0
            or not row.flags.c_contiguous
        ):
            return None
        try:
            return cls(array, root)
        except OSError:
            return None

    def __getitem__(self, indices):
        """Reads rows.

        Args:
            indices: int64 array.

        Returns:
            Array `[len(indices), ...]`.

        Raises:
            ValueError: if the file has become shorter.
            OSError: if it cannot be read.
        """
        if np.any(np.diff(indices) < 0):
            distinct, places = np.unique(indices, return_inverse=True)
            return self[distinct][places]
        rows = np.empty((len(indices), self._bytes), np.uint8)
        numbers, row_bytes = indices.tolist(), self._bytes
        view = memoryview(rows.reshape(-1))
        for begin, end in self._runs(indices):
            first = numbers[begin]
            if end == begin + 1:
                start = begin * row_bytes
                self._read(view[start : start + row_bytes], first)
                continue
            count = numbers[end - 1] - first + 1
            block = np.empty((count - 1) * self._pitch + row_bytes, np.uint8)
            self._read(memoryview(block), first)
            together = np.ndarray(
                (count, row_bytes), np.uint8, block, strides=(self._pitch, 1)
            )
            rows[begin:end] = together[indices[begin:end] - first]
        return rows.view(self._dtype).reshape(-1, *self._shape)

    def require_unchanged(self):
        """Refuses a file that has become shorter.

        Raises:
            ValueError: if it has.
        """
        size = os.fstat(self._file).st_size
        if size < self._end:
            raise ValueError(
                f"Expected {self._path} to have {self._end:,} bytes at least, "
                f"as when it was mapped, got {size:,}: it was cut. Restore the "
                "file, and call `fit` again."
            )

    def _runs(self, indices):
        """Yields where rows that are read together begin and end."""
        gaps = np.diff(indices) * self._pitch - self._bytes
        splits = (np.flatnonzero(gaps >= _PAGE) + 1).tolist()
        most = max(1, _LARGEST_READ // self._pitch)
        for begin, end in zip([0, *splits], [*splits, len(indices)]):
            # One row, as nearly always where few are drawn, is quick.
            while end > begin + 1 and indices[end - 1] - indices[begin] >= most:
                until = int(np.searchsorted(indices, indices[begin] + most))
                yield begin, until
                begin = until
            if begin < end:
                yield begin, end

    def _read(self, buffer, row):
        """Fills a buffer of bytes from a row on."""
        place, size = self._begin + row * self._pitch, len(buffer)
        done = os.preadv(self._file, [buffer], place)
        while done < size:
            count = os.preadv(self._file, [buffer[done:]], place + done)
            if count == 0:
                self.require_unchanged()
                raise OSError(f"{self._path} ends before row {row}.")
            done += count


def _root_of(array):
    """The map of a whole file that an array is a view of, or None."""
    root = None
    while array is not None and not isinstance(array, mmap.mmap):
        if isinstance(array, np.memmap):
            root = array
        array = getattr(array, "base", None)
    return root if isinstance(array, mmap.mmap) else None


def _address(array):
    return array.__array_interface__["data"][0]
