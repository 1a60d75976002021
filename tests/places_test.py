"""No row depends on its place, nor on anything that a step writes.

The argument is a coupling: random numbers of the places are held fixed. An
example then contributes the same at its place whatever stands at the others, so
that the sum of a batch is the sum of the contributions of its examples alone.
Places have numbers of their own, or all have the same. Hence removing an
example, where the others take their numbers with them, and replacing it by an
empty one both move the sum by its contribution alone.
"""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dpsub
from tf_dpsub import gradients
from tf_dpsub.data import given_batches
from tf_dpsub.gradients import vectorized
from tf_dpsub.training import run

L = keras.layers
PLACES, MICROBATCH, FEATURES, STEPS = 6, 2, 8, 4
EACH, ALL = "each", "all"


class DropConnect(L.Layer):
    """Drops entries of a kernel, the same for all examples."""

    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(1)

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 5))

    def call(self, x):
        ones = keras.ops.ones_like(self.kernel)
        return x @ (
            self.kernel
            * keras.random.dropout(ones, 0.5, seed=self.seed_generator)
        )


class ScaledNoise(L.Layer):
    """Noise whose scale is not the same for all features."""

    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(1)

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        noise = keras.random.normal(
            keras.ops.shape(x), seed=self.seed_generator
        )
        return x + 3.0 * noise * tf.stop_gradient(self.scale)


class Both(L.Layer):
    """A layer that draws for each example and for all from one generator."""

    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(1)

    def call(self, x):
        for shape in (keras.ops.shape(x), (1, x.shape[1])):
            x = x + keras.random.normal(shape, seed=self.seed_generator)
        return x


def _vectors(*layers):
    return keras.Sequential(
        [keras.Input((FEATURES,)), *layers, L.Dense(1, use_bias=False)]
    )


def _series(*layers):
    return keras.Sequential(
        [
            keras.Input((STEPS, FEATURES)),
            *layers,
            L.Flatten(),
            L.Dense(1, use_bias=False),
        ]
    )


