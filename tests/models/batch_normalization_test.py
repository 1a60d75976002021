"""Batch normalisation is replaced in one call."""

import keras
import numpy as np
import pytest

import tf_dpsub
from tf_dpsub.models import replace_batch_normalization

layers = keras.layers


def model_of(*parts, shape=(4, 4, 6)):
    return keras.Sequential(
        [keras.Input(shape), *parts, layers.Flatten(), layers.Dense(2)]
    )


def trained(norm):
    """Gives a layer other statistics, scales and offsets, as training does."""
    rng = np.random.default_rng(0)
    for weight in norm.weights:
        weight.assign(rng.uniform(0.5, 2.0, weight.shape))


def normalizations(model):
    return [n for n in model._flatten_layers() if "Normal" in type(n).__name__]


@pytest.mark.parametrize(
    "channels, groups", [(1, 1), (3, 3), (4, 4), (72, 24), (128, 32)]
)
def test_groups(channels, groups):
    plain = model_of(layers.BatchNormalization(), shape=(3, 3, channels))
    (norm,) = normalizations(replace_batch_normalization(plain))
    assert isinstance(norm, layers.GroupNormalization)
    assert norm.groups == groups
    plain = model_of(layers.BatchNormalization(), shape=(1, 1, channels))
    if channels == 1:
        with pytest.raises(ValueError, match="single one.*Rescaling"):
            replace_batch_normalization(plain)
        return
    (norm,) = normalizations(replace_batch_normalization(plain))
    # A single number in a group would become 0.
    assert channels // norm.groups >= 2
    (norm,) = normalizations(replace_batch_normalization(plain, groups=1))
    assert norm.groups == 1


def test_one_vector_gets_layer_normalization():
    plain = model_of(layers.BatchNormalization(), shape=(5,))
    (norm,) = normalizations(replace_batch_normalization(plain))
    assert isinstance(norm, layers.LayerNormalization)
    with pytest.raises(ValueError, match="single one"):
        replace_batch_normalization(
            model_of(layers.BatchNormalization(), shape=(1,))
        )


def nested():
    """A model with an inner model, shared layers and a frozen norm."""
    inner = keras.Sequential(
        [
            keras.Input((4, 4, 6)),
            layers.Conv2D(6, 1),
            layers.BatchNormalization(
                name="deep", center=False, gamma_regularizer="l2"
            ),
        ],
        name="inner",
    )
    dense = layers.Dense(6, name="shared")
    inputs = keras.Input((4, 4, 6))
    x = layers.BatchNormalization(trainable=False, name="frozen")(inputs)
    x = dense(inner(dense(x)))
    x = layers.Dropout(0.5)(x)
    # Keras keeps the arguments of a layer's call with the graph.
    x = (
        layers.BatchNormalization(name="called")(x, training=None, mask=None)
        + x
    )
    return keras.Model(inputs, layers.Dense(2)(layers.Flatten()(x)))


def test_the_rest_is_kept():
    plain = nested()
    trained(plain.get_layer("frozen"))
    changed = replace_batch_normalization(plain)
    deep = changed.get_layer("inner").get_layer("deep")
    assert isinstance(deep, layers.GroupNormalization)
    assert deep.beta is None and deep.gamma_regularizer is not None
    assert len(changed.trainable_variables) == len(plain.trainable_variables)
    for name in ("frozen", "shared"):
        for a, b in zip(
            plain.get_layer(name).variables, changed.get_layer(name).variables
        ):
            np.testing.assert_array_equal(a, b)
    assert replace_batch_normalization(changed) is changed
    assert isinstance(
        plain.get_layer("inner").get_layer("deep"), layers.BatchNormalization
    )
    # Each row is proved to be that of one example.
    model = tf_dpsub.make_private(changed)
    model.compile(
        tf_dpsub.optimizers.DPSGD(
            "sgd",
            l2_norm_clip=1.0,
            noise_multiplier=1.0,
            batch_size=4,
            per_example="graph",
        ),
        "mse",
    )
    model.train_on_batch(np.ones([4, 4, 4, 6], "float32"), np.ones([4, 2]))
    assert "statistics of BatchNormalization 'frozen'" in " ".join(
        model.privacy_statement(1e-5).split()
    )


class TestPretrained:
    @pytest.fixture(name="plain")
    def _plain(self):
        norm = layers.BatchNormalization(name="norm")
        plain = model_of(layers.Conv2D(6, 1), norm)
        trained(norm)
        return plain

    def test_raises(self, plain):
        with pytest.raises(ValueError, match="'norm'.*freeze.*fold.*replace"):
            replace_batch_normalization(plain)

    def test_replaced_on_request(self, plain):
        changed = replace_batch_normalization(plain, pretrained="replace")
        norm = changed.get_layer("norm")
        assert isinstance(norm, layers.GroupNormalization)
        for name in ("gamma", "beta"):
            np.testing.assert_array_equal(
                getattr(norm, name), getattr(plain.get_layer("norm"), name)
            )

    @pytest.mark.parametrize("how", ["fold", "freeze"])
    def test_equal_predictions(self, plain, how, tmp_path):
        changed = replace_batch_normalization(plain, pretrained=how)
        x = np.random.default_rng(1).normal(size=(5, 4, 4, 6))
        expected = plain(x, training=False)
        np.testing.assert_allclose(
            changed(x, training=True), expected, rtol=1e-4, atol=1e-5
        )
        assert changed.get_layer("norm").trainable_variables == []
        # It is saved and loaded as any plain model.
        changed.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        np.testing.assert_array_equal(loaded(x), changed(x))
        assert tf_dpsub.training.requirements.public_assumptions(loaded)

    def test_other_axes_are_not_folded(self):
        norm = layers.BatchNormalization(axis=1, name="norm")
        plain = model_of(norm)
        trained(norm)
        with pytest.raises(ValueError, match="last axis.*axis=1.*freeze"):
            replace_batch_normalization(plain, pretrained="fold")


class Block(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm = layers.BatchNormalization(name="within")

    def call(self, inputs, training=None):
        return self.norm(inputs, training=training)


class Own(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm = layers.BatchNormalization()

    def call(self, inputs, training=None):
        return self.norm(inputs, training=training)


def test_models_that_cannot_be_rewritten_are_named():
    model = Own(name="mine")
    model(np.ones([2, 3]))
    with pytest.raises(ValueError, match="Own 'mine'.*GroupNormalization"):
        replace_batch_normalization(model)
    with pytest.raises(ValueError, match="within' inside of another layer"):
        replace_batch_normalization(model_of(Block()))


def test_bad_arguments():
    plain = model_of()
    with pytest.raises(ValueError, match="raise, replace, fold, freeze, got"):
        replace_batch_normalization(plain, pretrained="keep")
    with pytest.raises(ValueError, match="groups >= 1"):
        replace_batch_normalization(plain, groups=0)
