"""The choice of an implementation, and its line in the log."""

import logging.handlers

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_dpsub import gradients
from tf_dpsub.gradients import selection

L = keras.layers


def _select(model, shape, dtype=tf.float32, **kwargs):
    def loss_fn(batch):
        outputs = model(batch, training=True)
        flat = tf.reshape(outputs, [outputs.shape[0], -1])
        return tf.reduce_mean(tf.square(flat), 1), outputs

    return selection.select_implementation(
        loss_fn,
        tf.TensorSpec([4, *shape], dtype),
        model.trainable_variables,
        name="it",
        **kwargs,
    )


def _model(shape, *layers):
    return keras.Sequential([keras.Input(shape), *layers])


class _WithoutRule(keras.layers.Layer):
    """A layer that keeps examples apart by an operation without a rule."""

    def call(self, x):
        return x * tf.math.betainc(1.0, 1.0, keras.ops.sigmoid(x))


def test_a_proved_model_takes_the_graph(caplog):
    caplog.set_level("INFO", logger="absl")
    assert _select(_model((3,), L.Dense(2)), (3,)) == "graph"
    assert "graph walk, proved" in caplog.text


def test_an_unproved_model_falls_back_in_one_line(caplog):
    chosen = _select(_model((3,), L.Dense(2), _WithoutRule()), (3,))
    assert chosen in ("vectorized_map", "map_fn")
    (record,) = [r for r in caplog.records if "one example at a time" in r.msg]
    message = record.getMessage()
    assert chosen in message and "Betainc" in message


def test_failed_conversions_are_not_logged():
    model = _model((None,), L.Embedding(9, 3), L.LSTM(2), _WithoutRule())
    records = logging.handlers.BufferingHandler(capacity=100)
    log = tf.get_logger()
    log.addHandler(records)
    try:
        level = log.level
        assert _select(model, (5,), tf.int32) == "map_fn"
        assert log.level == level
    finally:
        log.removeHandler(records)
    assert not records.buffer


def test_graph_alone_raises_where_nothing_is_proved():
    with pytest.raises(gradients.Unproven, match="has no rule"):
        model = _model((3,), L.Dense(2), _WithoutRule())
        _select(model, (3,), requested="graph")


class _Mode(keras.layers.Layer):
    """A layer that subtracts the most frequent of the rounded values."""

    def call(self, x):
        counts = tf.math.bincount(tf.cast(tf.reshape(x, [-1]), tf.int32))
        mode = tf.where(counts == tf.reduce_max(counts))[0, 0]
        return x - tf.cast(mode, x.dtype)


class _Positive(keras.layers.Layer):
    def call(self, x):
        return x * tf.cast(tf.shape(tf.where(tf.nn.relu(x)))[0], x.dtype)


@pytest.mark.parametrize("layer", [_Mode, _Positive])
def test_a_map_that_would_fail_when_it_runs_is_not_taken(layer):
    """TensorFlow traces it, but cannot stack results of different shapes."""
    model = _model((3,), layer(), L.Dense(2))
    assert _select(model, (3,), requested="vectorized_map") == "map_fn"


class _BatchMean(keras.layers.Layer):
    def call(self, x):
        return x - keras.ops.mean(x, 0, keepdims=True)


def test_mixing_examples_raises_with_the_cure():
    model = _model((3,), L.Dense(2), _BatchMean())
    with pytest.raises(
        gradients.MixesExamples, match="reduces over the batch.*vectorized_map"
    ):
        _select(model, (3,))


def test_mixing_examples_runs_one_at_a_time_on_request():
    model = _model((3,), L.Dense(2), _BatchMean())
    chosen = _select(model, (3,), requested="vectorized_map")
    assert chosen == "vectorized_map"


def test_a_walk_that_differs_from_the_gradient_is_not_used(monkeypatch, caplog):
    """The self-check would catch a rule that is wrong."""
    from tf_dpsub.gradients.graph import sites

    monkeypatch.setattr(
        sites.OuterProducts,
        "weighted_sum",
        lambda self, c: 1.01 * tf.zeros(self.shape) + 1.0,
    )
    assert _select(_model((3,), L.Dense(2)), (3,)) == "vectorized_map"
    assert "self-check" in caplog.text


def test_the_check_of_two_inputs_gives_them_different_ones():
    """The difference of equal inputs would have no gradient to compare."""
    tower = _model((3,), L.Dense(2))

    def loss_fn(batch):
        difference = tower(batch[0]) - tower(batch[1])
        return tf.norm(difference + 1e-3, axis=1), None

    spec = tf.TensorSpec([4, 3], tf.float32)
    chosen = selection.select_implementation(
        loss_fn, (spec, spec), tower.trainable_variables
    )
    assert chosen == "graph"


def test_states_are_restored_after_the_check():
    seeds = keras.random.SeedGenerator(7)

    class Drop(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.seeds = seeds

        def call(self, x):
            return keras.random.dropout(x, 0.5, seed=self.seeds)

    before = seeds.state.numpy()
    model = _model((3,), L.Dense(2), Drop())
    states = model.non_trainable_variables
    assert _select(model, (3,), states=states) == "graph"
    np.testing.assert_array_equal(seeds.state.numpy(), before)


class _Noisy(keras.layers.Layer):
    def call(self, x):
        return x * tf.random.normal(x.shape)


@pytest.mark.parametrize(
    ("make", "forward_passes"), [(lambda: L.Dropout(0.5), 2), (_Noisy, 1)]
)
def test_the_check_repeats_a_forward_pass_that_states_determine(
    make, forward_passes
):
    """So rows and the ordinary gradient are never in memory together."""
    model = keras.Sequential([L.Dense(2), make()])
    model.build((4, 3))
    traced = []

    def loss_fn(batch):
        traced.append(batch)
        return tf.reduce_sum(tf.square(model(batch, training=True)), 1), batch

    chosen = selection.select_implementation(
        loss_fn,
        tf.TensorSpec([4, 3]),
        model.trainable_variables,
        states=model.non_trainable_variables,
        requested="graph",
    )
    assert chosen == "graph"
    assert len(traced) == forward_passes


def test_changed_states_are_the_seeds_of_dropout():
    model = _model((3,), L.Dense(2), L.Dropout(0.5))
    frozen = L.Dense(2)
    frozen.build((None, 2))
    states = [*model.non_trainable_variables, *frozen.variables]

    def loss_fn(batch):
        return tf.reduce_mean(model(batch, training=True), 1), batch

    forward = selection.forward_pass(loss_fn, tf.TensorSpec([4, 3]), states)
    assert forward.changed == model.non_trainable_variables
    assert not forward.draws


def test_the_crash_of_onednn_is_avoided():
    """TensorFlow 2.21 writes out of bounds in this BatchMatMul."""
    inputs = keras.Input((7, 5))
    attended = L.MultiHeadAttention(2, 4)(inputs, inputs)
    model = keras.Model(inputs, L.Dense(3)(attended))
    assert _select(model, (7, 5), requested="vectorized_map") == "map_fn"
