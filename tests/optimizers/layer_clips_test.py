"""Each layer is clipped alone, and all of them together stay within C."""

import itertools
import json
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dpsub
from tf_dpsub import optimizers
from tf_dpsub.data import given_batches

_BATCH = 6
_LAYERS = {"first": slice(0, 2), "inner": slice(2, 4), "last": slice(4, 6)}


def plain_model():
    inner = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3, name="nested")], name="inner"
    )
    return keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(4, name="first"),
            inner,
            keras.layers.Dense(2, name="last"),
        ]
    )


def compiled(l2_norm_clip, make=optimizers.DPSGD, **arguments):
    model = tf_dpsub.make_private(plain_model())
    optimizer = make(
        keras.optimizers.SGD(1.0),
        noise_multiplier=1.0,
        l2_norm_clip=l2_norm_clip,
        batch_size=_BATCH,
        **arguments,
    )
    model.compile(optimizer, loss=product)
    return model


def product(y_true, y_pred):
    return keras.ops.sum(y_true * y_pred, -1)


def prepared(model):
    batch = padded(model, *data(1.0))
    model.prepare_training(
        tf.nest.map_structure(tf.type_spec_from_value, batch)
    )
    return model


def data(scale):
    random = np.random.default_rng(0)
    x = scale * random.normal(size=(_BATCH, 5))
    return x.astype("float32"), random.normal(size=(_BATCH, 2)).astype(
        "float32"
    )


def padded(model, x, y):
    return given_batches.padded(
        given_batches.named(x, y), model.microbatch_size
    )


def sums_of(model, x, y):
    """Sums of a batch without noise, one vector for each layer."""
    sums = model.training_step(padded(model, x, y))
    return [
        np.concatenate([np.ravel(s).astype(float) for s in sums[part]])
        for part in _LAYERS.values()
    ]


def rows_of(model, x, y):
    """Per-example gradients of each layer, `[batch, size]`, one by one."""
    rows = []
    for i in range(len(x)):
        with tf.GradientTape() as tape:
            loss = product(y[i : i + 1], model.model(x[i : i + 1]))
        gradients = tape.gradient(loss, [v.value for v in model.model.weights])
        rows.append(
            [
                np.concatenate([np.ravel(g).astype(float) for g in part])
                for part in (gradients[p] for p in _LAYERS.values())
            ]
        )
    return [np.array(part) for part in zip(*rows)]


