import keras
import numpy as np
import pytest

import tf_dpsub
from tf_dpsub import models


@pytest.fixture(scope="module")
def public():
    return np.random.default_rng(0).random((30, 12, 12, 1), "float32")


@pytest.fixture(scope="module")
def features(public):
    return models.image_features(
        public, kinds=("scattering", "patches"), words=3, rank=5, seed=0
    )


def test_image_features(public, features):
    outputs = features.predict(public, verbose=0)
    assert outputs.shape == (30, 5)
    np.testing.assert_allclose(outputs.mean(0), 0, atol=1e-4)
    assert np.median(np.linalg.norm(outputs, axis=1)) == pytest.approx(1, 1e-3)
    assert not features.trainable_variables


def test_all_features_without_a_rank(public):
    outputs = models.image_features(public)(public)
    assert outputs.shape == (30, 3 * 3 * 81)


def test_features_of_a_mirror_image(public, tmp_path):
    """They are those of the image; before, they were others."""
    plain, mirrored = (
        models.image_features(
            public,
            kinds=("scattering", "patches"),
            words=3,
            mirror=mirror,
            seed=0,
        )
        for mirror in (False, True)
    )
    images, others = public[:5], public[:5, :, ::-1]
    atol = 1e-5 * np.abs(mirrored(images)).max()
    np.testing.assert_allclose(mirrored(others), mirrored(images), atol=atol)
    assert np.abs(plain(others) - plain(images)).max() > 100 * atol
    assert mirrored.output_shape == plain.output_shape
    mirrored.save(tmp_path / "features.keras")
    loaded = keras.saving.load_model(tmp_path / "features.keras")
    np.testing.assert_array_equal(loaded(images), mirrored(images))


def test_features_of_a_mirror_image_are_proved_private(public, caplog):
    features = models.image_features(public, mirror=True, rank=5)
    _fitted(features, public[:5] / 2)
    assert "one example at a time" not in caplog.text


def test_classifier(public, features):
    model = models.feature_classifier(features, 10)
    (kernel,) = model.trainable_variables
    assert kernel.shape == (5, 10)
    np.testing.assert_array_equal(model(public), 0)


def test_bias(features):
    model = models.feature_classifier(features, 10, use_bias=True)
    assert [v.shape for v in model.trainable_variables] == [(5, 10), (10,)]


def test_features_of_any_shape():
    model = models.feature_classifier(keras.layers.Conv2D(2, 3), 4, (8, 8, 1))
    assert model.trainable_variables[0].shape == (6 * 6 * 2, 4)


def test_saved_model_has_the_whole_path(public, features, tmp_path):
    model = models.feature_classifier(features, 3)
    model.trainable_variables[0].assign(
        np.random.default_rng(1).standard_normal((5, 3))
    )
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(public), model(public))
    assert len(loaded.trainable_variables) == 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"kinds": ("wavelets",)}, "kinds"),
        ({"kinds": ()}, "kinds"),
        ({"rank": 30}, "rank <= 29"),
    ],
)
def test_errors_of_image_features(public, arguments, message):
    with pytest.raises(ValueError, match=message):
        models.image_features(public, **arguments)


def test_unknown_input_shape():
    with pytest.raises(ValueError, match="input_shape"):
        models.feature_classifier(keras.layers.Flatten(), 2)


def test_no_layer():
    with pytest.raises(ValueError, match="Keras layer"):
        models.feature_classifier(np.mean, 2, (3,))


def _fitted(features, images):
    model = tf_dpsub.make_private(models.feature_classifier(features, 3))
    head = tf_dpsub.heads.FullBatch(len(images), 1e3, 1e-5, steps=1)
    model.compile(
        head.optimizer(),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.fit(images, np.arange(len(images)) % 3, verbose=0)
    return model


def test_private_images_among_the_public_ones_raise(public, features):
    with pytest.raises(ValueError, match="those that features are made of"):
        _fitted(features, public[:5])


def test_public_images_are_named(public, features):
    model = _fitted(features, public[:5] / 2)
    statement = " ".join(model.privacy_statement(1e-5).split())
    assert "examples that features are made of (none equals" in statement


def test_private_images_that_are_allowed_are_not_covered(public):
    features = models.image_features(public, rank=3, allow_private=True)
    model = _fitted(features, public[:5])
    statement = " ".join(model.privacy_statement(1e-5).split())
    assert "the private examples that features are made of" in statement