def _attention():
    inputs = keras.Input((STEPS, FEATURES))
    h = L.MultiHeadAttention(2, 4, dropout=0.5, seed=1)(inputs, inputs)
    return keras.Model(inputs, L.Dense(1)(L.Flatten()(h)))


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its implementation, and the use of its random numbers."""

    build: object
    implementation: str = "graph"
    draws: str = EACH
    per_example: str = "auto"
    jit_compile: bool = False


CASES = {
    "dropout": Case(lambda: _vectors(L.Dropout(0.5, seed=1))),
    "dropout of two layers": Case(
        lambda: _vectors(
            L.Dropout(0.5, seed=1), L.Dense(6), L.Dropout(0.5, seed=1)
        )
    ),
    "dropout shared by a microbatch": Case(
        lambda: _vectors(L.Dropout(0.5, (1, FEATURES), seed=1)), draws=ALL
    ),
    "noise": Case(lambda: _vectors(L.GaussianNoise(1.0, seed=1))),
    "noise of several scales": Case(lambda: _vectors(ScaledNoise())),
    "alpha dropout": Case(lambda: _vectors(L.AlphaDropout(0.5, seed=1))),
    "dropout, compiled": Case(
        lambda: _vectors(
            L.Dropout(0.5, (1, FEATURES), seed=1), L.Dropout(0.5, seed=1)
        ),
        jit_compile=True,
    ),
    "dropped connections": Case(lambda: _vectors(DropConnect()), draws=ALL),
    "attention": Case(_attention),
    "recurrent": Case(
        lambda: _series(L.LSTM(3, dropout=0.5, seed=1, unroll=True))
    ),
    "recurrent, in a loop": Case(
        lambda: _series(
            L.SimpleRNN(3, dropout=0.5, recurrent_dropout=0.5, seed=1)
        )
    ),
    "one by one": Case(
        lambda: _vectors(L.Dropout(0.5, seed=1)),
        "vectorized_map",
        ALL,
        "vectorized_map",
    ),
    "two kinds of draws": Case(lambda: _vectors(Both()), "vectorized_map", ALL),
    "one after another": Case(
        lambda: _vectors(L.Dropout(0.5, seed=1)),
        "map_fn",
        per_example="vectorized_map",
    ),
}


def _private(plain, **arguments):
    private = tf_dpsub.make_private(plain)
    loss = arguments.pop("loss", lambda y, p: keras.ops.sum(y * p, -1))
    metrics = arguments.pop("metrics", None)
    arguments = {
        "l2_norm_clip": 1e6,
        "noise_multiplier": 0.0,
        "batch_size": PLACES,
        "microbatch_size": MICROBATCH,
        **arguments,
    }
    private.compile(
        tf_dpsub.optimizers.DPSGD(keras.optimizers.SGD(0.0), **arguments),
        loss=loss,
        metrics=metrics,
    )
    return private


def _sums(model, x, weights, secret=None):
    """Clipped sums of a batch, as one vector."""
    x = tf.constant(x, tf.float32)
    y = tf.ones([len(x), 1])
    named = given_batches.named(x, y, tf.constant(weights, tf.float32))
    batch = given_batches.padded(named, MICROBATCH)
    model.prepare_training(
        tf.nest.map_structure(tf.type_spec_from_value, batch)
    )
    if secret is not None:
        model.training_step._states._secret.assign([secret, 1])
    sums = model.training_step(batch)
    return np.concatenate([np.ravel(s) for s in sums])


@pytest.mark.parametrize("name", CASES)
def test_places_are_alike(name, monkeypatch):
    case = CASES[name]
    if case.implementation == "map_fn":
        monkeypatch.setattr(vectorized, "vectorizes", lambda *_: False)
    model = _private(case.build(), per_example=case.per_example)
    model.jit_compile = case.jit_compile
    shape = (PLACES, *model.model.input_shape[1:])
    x = np.random.default_rng(0).normal(size=shape) + 1.0

    def alone(examples):
        """Contributions of examples at their places, the others being empty."""
        return [
            _sums(model, np.where(at, examples, 0), np.ravel(at), secret=1)
            for at in np.eye(PLACES).reshape(
                PLACES, PLACES, *[1] * (len(shape) - 1)
            )
        ]

    shares = alone(x)
    whole = _sums(model, x, np.ones(PLACES), secret=1)
    assert model.training_step.implementation == case.implementation
    assert model.training_step.is_compiled == case.jit_compile
    np.testing.assert_allclose(whole, sum(shares), rtol=1e-4, atol=1e-5)

    same = alone(np.broadcast_to(x[:1], shape))
    differences = [
        np.abs(a - b).max() for k, a in enumerate(same) for b in same[:k]
    ]
    if case.draws == ALL:
        assert max(differences) < 1e-4
    else:
        assert min(differences) > 1e-3


def test_two_draws_are_shared_where_one_generator_makes_both():
    with pytest.raises(gradients.Unproven, match="two generators"):
        _sums(
            _private(_vectors(Both()), per_example="graph"),
            np.ones([2, FEATURES]),
            np.ones(2),
        )


def test_keys_are_new_at_each_step_and_are_forgotten():
    plain = _vectors(L.Dropout(0.5, seed=1), L.Dense(6), L.Dropout(0.5, seed=2))
    states = [v.numpy() for v in plain.non_trainable_variables]
    x, ones = np.ones([PLACES, FEATURES]), np.ones(PLACES)
    sums = []
    for _ in range(2):
        model = _private(plain)
        sums += [_sums(model, x, ones) for _ in range(2)]
    for k, one in enumerate(sums):
        assert all(np.abs(one - other).max() > 1e-3 for other in sums[:k])
    for variable, before in zip(plain.non_trainable_variables, states):
        np.testing.assert_array_equal(variable.numpy(), before)
    known = {id(v) for v in model.variables}
    assert all(
        id(v) not in known for v in model.training_step._states.variables
    )


def test_keys_have_all_their_bits():
    """Each word of a key enters, and each changes every other word."""
    model = _private(_vectors(L.Dropout(0.5, seed=1)))
    _sums(model, np.ones([2, FEATURES]), np.ones(2))
    states = model.training_step._states
    keys = []
    for secret in ([1, 1], [2**32 + 1, 1], [1, 2], [1, 2**32 + 1], [1, 1]):
        states._secret.assign(secret)
        states._passes.assign(0)
        keys.append(states._keys().numpy())
    for k, one in enumerate(keys[:4]):
        assert all((one != other).all() for other in keys[:k])
    np.testing.assert_array_equal(keys[0], keys[4])


class Counting(L.Layer):
    """A layer that counts its calls, and scales by the count."""

    def build(self, shape):
        self.calls = self.add_weight(
            shape=(), initializer="zeros", trainable=False
        )

    def call(self, x):
        self.calls.assign_add(1.0)
        return x * (self.calls + 1.0)


@pytest.mark.parametrize("per_example", ["graph", "vectorized_map"])
def test_a_state_begins_each_pass_with_one_value(per_example):
    plain = _vectors(Counting())
    model = _private(plain, per_example=per_example)
    (state,) = plain.non_trainable_variables
    for step in (1, 2):
        sums = _sums(model, np.ones([PLACES, FEATURES]), np.ones(PLACES))
        np.testing.assert_allclose(sums, PLACES * (step + 1.0))
        assert state.numpy() == step


class SignOfPlace(L.Layer):
    def call(self, x):
        place = keras.ops.arange(keras.ops.shape(x)[0]) % 2 * 2 - 1
        return x * keras.ops.cast(place, x.dtype)[:, None]


class Constant(L.Layer):
    def __init__(self, value):
        super().__init__()
        self.value = tf.constant(value, tf.float32)

    def call(self, x):
        return x * self.value[: keras.ops.shape(x)[0]]


class SeededNoise(L.Layer):
    def call(self, x):
        return x + keras.random.normal(keras.ops.shape(x), seed=3)


PLACED = {
    "sign of place": SignOfPlace,
    "weight of each place": lambda: L.EinsumDense(
        "ab,bc->ac", FEATURES, bias_axes="a"
    ),
    "constant": lambda: Constant(np.arange(1.0, PLACES + 1)[:, None]),
    "numbers that are not secret": SeededNoise,
}


@pytest.mark.parametrize("name", PLACED)
def test_values_that_differ_by_place_are_refused(name):
    inputs = keras.Input((FEATURES,), batch_size=MICROBATCH)
    outputs = L.Dense(1)(PLACED[name]()(inputs))
    model = _private(keras.Model(inputs, outputs))
    with pytest.raises(gradients.MixesExamples, match="place to place"):
        _sums(model, np.ones([PLACES, FEATURES]), np.ones(PLACES))


class BroadcastToken(L.Layer):
    """A layer that adds a weight to all places, in several ways."""

    def build(self, shape):
        self.token = self.add_weight(shape=(1, shape[-1]))

    def call(self, x):
        batch, width = keras.ops.shape(x)
        x = x + tf.broadcast_to(self.token, [batch, width])
        x = x + tf.repeat(self.token, batch, 0)
        x = keras.ops.concatenate([x, tf.tile(self.token, [batch, 1])], 1)
        return x * tf.reshape(tf.fill([batch * 2], 2.0), [batch, 2])[:, :1]

    def compute_output_shape(self, shape):
        return (shape[0], 2 * shape[1])


def test_values_that_are_alike_at_every_place_are_proved():
    model = _private(_vectors(BroadcastToken()), per_example="graph")
    _sums(model, np.ones([PLACES, FEATURES]), np.ones(PLACES))


class Unseeded(L.Layer):
    def __init__(self, seed=None):
        super().__init__()
        self.seed = seed

    def call(self, x):
        return x + tf.random.normal(tf.shape(x), seed=self.seed)


def test_draws_without_a_seed_take_fresh_entropy():
    """The program's own seed must not matter: who knows it would know them."""
    sums = []
    for _ in range(2):
        tf.random.set_seed(1)
        model = _private(_vectors(Unseeded()), per_example="graph")
        model.jit_compile = True
        x = np.ones([PLACES, FEATURES])
        sums.append(_sums(model, x, np.ones(PLACES)))
        # XLA draws from a constant.
        assert not model.training_step.is_compiled
    assert np.abs(sums[0] - sums[1]).max() > 1e-3


