"""Loops are proved, and their sites gathered, whatever layer makes them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.gradients import model_zoo
from tf_dpsub import gradients

L = keras.layers
BATCH = 4
STEPS = 5
X = np.random.default_rng(0).normal(size=(BATCH, STEPS, 3)).astype("float32")


class _Cell(keras.layers.Layer):
    """A cell that scales by a weight and reads another one transposed."""

    state_size = 2

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 2))
        self.gain = self.add_weight(shape=(2,), initializer="uniform")
        self.recurrent = self.add_weight(shape=(2, 2))

    def call(self, x, states):
        (h,) = states
        h = keras.ops.matmul(h, keras.ops.transpose(self.recurrent))
        h = keras.ops.tanh((1 + self.gain) * (x @ self.kernel) + h)
        return h, [h]


class _TrainedStart(keras.layers.Layer):
    """A recurrent layer whose first state is a weight."""

    def __init__(self):
        super().__init__()
        self.recurrent = L.SimpleRNN(2)

    def build(self, shape):
        self.recurrent.build(shape)
        self.start = self.add_weight(shape=(1, 2), initializer="uniform")

    def call(self, x):
        shape = (keras.ops.shape(x)[0], 2)
        start = keras.ops.broadcast_to(self.start, shape)
        return self.recurrent(x, initial_state=[start])


class _Mapped(keras.layers.Layer):
    """Multiplies each step of a sequence by a weight, in a loop of its own."""

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[-1:], initializer="uniform")

    def call(self, x):
        steps = tf.transpose(x, [1, 0, 2])
        mapped = tf.map_fn(lambda step: tf.tanh(step * self.scale), steps)
        return tf.transpose(mapped, [1, 0, 2])


def _problem(*layers):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((STEPS, 3)), *layers])

    def loss_fn(x):
        outputs = tf.reshape(model(x, training=True), [x.shape[0], -1])
        return tf.reduce_sum(tf.sin(outputs), 1), None

    return model_zoo.Problem(loss_fn, tf.constant(X), model.trainable_variables)


@pytest.mark.parametrize(
    "layer",
    [
        # Its kernel is cut into three inside of the loop.
        lambda: L.GRU(2, reset_after=False, go_backwards=True),
        lambda: L.RNN([L.LSTMCell(2), _Cell()], return_sequences=True),
        lambda: L.LSTM(2, activation="relu", use_bias=False),
        _TrainedStart,
        _Mapped,
    ],
    ids=["gru", "cells", "lstm", "trained_start", "mapped"],
)
def test_rows_are_those_of_one_example(layer):
    problem = _problem(layer())
    measured = model_zoo.measure(problem)
    rows = model_zoo.rows_alone(problem)
    assert model_zoo.relative_error(measured.rows, rows) < 1e-5
    np.testing.assert_allclose(
        np.sqrt(measured.sq_norms), model_zoo.norms(rows), rtol=1e-5
    )


def _sites(problem):
    sites = []

    @tf.function(autograph=False)
    def step(x):
        rows, _ = gradients.per_example_gradients(
            problem.loss_fn, x, problem.variables
        )
        sites.extend(site for site, _ in rows._parts.values())
        return rows.sq_norms()

    step.get_concrete_function(problem.inputs)
    return sites


def test_steps_are_terms_of_one_site():
    _, recurrent, _ = _sites(_problem(L.LSTM(20)))
    assert recurrent.terms == STEPS


def test_the_graph_does_not_grow_with_the_steps():
    counts = []
    for length in (5, 50):
        model = keras.Sequential([keras.Input((length, 3)), L.LSTM(2)])

        @tf.function(autograph=False)
        def step(x):
            rows, _ = gradients.per_example_gradients(
                lambda x: (tf.reduce_sum(model(x), 1), None),
                x,
                model.trainable_variables,
            )
            return rows.weighted_sum(tf.ones([BATCH]))

        graph = step.get_concrete_function(
            tf.TensorSpec([BATCH, length, 3])
        ).graph
        counts.append(len(graph.get_operations()))
    assert counts[1] <= counts[0] + 5


def test_a_loop_adds_nothing_to_what_the_model_computes():
    problem = _problem(L.GRU(2))
    traced_losses = []

    def observed(x):
        losses, aux = problem.loss_fn(x)
        traced_losses.append(losses)
        return losses, aux

    @tf.function(autograph=False)
    def step(x):
        gradients.per_example_gradients(observed, x, problem.variables)
        return traced_losses[0]

    np.testing.assert_array_equal(
        step(problem.inputs),
        tf.function(lambda x: problem.loss_fn(x)[0])(problem.inputs),
    )


def test_a_length_that_the_batch_decides_is_not_proved():
    """One example at a time it has a meaning: it is not called mixing."""

    class Rnn(L.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(3, 3))

        def call(self, x):
            length = tf.reduce_max(tf.cast(tf.abs(x), tf.int32)) + 1
            return tf.while_loop(
                lambda i, _: i < length,
                lambda i, h: (i + 1, tf.tanh(h @ self.kernel)),
                (0, x[:, 0]),
            )[1]

    layer = Rnn()
    layer.build(X.shape)

    def loss_fn(x):
        return tf.reduce_sum(layer(x), 1), None

    problem = model_zoo.Problem(loss_fn, X, layer.trainable_variables)
    with pytest.raises(gradients.Unproven, match="how often While") as error:
        _sites(problem)
    assert not isinstance(error.value, gradients.MixesExamples)


def test_states_kept_from_batch_to_batch_are_refused():
    keras.utils.set_random_seed(1)
    inputs = keras.Input(batch_shape=(BATCH, STEPS, 3))
    model = keras.Model(inputs, L.LSTM(2, stateful=True)(inputs))
    problem = model_zoo.Problem(
        lambda x: (tf.reduce_sum(model(x), 1), None),
        tf.constant(X),
        model.trainable_variables,
    )
    with pytest.raises(gradients.UpdatesState):
        _sites(problem)
