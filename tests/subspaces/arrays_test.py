"""Public data are part of a config, and come back from it as they were."""

import base64
import io
import json

import numpy as np
import pytest
import tensorflow as tf
from keras import tree

from tf_dpsub.subspaces import arrays

ARRAYS = {
    "floats": np.linspace(0, 1, 6, dtype="float32").reshape(2, 3),
    "not finite": np.array([np.nan, np.inf, -0.0, 1e-45], "float32"),
    "bytes": np.arange(6, dtype="uint8").reshape(3, 2, 1),
    "integers": np.array([2**62, -1]),
    "texts": np.array(["a", "ü b"]),
    "no example": np.zeros((0, 3), "float16"),
    "list": [np.ones(2), np.zeros(3)],
    "dict": {"a": np.ones(2), "b": {"c": np.arange(2)}},
}


@pytest.mark.parametrize("name", ARRAYS)
def test_round_trip_by_json(name):
    data = ARRAYS[name]
    found = arrays.decoded(json.loads(json.dumps(arrays.encoded(data))))
    tree.assert_same_structure(found, data)
    for one, other in zip(tree.flatten(found), tree.flatten(data)):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ARRAYS)
def test_leaves_arrays_as_they_are(name):
    found = arrays.decoded(ARRAYS[name])
    tree.map_structure(np.testing.assert_array_equal, found, ARRAYS[name])


def test_an_input_may_be_called_npz():
    data = {"npz": np.ones(2)}
    found = arrays.decoded(data)
    np.testing.assert_array_equal(found["npz"], data["npz"])
    found = arrays.decoded(arrays.encoded(data))
    np.testing.assert_array_equal(found["npz"], data["npz"])


@pytest.mark.parametrize("letters", ["a", "ü", "猫"])
@pytest.mark.parametrize("is_encoded", [False, True])
def test_texts_as_objects(letters, is_encoded):
    """A model reads the same texts, in the form that TensorFlow returns."""
    texts = [letters, "b " + letters]
    data = [t.encode() for t in texts] if is_encoded else texts
    data = np.array(data, object)
    found = arrays.decoded(json.loads(json.dumps(arrays.encoded(data))))
    assert tf.constant(found).numpy().tolist() == [t.encode() for t in texts]


def test_objects_are_not_loaded():
    """A config from elsewhere must not run code."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, array=np.array([{"a": 1}], object))
    text = base64.b64encode(buffer.getvalue()).decode()
    with pytest.raises(ValueError, match="allow_pickle=False"):
        arrays.decoded({"npz": text})