@pytest.mark.parametrize("per_example", ["auto", "vectorized_map"])
def test_draws_with_a_seed_of_the_program_are_refused(per_example):
    model = _private(_vectors(Unseeded(1)), per_example=per_example)
    with pytest.raises(gradients.ReadsState, match="Expected secret random"):
        _sums(model, np.ones([PLACES, FEATURES]), np.ones(PLACES))


class Remembering(L.Layer):
    """A layer that keeps its draws."""

    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(1)

    def build(self, shape):
        self.last = self.add_weight(shape=shape[1:], trainable=False)

    def call(self, x):
        noise = keras.random.normal(x.shape[1:], seed=self.seed_generator)
        self.last.assign(noise)
        return x + noise


@pytest.mark.parametrize("per_example", ["auto", "vectorized_map"])
def test_draws_are_not_kept(per_example):
    model = _private(_vectors(Remembering()), per_example=per_example)
    with pytest.raises(gradients.UpdatesState):
        _sums(model, np.ones([PLACES, FEATURES]), np.ones(PLACES))


class SetsSeeds(L.Layer):
    """A layer that draws from two generators, and writes their states."""

    def __init__(self, write):
        super().__init__()
        self.first, self.second = (
            keras.random.SeedGenerator(k) for k in (1, 2)
        )
        self.write = write

    def call(self, x):
        shape = keras.ops.shape(x)
        before = tf.identity(self.first.state.value)
        x = x + keras.random.normal(shape, seed=self.first)
        self.write(self.first.state, self.second.state, before)
        for seed in (self.first, self.second):
            x = x + keras.random.normal(shape, seed=seed)
        return x


