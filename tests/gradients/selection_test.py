"""The choice of an implementation, and its line in the log."""

import dataclasses
import logging.handlers
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dpsub
from tests.graphs import ancestors
from tf_dpsub import gradients
from tf_dpsub.gradients import selection, vectorized, zero_terms

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


def test_a_gradient_of_zero_is_no_error():
    last = L.Dense(2, kernel_initializer="zeros", trainable=False)
    assert _select(_model((3,), L.Dense(2), last), (3,)) == "graph"


class _Function(keras.layers.Dense):
    """A layer whose gradient TensorFlow builds when it optimizes the graph."""

    def call(self, x):
        return tf.function(super().call, autograph=False)(x)


def test_the_check_runs_gradients_that_are_left_to_the_runtime():
    layer = _Function(2, use_bias=False)
    assert _select(_model((3,), layer), (3,)) == "graph"


def test_the_check_leaves_the_options_of_tensorflow_as_they_were():
    before = tf.config.optimizer.get_experimental_options()
    assert _select(_model((3,), L.Dense(2)), (3,)) == "graph"
    assert tf.config.optimizer.get_experimental_options() == before


def test_the_ordinary_gradient_waits_for_the_rows(monkeypatch):
    """So they are never in memory together."""
    graphs = []
    original = selection.trace

    def traced(function, inputs):
        graphs.append(original(function, inputs))
        return graphs[-1]

    monkeypatch.setattr(selection, "trace", traced)
    assert _select(_model((3,), L.Dense(2, "tanh")), (3,)) == "graph"
    (graph,) = graphs
    # A function returns copies: two for each weight, and the norms.
    *returned, _ = [t.op.inputs[0].op for t in graph.outputs]
    half = len(returned) // 2
    sums, ordinary = returned[:half], returned[half:]
    for gradient in ordinary:
        assert ancestors(gradient).issuperset(sums)


def test_an_unproved_model_falls_back_in_one_line(caplog):
    chosen = _select(_model((3,), L.Dense(2), _WithoutRule()), (3,))
    assert chosen in ("vectorized_map", "map_fn")
    (record,) = [r for r in caplog.records if "one example at a time" in r.msg]
    message = record.getMessage()
    assert chosen in message and "Betainc" in message


class _LookUp(keras.layers.Embedding):
    """A table that a function of three inputs reads, one of them its own."""

    def call(self, ids):
        look_up = tf.function(tf.gather, autograph=False)
        return look_up(tf.identity(self.embeddings), tf.cast(ids, tf.int32))


def test_a_function_with_an_input_of_its_own_falls_back():
    assert _select(_model((3,), _LookUp(2, 4)), (3,)) != "graph"


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


def test_a_map_that_takes_apart_what_is_compiled_is_tried(monkeypatch):
    """Which grouped convolutions run without XLA depends on the processor."""
    shape, tried = (4, 4, 4), []
    convolution = L.Conv2D(4, 3, groups=2)
    model = _model(shape, convolution, _WithoutRule(), L.Flatten(), L.Dense(1))
    chosen = _select(model, shape)

    @tf.function(autograph=False)
    def sq_norms(x):
        rows, _ = gradients.per_example_gradients(
            lambda x: (model(x)[:, 0], None),
            x,
            model.trainable_variables,
            chosen,
        )
        return rows.sq_norms()

    x = tf.random.stateless_uniform([2, *shape], [0, 1])
    assert (sq_norms(x).numpy() >= 1).all()  # that of the last bias
    monkeypatch.setattr(vectorized, "_runs", lambda *args: tried.append(args))
    assert _select(model, shape) == "map_fn"
    assert len(tried) == 1


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


def test_a_walk_whose_norms_are_wrong_is_not_used(monkeypatch, caplog):
    """Sums of rows that are right would be clipped wrongly."""
    from tf_dpsub.gradients.graph import sites

    right = sites.OuterProducts.sq_norms
    monkeypatch.setattr(
        sites.OuterProducts, "sq_norms", lambda self: 0.9 * right(self)
    )
    assert _select(_model((3,), L.Dense(2)), (3,)) == "vectorized_map"
    assert "self-check" in caplog.text


