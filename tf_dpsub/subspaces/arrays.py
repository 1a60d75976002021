"""Arrays in the config of a subspace."""

import base64
import io

import numpy as np
from keras import tree


def encoded(arrays):
    """Arrays as compressed text: JSON would make ten times as much of them."""

    def encode(array):
        if array.dtype.kind == "O":
            array = np.vectorize(_text, otypes=[str])(array)
        buffer = io.BytesIO()
        np.savez_compressed(buffer, array=array)
        return {"npz": base64.b64encode(buffer.getvalue()).decode()}

    return tree.map_structure(encode, arrays)


def _text(value):
    """A text, as TensorFlow would read it, of a text or its bytes."""
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, str):
        return value
    raise ValueError(
        "Expected arrays of numbers or texts, got one that holds a "
        f"{type(value).__name__}."
    )


def decoded(data):
    """Undoes `encoded`, and leaves arrays as they are."""
    if isinstance(data, dict) and data.keys() == {"npz"}:
        if isinstance(data["npz"], str):
            buffer = io.BytesIO(base64.b64decode(data["npz"]))
            return np.load(buffer, allow_pickle=False)["array"]
    if isinstance(data, dict):
        return {key: decoded(part) for key, part in data.items()}
    if isinstance(data, (list, tuple)) and any(
        isinstance(part, dict) for part in data
    ):
        return type(data)(decoded(part) for part in data)
    return data
