"""A convolution by a standardised kernel, on the engine of the graph."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dpsub
from tf_dpsub import gradients
from tf_dpsub.layers import WeightStandardizedConv2D

_BATCH = 5
_ARGUMENTS = [
    {},
    {"padding": "same", "strides": 2},
    {"dilation_rate": 2, "use_bias": False},
    {"groups": 2, "activation": "relu"},
]


def built(shape=(8, 8, 4), dtype="float32", **arguments):
    keras.utils.set_random_seed(0)
    layer = WeightStandardizedConv2D(6, 3, dtype=dtype, **arguments)
    layer.build((None, *shape))
    random = np.random.default_rng(0)
    layer.gain.assign(random.normal(size=6))
    # Far from mean 0 and variance 1 / n.
    layer.kernel.assign(2 + 3 * random.normal(size=layer.kernel.shape))
    return layer


def standardized(kernel, gain, epsilon=1e-4):
    """As De et al. say it."""
    kernel = np.asarray(kernel, np.float64)
    axes = (0, 1, 2)
    fan_in = np.prod(kernel.shape[:3])
    variance = np.maximum(kernel.var(axes) * fan_in, epsilon)
    return np.asarray(gain) * (kernel - kernel.mean(axes)) / np.sqrt(variance)


@pytest.mark.parametrize("arguments", _ARGUMENTS)
def test_is_a_convolution_by_the_standardized_kernel(arguments):
    layer = built(**arguments)
    plain = keras.layers.Conv2D(6, 3, **arguments)
    plain.build((None, 8, 8, 4))
    plain.kernel.assign(standardized(layer.kernel, layer.gain))
    x = np.random.default_rng(1).normal(size=(_BATCH, 8, 8, 4))
    x = x.astype("float32")
    np.testing.assert_allclose(layer(x), plain(x), rtol=1e-4, atol=1e-5)
    squares = np.square(layer.standardized(layer.kernel)).sum((0, 1, 2))
    np.testing.assert_allclose(squares, np.square(layer.gain), rtol=1e-5)


def test_a_constant_kernel_is_zero():
    layer = built()
    layer.kernel.assign(np.full(layer.kernel.shape, 0.5))
    np.testing.assert_array_equal(layer.standardized(layer.kernel), 0)


def test_small_kernels_stay_small():
    layer = built(epsilon=0.01)
    layer.kernel.assign(1e-3 * layer.kernel)
    np.testing.assert_allclose(
        layer.standardized(layer.kernel),
        standardized(layer.kernel, layer.gain, 0.01),
        rtol=1e-4,
        atol=1e-7,
    )


@pytest.mark.parametrize("arguments", _ARGUMENTS)
def test_rows_of_the_graph_are_those_of_one_example_at_a_time(arguments):
    layer = built(**arguments)
    variables = layer.trainable_variables
    random = np.random.default_rng(2)
    x = tf.constant(random.normal(size=(_BATCH, 8, 8, 4)), tf.float32)
    t = tf.constant(random.normal(size=layer(x).shape), tf.float32)
    c = tf.constant(random.uniform(size=_BATCH), tf.float32)

    def losses(batch):
        products = layer(batch["x"]) * batch["t"]
        return tf.reduce_sum(products, [1, 2, 3]), None

    def results(implementation):
        @tf.function(autograph=False)
        def compute():
            rows, _ = gradients.per_example_gradients(
                losses, {"x": x, "t": t}, variables, implementation
            )
            return {
                "rows": [rows.rows(v) for v in variables],
                "sum": rows.weighted_sum(c),
                "norms": rows.sq_norms(),
                "bounds": rows.sq_norm_bounds(),
            }

        return compute()

    # A map of grouped convolutions needs oneDNN.
    graph, one_by_one = results("graph"), results("map_fn")
    for name in ("rows", "sum", "norms"):
        for found, expected in zip(
            tf.nest.flatten(graph[name]), tf.nest.flatten(one_by_one[name])
        ):
            scale = float(tf.reduce_max(tf.abs(expected)))
            np.testing.assert_allclose(
                found, expected, rtol=1e-4, atol=1e-5 * scale
            )
    assert (graph["bounds"].numpy() >= graph["norms"].numpy()).all()


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_trains_on_the_graph_engine(dtype, tmp_path):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(dtype)
    try:
        plain = keras.Sequential(
            [
                keras.Input((8, 8, 4)),
                built(dtype=dtype, padding="same"),
                keras.layers.GroupNormalization(3),
                keras.layers.GlobalAveragePooling2D(),
                keras.layers.Dense(2),
            ]
        )
    finally:
        keras.config.set_dtype_policy(before)
    model = tf_dpsub.make_private(plain)
    model.compile(
        tf_dpsub.optimizers.DPSGD(
            keras.optimizers.SGD(0.5),
            noise_multiplier=1.0,
            l2_norm_clip=1.0,
            batch_size=8,
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    random = np.random.default_rng(0)
    x = random.normal(size=(32, 8, 8, 4)).astype("float32")
    start = [w.numpy() for w in plain.trainable_weights]
    model.fit(x, random.integers(0, 2, 32), verbose=0)
    assert model.training_step.implementation == "graph"
    for old, new in zip(start, plain.trainable_weights):
        assert np.abs(old - new.numpy()).max() > 0
    plain.save(tmp_path / "plain.keras")
    again = keras.models.load_model(tmp_path / "plain.keras")
    np.testing.assert_array_equal(again.predict(x), plain.predict(x))


def test_arguments():
    layer = WeightStandardizedConv2D(4, 3, 2, epsilon=1e-3)
    again = WeightStandardizedConv2D.from_config(layer.get_config())
    assert again.strides == (2, 2) and again.epsilon == 1e-3
    with pytest.raises(ValueError, match="Expected epsilon > 0, got 0"):
        WeightStandardizedConv2D(4, 3, epsilon=0)
