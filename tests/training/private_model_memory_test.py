"""What a call of `fit` has held, it lets go."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dpsub
from tests import garbage
from tf_dpsub.data import row_gathers


class _Source:
    """Rows that are read one batch at a time."""

    def __init__(self, rows):
        self._rows = rows

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, indices):
        return self._rows[indices], np.zeros(len(indices), np.float32)


def _tensors(folder):
    x = tf.ones([8, 3])
    return x, (x, tf.zeros([8]))


def _memory_map(folder):
    np.save(folder / "x.npy", np.ones([8, 3], np.float32))
    x = np.load(folder / "x.npy", mmap_mode="r")
    return x, (x, np.zeros(8))


def _source(folder):
    source = _Source(np.ones([8, 3], np.float32))
    return source, (
        tf_dpsub.data.PoissonBatches(source, batch_size=4),
        None,
    )


def _model():
    model = tf_dpsub.make_private(
        keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    )
    model.compile(
        tf_dpsub.optimizers.DPSGD(
            "sgd", l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=4
        ),
        loss="mse",
    )
    return model


@pytest.mark.parametrize("make", [_tensors, _memory_map, _source])
def test_data_are_not_held_after_training(tmp_path, make):
    model = _model()
    held, (x, y) = make(tmp_path)
    model.fit(x, y, verbose=0)
    held = weakref.ref(held)
    del x, y
    assert garbage.ends(held)


def test_copies_of_arrays_end_with_the_call(monkeypatch):
    """One for each call would be kept until Python looks for cycles."""
    copies = []
    original = row_gathers.ArrayRows.__init__

    def init(self, arrays):
        original(self, arrays)
        copies.extend(map(weakref.ref, keras.tree.flatten(self.tensors)))

    monkeypatch.setattr(row_gathers.ArrayRows, "__init__", init)
    model = _model()
    x, y = np.ones([8, 3], np.float32), np.zeros(8, np.float32)
    gc.disable()
    try:
        model.fit(x, y, verbose=0)
        assert copies
        assert not any(copy() is not None for copy in copies)
    finally:
        gc.enable()
