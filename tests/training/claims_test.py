"""Sums, their noise and the ledger follow the same claims of an optimizer."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dpsub
from tests.training.plain_models import loss
from tf_dpsub import optimizers, subspaces
from tf_dpsub.gradients import Unproven, UpdatesState

ROWS = 20
X = 10 * np.random.default_rng(0).normal(size=(ROWS, 5)).astype("float32")
Y = np.arange(ROWS) % 3


class Mutable(optimizers.DPSGD):
    """A mechanism of a user's own: its clip is a plain attribute."""

    bound = 1.0
    l2_norm_clip = property(lambda self: self.bound)


def private(optimizer_class=Mutable, layers=(), jit_compile=False, **kwargs):
    keras.utils.set_random_seed(0)
    model = tf_dpsub.make_private(
        keras.Sequential([keras.Input((5,)), *layers, keras.layers.Dense(3)])
    )
    optimizer = optimizer_class(
        keras.optimizers.SGD(0.0),
        noise_multiplier=1.0,
        batch_size=ROWS,
        microbatch_size=4,
        **{"l2_norm_clip": 1.0, **kwargs},
    )
    model.compile(optimizer, loss(), jit_compile=jit_compile)
    return model


def assert_weights(model, expected):
    for weight, value in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_array_equal(weight, value)


