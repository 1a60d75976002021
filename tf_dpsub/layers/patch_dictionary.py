"""Image features by a dictionary of patches of public images."""

import keras
import numpy as np
import tensorflow as tf

from tf_dpsub.checks import check_count, check_seed

# Patches the dictionary is made of, at most.
_PATCHES = 100_000
_ROUNDS = 10
# What is added to the standard deviation of a patch, of colours in [0, 1], and
# to the eigenvalues of normalised patches: flat patches are not blown up.
_CONTRAST = 10 / 255
_RIDGE = 0.1


@keras.saving.register_keras_serializable("tf_dpsub")
class PatchDictionary(keras.layers.Layer):
    """Similarity of the patches of an image to words of a dictionary.

    Each patch of an image is centred, divided by its contrast and whitened.
    A word `w` gives it the two features `max(<w, patch> - threshold, 0)` and
    `max(-<w, patch> - threshold, 0)`, which are averaged over the cells of a
    grid on the image. `from_images` learns the dictionary from public images:
    nothing of the private ones enters.

    It computes in float32, whatever the precision of the model.

    Args:
        words: int, number of words `K`.
        patch_size: int, side of a patch in pixels. Defaults to `6`.
        cells: int, number of cells along each side. Defaults to `3`.
        threshold: float, at least 0. Defaults to `0.5`.
        **kwargs: as `keras.layers.Layer`.

    Input shape:
        `[batch, height, width, channels]`, colours in [0, 1].

    Output shape:
        `[batch, cells, cells, 2 K]`.

    Raises:
        ValueError: if an argument is out of range, or images are too small.

    Example:

    ```python
    features = tf_dpsub.layers.PatchDictionary.from_images(
        public_images, words=400
    )
    ```

    Reference:
        - [Coates, Ng, Lee, 2011](https://proceedings.mlr.press/v15/coates11a)
        - [Coates, Ng, 2012](https://doi.org/10.1007/978-3-642-35289-8_30),
          spherical k-means
    """

    def __init__(
        self,
        words: int,
        *,
        patch_size: int = 6,
        cells: int = 3,
        threshold: float = 0.5,
        **kwargs,
    ):
        # Inputs are cast up, never down.
        super().__init__(autocast=False, **kwargs)
        check_count("words", words)
        check_count("patch_size", patch_size)
        check_count("cells", cells)
        if not threshold >= 0:
            raise ValueError(f"Expected threshold >= 0, got {threshold}.")
        self.words = int(words)
        self.patch_size, self.cells = int(patch_size), int(cells)
        self.threshold = float(threshold)
        self.trainable = False

    @classmethod
    def from_images(
        cls, public_images, words: int, *, seed: int | None = None, **kwargs
    ):
        """Learns a dictionary by k-means on patches of public images.

        Args:
            public_images: array `[images, height, width, channels]`, colours in
                [0, 1].
            words: int, number of words.
            seed: int, of the patches that are drawn. Defaults to `None`, fresh
                entropy.
            **kwargs: the other arguments of `PatchDictionary`.

        Returns:
            A built `PatchDictionary`.

        Raises:
            ValueError: if images are not finite, not in [0, 1], too few or too
                small.
        """
        check_seed(seed)
        layer = cls(words, **kwargs)
        images = _checked_images(public_images)
        layer.build((None, *images.shape[1:]))
        generator = np.random.default_rng(seed)
        patches = _normalized(_drawn(images, layer.patch_size, generator))
        if len(patches) < layer.words:
            raise ValueError(
                f"Expected public images with at least {layer.words} patches, "
                f"one for each word, got {len(patches)}. Give more images, or "
                "ask for fewer words."
            )
        mean = patches.mean(0)
        whitening = _whitening(patches - mean)
        centres = _spherical_k_means(
            (patches - mean) @ whitening, layer.words, generator
        )  # [words, pixels]
        kernel = whitening @ centres.T
        layer.offsets.assign(-mean @ kernel)
        # The mean of a patch is taken off by the kernel.
        kernel -= kernel.mean(0)
        layer.kernel.assign(kernel.reshape(layer.kernel.shape))
        return layer

    def build(self, input_shape):
        if len(input_shape) != 4 or None in input_shape[1:]:
            raise ValueError(
                "Expected images [batch, height, width, channels] of known "
                f"size, got the shape {tuple(input_shape)}."
            )
        smallest = self.patch_size + self.cells - 1
        if min(input_shape[1:3]) < smallest:
            raise ValueError(
                f"Expected images of at least {smallest} pixels on each side, "
                f"for {self.cells} cells of patches of {self.patch_size}, got "
                f"{min(input_shape[1:3])}."
            )
        side = self.patch_size
        self.kernel = self.add_weight(
            name="kernel",
            shape=(side, side, input_shape[3], self.words),
            initializer="zeros",
            trainable=False,
            dtype="float32",
        )
        self.offsets = self.add_weight(
            name="offsets",
            shape=(self.words,),
            initializer="zeros",
            trainable=False,
            dtype="float32",
        )
        self.built = True

    def compute_output_shape(self, input_shape):
        return input_shape[0], self.cells, self.cells, 2 * self.words

    def call(self, images):
        images = tf.cast(images, tf.float32)
        products = tf.nn.conv2d(images, self.kernel, 1, "VALID")
        contrasts = _contrasts(images, self.patch_size)
        similarities = products / contrasts + tf.convert_to_tensor(self.offsets)
        features = tf.concat(
            [
                tf.nn.relu(similarities - self.threshold),
                tf.nn.relu(-similarities - self.threshold),
            ],
            -1,
        )  # [batch, rows, columns, 2 words]
        rows, columns = (
            tf.constant(_averages(side, self.cells), tf.float32)
            for side in features.shape[1:3]
        )
        averages = tf.einsum("ik,bklw,jl->bijw", rows, features, columns)
        return tf.cast(averages, self.compute_dtype)

    def get_config(self):
        return {
            **super().get_config(),
            "words": self.words,
            "patch_size": self.patch_size,
            "cells": self.cells,
            "threshold": self.threshold,
        }


