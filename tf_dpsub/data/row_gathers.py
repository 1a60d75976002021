"""Functions of TensorFlow that read the rows of drawn examples."""

import weakref

import keras
import numpy as np
import tensorflow as tf

from tf_dpsub.data import memory_maps


class SourceReader:
    """Reads the parts of rows from a random-access source.

    Args:
        source: object with `__len__` and `__getitem__` of an array of indices.
        named: function of what an element holds, `x`, `y` and weights, that
            returns a dict of its parts.
    """

    def __init__(self, source, named):
        self._source, self._named = source, named
        self._rows = len(source)

    def __call__(self, indices):
        """Reads rows.

        Args:
            indices: int64 array, ascending and distinct.

        Returns:
            dict of structures of arrays `[len(indices), ...]`.

        Raises:
            ValueError: if one cannot be read; the message names it, and is as
                private as the draw.
        """
        try:
            rows = self._source[indices]
        except Exception as error:
            raise self._unreadable(indices, error) from None
        return self._named(*keras.utils.unpack_x_y_sample_weight(rows))

    def inputs_in_chunks(self, rows: int):
        """Yields all inputs, so many rows at a time."""
        for start in range(0, self._rows, rows):
            end = min(start + rows, self._rows)
            yield self(np.arange(start, end))["x"]

    def require_unchanged(self):
        """Refuses a source as the function of this name does."""
        require_unchanged(self._source, self._rows)

    def _unreadable(self, indices, error):
        if isinstance(error, ValueError) and str(error).startswith("Expected "):
            # It says already what is wrong, without values of rows.
            return error
        row = self._first_unreadable(indices)
        which = (
            f"{len(indices)} rows together, and none for each alone"
            if row is None
            else f"row {row}"
        )
        kind = type(error).__name__
        if isinstance(error, OSError) and error.strerror:
            kind += f" ({error.strerror})"
        again = "" if row is None else f"; `source[{row}]` raises it in full"
        return ValueError(
            f"Expected a source whose rows can all be read, got {kind} for "
            f"{which}. Steps that were charged stay so, no further one was "
            f"taken. Repair the source{again}. Keep this message to yourself: "
            "it tells which row was drawn."
        )

    def _first_unreadable(self, indices):
        while len(indices) > 1:
            half = len(indices) // 2
            is_low = not self._can_read(indices[:half])
            indices = indices[:half] if is_low else indices[half:]
        if len(indices) and not self._can_read(indices):
            return int(indices[0])
        return None

    def _can_read(self, indices):
        try:
            self._source[indices]
        except Exception:
            return False
        return True


class MemoryMapReader:
    """Reads the parts of rows of arrays of which some are memory maps.

    Args:
        arrays: structure of arrays `[examples, ...]`.
    """

    def __init__(self, arrays):
        self._arrays = keras.tree.map_structure(
            lambda array: memory_maps.MappedRows.of(array) or array,
            keras.tree.map_structure(np.asarray, arrays),
        )
        lengths = {len(array) for array in keras.tree.flatten(arrays)}
        if len(lengths) > 1:
            raise ValueError(
                "Expected arrays of the same number of rows, got lengths "
                f"{sorted(lengths)}."
            )
        (self._rows,) = lengths

    @classmethod
    def of(cls, arrays):
        """A `MemoryMapReader`, or None where no array is a memory map."""
        if any(map(memory_maps.is_memory_map, keras.tree.flatten(arrays))):
            return cls(arrays)
        return None

    def __len__(self):
        return self._rows

    def __call__(self, indices):
        """Reads rows: that structure, of any indices."""
        return self[indices]

    def __getitem__(self, indices):
        return keras.tree.map_structure(
            lambda array: array[indices], self._arrays
        )

    def require_unchanged(self):
        """Refuses files that have become shorter.

        Raises:
            ValueError: if one has.
        """
        for array in keras.tree.flatten(self._arrays):
            if isinstance(array, memory_maps.MappedRows):
                array.require_unchanged()


