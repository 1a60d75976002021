import numpy as np
import pytest

from tf_dpsub.layers import PatchDictionary


def _images(count=40, side=9, channels=2, seed=0):
    generator = np.random.default_rng(seed)
    return generator.random((count, side, side, channels), "float32")


@pytest.fixture(scope="module")
def dictionary():
    return PatchDictionary.from_images(
        _images(), words=5, patch_size=4, cells=2, seed=0
    )


def test_features_by_definition(dictionary):
    """Every patch by itself, with the steps one after another, in float64."""
    images = _images(3, seed=1)
    features = dictionary(images).numpy()
    assert features.shape == (3, 2, 2, 10)
    kernel = dictionary.kernel.numpy().reshape(-1, 5).astype("float64")
    expected = np.zeros((3, 6, 6, 10))
    for row in range(6):
        for column in range(6):
            patches = images[:, row : row + 4, column : column + 4]
            patches = patches.reshape(3, -1).astype("float64")
            patches -= patches.mean(1, keepdims=True)
            contrast = np.sqrt(patches.var(1, keepdims=True) + (10 / 255) ** 2)
            products = patches / contrast @ kernel + dictionary.offsets.numpy()
            expected[:, row, column] = np.maximum(
                np.concatenate([products, -products], 1) - 0.5, 0
            )
    cells = expected.reshape(3, 2, 3, 2, 3, 10).mean((2, 4))
    np.testing.assert_allclose(features, cells, atol=1e-5)


def test_words_are_found_again():
    """Patches that are one of two, or the negative, make these two words."""
    generator = np.random.default_rng(0)
    pixels = np.arange(16)
    basis = np.stack([np.cos(pixels * np.pi / 8), np.sin(pixels * np.pi / 8)])
    which, sign = (
        generator.integers(2, size=300),
        generator.choice([-1, 1], 300),
    )
    patches = 0.5 + 0.2 * sign[:, None] * basis[which]
    images = patches.reshape(300, 4, 4, 1).astype("float32")
    layer = PatchDictionary.from_images(
        images, words=2, patch_size=4, cells=1, threshold=0.0, seed=0
    )
    features = layer(images).numpy().reshape(300, 4)
    strongest = features.argmax(1)
    labels = 2 * which + (sign > 0)
    # Each kind of patch is told from the others by its strongest feature.
    assert len({(a, b) for a, b in zip(labels, strongest)}) == 4


def test_contrast_does_not_matter(dictionary):
    images = _images(4)
    features = dictionary(images)
    # But for what is added to the contrast of each patch.
    changed = dictionary(0.5 + 0.9 * (images - 0.5))
    np.testing.assert_allclose(features, changed, atol=0.05)
    assert np.max(features) > 0.5


def test_dictionaries_of_one_seed_are_equal(dictionary):
    again, other = (
        PatchDictionary.from_images(
            _images(), words=5, patch_size=4, cells=2, seed=seed
        )
        for seed in (0, 1)
    )
    np.testing.assert_array_equal(dictionary.kernel, again.kernel)
    assert np.abs(dictionary.kernel - other.kernel).max() > 0.1


def test_it_is_not_trained(dictionary):
    assert not dictionary.trainable_variables
    assert len(dictionary.non_trainable_variables) == 2


def test_uneven_cells():
    layer = PatchDictionary.from_images(
        _images(side=28, channels=1, count=10), words=3, cells=4, seed=0
    )
    assert layer(_images(2, 28, 1)).shape == (2, 4, 4, 6)


@pytest.mark.parametrize(
    "images, arguments, message",
    [
        (np.full((2, 9, 9, 1), 255.0), {}, r"colours in \[0, 1\]"),
        (np.full((2, 9, 9, 1), np.nan), {}, r"colours in \[0, 1\]"),
        (np.zeros((2, 9, 9)), {}, "shape"),
        (np.zeros((0, 9, 9, 1)), {}, "shape"),
        (_images(1, 7), {"words": 5}, "one for each word"),
        (_images(1, 7), {}, "at least 8 pixels"),
        (_images(), {"words": 0}, "words >= 1"),
        (_images(), {"threshold": -1.0}, "threshold >= 0"),
        (_images(), {"seed": -1}, "seed >= 0"),
    ],
)
def test_errors(images, arguments, message):
    if "words" in arguments and arguments["words"] == 5:
        arguments = arguments | {"patch_size": 6, "cells": 1}
    with pytest.raises(ValueError, match=message):
        PatchDictionary.from_images(images, **{"words": 1} | arguments)
