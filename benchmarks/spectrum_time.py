"""Time and memory of decomposing a tall stack of gradients on disk.

Writes gradients whose singular values decay as 1 / sqrt(j), and finds the first
k of them with their directions, in a process of its own.
"""

import json
import multiprocessing
import resource
import tempfile
import time

import keras
import numpy as np
from absl import app, flags

from tf_dpsub import analysis

_ROWS = flags.DEFINE_integer("rows", 4000, "How many gradients.")
_COLUMNS = flags.DEFINE_integer("columns", 1_800_000, "Parameters.")
_K = flags.DEFINE_integer("k", 100, "How many singular values to find.")
_FOLDER = flags.DEFINE_string("folder", None, "Where to write; else in /tmp.")

# A few directions stand out of the noise of batches.
_COMMON = 200
_TOGETHER = 50


def _write(folder, rows, columns):
    """Writes gradients in float16."""
    rng = np.random.default_rng(0)
    weights = keras.Variable(np.zeros(columns, "float32"), name="weights")
    store = analysis.GradientStore.create(folder, [weights], dtype="float16")
    shape = _COMMON, columns
    common = rng.standard_normal(shape, np.float32) / np.sqrt(
        np.arange(1.0, _COMMON + 1, dtype=np.float32)[:, None]
    )
    for first in range(0, rows, _TOGETHER):
        size = min(_TOGETHER, rows - first)
        block = rng.standard_normal((size, columns), np.float32)
        block += rng.standard_normal((size, _COMMON), np.float32) @ common
        for step, row in enumerate(block, first):
            store.append([row], step)


def _decompose(folder, k):
    """Measures seconds, peak memory in GiB, and errors of the result."""
    store = analysis.GradientStore(folder)
    start = time.perf_counter()
    spectrum = analysis.top_singular_values(store, k, directions=True)
    seconds = time.perf_counter() - start
    directions = spectrum.directions
    products = directions.T @ directions
    return {
        "seconds": seconds,
        "GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "first and last": [float(s) for s in spectrum.singular_values[[0, -1]]],
        "not orthonormal by": float(np.abs(products - np.eye(k)).max()),
    }


def main(_):
    with tempfile.TemporaryDirectory(dir=_FOLDER.value) as folder:
        _write(folder, _ROWS.value, _COLUMNS.value)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            results = pool.apply(_decompose, (folder, _K.value))
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    app.run(main)