def _moved_on(state, by):
    """Builds a function that adds to a seed."""
    variable = state._value

    def write():
        variable.assign(variable + tf.constant(by, variable.dtype))
        return 0

    return write


def _write_in_a_function(first, second, before):
    tf.cond(before[0] == 0, _moved_on(first, [0, -1]), lambda: 0)


def _write_by_another_name(first, second, before):
    handle = tf.identity(first._value.handle)
    tf.raw_ops.AssignVariableOp(resource=handle, value=before * 0)


def _twice_to_the_same(handle, same, dtype):
    """Advances a seed by each of its two names, from its first value."""
    reads = [
        tf.raw_ops.ReadVariableOp(resource=name, dtype=dtype)
        for name in (handle, same)
    ]
    for name, read in zip((handle, same), reads):
        moved_on = read + tf.constant([0, 1], dtype)
        tf.raw_ops.AssignVariableOp(resource=name, value=moved_on)
    return 0


def _write_by_another_name_in_a_function(first, second, before):
    handle, dtype = first._value.handle, first._value.dtype
    tf.cond(
        before[0] == 0,
        lambda: _twice_to_the_same(handle, tf.identity(handle), dtype),
        lambda: 0,
    )


def _write_by_two_arguments(first, second, before):
    handle, dtype = first._value.handle, first._value.dtype
    write = tf.function(lambda *names: _twice_to_the_same(*names, dtype))
    write(handle, handle)


SEED_WRITES = {
    "a constant": lambda first, second, before: first.assign([1, 2]),
    "another's": lambda first, second, before: second.assign(first.value),
    "the one before": lambda first, second, before: first.assign(before),
    "the one before, moved on": lambda first, second, before: first.assign(
        before + tf.constant([0, 1], before.dtype)
    ),
    "back": lambda first, second, before: first.assign_sub([0, 1]),
    "one of few": lambda first, second, before: first.assign(
        (first + 1) * 5387 % 933199
    ),
    "in a function": _write_in_a_function,
    "by another name": _write_by_another_name,
    "by another name in a function": _write_by_another_name_in_a_function,
    "by two arguments": _write_by_two_arguments,
}


@pytest.mark.parametrize("per_example", ["auto", "vectorized_map"])
@pytest.mark.parametrize("name", SEED_WRITES)
def test_a_layer_sets_no_seed(name, per_example):
    """A key would be public, or be used twice and counted once."""
    layer = SetsSeeds(SEED_WRITES[name])
    model = _private(_vectors(layer), per_example=per_example)
    with pytest.raises(gradients.UpdatesState, match="SeedGenerator"):
        _sums(model, np.ones([PLACES, FEATURES]), np.ones(PLACES))


def test_a_generator_may_be_moved_on_within_a_function():
    layer = SetsSeeds(
        lambda first, second, before: tf.cond(
            before[0] == 0, _moved_on(first, [0, 1]), lambda: 0
        )
    )
    model = _private(_vectors(layer), per_example="vectorized_map")
    _sums(model, np.ones([PLACES, FEATURES]), np.ones(PLACES))


class Reads(L.Layer):
    """A layer that multiplies by the output of an operation."""

    def __init__(self, read):
        super().__init__()
        self.read = read

    def build(self, shape):
        self.weight = self.add_weight(shape=(), trainable=False)

    def call(self, x):
        return x * tf.reshape(self.read(self.weight, x), [])

    def compute_output_shape(self, shape):
        return shape


def _read_variable_by_name(weight, x):
    handle = tf.raw_ops.VarHandleOp(
        dtype=tf.float32, shape=[], shared_name="by_name"
    )
    return tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)


