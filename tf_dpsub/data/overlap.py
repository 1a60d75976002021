"""Examples that two data sets have in common."""

import hashlib

import numpy as np
from keras import tree

# Examples that are read at a time.
_ROWS = 1024


def count_common(public, private) -> int:
    """Counts the private examples whose inputs are public ones, too.

    Inputs are compared by their hashes, as the numbers of float32 that a model
    sees: `uint8` images equal their `float32` copies.

    Args:
        public: structure of arrays whose axis 0 is the example.
        private: the same.

    Returns:
        int.
    """
    known = set(_hashes(public))
    return sum(digest in known for digest in _hashes(private))


def _hashes(inputs):
    parts = tree.flatten(inputs)
    for start in range(0, len(parts[0]), _ROWS):
        chunks = [_canonical(part[start : start + _ROWS]) for part in parts]
        for row in zip(*chunks):
            digest = hashlib.blake2b(digest_size=16)
            for value in row:
                digest.update(value)
            yield digest.digest()


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
