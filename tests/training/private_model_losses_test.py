"""Losses of `compile`, of layers, and of weights, over any outputs."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.training.plain_models import (
    CLASSES,
    EXACT,
    EXAMPLES,
    FEATURES,
    X,
    Y,
    assert_same_weights,
    dpsgd,
    linear,
    loss,
    mlp,
    private,
    twin,
)

layers = keras.layers

TARGETS = np.random.default_rng(1).normal(size=(EXAMPLES, 2)).astype("float32")


def two_by_two():
    """Two inputs, two outputs, one layer that both share."""
    a, b = keras.Input((FEATURES,), name="a"), keras.Input((2,), name="b")
    shared = layers.Concatenate()([a, b])
    shared = layers.Dense(4, activation="tanh")(shared)
    kind = layers.Dense(CLASSES, name="kind")(shared)
    size = layers.Dense(2, name="size")(shared)
    return keras.Model({"a": a, "b": b}, {"kind": kind, "size": size})


def listed(model):
    """The same model with lists in place of dicts."""
    return keras.Model(
        [model.input["a"], model.input["b"]],
        [model.output["kind"], model.output["size"]],
    )


def check_equals_keras(plain, arguments, x, y):
    expected = twin(plain)
    model = private(plain, dpsgd(batch_size=EXAMPLES, **EXACT), **arguments())
    history = model.fit(x, y, epochs=3, verbose=0).history
    expected.compile(keras.optimizers.SGD(0.1), **arguments(), run_eagerly=True)
    reference = expected.fit(
        x, y, batch_size=EXAMPLES, shuffle=False, epochs=3, verbose=0
    ).history
    assert_same_weights(plain, expected)
    assert history.pop("dropped") == [0.0] * 3
    assert set(history) == set(reference)
    for name, values in reference.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5)


class TestOutputs:
    def test_dicts(self):
        check_equals_keras(
            two_by_two(),
            lambda: {
                "loss": {"kind": loss(), "size": "mse"},
                "loss_weights": {"kind": 1.0, "size": 0.3},
                "metrics": {"kind": ["accuracy"], "size": ["mae", "mse"]},
            },
            {"a": X, "b": TARGETS},
            {"kind": Y, "size": TARGETS},
        )

    def test_lists(self):
        check_equals_keras(
            listed(two_by_two()),
            lambda: {
                "loss": [loss(), "mse"],
                "loss_weights": [1.0, 0.3],
                "metrics": [["accuracy"], ["mae"]],
                "weighted_metrics": [[], ["mse"]],
            },
            [X, TARGETS],
            [Y, TARGETS],
        )

    @pytest.mark.filterwarnings("ignore:Gradients do not exist")
    def test_output_without_a_loss(self):
        check_equals_keras(
            two_by_two(),
            lambda: {"loss": {"size": "mse"}},
            {"a": X, "b": TARGETS},
            {"size": TARGETS},
        )


class TestTokens:
    """Outputs with a mask, one for each token."""

    tokens = np.random.default_rng(2).integers(0, 5, [EXAMPLES, 6])

    def model(self):
        tokens = keras.Input((6,), dtype="int32")
        x = layers.Embedding(5, 4, mask_zero=True)(tokens)
        x = layers.LayerNormalization()(x)
        return keras.Model(tokens, layers.Dense(5)(x))

    def test_metrics_see_the_mask(self):
        metrics = {
            "metrics": ["accuracy"],
            "weighted_metrics": [
                keras.metrics.SparseCategoricalCrossentropy(from_logits=True)
            ],
        }
        optimizer = dpsgd(
            keras.optimizers.SGD(0.0),
            batch_size=EXAMPLES,
            microbatch_size=7,
            **EXACT,
        )
        model = private(self.model(), optimizer, **metrics)
        assert 0 < (self.tokens == 0).mean() < 1
        history = model.fit(self.tokens, self.tokens, verbose=0).history
        expected = model.evaluate(
            self.tokens, self.tokens, verbose=0, return_dict=True
        )
        # Keras's loss weighs tokens alike; a private one, examples.
        expected.pop("loss")
        for name, value in expected.items():
            assert history[name] == pytest.approx([value], rel=1e-5)

    def test_loss_is_the_mean_over_the_tokens_of_an_example(self):
        plain = self.model()
        optimizer = dpsgd(batch_size=EXAMPLES, **EXACT)
        before = [tf.identity(v.value) for v in plain.trainable_variables]
        model = private(plain, optimizer)
        with tf.GradientTape() as tape:
            tokens = tf.constant(self.tokens)
            losses = keras.losses.sparse_categorical_crossentropy(
                tokens, plain(tokens), from_logits=True
            )
            own = tf.cast(tokens != 0, tf.float32)
            losses = tf.reduce_sum(losses * own, 1) / tf.reduce_sum(own, 1)
            mean = tf.reduce_mean(losses)
        gradients = tape.gradient(
            mean, [v.value for v in plain.trainable_variables]
        )
        history = model.fit(self.tokens, self.tokens, verbose=0).history
        assert history["loss"] == pytest.approx([float(mean)], rel=1e-5)
        for variable, start, gradient in zip(
            plain.trainable_variables, before, gradients, strict=True
        ):
            np.testing.assert_allclose(
                variable.numpy(),
                start - 0.1 * tf.convert_to_tensor(gradient),
                rtol=1e-4,
                atol=1e-6,
            )


class Penalty(layers.Layer):
    """Adds a loss for each example, or another shape."""

    def __init__(self, reduce=lambda squares: tf.reduce_mean(squares, 1)):
        super().__init__()
        self.reduce = reduce

    def call(self, inputs):
        self.add_loss(self.reduce(tf.square(inputs)))
        return inputs


class TestAddedLosses:
    @pytest.mark.parametrize("with_loss", [True, False])
    def test_one_for_each_example(self, with_loss):
        plain = mlp(layers.Dense(5, activation="tanh"), Penalty())
        before = [tf.identity(v.value) for v in plain.trainable_variables]
        with tf.GradientTape() as tape:
            logits = plain(X)
            added = plain.losses[0]
            total = tf.reduce_mean(added)
            if with_loss:
                total += loss()(Y, logits)
        gradients = tape.gradient(
            total, [v.value for v in plain.trainable_variables]
        )
        model = private(
            plain,
            dpsgd(batch_size=EXAMPLES, **EXACT),
            loss=loss() if with_loss else None,
        )
        history = model.fit(X, Y if with_loss else None, verbose=0).history
        assert history["loss"] == pytest.approx([float(total)], rel=1e-5)
        for variable, start, gradient in zip(
            plain.trainable_variables, before, gradients, strict=True
        ):
            step = 0.0 if gradient is None else 0.1 * gradient
            np.testing.assert_allclose(
                variable.numpy(), start - step, rtol=1e-4, atol=1e-6
            )
            variable.assign(start)
        evaluated = model.evaluate(
            X, Y if with_loss else None, verbose=0, batch_size=EXAMPLES
        )
        assert evaluated == pytest.approx(float(total), rel=1e-5)

    @pytest.mark.parametrize(
        "reduce",
        [
            tf.reduce_mean,
            lambda squares: squares,
            lambda squares: tf.reduce_mean(squares, 0),
        ],
        ids=["scalar", "matrix", "of_the_batch"],
    )
    def test_other_shapes_raise(self, reduce):
        model = private(mlp(layers.Dense(5), Penalty(reduce)), dpsgd())
        with pytest.raises(
            ValueError, match=r"shape \[batch\] from add_loss.*one value for"
        ):
            model.fit(X, Y, verbose=0)

    def test_activity_regularizers_raise(self):
        model = private(
            mlp(layers.Dense(5, activity_regularizer="l2")), dpsgd()
        )
        with pytest.raises(ValueError, match="kernel_regularizer"):
            model.fit(X, Y, verbose=0)


class TestRegularizers:
    def model(self):
        return mlp(
            layers.Dense(
                5,
                activation="tanh",
                kernel_regularizer=keras.regularizers.L2(0.5),
                bias_regularizer=keras.regularizers.L1(0.1),
                bias_initializer="ones",
            )
        )

    def test_equal_keras(self):
        plain = self.model()
        expected = twin(plain)
        model = private(plain, dpsgd(batch_size=EXAMPLES, **EXACT))
        history = model.fit(X, Y, epochs=3, verbose=0, validation_data=(X, Y))
        expected.compile(
            keras.optimizers.SGD(0.1), loss=loss(), run_eagerly=True
        )
        reference = expected.fit(
            X,
            Y,
            batch_size=EXAMPLES,
            shuffle=False,
            epochs=3,
            verbose=0,
            validation_data=(X, Y),
        )
        assert_same_weights(plain, expected)
        # They are part of the loss, in training as in evaluation.
        for name in ("loss", "val_loss"):
            np.testing.assert_allclose(
                history.history[name], reference.history[name], rtol=1e-5
            )

    def test_are_not_clipped(self):
        """With a tiny clip, they are all that is left of a step."""
        plain = self.model()
        kernel, bias, *head = plain.get_weights()
        model = private(
            plain,
            dpsgd(
                batch_size=EXAMPLES, noise_multiplier=0.0, l2_norm_clip=1e-12
            ),
        )
        model.fit(X, Y, verbose=0)
        expected = [kernel - 0.1 * 2 * 0.5 * kernel, bias - 0.1 * 0.1, *head]
        for own, other in zip(plain.get_weights(), expected, strict=True):
            np.testing.assert_allclose(own, other, rtol=1e-6, atol=1e-9)

    def test_of_frozen_weights_are_left_out(self):
        plain = self.model()
        plain.layers[0].trainable = False
        kernel = plain.get_weights()[0]
        private(plain, dpsgd()).fit(X, Y, verbose=0)
        np.testing.assert_array_equal(plain.get_weights()[0], kernel)


class TestDropout:
    def model(self):
        return mlp(layers.Dropout(0.5, seed=1), layers.Dense(5))

    def test_differs_between_steps_and_examples(self):
        """Gradients count the examples that keep a feature."""
        plain = keras.Sequential(
            [
                keras.Input((64,)),
                layers.Dropout(0.5, seed=1),
                layers.Dense(1, use_bias=False),
            ]
        )
        optimizer = dpsgd(
            keras.optimizers.SGD(1.0), batch_size=2, microbatch_size=2, **EXACT
        )
        model = private(plain, optimizer, loss=lambda y, p: p[:, 0])
        (kernel,) = plain.trainable_variables
        moved = []
        for _ in range(2):
            before = kernel.numpy()
            model.train_on_batch(np.ones([2, 64]), np.zeros(2))
            moved.append(np.round(before - kernel.numpy(), 5))
        # Of two examples none, one or both; each that does, doubled.
        assert set(np.unique(moved)) == {0.0, 1.0, 2.0}
        assert not np.array_equal(*moved)

    def test_evaluation_drops_nothing(self):
        plain = self.model()
        model = private(plain, dpsgd())
        np.testing.assert_allclose(
            model.predict(X, verbose=0), plain(X, training=False), rtol=1e-5
        )


def test_loss_that_mixes_examples_raises():
    def batch_loss(y_true, y_pred):
        return (y_pred - tf.reduce_mean(y_pred, 0))[:, 0]

    model = private(linear(), dpsgd(), loss=batch_loss)
    with pytest.raises(Exception, match="mixes the examples of a batch"):
        model.fit(X, Y, verbose=0)


def test_loss_of_another_length_raises():
    model = private(linear(), dpsgd(), loss=lambda y_true, y_pred: y_pred[:1])
    with pytest.raises(ValueError, match="a value for each of 4 examples"):
        model.fit(X, Y, verbose=0)