@pytest.mark.parametrize(
    "compute_dtype, chosen",
    [("bfloat16", "graph"), ("float32", "vectorized_map")],
)
def test_sums_that_a_processor_rounds_are_not_compared(
    monkeypatch, compute_dtype, chosen
):
    """Without oneDNN, convolutions sum an ordinary gradient in bfloat16."""
    original = zero_terms.gradients

    def rounded(total, variables, terms):
        (weighted, _) = total.op.inputs
        summed = tf.math.count_nonzero(weighted, dtype=tf.float32)
        return [
            (1.0 - 0.02 * summed) * tf.convert_to_tensor(gradient)
            for gradient in original(total, variables, terms)
        ]

    monkeypatch.setattr(
        selection, "zero_terms", types.SimpleNamespace(gradients=rounded)
    )
    model = _model((3,), L.Dense(2))
    assert _select(model, (3,), compute_dtype=compute_dtype) == chosen


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


@pytest.mark.parametrize("make", [lambda: L.Dropout(0.5), _Noisy])
def test_the_check_traces_one_forward_pass(make):
    """Rows and the ordinary gradient share it, and what it draws."""
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
    assert len(traced) == 1


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


class TestAGraphThatPassedBefore:
    """It is not checked again: checking takes a third of a first step."""

    @pytest.fixture(autouse=True)
    def none_passed_yet(self, monkeypatch):
        monkeypatch.setattr(selection, "_CHECKED", {})

    def traces(self, *layers, power=2, frozen=0, rows=4, states=()):
        """How often the check of a model traces its loss."""
        model = _model((3,), *layers)
        for layer in model.layers[:frozen]:
            layer.trainable = False
        traced = []

        def loss_fn(batch):
            traced.append(batch)
            outputs = model(batch, training=True)
            return tf.reduce_mean(outputs**power, 1), outputs

        spec = tf.TensorSpec([rows, 3])
        forward = selection.forward_pass(loss_fn, spec, list(states))
        traced.clear()
        chosen = selection.select_implementation(
            loss_fn,
            spec,
            model.trainable_variables,
            may_read=gradients.Sources([*model.variables, *states]),
            forward=forward,
        )
        assert chosen == "graph"
        return len(traced)

    def test_the_same_model_built_again(self):
        first, second = (
            self.traces(L.Dense(4, "relu"), L.Dense(2)) for _ in range(2)
        )
        assert (first, second) == (1, 0)

    @pytest.mark.parametrize(
        "layers, kwargs",
        [
            ((L.Dense(4, "tanh"), L.Dense(2)), {}),
            ((L.Dense(5, "relu"), L.Dense(2)), {}),
            ((L.Dense(4, "relu"), L.Dense(2)), {"power": 3}),
            ((L.Dense(4, "relu"), L.Dense(2)), {"frozen": 1}),
            ((L.Dense(4, "relu"), L.Dense(2)), {"rows": 6}),
            ((L.Dense(4, "relu"), L.Dense(2, use_bias=False)), {}),
        ],
    )
    def test_another_one(self, layers, kwargs):
        self.traces(L.Dense(4, "relu"), L.Dense(2))
        assert self.traces(*layers, **kwargs) == 1

    def test_constants_count(self):
        for scale in (0.5, 0.25):
            assert self.traces(L.Rescaling(scale), L.Dense(2)) == 1

    @pytest.mark.parametrize("effect", ["draws", "calls_python"])
    def test_what_the_graph_does_not_tell_is_always_checked(self, effect):
        model = _model((3,), L.Dense(2))
        forward = selection.forward_pass(
            lambda x: (tf.reduce_mean(model(x), 1), x),
            tf.TensorSpec([4, 3]),
            [],
        )
        known = model.trainable_variables, gradients.Sources(model.variables)
        assert len(forward.fingerprint(*known)) == 32
        forward = dataclasses.replace(forward, **{effect: True})
        assert forward.fingerprint(*known) is None

    def test_one_whose_walk_is_wrong(self, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setattr(selection, "_TOLERANCE", -1.0)
            with pytest.raises(AssertionError):
                self.traces(L.Dense(2))
        assert self.traces(L.Dense(2)) == 1

    def test_seeds_are_used_as_before(self):
        uses = []
        for _ in range(2):
            model = tf_dpsub.make_private(
                _model((3,), L.Dense(2), L.Dropout(0.5), L.Dense(1))
            )
            model.compile(
                tf_dpsub.optimizers.DPSGD(
                    "sgd", l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=4
                ),
                "mse",
            )
            model.prepare_training(
                {
                    "x": tf.TensorSpec([None, 3]),
                    "y": tf.TensorSpec([None, 1]),
                    "real": tf.TensorSpec([None]),
                }
            )
            uses.append(model.training_step._may_read.uses)
            assert model.training_step.is_random
        assert uses == [{0: "each"}] * 2
        assert len(selection._CHECKED) == 1