@pytest.mark.parametrize("per_example", ["graph", "vectorized_map"])
@pytest.mark.parametrize("clipping", ["flat", "automatic"])
def test_equals_the_definition(per_example, clipping):
    clips = {"last": 0.3, "first": 2.0, "inner": 1.0}
    model = prepared(
        compiled(clips, per_example=per_example, clipping=clipping)
    )
    share = 1 - 1.25 * 2.0**-10
    of_scales = [
        zip(_LAYERS, rows_of(model, x, y), sums_of(model, x, y))
        for x, y in map(data, (0.1, 1.0, 10.0))
    ]
    for layer, rows, found in itertools.chain(*of_scales):
        norms = np.linalg.norm(rows, axis=1)
        factors = np.minimum(1, clips[layer] * share / norms)
        if clipping == "automatic":
            factors = clips[layer] * share / (norms + 0.01)
        np.testing.assert_allclose(found, factors @ rows, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("split", ["equal", "size"])
def test_a_split_clip_is_the_whole(split):
    model = prepared(compiled(2.0, layer_clips=split))
    sizes = np.array([24, 15, 8]) if split == "size" else np.ones(3)
    clips = 2.0 * np.sqrt(sizes / sizes.sum())
    x, y = data(1e3)
    found = sums_of(model, x[:1], y[:1])
    norms = [np.linalg.norm(part) for part in found]
    np.testing.assert_allclose(norms, clips * (1 - 1.25 * 2.0**-10), rtol=1e-5)
    assert np.linalg.norm(np.concatenate(found)) <= 2.0


def test_claims_the_whole_and_says_so_in_the_ledger():
    model = compiled({"first": 3.0, "inner": 4.0, "last": 12.0})
    assert model.optimizer.l2_norm_clip == 13.0
    assert model.optimizer.effective_noise_multiplier == 1.0
    x, y = data(1.0)
    model.fit(x, y, epochs=1, verbose=0)
    assert set(model.optimizer.noise_stddevs()) == {13.0}
    (entry,) = model.ledger.entries
    assert entry.l2_norm_clip == 13.0
    assert entry.mechanism == (
        "DPSGD, with clips of layers (first 3, inner 4, last 12)"
    )


def test_low_rank_afterwards():
    model = prepared(
        compiled(1.0, optimizers.DPPowerSGD, rank=1, layer_clips="equal")
    )
    assert model.optimizer.mechanism == (
        "DPPowerSGD of rank 1, with clips of layers (equal shares of C)"
    )
    norms = [np.linalg.norm(s) for s in sums_of(model, *data(1e6))]
    assert max(norms) <= _BATCH * math.sqrt(1 / 3)


@pytest.mark.parametrize(
    "arguments",
    [
        {"l2_norm_clip": {"first": 3.0, "inner": 4.0, "last": 12.0}},
        {"l2_norm_clip": 1.0, "layer_clips": "size"},
    ],
)
def test_config_is_restored(arguments):
    optimizer = optimizers.DPSGD(
        "sgd", noise_multiplier=1.0, batch_size=8, **arguments
    )
    config = json.loads(
        json.dumps(keras.saving.serialize_keras_object(optimizer))
    )
    again = keras.saving.deserialize_keras_object(config)
    assert again.get_config() == optimizer.get_config()
    assert again.mechanism == optimizer.mechanism


class TestOutOfRange:
    @pytest.mark.parametrize(
        ("clips", "told"),
        [
            ({}, "a clip for each layer, got none"),
            ({"first": 0.0}, r"l2_norm_clip\['first'\] >= 1e-12, got 0.0"),
            ({"first": -1.0}, "got -1.0"),
            ({"first": math.nan}, "got nan"),
            ({"first": math.inf}, "Expected finite"),
            ({"first": 1e-13}, ">= 1e-12"),
            ({"first": None}, "to be a number, got None"),
            ({"first": True}, "to be a number, got True"),
        ],
    )
    def test_clips(self, clips, told):
        with pytest.raises(ValueError, match=told):
            compiled(clips)

    @pytest.mark.parametrize(
        ("clips", "told"),
        [
            (
                {"first": 1.0, "inner": 1.0, "lst": 1.0},
                "unknown name 'lst'. There are first, nested, last",
            ),
            ({"first": 1.0, "inner": 1.0}, "last/kernel, .* in none"),
            (
                {"first": 1, "inner": 1, "nested": 1, "last": 1},
                "in two: by 'inner' and by 'nested'",
            ),
        ],
    )
    def test_layers(self, clips, told):
        expected = f"l2_norm_clip to have one clip for each layer.*{told}"
        with pytest.raises(ValueError, match=expected):
            prepared(compiled(clips))

    def test_split(self):
        with pytest.raises(ValueError, match="layer_clips to be one of"):
            compiled(1.0, layer_clips="layers")
        with pytest.raises(ValueError, match="with a number to split"):
            compiled({"first": 1.0}, layer_clips="equal")
        with pytest.raises(ValueError, match="clips of layers >= 1e-12"):
            prepared(compiled(1e-12, layer_clips="equal"))

    def test_carriers_have_one_clip(self):
        with pytest.raises(ValueError, match="one l2_norm_clip for RGP"):
            compiled(1.0, optimizers.RGP, layer_clips="equal")

    def test_without_a_model_there_are_no_layers(self):
        optimizer = optimizers.DPSGD(
            "sgd",
            noise_multiplier=1.0,
            l2_norm_clip=1.0,
            layer_clips="equal",
            batch_size=8,
        )
        optimizer.build(plain_model().trainable_variables)
        with pytest.raises(RuntimeError, match="Compile a private model"):
            optimizer.clipped_sums(None, None)
