import numpy as np
import pytest

from tf_dpsub.data import dead_leaves


def test_are_images_that_a_seed_determines():
    images = dead_leaves(300, (12, 16), seed=3)  # more than a chunk
    assert images.shape == (300, 12, 16, 3)
    assert images.dtype == np.uint8
    np.testing.assert_array_equal(dead_leaves(300, (12, 16), seed=3), images)
    assert (dead_leaves(300, (12, 16), seed=4) != images).mean() > 0.9
    assert len(np.unique(images.reshape(300, -1), axis=0)) == 300


def test_colours_are_those_of_leaves():
    """Uniform, bare nowhere, and the same within a leaf."""
    images = dead_leaves(100)
    assert 0.45 < (images / 255.0).mean() < 0.55
    assert images.min() == 0 and images.max() == 255
    assert (images == 0).all(-1).mean() < 1e-3
    equal = (images[:, :, 1:] == images[:, :, :-1]).all(-1)
    assert 0.6 < equal.mean() < 0.95


def test_all_places_and_directions_are_alike():
    images = dead_leaves(400).astype(float)
    edges = (images[:, 1:] != images[:, :-1]).any(-1).mean((0, 2))
    assert edges.max() < 1.3 * edges.min()
    across = (images[:, :, 1:] != images[:, :, :-1]).any(-1).mean()
    assert across == pytest.approx(edges.mean(), rel=0.05)


def test_spectrum_falls_as_that_of_photographs():
    """By about the second power of the frequency."""
    images = dead_leaves(100).mean(-1)
    power = np.abs(np.fft.fft2(images - images.mean())) ** 2
    along = power.mean(0)[0, 1:9]
    slope = np.polyfit(np.log(np.arange(1, 9)), np.log(along), 1)[0]
    assert -2.6 < slope < -1.4


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0,), "count"),
        ((5, (0, 8)), "height"),
        ((5, (8, 2.5)), "width"),
        ((5, (4, 30)), "larger than 4 pixels, got 4 x 30"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        dead_leaves(*arguments)