def require_unchanged(source, rows: int):
    """Refuses a source that is not as it was when batches were made of it.

    Args:
        source: object with `__len__`, and perhaps a `require_unchanged`.
        rows: int, the number that it had.

    Raises:
        ValueError: if it has another number of rows, or says so itself.
    """
    if hasattr(source, "require_unchanged"):
        source.require_unchanged()
    if len(source) != rows:
        raise ValueError(
            f"Expected a source of {rows:,} rows, as when its batches were "
            f"made, got {len(source):,}: rows would be drawn with another "
            "probability than the account says. No further step was taken. "
            "Keep the source as it is during a run, and make new batches of it "
            "for the next."
        )


class ArrayRows:
    """Function of numbers of examples that gives their rows of arrays.

    It takes an int64 tensor `[drawn]`, and returns the structure of the arrays,
    of tensors `[drawn, ...]`.

    Args:
        arrays: structure of arrays `[examples, ...]`, which are copied.

    Attributes:
        tensors: structure of tensors, these copies. A function of a dataset
            that captures them keeps them until Python looks for cycles: it
            takes them as an element, for `of`.
        row_spec: structure of `tf.TensorSpec`, of a row.
    """

    def __init__(self, arrays):
        # On the host: the data set need not fit into an accelerator's memory.
        with tf.device("CPU"):
            self.tensors = keras.tree.map_structure(
                tf.convert_to_tensor, arrays
            )
        self.row_spec = keras.tree.map_structure(
            lambda tensor: tf.TensorSpec(tensor.shape[1:], tensor.dtype),
            self.tensors,
        )

    def __call__(self, indices):
        return self.of(self.tensors)(indices)

    @staticmethod
    def of(tensors):
        """Such a function, of tensors."""
        return lambda indices: keras.tree.map_structure(
            lambda tensor: tf.gather(tensor, indices), tensors
        )


class ReaderRows:
    """As `ArrayRows`, of rows that a function of Python reads.

    Args:
        read: function of an int64 array `[drawn]` that returns a structure of
            arrays `[drawn, ...]`.

    Attributes:
        row_spec: as of `ArrayRows`.

    Raises:
        ValueError: if it does not return one row for each index.
    """

    def __init__(self, read):
        self._read = read
        first = read(np.zeros([1], np.int64))
        self.row_spec = keras.tree.map_structure(
            lambda rows: _spec_of_row(np.asarray(rows)), first
        )
        self._specs = keras.tree.flatten(self.row_spec)

    def __call__(self, indices):
        leaves = tf.numpy_function(
            _held_weakly(self._read_leaves),
            [indices],
            [spec.dtype for spec in self._specs],
        )
        for leaf, spec in zip(leaves, self._specs, strict=True):
            leaf.set_shape([None, *spec.shape])
        return keras.tree.pack_sequence_as(self.row_spec, leaves)

    def _read_leaves(self, indices):
        if len(indices) == 0:
            return [
                np.zeros((0, *spec.shape), spec.dtype.as_numpy_dtype)
                for spec in self._specs
            ]
        leaves = [
            np.asarray(rows) for rows in keras.tree.flatten(self._read(indices))
        ]
        if any(rows.shape[:1] != (len(indices),) for rows in leaves):
            raise ValueError(
                "Expected a row for each index, as for the first one, got "
                "another number of rows from the source."
            )
        # How many were drawn is private.
        specs = [tf.TensorSpec(r.shape[1:], r.dtype) for r in leaves]
        if specs != self._specs:
            raise ValueError(
                f"Expected rows {self._specs}, got {specs} from the source. "
                "Every example must have the shapes and dtypes of the first "
                "one."
            )
        return leaves


def _held_weakly(method):
    """Wraps a method for TensorFlow, which keeps the wrapper forever.

    The dataset holds the object itself, with all data, as long as it is needed.
    """
    reference = weakref.WeakMethod(method)
    return lambda *arguments: reference()(*arguments)


def _spec_of_row(rows):
    if rows.shape[:1] != (1,):
        raise ValueError(
            "Expected the source to return arrays with one row for each "
            f"index, got shape {rows.shape} for one index."
        )
    return tf.TensorSpec(rows.shape[1:], rows.dtype)
