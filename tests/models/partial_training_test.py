"""Some kinds of weights are trained, and all others are frozen."""

import keras
import numpy as np
import pytest

import tf_dpsub
from tests.training.plain_models import CLASSES, EXAMPLES, Y, dpsgd, private
from tf_dpsub.models import train_only

layers = keras.layers

IMAGES = (
    np.random.default_rng(0).normal(size=(EXAMPLES, 6, 6, 2)).astype("float32")
)


def network():
    body = keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            layers.Conv2D(4, 3, name="conv"),
            layers.GroupNormalization(2, name="norm"),
            layers.ReLU(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(4, name="hidden"),
        ],
        name="body",
    )
    inputs = keras.Input((6, 6, 2))
    hidden = layers.Dropout(0.1)(body(inputs))
    logits = layers.Dense(CLASSES, name="logits")(hidden)
    return keras.Model(inputs, layers.Activation("linear")(logits))


# Paths without the names of the models that the layers are in.
BIASES = {"conv/bias", "hidden/bias", "logits/bias"}
SCALES = {"norm/gamma", "norm/beta"}
HEAD = {"logits/kernel", "logits/bias"}


class TestKinds:
    @pytest.mark.parametrize(
        ("kinds", "expected"),
        [
            ("bias", BIASES),
            (("norm",), SCALES),
            (["head"], HEAD),
            (("bias", "norm", "head"), BIASES | SCALES | HEAD),
        ],
    )
    def test_of_a_nested_model(self, kinds, expected):
        model = network()
        trained = train_only(model, kinds)
        assert {"/".join(v.path.split("/")[-2:]) for v in trained} == expected
        assert len(trained) == len(expected)
        assert trained == model.trainable_variables

    def test_another_choice_replaces_the_first(self):
        model = network()
        train_only(model, "bias")
        assert len(train_only(model, "norm")) == 2

    def test_frozen_layers_stay_frozen(self):
        model = network()
        model.get_layer("body").trainable = False
        trained = train_only(model, "bias")
        assert [v.path for v in trained] == ["logits/bias"]
        with pytest.raises(ValueError, match=r"bias \(1\), head \(2\)"):
            train_only(model, "norm")

    def test_heads_of_several_outputs(self):
        inputs = keras.Input((4,))
        hidden = layers.Dense(3)(inputs)
        first = layers.Dense(2, name="first")(hidden)
        second = layers.Softmax()(layers.Dense(2, name="second")(hidden))
        model = keras.Model(inputs, [first, second])
        trained = {v.path for v in train_only(model, "head")}
        assert trained == {
            "first/kernel", "first/bias", "second/kernel", "second/bias",
        }  # fmt: skip

    def test_head_of_nested_models(self):
        model = keras.Sequential([keras.Input((6, 6, 2)), network()])
        assert len(train_only(model, "head")) == 2

    def test_subclass(self):
        class Own(keras.Model):
            def __init__(self):
                super().__init__()
                self.hidden = layers.Dense(3)
                self.last = layers.Dense(2)

            def call(self, x):
                return self.last(self.hidden(x))

        model = Own()
        model(np.zeros((1, 4)))
        assert train_only(model, "head") == model.last.trainable_variables

    def test_attention_and_recurrent_biases(self):
        inputs = keras.Input((4, 3))
        hidden = layers.MultiHeadAttention(2, 2)(inputs, inputs)
        outputs = layers.Dense(2)(layers.GRU(3)(hidden))
        model = keras.Model(inputs, outputs)
        assert len(train_only(model, "bias")) == 4 + 1 + 1

    def test_lora(self):
        """What LoRA adds to stays frozen, whatever kind is chosen."""
        model = network()
        model.get_layer("logits").enable_lora(2)
        trained = train_only(model, "lora")
        assert [v.name for v in trained] == ["lora_kernel_a", "lora_kernel_b"]
        train_only(model, ("head", "bias"))
        assert not model.get_layer("logits")._kernel.trainable
        with pytest.raises(ValueError, match="got 'lora'"):
            train_only(network(), "lora")

    @pytest.mark.parametrize(
        ("kinds", "message"),
        [
            ("biases", "Did you mean 'bias'"),
            (("bias", "kernel"), "kernel"),
            ((), r"bias \(3\), head \(2\), norm \(2\)"),
            ("lora", r"got 'lora'. It has bias \(3\), head \(2\), norm \(2\)"),
        ],
    )
    def test_errors(self, kinds, message):
        model = network()
        with pytest.raises(ValueError, match=message):
            train_only(model, kinds)
        assert len(model.trainable_variables) == 8

    def test_no_biases_at_all(self):
        model = keras.Sequential(
            [keras.Input((3,)), layers.Dense(2, use_bias=False)]
        )
        with pytest.raises(ValueError, match=r"got 'bias'. It has head \(1\)"):
            train_only(model, "bias")


class TestPrivately:
    @pytest.mark.parametrize("per_example", ["graph", "vectorized_map"])
    def test_the_others_do_not_change(self, per_example):
        plain = network()
        chosen = {id(v) for v in train_only(plain, ("bias", "norm"))}
        before = plain.get_weights()
        model = private(plain, dpsgd(per_example=per_example))
        model.fit(IMAGES, Y, verbose=0)
        assert model.training_step.implementation == per_example
        rows = model.optimizer.per_example_variables
        assert {id(v) for v in rows} == chosen
        for variable, old in zip(plain.weights, before, strict=True):
            assert (id(variable) in chosen) == bool(
                np.any(variable.numpy() != old)
            )

    def test_batch_normalization_still_raises(self):
        plain = keras.Sequential(
            [keras.Input((4,)), layers.BatchNormalization(), layers.Dense(3)]
        )
        train_only(plain, "head")
        with pytest.raises(ValueError, match="BatchNormalization"):
            tf_dpsub.make_private(plain)

    def test_survives_compiling_and_saving(self, tmp_path):
        plain = network()
        train_only(plain, ("bias", "head"))
        model = private(plain, dpsgd(keras.optimizers.Adam(0.01)))
        model.fit(IMAGES, Y, verbose=0)
        model.compile(dpsgd(), loss=model.loss)
        model.fit(IMAGES, Y, verbose=0)
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        assert [v.shape for v in loaded.trainable_variables] == [
            v.shape for v in model.trainable_variables
        ]
        before = loaded.get_weights()
        for old, weight in zip(before, model.weights, strict=True):
            np.testing.assert_array_equal(old, weight.numpy())
        loaded.fit(IMAGES, Y, verbose=0)
        for variable, old in zip(loaded.weights, before, strict=True):
            assert variable.trainable == bool(np.any(variable.numpy() != old))
        assert loaded.ledger.steps == 15
