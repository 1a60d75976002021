"""Any model gets gradient carriers, keeps its weights, and is restored."""

import keras
import numpy as np
import pytest

from tf_dpsub import layers, make_private

_random = np.random.default_rng(0)
X = _random.normal(size=(3, 6, 8)).astype("float32")


class Block(keras.layers.Layer):
    """A layer with layers inside, as in a transformer's encoder."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = keras.layers.MultiHeadAttention(2, 4, name="attend")
        self.hidden = [keras.layers.Dense(16, "relu", name="hidden")]

    def build(self, shape):
        self.attention.build(shape, shape)
        self.hidden[0].build(shape)

    def call(self, x):
        return self.hidden[0](x + self.attention(x, x))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.block = Block(name="block")
        self.logits = keras.layers.Dense(3, name="logits")

    def call(self, x):
        return self.logits(self.block(x))


def functional():
    inputs = keras.Input(X.shape[1:])
    x = Block(name="block")(inputs)
    x = keras.layers.MultiHeadAttention(2, 8, name="attention")(x, x)
    x = keras.layers.Dense(12, name="hidden")(x)
    return keras.Model(inputs, keras.layers.Dense(3, name="logits")(x))


def sequential():
    return keras.Sequential(
        [
            keras.Input(X.shape[1:]),
            keras.layers.Reshape((6, 8, 1)),
            keras.layers.Conv2D(8, 3, name="convolution"),
            keras.layers.Flatten(),
            keras.layers.Dense(3, name="logits"),
        ]
    )


def subclassed():
    model = Subclassed()
    model(X)
    return model


MODELS = pytest.mark.parametrize(
    "make", [functional, sequential, subclassed, lambda: nested()]
)


def nested():
    """A model as a layer of another one."""
    inputs = keras.Input(X.shape[1:])
    return keras.Model(inputs, functional()(inputs))


def ranks(model):
    return {
        layer.path: layer.carriers.rank
        for layer in layers.reparametrized_layers(model)
    }


@MODELS
def test_keeps_the_model(make):
    model = make()
    expected, weights = model(X).numpy(), list(model.weights)
    assert layers.reparametrize(model, 3) is model
    assert layers.reparametrized_layers(model)
    assert [id(w) for w in model.weights] == [id(w) for w in weights]
    np.testing.assert_array_equal(model(X), expected)
    np.testing.assert_allclose(model(X, training=True), expected, atol=1e-5)


@MODELS
def test_merging_restores_the_model(make):
    model, plain = make(), make()
    types = [type(v) for v in plain._flatten_layers()]
    config = None if make is subclassed else model.get_config()
    weights = model.get_weights()
    layers.reparametrize(model, 3)
    assert [type(v) for v in model._flatten_layers()] != types
    assert layers.merge(model) is model
    assert [type(v) for v in model._flatten_layers()] == types
    for actual, expected in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(actual, expected)
    if config is not None:
        assert model.get_config() == config
    assert not layers.reparametrized_layers(model)
    layers.reparametrize(model, 2)
    assert {v.carriers.rank for v in layers.reparametrized_layers(model)} == {2}


@MODELS
def test_checkpoints_are_those_of_the_plain_model(make, tmp_path):
    """This is so after merging, as Keras finds layers by their class."""
    path = tmp_path / "model.weights.h5"
    plain, model = make(), make()
    plain.save_weights(path)
    model.load_weights(path)
    layers.reparametrize(model, 3)
    np.testing.assert_array_equal(model(X), plain(X))
    model.set_weights([w + 1 for w in plain.get_weights()])
    layers.merge(model).save_weights(path)
    plain.load_weights(path)
    np.testing.assert_array_equal(model(X), plain(X))


@MODELS
def test_predicts_as_before(make):
    model = make()
    expected = model.predict(X, verbose=0)
    layers.reparametrize(model, 3)
    np.testing.assert_array_equal(model.predict(X, verbose=0), expected)


def test_converts_what_is_wide_enough():
    model = layers.reparametrize(functional(), 4)
    assert [type(v).__name__ for v in model.layers] == [
        "InputLayer",
        "Block",
        "RGPMultiHeadAttention",
        "RGPDense",
        "Dense",  # three logits
    ]
    assert set(ranks(model).values()) == {4}
    assert len(ranks(model)) == 4 + 1 + 4 + 1
    assert type(model.layers[1].attention) is layers.RGPMultiHeadAttention


def test_ranks_differ_by_layer():
    model = functional()
    layers.reparametrize(model, 2, include=["query", "value"])
    layers.reparametrize(model, 5, include=["hidden$"], exclude=["^block/"])
    rank_of = ranks(model)
    assert rank_of.pop("hidden") == 5
    assert set(rank_of.values()) == {2}
    assert len(rank_of) == 4
    # An attention layer with other ranks inside has none of its own.
    assert type(model.layers[2]) is keras.layers.MultiHeadAttention
    layers.merge(model)
    assert not layers.reparametrized_layers(model)


def test_frozen_layers_stay_plain():
    model = functional()
    model.get_layer("block").trainable = False
    layers.reparametrize(model, 4)
    assert not any(path.startswith("block/") for path in ranks(model))
    assert type(model.get_layer("block").hidden[0]) is keras.layers.Dense


def test_a_layer_used_twice_is_converted_once():
    inputs = keras.Input((8,))
    shared = keras.layers.Dense(8, name="shared")
    model = keras.Model(inputs, shared(shared(inputs)))
    layers.reparametrize(model, 4)
    assert len(layers.reparametrized_layers(model)) == 1
    layers.merge(model)
    assert type(shared) is keras.layers.Dense


def test_layers_of_others_stay_plain():
    class Twice(keras.layers.Dense):
        def call(self, inputs, training=None):
            return super().call(inputs) * 2

    inputs = keras.Input((8,))
    x = Twice(8)(inputs)
    x = keras.layers.Dense(8)(x)
    x = keras.layers.Reshape((2, 2, 2))(x)
    x = keras.layers.Conv2D(4, 2, groups=2)(x)
    model = layers.reparametrize(keras.Model(inputs, x), 2)
    assert len(layers.reparametrized_layers(model)) == 1


def test_a_private_model_is_loaded_with_its_ranks(tmp_path):
    """The config of a layer alone lacks the ranks of layers inside of it."""
    keras.saving.register_keras_serializable("test")(Block)
    model = make_private(layers.reparametrize(functional(), 4))
    layers.reparametrize(model.model, 3, include=["logits"])
    model.save(tmp_path / "private.keras")
    loaded = keras.saving.load_model(tmp_path / "private.keras")
    assert ranks(loaded.model) == ranks(model.model)
    np.testing.assert_array_equal(loaded(X), model(X))


def test_masked_layers_keep_their_masks():
    inputs = keras.Input((4,), dtype="int32")
    x = keras.layers.Embedding(5, 8, mask_zero=True)(inputs)
    x = keras.layers.Dense(8, name="wide")(x)
    model = keras.Model(inputs, keras.layers.LSTM(3)(x))
    tokens = np.array([[1, 2, 0, 0], [1, 2, 3, 4]])
    expected = model(tokens).numpy()
    layers.reparametrize(model, 4)
    np.testing.assert_allclose(
        model(tokens, training=True), expected, atol=1e-6
    )


class TestErrors:
    @pytest.mark.parametrize("rank", [0, -3, 2.5, "4"])
    def test_rank(self, rank):
        with pytest.raises(ValueError, match="Expected rank >= 1"):
            layers.reparametrize(functional(), rank)

    def test_nothing_to_convert(self):
        with pytest.raises(ValueError, match="whose kernel is 100 wide"):
            layers.reparametrize(functional(), 100)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Rescaling(2)])
        with pytest.raises(ValueError, match="layers to reparametrize"):
            layers.reparametrize(model, 1)
        model = layers.reparametrize(sequential(), 3)
        with pytest.raises(ValueError, match="layers to reparametrize"):
            layers.reparametrize(model, 3)

    @pytest.mark.parametrize("which", ["include", "exclude"])
    def test_pattern_that_fits_nothing(self, which):
        with pytest.raises(ValueError, match="'hiden'.*hidden"):
            layers.reparametrize(functional(), 2, **{which: ["hiden"]})

    def test_model_without_weights(self):
        with pytest.raises(ValueError, match="Expected a built model"):
            layers.reparametrize(Subclassed(), 2)

    def test_layer_without_weights(self):
        model = subclassed()
        model.extra = None
        model._tracker.unlock()
        model.extra = keras.layers.Dense(4, name="extra")
        with pytest.raises(ValueError, match="Expected built layers.*'extra'"):
            layers.reparametrize(model, 2)
        layers.reparametrize(model, 2, include=["hidden"])

    def test_quantized_layer(self):
        model = functional()
        model.get_layer("hidden").quantize("int8")
        with pytest.raises(ValueError, match="'hidden'.*quantized to int8"):
            layers.reparametrize(model, 2)
        # No layer was converted.
        assert not layers.reparametrized_layers(model)
        layers.reparametrize(model, 2, exclude=["^hidden"])

    def test_layer_with_lora(self):
        model = functional()
        model.get_layer("hidden").enable_lora(2)
        with pytest.raises(ValueError, match="without LoRA, got.*'hidden'"):
            layers.reparametrize(model, 2)
