"""Adapters that read rows of data sets of other kinds."""

import keras
import numpy as np
import tensorflow as tf

from tf_dpsub.data import arrow_rows
from tf_dpsub.data.stored_rows import StoredRows

# Number of rows that are read both together and alone.
_COMPARED = 4
# For the statement.
_INDEPENDENT = (
    "that what the source gives for an example depends on that example alone"
)


def as_source(x):
    """Wraps data as a source from which `PoissonBatches` reads rows.

    Args:
        x: `keras.utils.PyDataset`; a `tf.data.Dataset` of rows; a
            `pyarrow.Table`; a `datasets.Dataset`; or an object with `__len__`
            and `__getitem__` of one index or of an array of indices, or
            `__getitems__` of a list of them.

    Returns:
        An object with `__len__` and `__getitem__` of an array of indices.

    Raises:
        ValueError: if rows cannot be read one by one.
    """
    if isinstance(x, keras.utils.PyDataset):
        return _RowsOfBatches(x)
    if isinstance(x, tf.data.Dataset):
        return _RowsOfDataset(x)
    if isinstance(x, StoredRows):
        return x
    if arrow_rows.is_table(x):
        rows = arrow_rows.TableRows(x)
        if rows.are_stored:
            return rows
        x = rows
    if not len(x):
        return x
    indices = np.arange(min(2, len(x)))
    try:
        x[indices]
    except Exception as error:
        try:
            x[0]
        except Exception:
            # The source's own error says more.
            raise error from None
        if not hasattr(x, "__getitems__"):
            return _OneByOne(x)
        source = _ByLists(x)
    else:
        source = _ByIndices(x)
    _require_independent_rows(source, type(x).__name__)
    return source


def _require_independent_rows(source, name):
    """Refuses a source whose rows depend on the other rows of a request.

    Formal guarantees: none. A few rows are compared, of a source that gives the
    same rows twice; the statement names the assumption.
    """
    last = len(source) - 1
    indices = np.unique(np.linspace(0, last, _COMPARED, dtype=np.int64))

    def read(subset):
        parts = keras.tree.flatten(source[subset])
        return [np.asarray(part) for part in parts if part is not None]

    together = read(indices)
    if not all(map(_is_close, read(indices), together)):
        # Rows are drawn anew each time.
        return
    for k in range(len(indices)):
        alone = read(indices[k : k + 1])
        in_batch = [part[k : k + 1] for part in together]
        if [part.shape for part in alone] != [part.shape for part in in_batch]:
            # Sources without a row for each index raise elsewhere.
            return
        if not all(map(_is_close, alone, in_batch)):
            raise ValueError(
                "Expected a source that gives the same row for an index, "
                f"whatever is read with it, got another one from "
                f"{name} for {int(indices[k])} alone than "
                "among others: an example would change what others "
                "contribute. Compute statistics beforehand, from public data."
            )


def _is_close(one, other):
    """Returns whether rows agree, up to rounding in batches of other sizes."""
    if one.shape != other.shape:
        return False
    if one.dtype.kind not in "fc":
        return bool(np.all(one == other))
    scale = np.max(np.abs(other), initial=0, where=np.isfinite(other))
    return np.allclose(one, other, 1e-5, 1e-6 * scale, equal_nan=True)


class _ByIndices:
    """A source that gives the rows of an array of indices."""

    assumptions = (_INDEPENDENT,)

    def __init__(self, source):
        self._source = source

    def __len__(self):
        return len(self._source)

    def __getitem__(self, indices):
        return self._source[indices]


def _stacked(rows):
    return keras.tree.map_structure(
        lambda *parts: np.stack([_as_array(part) for part in parts]), *rows
    )


def _as_array(part):
    # NumPy's own type of bytes drops zeros at their end.
    return np.asarray(part, object if isinstance(part, bytes) else None)


class _ByLists:
    """A data set that gives lists of rows, as those of ArrayRecord do."""

    assumptions = (_INDEPENDENT,)

    def __init__(self, rows):
        self._rows = rows

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, indices):
        rows = self._rows.__getitems__([int(i) for i in indices])
        if len(rows) != len(indices):
            raise ValueError(
                f"Expected a row for each of {len(indices)} indices of "
                f"{type(self._rows).__name__}.__getitems__, got {len(rows)}."
            )
        return _stacked(rows)


class _OneByOne:
    """A data set that gives the row of one index, as those of PyTorch do."""

    assumptions = (_INDEPENDENT,)

    def __init__(self, rows):
        self._rows = rows

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, indices):
        return _stacked([self._rows[int(i)] for i in indices])


class _RowsOfDataset:
    """A `tf.data.Dataset` of rows that can be read by their number."""

    assumptions = (_INDEPENDENT,)

    def __init__(self, dataset):
        self._dataset = dataset
        self._length = int(dataset.cardinality())
        if self._length < 0:
            raise ValueError(
                "Expected a tf.data.Dataset of rows whose number is known, got "
                "one of unknown or infinite length. Do not repeat it, and "
                "state its length with `tf.data.experimental."
                "assert_cardinality`."
            )
        try:
            self[[0]]
        except tf.errors.OpError as error:
            raise ValueError(
                "Expected a tf.data.Dataset that can be read by index, as "
                "`from_tensor_slices` and `map` make it, got one that cannot: "
                f"{error.message.splitlines()[0]} Give arrays, or an object "
                "with `__len__` and `__getitem__`."
            ) from error

    def __len__(self):
        return self._length

    def __getitem__(self, indices):
        return _stacked(
            [tf.data.experimental.at(self._dataset, int(i)) for i in indices]
        )


class _RowsOfBatches:
    """A `keras.utils.PyDataset`: row r is in batch r // size, at r % size."""

    def __init__(self, batches):
        self.assumptions = (
            "that no row of the PyDataset was computed from another",
        )
        self._batches = batches
        count = batches.num_batches
        if not count or count == float("inf"):
            raise ValueError(
                f"Expected a PyDataset of a known number of batches, got "
                f"{count} from {type(batches).__name__}. Give arrays, or an "
                "object with `__len__` and `__getitem__`."
            )
        self._size = _rows_of(batches[0])
        self._last = count - 1
        self._length = self._size * self._last + _rows_of(batches[self._last])

    def __len__(self):
        return self._length

    def __getitem__(self, indices):
        numbers, within = np.divmod(np.asarray(indices), self._size)
        return keras.tree.map_structure(
            lambda *parts: np.concatenate(parts),
            *(
                self._read(int(number), within[numbers == number])
                for number in np.unique(numbers)
            ),
        )

    def _read(self, number, within):
        batch = self._batches[number]
        is_last = number == self._last
        expected = self._length - number * self._size if is_last else self._size
        if _rows_of(batch) != expected:
            raise ValueError(
                f"Expected batches of {self._size} rows of "
                f"{type(self._batches).__name__}, the last of "
                f"{self._length - self._last * self._size}, as they were "
                "first, got another size: an index would mean another row."
            )
        return keras.tree.map_structure(lambda a: np.asarray(a)[within], batch)


def _rows_of(batch):
    return len(keras.tree.flatten(batch)[0])
