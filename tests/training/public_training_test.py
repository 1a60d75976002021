import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dpsub

_LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _data(count, seed):
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((count, 4)).astype("float32")
    return x, (x[:, 0] > 0).astype("int64")


def _plain():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])


def _private(plain):
    model = tf_dpsub.make_private(plain)
    model.compile(
        tf_dpsub.optimizers.DPSGD(
            keras.optimizers.SGD(0.1),
            l2_norm_clip=1.0,
            noise_multiplier=1.0,
            batch_size=20,
        ),
        _LOSS,
    )
    return model


@pytest.fixture(scope="module")
def trained():
    plain = _plain()
    tf_dpsub.fit_public(
        plain, *_data(50, 0), steps=200, learning_rate=0.1, seed=0
    )
    return plain


def test_it_learns(trained):
    x, y = _data(500, 1)
    assert np.mean(np.argmax(trained(x), 1) == y) > 0.9


def test_statement_names_the_examples(trained):
    model = _private(trained)
    model.fit(*_data(60, 2), epochs=1, verbose=0)
    statement = model.privacy_statement(1e-5)
    assert "50 examples that the weights were trained on before" in (
        " ".join(statement.split())
    )


def test_private_examples_among_them_raise(trained):
    model = _private(trained)
    x, y = _data(60, 2)
    x[7] = _data(50, 0)[0][3]
    with pytest.raises(ValueError, match="weights were trained on before"):
        model.fit(x, y, epochs=1, verbose=0)
    with pytest.raises(ValueError, match="weights were trained on before"):
        model.train_on_batch(x[:20], y[:20])
    assert model.ledger.steps == 0


def _backbone():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])


@pytest.mark.parametrize("part", ["layer", "features", "cut"])
def test_weights_within_another_model(part):
    """They tell of the examples, whichever model holds them now."""
    backbone, (x, y) = _backbone(), _data(60, 2)
    whole = keras.Sequential([backbone, keras.layers.Dense(2)])
    tf_dpsub.fit_public(whole, x[:9], y[:9], steps=2)
    if part == "layer":
        plain = keras.Sequential([backbone, keras.layers.Dense(2)])
    elif part == "features":
        plain = tf_dpsub.models.feature_classifier(backbone, 2)
    else:
        outputs = keras.layers.Dense(2)(whole.layers[0].outputs[0])
        plain = keras.Model(whole.layers[0].inputs, outputs)
    del whole, backbone
    model = _private(plain)
    with pytest.raises(ValueError, match="weights were trained on before"):
        model.fit(x, y, epochs=1, verbose=0)
    assert model.ledger.steps == 0


def test_weights_that_were_frozen_tell_nothing():
    backbone, (x, y) = _backbone(), _data(60, 2)
    backbone.trainable = False
    whole = keras.Sequential([backbone, keras.layers.Dense(2)])
    tf_dpsub.fit_public(whole, x[:9], y[:9], steps=2)
    backbone.trainable = True
    model = _private(keras.Sequential([backbone, keras.layers.Dense(2)]))
    model.fit(x, y, epochs=1, verbose=0)
    assert "trained on before" not in model.privacy_statement(1e-5)


def test_examples_that_are_changed_afterwards():
    plain, (x, y) = _plain(), _data(60, 2)
    public = x[:9].copy()
    tf_dpsub.fit_public(plain, public, y[:9], steps=2)
    public *= 2
    with pytest.raises(ValueError, match="weights were trained on before"):
        _private(plain).fit(x, y, epochs=1, verbose=0)


def test_private_examples_that_are_allowed_are_not_covered():
    plain, (x, y) = _plain(), _data(60, 2)
    tf_dpsub.fit_public(plain, x[:9], y[:9], steps=2, allow_private=True)
    model = _private(plain)
    model.fit(x, y, epochs=1, verbose=0)
    statement = " ".join(model.privacy_statement(1e-5).split())
    assert "the private examples that the weights were trained on" in statement


def test_datasets_cannot_be_compared(trained):
    model = _private(trained)
    dataset = tf.data.Dataset.from_tensor_slices(_data(60, 2)).batch(20)
    model.fit(dataset, epochs=1, verbose=0)
    statement = " ".join(model.privacy_statement(1e-5).split())
    assert "trained on before, unchecked" in statement


def test_augmentation():
    seen = []

    class Recorder(keras.layers.Layer):
        def call(self, inputs):
            seen.append(inputs.shape)
            return inputs + 1.0

    plain = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(2, use_bias=False)]
    )
    # Without it all inputs are zero, and nothing can be learned.
    before = plain.get_weights()[0]
    tf_dpsub.fit_public(
        plain,
        np.zeros((8, 1), "float32"),
        np.ones(8, int),
        augmentation=Recorder(),
        steps=20,
    )
    assert seen and plain.get_weights()[0][0, 1] > before[0, 1]


def test_affine_images():
    plain = keras.Sequential(
        [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(3)]
    )
    images = np.random.default_rng(0).random((10, 8, 8, 1), "float32")
    history = tf_dpsub.fit_public(
        plain, images, np.arange(10) % 3, augmentation="affine", steps=4
    )
    assert np.isfinite(history.history["loss"]).all()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"y": None}, "Expected labels"),
        ({"y": np.zeros(3)}, "same number"),
        ({"x": np.zeros((0, 4)), "y": np.zeros(0)}, "at least one"),
        ({"steps": 0}, "steps >= 1"),
        ({"learning_rate": 0.0}, "learning_rate > 0"),
        ({"augmentation": "flip"}, "affine"),
        ({"model": 3}, "keras.Model"),
        ({"model": keras.Sequential([keras.Input((4,))])}, "trainable weights"),
    ],
)
def test_errors(arguments, message):
    x, y = _data(10, 0)
    with pytest.raises(ValueError, match=message):
        tf_dpsub.fit_public(**{"model": _plain(), "x": x, "y": y} | arguments)


def test_private_models_raise(trained):
    with pytest.raises(ValueError, match="before `make_private`"):
        tf_dpsub.fit_public(tf_dpsub.make_private(trained), *_data(10, 0))
