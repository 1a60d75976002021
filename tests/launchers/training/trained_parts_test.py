import keras
import numpy as np
import pytest

import tf_dpsub
from tf_dpsub import layers
from tf_dpsub.configs import default
from tf_dpsub.launchers.training import trained_parts


def network():
    inputs = keras.Input((5, 8))
    x = keras.layers.MultiHeadAttention(2, 4, name="attention")(inputs, inputs)
    x = keras.layers.Dense(6, "tanh", name="hidden")(x)
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, keras.layers.Dense(3, name="logits")(x))


def prepared(**fields):
    config = default.get_config()
    for name, value in fields.items():
        config[name] = value
    model = network()
    trained_parts.prepare(model, config)
    return model


def trained(model):
    return {v.path for v in model.trainable_variables}


def test_all_by_default():
    assert trained(prepared()) == {v.path for v in network().weights}


def test_layers_by_their_paths():
    model = prepared(trainable_layers=("query$", "value", "^logits"))
    assert {path.rpartition("/")[0] for path in trained(model)} == {
        "attention/query",
        "attention/value",
        "logits",
    }


def test_carriers():
    model = prepared(reparametrize={"rank": 4, "exclude": ["hidden"]})
    paths = {v.path for v in layers.reparametrized_layers(model)}
    assert paths == {
        f"attention/{part}"
        for part in ("query", "key", "value", "attention_output")
    }


def test_carriers_of_trained_layers_alone():
    model = prepared(
        trainable_layers=("hidden", "logits"), reparametrize={"rank": 3}
    )
    paths = {v.path for v in layers.reparametrized_layers(model)}
    assert paths == {"hidden", "logits"}


def test_lora_is_trained_privately():
    model = prepared(
        trainable_layers=("logits",),
        lora={"rank": 2, "include": ("query", "hidden")},
    )
    assert trained(model) == {
        f"{layer}/{name}"
        for layer in ("attention/query", "hidden")
        for name in ("lora_kernel_a", "lora_kernel_b", "bias")
    } | {"logits/kernel", "logits/bias"}
    frozen = {
        v.path: v.numpy() for v in model.weights if v.path not in trained(model)
    }
    private = tf_dpsub.make_private(model)
    private.compile(
        tf_dpsub.optimizers.DPSGD(
            keras.optimizers.SGD(0.1),
            noise_multiplier=1.0,
            l2_norm_clip=1.0,
            batch_size=4,
            per_example="graph",
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    before = [v.numpy() for v in model.trainable_variables]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(12, 5, 8)).astype("float32")
    private.fit(x, rng.integers(0, 3, 12), verbose=0)
    assert private.training_step.implementation == "graph"
    for a, v in zip(before, model.trainable_variables):
        assert np.any(a != v.numpy())
    for v in model.weights:
        if v.path in frozen:
            np.testing.assert_array_equal(v, frozen[v.path])


@pytest.mark.parametrize(
    "fields",
    [
        {"trainable_layers": ("hiden",)},
        {"lora": {"rank": 2, "include": ("hiden",)}},
        {"reparametrize": {"rank": 2, "include": ["hiden"]}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_pattern_that_fits_nothing(fields):
    with pytest.raises(ValueError, match="'hiden'.*attention/query"):
        prepared(**fields)
