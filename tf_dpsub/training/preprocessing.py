"""Preprocessing of data by the model itself, as tasks of keras_hub have it."""

import keras
import tensorflow as tf


def preprocessed(model, data):
    """Applies the preprocessing of a keras_hub task, if the model is one.

    Args:
        model: plain `keras.Model`.
        data: tuple of `x`, and perhaps `y` and sample weights, where `x` may be
            a `tf.data.Dataset`; or a dataset of such tuples.

    Returns:
        The same.
    """
    preprocess = getattr(model, "preprocess_samples", None)
    if preprocess is None:
        return data
    if isinstance(data, tuple) and isinstance(data[0], tf.data.Dataset):
        return (data[0].map(preprocess), *data[1:])
    if isinstance(data, tf.data.Dataset):
        return data.map(preprocess)
    parts = keras.utils.unpack_x_y_sample_weight(data)
    done = keras.utils.unpack_x_y_sample_weight(preprocess(*parts))
    return done[: len(data)]