def _checked_images(images):
    images = np.asarray(images)
    if images.ndim != 4 or not images.size:
        raise ValueError(
            "Expected public images [images, height, width, channels], got an "
            f"array of shape {images.shape}."
        )
    images = images.astype(np.float32)
    # NaN is in no range.
    if not (images.min() >= 0 and images.max() <= 1):
        raise ValueError(
            "Expected public images with colours in [0, 1], got values from "
            f"{images.min()} to {images.max()}. Divide bytes by 255."
        )
    return images


def _drawn(images, side, generator):
    """Patches at random places, `[patches, side * side * channels]`."""
    count, height, width, _ = images.shape
    places = count * (height - side + 1) * (width - side + 1)
    patches = min(_PATCHES, places)
    chosen = generator.choice(places, patches, replace=False)
    image, row, column = np.unravel_index(
        chosen, (count, height - side + 1, width - side + 1)
    )
    windows = np.lib.stride_tricks.sliding_window_view(
        images, (side, side), axis=(1, 2)
    )  # [images, rows, columns, channels, side, side]
    drawn = windows[image, row, column]
    return np.moveaxis(drawn, 1, -1).reshape(patches, -1)


def _normalized(patches):
    patches = patches - patches.mean(1, keepdims=True)
    variances = np.square(patches).mean(1, keepdims=True)
    return patches / np.sqrt(variances + _CONTRAST**2)


def _whitening(patches):
    """The symmetric matrix that whitens centred patches (ZCA)."""
    values, vectors = np.linalg.eigh(patches.T @ patches / len(patches))
    return (vectors * (values + _RIDGE) ** -0.5) @ vectors.T


def _spherical_k_means(patches, words, generator):
    """Unit vectors to which patches are most similar, sign apart."""
    centres = patches[generator.choice(len(patches), words, replace=False)]
    for _ in range(_ROUNDS):
        centres = _unit(centres)
        products = patches @ centres.T
        nearest = np.abs(products).argmax(1)
        weights = products[np.arange(len(patches)), nearest]
        totals = np.zeros_like(centres)
        np.add.at(totals, nearest, weights[:, None] * patches)
        # A word that nothing is nearest to stays.
        is_used = np.abs(totals).sum(1) > 0
        centres[is_used] = totals[is_used]
    return _unit(centres)


def _unit(vectors):
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.maximum(norms, 1e-12)


def _contrasts(images, side):
    """Standard deviations of patches, `[batch, rows, columns, 1]`."""
    # About the mean of each image: squares of small numbers lose no digits.
    images -= tf.reduce_mean(images, [1, 2, 3], keepdims=True)
    moments = tf.stack(
        [tf.reduce_mean(images, 3), tf.reduce_mean(tf.square(images), 3)], 3
    )
    means, squares = tf.unstack(
        tf.nn.avg_pool2d(moments, side, 1, "VALID"), axis=3
    )
    variances = tf.maximum(squares - tf.square(means), 0.0)
    return tf.sqrt(variances + _CONTRAST**2)[..., None]


def _averages(side, cells):
    """The matrix that averages positions over cells, `[cells, side]`."""
    bounds = np.linspace(0, side, cells + 1).round().astype(int)
    position = np.arange(side)
    inside = (bounds[:-1, None] <= position) & (position < bounds[1:, None])
    return inside / inside.sum(1, keepdims=True)
