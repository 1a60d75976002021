"""Models with their own `compute_loss` train as Keras trains them."""

import keras
import numpy as np
import pytest
from keras import ops

import tf_dpsub
from tests.training.plain_models import (
    CLASSES,
    EXACT,
    EXAMPLES,
    FEATURES,
    W,
    X,
    Y,
    assert_same_weights,
    dpsgd,
    loss,
    private,
)

layers = keras.layers


class Alone(keras.Model):
    """Reconstructs its input, by a loss that is all its own."""

    def compute_loss(self, x, y, y_pred, sample_weight=None):
        logits, image = y_pred
        error = ops.mean(ops.sum(ops.square(x - image), axis=1))
        return 0.5 * error + 0.1 * ops.mean(ops.square(logits))


class Besides(keras.Model):
    """Classifies by the loss of `compile` and reconstructs besides."""

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        logits, image = y_pred
        of_keras = super().compute_loss(x, y, logits, sample_weight, training)
        error = ops.sum(ops.square(x - image), axis=1)
        return of_keras + 0.5 * ops.mean(error)


def model_of(kind, **arguments):
    inputs = keras.Input((FEATURES,))
    hidden = layers.Dense(5, activation="tanh", **arguments)(inputs)
    outputs = [layers.Dense(CLASSES)(hidden), layers.Dense(FEATURES)(hidden)]
    return kind(inputs, outputs)


@pytest.mark.parametrize(
    "kind, arguments, weights",
    [
        (Alone, {}, None),
        (Besides, {"kernel_regularizer": "l2"}, W),
    ],
)
def test_as_keras(kind, arguments, weights):
    plain, expected = model_of(kind, **arguments), model_of(kind, **arguments)
    expected.set_weights(plain.get_weights())
    compiled = None if kind is Alone else loss()
    model = private(plain, dpsgd(batch_size=EXAMPLES, **EXACT), loss=compiled)
    data = {"x": X, "y": Y, "sample_weight": weights, "verbose": 0, "epochs": 2}
    own = model.fit(
        **data, validation_data=(X, Y), validation_batch_size=EXAMPLES
    ).history
    assert model.training_step.implementation == "graph"
    expected.compile(keras.optimizers.SGD(0.1), compiled, run_eagerly=True)
    reference = expected.fit(
        **data, validation_data=(X, Y), batch_size=EXAMPLES, shuffle=False
    ).history
    assert_same_weights(plain, expected)
    for name in ("loss", "val_loss"):
        np.testing.assert_allclose(own[name], reference[name], rtol=1e-5)


def test_the_method_sees_one_example():
    """So that the result does not depend on the size of a microbatch."""

    class Sums(keras.Model):
        def compute_loss(self, x, y, y_pred, sample_weight=None):
            # Per example: the sum over the batch of one, divided by one.
            return ops.sum(ops.square(y_pred)) / ops.shape(x)[0]

    results = []
    inputs = keras.Input((FEATURES,))
    for size in (2, 20):
        plain = Sums(inputs, layers.Dense(1, kernel_initializer="ones")(inputs))
        optimizer = dpsgd(batch_size=EXAMPLES, microbatch_size=size, **EXACT)
        model = private(plain, optimizer, loss=None)
        model.fit(X, verbose=0)
        results.append(plain.get_weights()[0])
    np.testing.assert_allclose(*results, rtol=1e-5)


def mixing(change):
    class Mixing(keras.Model):
        def compute_loss(self, x, y, y_pred, sample_weight=None):
            return change(self, y_pred)

    inputs = keras.Input((FEATURES,))
    plain = Mixing(inputs, layers.Dense(3)(inputs))
    return private(plain, dpsgd(), loss=None)


@pytest.mark.parametrize(
    "change",
    [
        lambda self, p: ops.square(ops.mean(p)),
        lambda self, p: ops.mean(ops.softmax(p, axis=0)),
        lambda self, p: ops.mean(p @ ops.transpose(p)),
        lambda self, p: ops.max(p),
        lambda self, p: ops.mean(p) / (1.0 + ops.sum(ops.square(p))),
        lambda self, p: ops.mean(ops.square(p - ops.mean(p, axis=0))),
    ],
    ids=["square", "softmax", "pairs", "max", "quotient", "variance"],
)
def test_a_loss_that_mixes_examples_is_refused(change):
    with pytest.raises(ValueError, match="sum or mean of one value.*add_loss"):
        mixing(change).fit(X, verbose=0)


def test_metrics_within_are_refused():
    tracker = keras.metrics.Mean()

    def change(self, y_pred):
        value = ops.mean(ops.square(y_pred))
        tracker.update_state(value)
        return value

    with pytest.raises(ValueError, match="compute_loss.*pass them to"):
        mixing(change).fit(X, verbose=0)


def test_own_training_step_shows_the_way():
    class Own(keras.Model):
        def train_step(self, data):
            return {}

    # Before it is built: where there is no `call`, building would not help.
    with pytest.raises(ValueError, match=r"train_step.*add_loss\(losses\)"):
        tf_dpsub.make_private(Own())
