"""Examples that two data sets have in common."""

import hashlib

import numpy as np
import tensorflow as tf
from keras import tree

# Number of examples that are read at a time.
_ROWS = 1024


def count_common(public, private) -> int:
    """Counts the private examples whose inputs are also public.

    Inputs are compared by their hashes, as the float32 numbers that a model
    sees: `uint8` images equal their `float32` copies.

    Args:
        public: structure of arrays whose axis 0 is the example; or a function
            of a number, which returns an iterable of such structures, of that
            number of rows each.
        private: the same.

    Returns:
        int.
    """
    digests = set(_hashes(public))
    return sum(digest in digests for digest in _hashes(private))


def _hashes(inputs):
    for chunk in inputs(_ROWS) if callable(inputs) else _chunks(inputs):
        for row in zip(*map(_canonical, tree.flatten(chunk))):
            digest = hashlib.blake2b(digest_size=16)
            for value in row:
                digest.update(value)
            yield digest.digest()


def _chunks(inputs):
    for start in range(0, len(tree.flatten(inputs)[0]), _ROWS):
        yield tree.map_structure(
            lambda part: part[start : start + _ROWS], inputs
        )


def inputs_of(data):
    """Inputs of the data on which Keras evaluates a model.

    Args:
        data: tuple of `x`, and perhaps `y` and weights; `tf.data.Dataset` of
            batches of them; or another source of such batches.

    Returns:
        An argument of `count_common`; None where batches cannot be read twice.
    """
    if isinstance(data, (tuple, list)):
        return data[0]
    if isinstance(data, tf.data.Dataset):
        # Several inputs are a tuple in the first place of an element.
        return lambda _: (
            element[0] if isinstance(element, tuple) else element
            for element in data
        )
    return None


def _canonical(chunk):
    """List of bytes-like, one for each example."""
    chunk = np.asarray(chunk)
    if chunk.dtype.kind in "biuf" or chunk.dtype.name == "bfloat16":
        # Adding 0 turns -0 into 0.
        return list(np.ascontiguousarray(chunk, np.float32) + np.float32(0))
    rows = chunk.reshape(len(chunk), -1).tolist()
    return [
        repr(
            [v if isinstance(v, bytes) else str(v).encode() for v in row]
        ).encode()
        for row in rows
    ]
