"""Layers with gradient carriers compute and train like plain layers."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_dpsub import layers

BATCH, RANK = 5, 3

_random = np.random.default_rng(0)


def _sequence(*shape):
    return _random.normal(size=(BATCH, *shape)).astype("float32")


# Twin, arguments, inputs.
CASES = {
    "dense": (
        layers.RGPDense,
        {"units": 7, "activation": "gelu"},
        _sequence(6),
    ),
    "dense on a sequence": (
        layers.RGPDense,
        {"units": 7, "use_bias": False},
        _sequence(4, 6),
    ),
    "convolution": (
        layers.RGPConv2D,
        {"filters": 7, "kernel_size": 3, "activation": "relu"},
        _sequence(6, 5, 2),
    ),
    "convolution, strides": (
        layers.RGPConv2D,
        {
            "filters": 7,
            "kernel_size": (3, 2),
            "strides": 2,
            "padding": "same",
            "use_bias": False,
        },
        _sequence(6, 5, 2),
    ),
    "convolution, dilated": (
        layers.RGPConv2D,
        {"filters": 4, "kernel_size": 2, "dilation_rate": 2},
        _sequence(6, 5, 2),
    ),
    "convolution of one place": (
        layers.RGPConv2D,
        {"filters": 7, "kernel_size": 1},
        _sequence(4, 4, 6),
    ),
    "einsum, heads": (
        layers.RGPEinsumDense,
        {"equation": "abc,cde->abde", "output_shape": (None, 2, 4)}
        | {"bias_axes": "de"},
        _sequence(4, 6),
    ),
    "einsum, heads together": (
        layers.RGPEinsumDense,
        {"equation": "abcd,cde->abe", "output_shape": (None, 7)},
        _sequence(4, 2, 3),
    ),
    "einsum, kernel transposed": (
        layers.RGPEinsumDense,
        {"equation": "abc,dc->abd", "output_shape": (None, 7)},
        _sequence(4, 6),
    ),
    "einsum, other axes": (
        layers.RGPEinsumDense,
        {"equation": "...x,xy->...y", "output_shape": 7, "bias_axes": "y"},
        _sequence(4, 6),
    ),
    "einsum, axes crossed": (
        layers.RGPEinsumDense,
        {"equation": "abcd,edb->aec", "output_shape": (7, None)},
        _sequence(4, 5, 2),
    ),
    "attention": (
        layers.RGPMultiHeadAttention,
        {"num_heads": 2, "key_dim": 4, "value_dim": 5, "output_shape": 7},
        _sequence(4, 6),
    ),
}
TWINS = pytest.mark.parametrize("case", CASES)
WITH_KERNEL = pytest.mark.parametrize(
    "case", [c for c in CASES if c != "attention"]
)


def make(case, rank=RANK, **changes):
    """A plain layer and its twin, with the same weights, and their inputs."""
    twin, arguments, x = CASES[case]
    arguments = arguments | changes
    pair = twin.plain(**arguments), twin(**arguments, rank=rank)
    for layer in pair:
        run(layer, x)
    weights = [_random.normal(size=w.shape) for w in pair[0].get_weights()]
    for layer in pair:
        layer.set_weights(weights)
    return *pair, x


def run(layer, x, **kwargs):
    if isinstance(layer, keras.layers.MultiHeadAttention):
        return layer(x, x, **kwargs)
    return layer(x, **kwargs)


def carriers(layer):
    return [v.carriers for v in layers.reparametrized_layers(layer)]


def set_carriers(layer):
    for c in carriers(layer):
        c.assign(
            _random.normal(size=(c.inputs, c.rank)),
            _random.normal(size=(c.rank, c.outputs)),
        )


def gradients(layer, x, sources):
    """Gradients of a loss, by weights and by inputs."""
    x = tf.constant(x)
    with tf.GradientTape() as tape:
        # Carriers are not trainable.
        tape.watch([x, *sources])
        outputs = run(layer, x, training=True)
        weights = np.random.default_rng(1).normal(size=outputs.shape)
        loss = tf.reduce_sum(outputs * tf.constant(weights, outputs.dtype))
    return tape.gradient(loss, [*sources, x])


@TWINS
@pytest.mark.parametrize("training", [False, True])
def test_computes_the_same(case, training):
    plain, twin, x = make(case)
    set_carriers(twin)
    expected = run(plain, x).numpy()
    actual = run(twin, x, training=training).numpy()
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    if not training:
        np.testing.assert_array_equal(actual, expected)


@TWINS
def test_has_the_same_weights(case):
    plain, twin, _ = make(case)
    assert [w.name for w in twin.weights] == [w.name for w in plain.weights]
    assert len(twin.trainable_weights) == len(plain.trainable_weights)
    assert twin.count_params() == plain.count_params()


@TWINS
def test_trains_like_it(case):
    """Without RGP, carriers change nothing."""
    plain, twin, x = make(case)
    set_carriers(twin)
    pairs = zip(
        gradients(plain, x, [v.value for v in plain.trainable_variables]),
        gradients(twin, x, [v.value for v in twin.trainable_variables]),
    )
    for expected, actual in pairs:
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@WITH_KERNEL
def test_carriers_have_their_part_of_the_gradient(case):
    plain, twin, x = make(case)
    set_carriers(twin)
    (pair,) = carriers(twin)
    kernel, _ = gradients(plain, x, [plain.kernel.value])
    left, right, _ = gradients(twin, x, [pair.left.value, pair.right.value])
    kernel = pair.matrix(kernel).numpy()
    left_matrix = np.reshape(pair.left, [pair.inputs, RANK])
    right_matrix = np.reshape(pair.right, [RANK, pair.outputs])
    np.testing.assert_allclose(
        np.reshape(left, left_matrix.shape),
        kernel @ right_matrix.T,
        rtol=1e-4,
        atol=1e-3,
    )
    np.testing.assert_allclose(
        np.reshape(right, right_matrix.shape),
        left_matrix.T @ kernel,
        rtol=1e-4,
        atol=1e-3,
    )


@WITH_KERNEL
def test_kernel_is_a_matrix_from_inputs_to_outputs(case):
    plain, twin, x = make(case, activation=None)
    (pair,) = carriers(twin)
    tensor = tf.constant(plain.kernel.numpy())
    back = pair.like_kernel(pair.matrix(tensor))
    np.testing.assert_array_equal(back, tensor)
    # Of rank one as a matrix, outputs less the bias have one direction.
    outer = np.outer(
        _random.normal(size=pair.inputs), _random.normal(size=pair.outputs)
    )
    plain.kernel.assign(pair.like_kernel(tf.constant(outer, tf.float32)))
    difference = (run(plain, x) - run(plain, 0 * x)).numpy()
    outputs = np.moveaxis(difference, 1, -1) if "crossed" in case else None
    if outputs is None:
        outputs = difference
    spectrum = np.linalg.svd(
        outputs.reshape(-1, pair.outputs), compute_uv=False
    )
    assert spectrum[1] < 1e-5 * spectrum[0]


@TWINS
def test_config_is_whole(case):
    _, twin, x = make(case)
    again = type(twin).from_config(twin.get_config())
    assert again.carrier_rank == RANK
    run(again, x)
    again.set_weights(twin.get_weights())
    np.testing.assert_array_equal(run(again, x), run(twin, x))
    assert [c.left.shape for c in carriers(again)] == [
        c.left.shape for c in carriers(twin)
    ]


@TWINS
def test_saves_and_loads(case, tmp_path):
    _, twin, x = make(case)
    inputs = keras.Input(x.shape[1:])
    model = keras.Model(inputs, run(twin, inputs))
    set_carriers(twin)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(x), model(x))
    assert isinstance(loaded.layers[-1], type(twin))


@TWINS
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_dtype_policies(case, policy):
    plain, twin, x = make(case, dtype=policy)
    set_carriers(twin)
    outputs = run(twin, x, training=True)
    assert outputs.dtype == policy.removeprefix("mixed_")
    np.testing.assert_array_equal(
        tf.cast(outputs, tf.float32), tf.cast(run(plain, x), tf.float32)
    )
    assert all(c.left.dtype == "float32" for c in carriers(twin))
    sources = [v.value for c in carriers(twin) for v in (c.left, c.right)]
    for gradient in gradients(twin, x, sources):
        assert np.all(np.isfinite(gradient))


@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
def test_channels(data_format):
    layer = layers.RGPConv2D(7, 3, rank=RANK, data_format=data_format)
    x = keras.Input((6, 5, 4))
    # A convolution with channels first does not run on a CPU.
    outputs = layer(x, training=True)
    axis = 3 if data_format == "channels_last" else 1
    assert outputs.shape[axis] == 7


def test_masks_pass_through():
    inputs = keras.Input((4,), dtype="int32")
    tokens = np.array([[1, 2, 0, 0], [1, 2, 3, 4]])
    x = keras.layers.Embedding(5, 6, mask_zero=True)(inputs)
    x = layers.RGPDense(7, rank=RANK)(x)
    outputs = layers.RGPMultiHeadAttention(2, 4, rank=RANK)(x, x)
    model = keras.Model(inputs, outputs)
    outputs = model(tokens, training=True)
    np.testing.assert_array_equal(outputs._keras_mask, tokens > 0)
    # Masked positions get no attention.
    alone = keras.Model(inputs, outputs=x)(tokens, training=True)
    attention = model.layers[-1]
    alone = attention(alone[:1, :2], alone[:1, :2])
    np.testing.assert_allclose(outputs[0, :2], alone[0], atol=1e-5)


@WITH_KERNEL
def test_a_narrow_kernel_has_no_carriers(case):
    plain, twin, x = make(case, rank=100)
    assert twin.carriers is None
    np.testing.assert_array_equal(run(twin, x, training=True), run(plain, x))


@TWINS
@pytest.mark.parametrize("rank", [0, -1, 1.5, True, None])
def test_invalid_rank(case, rank):
    twin, arguments, _ = CASES[case]
    with pytest.raises(ValueError, match="Expected rank >= 1"):
        twin(**arguments, rank=rank)


@WITH_KERNEL
def test_no_lora_beneath_carriers(case):
    _, twin, _ = make(case)
    with pytest.raises(ValueError, match="merge"):
        twin.enable_lora(2)


@pytest.mark.parametrize(
    "make_layer, message",
    [
        (
            lambda: layers.RGPConv2D(4, 3, groups=2, rank=2),
            "Expected groups=1, got 2",
        ),
        (
            lambda: layers.RGPEinsumDense("abc,bcd->abd", (3, 4), rank=2),
            "Expected an equation.*got 'abc,bcd->abd'",
        ),
        (
            lambda: layers.RGPEinsumDense("abc,cd->ab", 4, rank=2),
            "Expected an equation",
        ),
    ],
)
def test_kernels_that_are_no_matrix(make_layer, message):
    with pytest.raises(ValueError, match=message):
        make_layer()
