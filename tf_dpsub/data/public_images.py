"""Public images from other sources, converted to a model's input shape."""

import numpy as np
import tensorflow as tf

from tf_dpsub.data import npz


def load_images(path, input_shape: tuple):
    """Loads images, and converts them to the input shape of a model.

    They are resized with antialiasing, and made grey (by luma weights) where
    the model takes one channel.

    Args:
        path: str or path, an .npz file with the array `images`, uint8,
            `[images, height, width, channels]` with 1 or 3 channels.
        input_shape: tuple of ints, height, width and channels (1 or 3) of one
            input of the model.

    Returns:
        float32 array in [0, 1], `[images, *input_shape]`.

    Raises:
        ValueError: if the file does not hold such images, or the model takes
            none.
    """
    checked_shape(input_shape)
    return fitted(_read(path), input_shape)


def fitted(images, input_shape: tuple):
    """Converts images to the input shape of a model.

    Args:
        images: uint8 array `[images, height, width, 1 or 3]`.
        input_shape: tuple of ints, as for `load_images`.

    Returns:
        float32 array, as `load_images` returns it.

    Raises:
        ValueError: if the model takes no images.
    """
    height, width, channels = checked_shape(input_shape)
    images = tf.constant(images, tf.float32) / 255.0
    if images.shape[-1] == 3 and channels == 1:
        images = tf.image.rgb_to_grayscale(images)
    elif images.shape[-1] == 1 and channels == 3:
        images = tf.image.grayscale_to_rgb(images)
    if images.shape[1:3] != (height, width):
        images = tf.image.resize(images, (height, width), antialias=True)
    # The weights of the colours and of the resizing sum to 1 but for rounding.
    return tf.clip_by_value(images, 0.0, 1.0).numpy()


def checked_shape(input_shape):
    """Height, width and channels of a model's input, if these are images."""
    shape = tuple(input_shape)
    if len(shape) != 3 or shape[-1] not in (1, 3):
        raise ValueError(
            "Expected a model that takes images of 1 or 3 channels to use "
            f"public images, got one whose inputs have the shape {shape}. Use "
            "public examples of the data set itself."
        )
    return shape


def _read(path):
    (images,) = npz.read_arrays(path, ["images"])
    if (
        images.dtype != np.uint8
        or images.ndim != 4
        or images.shape[-1] not in (1, 3)
        or not images.size
    ):
        raise ValueError(
            "Expected images of type uint8 and shape [images, height, width, 1 "
            f"or 3] in {path}, got {images.dtype} {list(images.shape)}."
        )
    return images