class Begin(keras.callbacks.Callback):
    """Lets a layer begin to do something once the step was checked."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def on_train_begin(self, logs=None):
        self.layer.begins = True


class Sums(keras.callbacks.Callback):
    """Norm of the sums of the last step."""

    def on_train_begin(self, logs=None):
        self.norm = tf.Variable(0.0)
        self.model.current_run.observe_sums(
            lambda sums: self.norm.assign(
                tf.linalg.global_norm([tf.cast(s, tf.float32) for s in sums])
            ),
            "the norm of sums",
        )


def fit(model, *callbacks):
    sums = Sums()
    model.fit(X, Y, callbacks=[sums, *callbacks], verbose=0)
    return float(sums.norm)


def changed_between_fits(model):
    before = fit(model)
    model.optimizer.bound = 0.01
    return before, fit(model)


def test_a_clip_that_changes_between_runs_is_that_of_sums_and_noise():
    model = private()
    before, after = changed_between_fits(model)
    # Norms of gradients are above both clips: all sums are scaled alike.
    assert 0.1 < before <= ROWS
    assert after == pytest.approx(0.01 * before, rel=0.5)
    assert model.optimizer.noise_stddevs() == [0.01, 0.01]
    assert [e.l2_norm_clip for e in model.ledger.entries] == [1.0, 0.01]


def test_split_clips_follow_a_clip_that_changes_between_runs():
    before, after = changed_between_fits(private(layer_clips="equal"))
    assert after == pytest.approx(0.01 * before, rel=0.5)


@pytest.mark.parametrize("when", ["train", "epoch", "train_batch"])
def test_a_clip_that_changes_within_a_run_is_refused(when):
    model = private()

    class Change(keras.callbacks.Callback):
        def change(self, *args, **kwargs):
            self.model.optimizer.bound = 0.01

    setattr(Change, f"on_{when}_begin", Change.change)
    with pytest.raises(
        RuntimeError, match="clip 1 with noise multiplier 1, got .* clip 0.01"
    ):
        fit(model, Change())
    assert model.ledger.steps == 0


def test_traced_sums_want_the_clip_that_they_have():
    model = private()
    fit(model)
    step = model.training_step
    batch = {"x": X[:4], "y": Y[:4], "real": np.ones(4, "float32")}
    step(tf.nest.map_structure(tf.constant, batch))
    model.optimizer.bound = 0.01
    with pytest.raises(RuntimeError, match="where its sums were traced"):
        step(tf.nest.map_structure(tf.constant, batch))


@pytest.mark.parametrize(
    ("change", "is_traced_again"),
    [
        (lambda optimizer: None, False),
        (lambda optimizer: setattr(optimizer, "secure_noise", True), True),
    ],
    ids=["nothing", "secure_noise"],
)
def test_steps_are_traced_again_where_claims_change(change, is_traced_again):
    model = private(optimizers.DPSGD)
    model.fit(X, Y, verbose=0)
    function, step = model.train_function, model.training_step
    change(model.optimizer)
    model.fit(X, Y, verbose=0)
    assert (model.train_function is not function) == is_traced_again
    assert (model.training_step is not step) == is_traced_again


def targeted(**compile_arguments):
    """A stock optimizer, which finds its noise for an ε."""
    model = tf_dpsub.make_private(
        keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
    )
    optimizer = optimizers.DPSGD(
        keras.optimizers.SGD(1.0),
        epsilon=2.0,
        delta=1e-5,
        l2_norm_clip=1.0,
        batch_size=ROWS,
    )
    model.compile(optimizer, loss(), **compile_arguments)
    return model


@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_noise_that_data_change_while_they_are_read_is_refused(
    steps_per_execution,
):
    model = targeted(steps_per_execution=steps_per_execution)

    def batches():
        for _ in range(4):
            if model.ledger.steps or model.optimizer.is_calibrated:
                model.optimizer.calibrate(1e-4)
            yield X, Y

    data = tf.data.Dataset.from_generator(
        batches,
        output_signature=(
            tf.TensorSpec([ROWS, 5]),
            tf.TensorSpec([ROWS], tf.int64),
        ),
    )
    before = model.get_weights()
    # By when the thread that reads them comes to it.
    seen = "something has changed it since|its sums were traced"
    with pytest.raises(RuntimeError, match=seen):
        model.fit(data, steps_per_epoch=4, verbose=0)
    # No step was taken, or those of one execution with the noise of the run.
    change = np.abs(model.get_weights()[0] - before[0]).max()
    assert change == 0 or (steps_per_execution == 2 and change > 0.01)


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_noise_that_a_loss_changes_while_it_is_traced_is_refused(run_eagerly):
    class Changing(keras.losses.SparseCategoricalCrossentropy):
        def call(self, y_true, y_pred):
            if model.current_run is not None:
                model.optimizer.calibrate(1e-4)
            return super().call(y_true, y_pred)

    model = targeted(run_eagerly=run_eagerly)
    model.compile(model.optimizer, Changing(from_logits=True))
    before = model.get_weights()
    with pytest.raises(RuntimeError, match="its sums were traced"):
        model.fit(X, Y, verbose=0)
    assert_weights(model, before)


def test_other_noise_than_the_claimed_one_is_refused():
    class Quiet(optimizers.DPSGD):
        def noise_stddevs(self):
            return [stddev / 100 for stddev in super().noise_stddevs()]

    model = private(Quiet)
    with pytest.raises(ValueError, match="the noise that it claims"):
        model.fit(X, Y, verbose=0)
    assert model.ledger.steps == 0


def test_claims_of_arrays_that_change_in_place_are_seen():
    class OfArrays(optimizers.DPSGD):
        array = np.ones([])
        l2_norm_clip = property(lambda self: self.array)

    model = private(OfArrays)
    before = fit(model)
    OfArrays.array[...] = 0.01
    assert fit(model) == pytest.approx(0.01 * before, rel=0.5)
    clips = [entry.l2_norm_clip for entry in model.ledger.entries]
    assert clips == pytest.approx([1.0, 0.01])


def test_an_optimizer_trains_one_model_at_a_time():
    first = private()
    second = tf_dpsub.make_private(first.model)
    second.compile(first.optimizer, loss())

    class Nested(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            second.fit(X, Y, verbose=0)

    with pytest.raises(RuntimeError, match="trains no other model"):
        first.fit(X, Y, callbacks=[Nested()], verbose=0)
    assert first.ledger.steps == second.ledger.steps == 0
    # Neither is left in a run.
    second.fit(X, Y, verbose=0)


@pytest.mark.parametrize("when", ["train", "epoch"])
@pytest.mark.parametrize("is_traced", [False, True])
def test_rewriting_to_bfloat16_is_refused_within_a_run(when, is_traced):
    model = private()
    if is_traced:
        model.fit(X, Y, verbose=0)
    steps = model.ledger.steps
    option = "auto_mixed_precision_onednn_bfloat16"
    turned_on = keras.callbacks.Callback()
    setattr(
        turned_on,
        f"on_{when}_begin",
        lambda *args, **kwargs: tf.config.optimizer.set_experimental_options(
            {option: True}
        ),
    )
    try:
        with pytest.raises(ValueError, match=f"the option {option}"):
            model.fit(X, Y, callbacks=[turned_on], verbose=0)
    finally:
        tf.config.optimizer.set_experimental_options({option: False})
    assert model.ledger.steps == steps


@pytest.mark.parametrize("per_example", ["graph", "vectorized_map"])
def test_a_state_that_a_layer_begins_to_write_is_refused(per_example):
    """It would count the passes of a step, and so its examples."""

    class Counting(keras.layers.Layer):
        begins = False

        def build(self, shape):
            self.passes = self.add_weight(
                shape=(), initializer="zeros", trainable=False
            )

        def call(self, x):
            if self.begins:
                self.passes.assign(self.passes + 1.0)
            return x * (1.0 + self.passes)

    layer = Counting()
    model = private(layers=[layer], per_example=per_example)
    with pytest.raises(UpdatesState, match="writes"):
        model.fit(X, Y, callbacks=[Begin(layer)], verbose=0)
    # What is written from the beginning is found, and kept apart.
    model.compile(model.optimizer, loss())
    model.fit(X, Y, verbose=0)
    assert float(layer.passes) == 1.0


def texts(*layers):
    """A model of texts, one example at a time by `tf.map_fn`."""
    vectorize = keras.layers.TextVectorization(output_sequence_length=3)
    vectorize.adapt(["a b c"])
    return keras.Sequential(
        [
            keras.Input((), dtype="string"),
            vectorize,
            keras.layers.Embedding(6, 4),
            *layers,
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(3),
        ]
    )


@pytest.mark.parametrize("rows", [4, 20])
@pytest.mark.parametrize(
    "layer",
    [
        lambda: keras.layers.Dropout(0.5),
        lambda: keras.layers.LSTM(2, return_sequences=True),
    ],
    ids=["Dropout", "LSTM"],
)
def test_states_within_a_map_are_those_that_were_found(layer, rows):
    model = tf_dpsub.make_private(texts(layer()))
    optimizer = optimizers.DPSGD(
        "sgd",
        noise_multiplier=1.0,
        l2_norm_clip=1.0,
        batch_size=rows,
        microbatch_size=4,
    )
    model.compile(optimizer, loss())
    words = np.array(["a b", "c"] * (rows // 2), object)
    model.fit(words, np.arange(rows) % 3, verbose=0)
    assert model.training_step.implementation == "map_fn"
    assert model.ledger.steps == 1


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_rewriting_that_a_loss_turns_on_while_it_is_traced(run_eagerly):
    option = "auto_mixed_precision_onednn_bfloat16"

    class Changing(keras.losses.SparseCategoricalCrossentropy):
        def call(self, y_true, y_pred):
            if model.current_run is not None:
                tf.config.optimizer.set_experimental_options({option: True})
            return super().call(y_true, y_pred)

    model = private()
    model.compile(
        model.optimizer, Changing(from_logits=True), run_eagerly=run_eagerly
    )
    before = model.get_weights()
    try:
        with pytest.raises(ValueError, match=f"the option {option}"):
            model.fit(X, Y, verbose=0)
    finally:
        tf.config.optimizer.set_experimental_options({option: False})
    assert_weights(model, before)


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("what", ["random numbers", "Python functions"])
def test_what_a_layer_begins_to_do_is_refused(what, jit_compile):
    """Compiled, it would draw the same numbers each time."""

    class Beginning(keras.layers.Layer):
        begins = False

        def call(self, x):
            if self.begins and what == "random numbers":
                x *= tf.sign(tf.random.uniform(tf.shape(x)) - 0.5)
            elif self.begins:
                ones = tf.numpy_function(np.ones_like, [x], tf.float32)
                x *= tf.ensure_shape(ones, x.shape)
            return x

    if what == "Python functions" and jit_compile:
        per_example = "auto"
    else:
        per_example = "graph" if jit_compile else "vectorized_map"
    layer = Beginning()
    model = private(
        layers=[layer], jit_compile=jit_compile, per_example=per_example
    )
    before = model.get_weights()
    with pytest.raises(Unproven):
        model.fit(X, Y, callbacks=[Begin(layer)], verbose=0)
    assert_weights(model, before)


def test_a_metric_that_writes_the_scales_of_a_subspace_is_refused():
    subspace = subspaces.PublicSubspace(X + 1.0, Y, rank=4, whiten=1.0)
    model = private(
        optimizers.ProjectedDPSGD, subspace=subspace, truncate=False
    )

    class Writing(keras.metrics.Mean):
        def update_state(self, y_true, y_pred, sample_weight=None):
            scales = getattr(subspace, "scales", None)
            if scales is not None:
                scales.assign(scales * 1000.0)
            return super().update_state(y_pred)

    model.compile(model.optimizer, loss(), metrics=[Writing()])
    with pytest.raises(UpdatesState, match="the basis of|would be released"):
        model.fit(X, Y, verbose=0)
