import numpy as np
import pytest

from tf_dpsub.data import load_images


def written(folder, images):
    file = folder / "images.npz"
    np.savez(file, images=images)
    return file


class TestFit:
    def test_images_that_fit_are_scaled_only(self, tmp_path):
        images = np.random.default_rng(0).integers(
            0, 256, (5, 8, 6, 3), np.uint8
        )
        loaded = load_images(written(tmp_path, images), (8, 6, 3))
        assert loaded.dtype == np.float32
        np.testing.assert_allclose(loaded, images / 255.0, atol=1e-7)

    def test_colours_become_grey_by_how_bright_they_look(self, tmp_path):
        colours = np.array(
            [[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255]], np.uint8
        )
        images = np.broadcast_to(colours[:, None, None], (4, 5, 5, 3))
        loaded = load_images(written(tmp_path, images), (5, 5, 1))
        assert loaded.shape == (4, 5, 5, 1)
        # Rec. 601, of which implementations round the digits.
        expected = np.array([0.299, 0.587, 0.114, 1.0])
        np.testing.assert_allclose(
            loaded,
            np.broadcast_to(expected[:, None, None, None], (4, 5, 5, 1)),
            atol=2e-4,
        )

    def test_grey_becomes_three_equal_channels(self, tmp_path):
        images = np.arange(2 * 4 * 4, dtype=np.uint8).reshape(2, 4, 4, 1)
        loaded = load_images(written(tmp_path, images), (4, 4, 3))
        for channel in range(3):
            np.testing.assert_allclose(
                loaded[..., channel], images[..., 0] / 255.0, atol=1e-7
            )

    def test_resizing_averages_fine_patterns(self, tmp_path):
        # Every second column is white: without antialiasing a smaller image
        # keeps columns that are all black or white.
        images = np.zeros((1, 32, 32, 1), np.uint8)
        images[:, :, ::2] = 255
        loaded = load_images(written(tmp_path, images), (8, 8, 1))
        assert loaded.shape == (1, 8, 8, 1)
        np.testing.assert_allclose(loaded[:, :, 1:-1], 0.5, atol=0.02)

    def test_height_and_width_are_not_exchanged(self, tmp_path):
        images = np.zeros((1, 4, 4, 1), np.uint8)
        images[:, :2] = 255
        loaded = load_images(written(tmp_path, images), (2, 6, 1))
        assert loaded.shape == (1, 2, 6, 1)
        assert (loaded[:, 0] > 0.8).all() and (loaded[:, 1] < 0.2).all()

    def test_values_stay_in_range(self, tmp_path):
        images = (
            np.random.default_rng(0)
            .choice([0, 255], (20, 9, 9, 3))
            .astype(np.uint8)
        )
        loaded = load_images(written(tmp_path, images), (28, 28, 1))
        assert loaded.min() >= 0 and loaded.max() <= 1


class TestMistakes:
    @pytest.mark.parametrize("shape", [(), (64,), (8, 8), (8, 8, 2)])
    def test_a_model_that_takes_no_images(self, tmp_path, shape):
        file = written(tmp_path, np.zeros((2, 8, 8, 1), np.uint8))
        with pytest.raises(ValueError, match="images of 1 or 3 channels"):
            load_images(file, shape)

    @pytest.mark.parametrize(
        "images",
        [
            np.zeros((2, 8, 8, 1), np.float32),
            np.zeros((2, 8, 8), np.uint8),
            np.zeros((2, 8, 8, 4), np.uint8),
            np.zeros((0, 8, 8, 1), np.uint8),
        ],
        ids=["floats", "no channels", "four channels", "none"],
    )
    def test_what_are_no_such_images(self, tmp_path, images):
        with pytest.raises(ValueError, match="Expected images of type uint8"):
            load_images(written(tmp_path, images), (8, 8, 1))

    def test_a_file_without_images(self, tmp_path):
        file = tmp_path / "other.npz"
        np.savez(file, pictures=np.zeros(3))
        with pytest.raises(ValueError, match="images in .*got pictures"):
            load_images(file, (8, 8, 1))