def _read_file(weight, x):
    name = tf.strings.as_string(tf.convert_to_tensor(weight))
    return tf.strings.to_number(tf.io.read_file(name))


OUTSIDE = {
    "a file": _read_file,
    "a file, in a function": lambda weight, x: tf.cond(
        tf.convert_to_tensor(weight) > 0,
        lambda: _read_file(weight, x),
        lambda: 0.0,
    ),
    "a variable by name": _read_variable_by_name,
    "a clock": lambda weight, x: tf.cast(tf.timestamp(), tf.float32),
    "memory": lambda weight, x: tf.raw_ops.Empty(shape=[], dtype=tf.float32),
    "a stage": lambda weight, x: tf.cast(
        tf.raw_ops.StageSize(dtypes=[tf.float32]), tf.float32
    ),
}


@pytest.mark.parametrize("per_example", ["auto", "vectorized_map"])
@pytest.mark.parametrize("name", OUTSIDE)
def test_outputs_that_no_input_determines_are_refused(name, per_example):
    """A metric, or an earlier row, may have left it there."""
    layer = Reads(OUTSIDE[name])
    model = _private(_vectors(layer), per_example=per_example)
    with pytest.raises(gradients.Unproven, match="do not determine"):
        _sums(model, np.ones([PLACES, FEATURES]), np.ones(PLACES))


def _sampled(weight, x):
    ids = tf.random.uniform_candidate_sampler(
        tf.zeros([1, 1], tf.int64), 1, 1, False, 9, seed=7
    ).sampled_candidates
    return tf.cast(ids, tf.float32)


def test_samplers_with_a_seed_of_the_program_are_refused():
    model = _private(_vectors(Reads(_sampled)), per_example="vectorized_map")
    with pytest.raises(gradients.ReadsState, match="Expected secret random"):
        _sums(model, np.ones([PLACES, FEATURES]), np.ones(PLACES))


def test_gradients_of_draws_have_no_seed():
    """Unlike operations of similar names, it has no such attribute."""

    def gradient(weight, x):
        return tf.raw_ops.RandomGammaGrad(
            alpha=tf.convert_to_tensor(weight) + 2.0, sample=1.0
        )

    model = _private(_vectors(Reads(gradient)), per_example="vectorized_map")
    _sums(model, np.ones([PLACES, FEATURES]), np.ones(PLACES))


def test_the_statement_names_python_functions():
    def python(weight, x):
        return tf.numpy_function(lambda: np.float32(1.0), [], tf.float32)

    model = _private(_vectors(Reads(python)), per_example="vectorized_map")
    _sums(model, np.ones([PLACES, FEATURES]), np.ones(PLACES))
    assert "Python functions" in run.entry_of(model).notes[0]


METRIC = keras.metrics.MeanSquaredError


def _reads_metric(model, metric):
    return metric.result()


def _reads_tracker(model, metric):
    return model._loss_tracker.result()


def _reads_tally(model, metric):
    return model._tallies.dropped.result()


def _reads_variable(model, metric, elsewhere=[]):  # noqa: B006
    if not elsewhere:
        with tf.init_scope():
            elsewhere.append(tf.Variable(1.0))
    return elsewhere[0]


@pytest.mark.parametrize("per_example", ["auto", "vectorized_map"])
@pytest.mark.parametrize(
    "read", [_reads_metric, _reads_tracker, _reads_tally, _reads_variable]
)
def test_a_loss_reads_no_state_of_the_step(read, per_example):
    metric = METRIC()

    def loss(y, p):
        return keras.ops.square(y - p)[:, 0] / (1.0 + read(model, metric))

    model = _private(
        _vectors(), loss=loss, metrics=[metric], per_example=per_example
    )
    with pytest.raises(gradients.ReadsState, match="no weight of the model"):
        _sums(model, np.ones([PLACES, FEATURES]), np.ones(PLACES))


class Weighted(L.Layer):
    def build(self, shape):
        self.weight = self.add_weight(shape=(), trainable=False)

    def call(self, x):
        return x


def test_a_loss_reads_weights_that_are_not_trained():
    plain = _vectors(Weighted())
    rate = plain.layers[0].weight

    def loss(y, p):
        return rate * keras.ops.square(y - p)[:, 0]

    model = _private(plain, loss=loss, per_example="graph")
    _sums(model, np.ones([PLACES, FEATURES]), np.ones(PLACES))


