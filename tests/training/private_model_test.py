"""A private model trains, evaluates and predicts as Keras does.

Without noise, without a clip, and with every example in every batch, private
training is plain training: Keras itself is the reference.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.training.plain_models import (
    CLASSES,
    EXACT,
    EXAMPLES,
    X,
    Y,
    assert_same_weights,
    dpsgd,
    fit_plainly,
    linear,
    mlp,
    private,
    twin,
)

layers = keras.layers

# Each of their settings changes the weights.
INNER = {
    "sgd": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5),
        momentum=0.9,
        nesterov=True,
        weight_decay=0.1,
        clipnorm=0.1,
    ),
    "moving_average": lambda: keras.optimizers.SGD(
        0.1, use_ema=True, ema_momentum=0.5
    ),
    "adamw": lambda: keras.optimizers.AdamW(0.05, weight_decay=0.1),
}


class TestEqualsKeras:
    @pytest.mark.parametrize("inner", INNER)
    def test_any_inner_optimizer(self, inner):
        plain = linear()
        expected = twin(plain)
        model = private(
            plain, dpsgd(INNER[inner](), batch_size=EXAMPLES, **EXACT)
        )
        history = model.fit(X, Y, epochs=3, verbose=0).history
        reference = fit_plainly(expected, INNER[inner]())
        assert_same_weights(plain, expected)
        np.testing.assert_allclose(
            history["loss"], reference["loss"], rtol=1e-5
        )

    # Those of 7, which do not divide the batch, are below.
    @pytest.mark.parametrize("microbatch_size", [1, 64, None])
    def test_microbatches_never_change_the_result(self, microbatch_size):
        plain = mlp()
        expected = twin(plain)
        optimizer = dpsgd(
            batch_size=EXAMPLES, microbatch_size=microbatch_size, **EXACT
        )
        model = private(plain, optimizer, metrics=["accuracy"])
        history = model.fit(X, Y, epochs=3, verbose=0).history
        reference = fit_plainly(expected, keras.optimizers.SGD(0.1))
        assert_same_weights(plain, expected)
        for name in ("loss", "accuracy"):
            np.testing.assert_allclose(
                history[name], reference[name], rtol=1e-5
            )

    @pytest.mark.parametrize(
        ("per_example", "how"),
        [
            ("graph", {"jit_compile": True}),
            ("graph", {"run_eagerly": True}),
            ("graph", {"steps_per_execution": 2}),
            ("vectorized_map", {"jit_compile": False}),
            ("vectorized_map", {"jit_compile": True}),
        ],
    )
    def test_any_way_of_running(self, per_example, how):
        plain = mlp()
        expected = twin(plain)
        optimizer = dpsgd(
            keras.optimizers.Adam(0.05),
            batch_size=EXAMPLES,
            microbatch_size=7,
            per_example=per_example,
            **EXACT,
        )
        model = private(plain, optimizer, metrics=["accuracy"], **how)
        # An epoch of two batches of all examples.
        history = model.fit(
            X, Y, steps_per_epoch=2, epochs=2, verbose=0
        ).history
        reference = fit_plainly(expected, keras.optimizers.Adam(0.05), 4)
        assert_same_weights(plain, expected)
        for name in ("loss", "accuracy"):
            pairs = np.reshape(reference[name], [2, 2])
            np.testing.assert_allclose(history[name], pairs.mean(1), rtol=1e-5)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("layer", "jit_compile"), [(layers.LSTM, True), (layers.GRU, False)]
    )
    def test_recurrent_layers(self, layer, jit_compile):
        """Their loop stands within that over the microbatches."""
        plain = keras.Sequential(
            [keras.Input((3, 2)), layer(2), layers.Dense(CLASSES)]
        )
        expected = twin(plain)
        random = np.random.default_rng(1)
        series = random.normal(size=(EXAMPLES, 3, 2)).astype("float32")
        model = private(
            plain,
            dpsgd(batch_size=EXAMPLES, **EXACT),
            jit_compile=jit_compile,
            steps_per_execution=2,
        )
        model.fit(series, Y, verbose=0)
        assert model.training_step.implementation == "graph"
        fit_plainly(expected, keras.optimizers.SGD(0.1), 1, x=series)
        assert_same_weights(plain, expected)

    def test_learning_rate_is_that_of_the_inner_optimizer(self):
        optimizer = dpsgd(keras.optimizers.SGD(0.5), **EXACT)
        model = private(linear(), optimizer)
        before = model.get_weights()
        model.optimizer.learning_rate = 0.0
        assert float(optimizer.inner_optimizer.learning_rate) == 0.0
        model.fit(X, Y, verbose=0)
        for own, other in zip(model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(own, other)
        assert int(model.optimizer.iterations) == 5


@pytest.fixture(params=["mixed_bfloat16", "mixed_float16"])
def mixed(request):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_dtype_policy(before)


class TestMixedPrecision:
    def test_trains_as_in_float32(self, mixed):
        plain = mlp()
        assert plain.compute_dtype == mixed.removeprefix("mixed_")
        keras.config.set_dtype_policy("float32")
        expected = mlp()
        expected.set_weights(plain.get_weights())
        keras.config.set_dtype_policy(mixed)
        optimizer = dpsgd(batch_size=EXAMPLES, **EXACT)
        model = private(plain, optimizer, metrics=["accuracy"])
        assert model.predict(X, verbose=0).dtype == plain.compute_dtype
        history = model.fit(X, Y, epochs=3, verbose=0).history
        reference = fit_plainly(expected, keras.optimizers.SGD(0.1))
        # 8 and 11 bits of the activations.
        tolerance = {"mixed_bfloat16": 4e-2, "mixed_float16": 5e-3}[mixed]
        np.testing.assert_allclose(
            history["loss"], reference["loss"], rtol=tolerance
        )
        assert_same_weights(plain, expected, tolerance)
        assert {w.dtype.name for w in plain.get_weights()} == {"float32"}

    def test_noise_is_not_rounded(self, mixed):
        """Noise in half precision would be a grid, and tell what is below."""
        plain = linear()
        optimizer = dpsgd(keras.optimizers.SGD(1.0), seed=0)
        model = private(plain, optimizer)
        before = plain.get_weights()[0]
        model.fit(X, Y, verbose=0)
        moved = plain.get_weights()[0] - before
        assert not np.array_equal(
            moved, tf.cast(tf.cast(moved, mixed[6:]), tf.float32)
        )

    def test_small_gradients_survive(self, mixed):
        """In float16 the gradient at the logits would be zero."""
        plain = linear()
        weight = 1e-7
        model = private(
            plain,
            dpsgd(
                keras.optimizers.SGD(1 / weight), batch_size=EXAMPLES, **EXACT
            ),
        )
        before = plain.get_weights()
        model.fit(X, Y, sample_weight=np.full(EXAMPLES, weight), verbose=0)
        moved = [b - a for a, b in zip(before, plain.get_weights())]
        probabilities = tf.nn.softmax(X @ before[0] + before[1]).numpy()
        delta = probabilities - np.eye(CLASSES)[Y]
        expected = [-X.T @ delta / EXAMPLES, -delta.mean(0)]
        for a, b in zip(moved, expected):
            assert np.linalg.norm(a - b) / np.linalg.norm(b) < 4e-2
