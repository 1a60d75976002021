"""Stored rows, which must not change while batches are drawn of them."""

import abc
import os

import numpy as np


class StoredRows(abc.ABC):
    """A source that gives the same row for an index, whatever is read with it.

    Attributes:
        assumptions: tuple of strings, on which the privacy statement rests.
    """

    assumptions: tuple[str, ...] = ()

    @abc.abstractmethod
    def __len__(self):
        """Number of rows."""

    def require_range(self, indices):
        """Refuses numbers of rows that there are not.

        Args:
            indices: int64 array.

        Raises:
            IndexError: if one is negative, or too large.
        """
        rows = len(self)
        if len(indices) and not 0 <= np.min(indices) <= np.max(indices) < rows:
            raise IndexError(f"Expected rows from 0 to {rows - 1}, got others.")


class FileStates:
    """Sizes and times of modification of some files, as they are now.

    Args:
        files: path of a file, or a sequence of paths.

    Attributes:
        paths: list of strings.
        sizes: int64 array `[files]`, bytes.
        times: int64 array `[files]`, nanoseconds since 1970.

    Raises:
        ValueError: if there are none, or one is missing, or given twice.
    """

    def __init__(self, files):
        if isinstance(files, (str, os.PathLike)):
            files = [files]
        self.paths = [os.fspath(path) for path in files]
        if not self.paths:
            raise ValueError("Expected at least one file of rows, got none.")
        self._states = {path: self._state(path) for path in self.paths}
        if len(self._states) < len(self.paths):
            raise ValueError(
                "Expected each file of rows once, got one twice: each of its "
                "rows would be two examples."
            )
        states = np.array(list(self._states.values()), np.int64)
        self.sizes, self.times = states.T

    def require_unchanged(self, path: str):
        """Refuses one of the files if it was changed since.

        Args:
            path: string, of `paths`.

        Raises:
            ValueError: if it was, or is missing.
        """
        if self._state(path) != self._states[path]:
            raise ValueError(
                f"Expected {path} as it was when reading began, got another "
                "size or time of modification: a row may be another one now. "
                "No further step was taken. Restore the file, or make the "
                "source and its batches anew for the next run."
            )

    def require_all_unchanged(self):
        """Refuses files as `require_unchanged` does, whichever it is."""
        for path in self.paths:
            self.require_unchanged(path)

    @staticmethod
    def _state(path):
        try:
            state = os.stat(path)
        except FileNotFoundError as error:
            raise ValueError(
                f"Expected the file {path} of rows, got none."
            ) from error
        return state.st_size, state.st_mtime_ns