def test_a_metric_writes_no_weight():
    """It would release the batch without noise."""
    plain = _vectors(Weighted())
    weight = plain.layers[0].weight

    class Writes(METRIC):
        def update_state(self, y, p, sample_weight=None):
            weight.assign(keras.ops.mean(p))
            return super().update_state(y, p, sample_weight)

    model = _private(plain, metrics=[Writes()])
    with pytest.raises(gradients.UpdatesState, match="metric"):
        _sums(model, np.ones([PLACES, FEATURES]), np.ones(PLACES))


@pytest.mark.parametrize("by_another_name", [False, True])
def test_a_metric_writes_no_weight_that_the_model_writes(by_another_name):
    """The step that follows would begin with what it wrote."""
    plain = _vectors(Counting())
    (weight,) = plain.non_trainable_variables

    class Writes(METRIC):
        def update_state(self, y, p, sample_weight=None):
            handle = weight.value.handle
            if by_another_name:
                handle = tf.identity(handle)
            tf.raw_ops.AssignVariableOp(
                resource=handle, value=tf.reduce_mean(p)
            )
            return super().update_state(y, p, sample_weight)

    model = _private(plain, metrics=[Writes()])
    with pytest.raises(gradients.UpdatesState, match="metric"):
        _sums(model, np.ones([PLACES, FEATURES]), np.ones(PLACES))


def test_a_metric_writes_no_table_that_the_loss_reads():
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 1.0)
    key = tf.constant([0], tf.int64)

    class Writes(METRIC):
        def update_state(self, y, p, sample_weight=None):
            table.insert(key, tf.reduce_mean(p)[None])
            return super().update_state(y, p, sample_weight)

    def loss(y, p):
        return keras.ops.square(y - p)[:, 0] * tf.ensure_shape(
            table.lookup(key), [1]
        )

    model = _private(_vectors(), loss=loss, metrics=[Writes()])
    with pytest.raises(gradients.UpdatesState, match="table"):
        _sums(model, np.ones([PLACES, FEATURES]), np.ones(PLACES))


def test_functions_that_run_eagerly_are_refused():
    model = _private(_vectors())
    tf.config.run_functions_eagerly(True)
    try:
        with pytest.raises(RuntimeError, match="run_functions_eagerly"):
            _sums(model, np.ones([2, FEATURES]), np.ones(2))
    finally:
        tf.config.run_functions_eagerly(False)


def _same_key(seed, first, second):
    key = tf.cast(seed.next(), tf.int32)
    return [tf.random.stateless_uniform(s, key) for s in (first, second)]


SQUARE = [FEATURES, FEATURES]
SHARING = {
    "a row and a column of one draw": lambda seed: (
        lambda r: r * tf.transpose(r)
    )(keras.random.normal(SQUARE, seed=seed)),
    "one draw, seen at two places": lambda seed: (
        lambda r: r * tf.roll(r, 1, 0)
    )(keras.random.normal(SQUARE, seed=seed)),
    "less the mean over the batch": lambda seed: (
        lambda r: r - tf.reduce_mean(r, 0)
    )(keras.random.normal(SQUARE, seed=seed)),
    "sorted over the batch": lambda seed: tf.sort(
        keras.random.normal(SQUARE, seed=seed), 0
    ),
    "one key, of two shapes": lambda seed: (
        lambda a, b: a * tf.reduce_sum(b, -1)
    )(*_same_key(seed, SQUARE, [*SQUARE, 2])),
    "a place that is drawn for all": lambda seed: tf.gather(
        tf.eye(FEATURES), keras.random.shuffle(tf.range(FEATURES), seed=seed)
    ),
    "one law for each place": lambda seed: tf.random.stateless_gamma(
        SQUARE,
        tf.cast(seed.next(), tf.int32),
        tf.range(1.0, FEATURES + 1)[:, None],
    ),
}


@pytest.mark.parametrize("name", SHARING)
def test_numbers_that_only_some_examples_share_are_not_proved(name):
    """They are neither each example's own nor common to the step."""
    seed = keras.random.SeedGenerator(1)
    kernel = tf.Variable(tf.ones([FEATURES, 2]))

    def loss_fn(x):
        return tf.reduce_sum((x * SHARING[name](seed)) @ kernel, 1), None

    @tf.function(autograph=False)
    def step(x):
        return gradients.per_example_gradients(loss_fn, x, [kernel])[
            0
        ].sq_norms()

    with pytest.raises(gradients.Unproven):
        step.get_concrete_function(tf.TensorSpec([FEATURES, FEATURES]))
