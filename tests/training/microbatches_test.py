"""How many examples a step works through at a time, if nobody says."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dpsub
from tf_dpsub.training import microbatches, private_batches

L = keras.layers


def small():
    return keras.Sequential([keras.Input((4,)), L.Dense(3), L.Dense(2)])


class Composed(L.Layer):
    """Nothing tells how much its inner layer puts out."""

    def __init__(self):
        super().__init__()
        self.inner = L.Dense(2)

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        return self.inner(x)


def test_numbers_of_an_example():
    # Outputs of layers, inputs among them, and weights.
    assert microbatches._numbers(small()) == (4 + 3 + 2) + (15 + 8)
    nested = keras.Sequential([keras.Input((4,)), small()])
    assert microbatches._numbers(nested) == 4 + 9 + 23


@pytest.mark.parametrize("size", [8, 250, 400, 1000, 5000])
def test_small_models_take_hardly_more_parts_than_a_poisson_batch_needs(size):
    found = microbatches.default_size(small(), size)
    assert 2 <= found <= 512
    drawn = np.random.default_rng(0).poisson(size, 20_000)
    parts = -(-drawn // found)
    # Nearly all batches take the same few parts.
    assert np.mean(parts > np.ceil((size + 3 * size**0.5) / 512)) < 0.02


@pytest.mark.parametrize("sizes", [1, 2])
@pytest.mark.parametrize("size", [16, 60, 128, 250, 5000])
def test_rows_are_whole_vectors_of_a_processor(size, sizes):
    assert microbatches.default_size(small(), size, sizes=sizes) % 16 == 0


def test_replicas_share_the_batch():
    alone = microbatches.default_size(small(), 128)
    assert microbatches.default_size(small(), 256, replicas=2) == alone


LARGE = {
    "weights": lambda: keras.Sequential([keras.Input((400,)), L.Dense(400)]),
    "outputs": lambda: keras.Sequential(
        [keras.Input((64, 64, 3)), L.Conv2D(30, 1), L.GlobalMaxPool2D()]
    ),
    "layers within layers": lambda: keras.Sequential(
        [keras.Input((4,)), Composed()]
    ),
    "any length": lambda: keras.Sequential(
        [keras.Input((None, 4)), L.Conv1D(2, 3), L.GlobalMaxPool1D()]
    ),
}


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("sizes", [1, 2])
def test_large_models_stay_in_the_caches(name, sizes):
    model = LARGE[name]()
    assert microbatches.default_size(model, 250, sizes=sizes) == 64
    assert microbatches.default_size(model, 32, sizes=sizes) == 32


def test_of_a_batch_of_one():
    assert microbatches.default_size(LARGE["weights"](), 1) == 2


def test_a_gpu_takes_many(monkeypatch):
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [kind])
    for model in (small(), LARGE["weights"]()):
        assert microbatches.default_size(model, 1000) == 512
        assert microbatches.default_size(model, 250) == 250
        # Beginning with a pass takes long: hardly any batch takes two.
        assert microbatches.default_size(model, 250, sizes=2) >= 272
        assert microbatches.default_size(model, 5000, sizes=2) == 448


@pytest.mark.parametrize("given, expected", [(None, 48), (7, 7), (1, 2)])
def test_of_a_private_model(given, expected):
    model = tf_dpsub.make_private(small())
    for batch_size in (5, 20):
        model.compile(
            tf_dpsub.optimizers.DPSGD(
                keras.optimizers.SGD(0.1),
                l2_norm_clip=1.0,
                noise_multiplier=1.0,
                batch_size=batch_size,
                microbatch_size=given,
            ),
            loss="mse",
        )
        # 20 + 3 sqrt(20), in whole vectors; 5 + 3 sqrt(5).
        own = expected if batch_size == 20 or given else 12
        assert model.microbatch_size == own


@pytest.mark.parametrize(
    "make, expected, most",
    [
        (small, 32, 1.24),
        (small, 250, 1.08),
        (small, 1000, 1.05),
        (small, 5000, 1.01),
        (LARGE["weights"], 32, 1.12),
        (LARGE["weights"], 64, 1.08),
        (LARGE["weights"], 250, 1.04),
        (LARGE["weights"], 1000, 1.04),
    ],
)
def test_a_poisson_batch_takes_hardly_more_rows_than_it_has(
    make, expected, most
):
    size = microbatches.default_size(make(), expected, sizes=2)
    passes = microbatches.passes_of(
        size, 2, expected, microbatches.beginning(make())
    )
    assert passes.sizes[0] == size
    drawn = np.random.default_rng(0).poisson(expected, 20_000)
    rows = rows_of(passes, drawn)
    assert np.mean(rows) <= most * expected
    assert np.all(rows >= drawn)


def rows_of(passes, drawn):
    """Rows of all passes for so many examples."""
    return sum(s * c for s, c in zip(passes.sizes, passes.counts(drawn)))


@pytest.mark.parametrize("largest, expected", [(32, 32), (64, 20), (16, 40)])
def test_passes_fit_into_whole_microbatches(largest, expected):
    """Batches are padded to those: no pass may reach beyond them."""
    passes = microbatches.passes_of(largest, 2, expected, beginning=2)
    drawn = np.arange(4 * largest)
    whole = np.maximum(1, -(-drawn // largest)) * largest
    rows = rows_of(passes, drawn)
    assert np.all((drawn <= rows) & (rows <= whole))
    # An empty batch takes a pass, too.
    assert sum(passes.counts(0)) == 1
    counts = [passes.counts(tf.constant(int(n))) for n in drawn]
    assert np.array_equal(np.transpose(counts), passes.counts(drawn))


@pytest.mark.parametrize(
    "size, sizes, expected", [(12, 2, 8), (4, 2, 40), (32, 1, 32)]
)
def test_small_batches_and_short_runs_have_passes_of_one_size(
    size, sizes, expected
):
    assert microbatches.passes_of(size, sizes, expected, 2).sizes == (size,)
    assert not microbatches.is_long(None)
    assert not microbatches.is_long(299)
    assert microbatches.is_long(300)


def sums_of(model, rows):
    """Clipped sums of so many examples of a batch of Poisson sampling."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 4)).astype("float32")
    batch = private_batches.padded(model, (x, np.ones([rows, 2], "float32")))
    model.prepare_training(
        tf.nest.map_structure(tf.type_spec_from_value, batch), sizes=2
    )
    return [s.numpy() for s in model.training_step(batch)]


def compiled(layer=None, **arguments):
    keras.utils.set_random_seed(0)
    layer = layer or L.Dense(3, "tanh")
    model = tf_dpsub.make_private(
        keras.Sequential([keras.Input((4,)), layer, L.Dense(2)])
    )
    jit_compile = arguments.pop("jit_compile", False)
    model.compile(
        dpsgd_of(**({"microbatch_size": 32} | arguments)),
        loss="mse",
        jit_compile=jit_compile,
    )
    return model


def dpsgd_of(**arguments):
    return tf_dpsub.optimizers.DPSGD(
        keras.optimizers.SGD(0.1),
        l2_norm_clip=0.1,
        noise_multiplier=1.0,
        batch_size=32,
        **arguments,
    )


@pytest.mark.parametrize(
    "arguments",
    [{}, {"jit_compile": True}, {"per_example": "vectorized_map"}],
    ids=["graph", "compiled", "vectorized_map"],
)
def test_sizes_of_passes_never_change_the_result(arguments, monkeypatch):
    model = compiled(**arguments)
    rows = (5, 30, 41, 70)
    sums = [sums_of(model, n) for n in rows]
    assert model.training_step.pass_sizes == (32, 8)
    assert model.training_step.is_compiled == ("jit_compile" in arguments)
    monkeypatch.setattr(
        microbatches, "passes_of", lambda *_: microbatches.Passes((32,))
    )
    model = compiled(**arguments)
    for n, expected in zip(rows, sums):
        for a, b in zip(sums_of(model, n), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert model.training_step.pass_sizes == (32,)


MODELS = {
    "dense": lambda: [keras.Input((40,)), L.Dense(30, "tanh"), L.Dense(3)],
    "convolution": lambda: [
        keras.Input((12, 12, 3)),
        L.Conv2D(8, 3, activation="gelu"),
        L.GroupNormalization(4),
        L.Flatten(),
        L.Dense(3),
    ],
    "attention": lambda: [
        keras.Input((6, 16)),
        keras_hub_layer("TransformerEncoder")(32, 2),
        L.GlobalAveragePooling1D(),
        L.Dense(3),
    ],
    "recurrent": lambda: [keras.Input((6, 5)), L.LSTM(8), L.Dense(3)],
}


def keras_hub_layer(name):
    from keras_hub import layers

    return getattr(layers, name)


@pytest.mark.parametrize("name", MODELS)
def test_rows_are_rounded_alike_in_passes_of_all_sizes(name):
    """Clipping leaves 2^-20 of the clip for what is not."""
    gradients = []
    for size in (48, 32, 16, 8):
        of_place = gradient_of_place(name, size)
        for place in (0, 1, size // 2 + 1, size - 1):
            gradients.append(of_place(place))
    expected, *others = gradients
    for found in others:
        difference = np.linalg.norm(found - expected)
        assert difference <= 2.0**-20 * np.linalg.norm(expected)


def gradient_of_place(name, size):
    """Gradient of an example at a place among random ones, as one vector."""
    keras.utils.set_random_seed(0)
    model = tf_dpsub.make_private(keras.Sequential(MODELS[name]()))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(dpsgd_of(microbatch_size=size), loss=loss)
    rng = np.random.default_rng(0)
    example = rng.normal(size=model.input_shape[1:])
    x = rng.normal(size=(size, *model.input_shape[1:])).astype("float32")
    y = rng.integers(0, 3, size)
    spec = tf.nest.map_structure(
        lambda a: tf.TensorSpec(a.shape, a.dtype),
        {"x": x, "y": y, "real": np.ones(size, "float32")},
    )
    model.prepare_training(spec)

    @tf.function(autograph=False)
    def weighted(batch, factors):
        rows, _ = model.training_step.per_example_gradients(batch)
        return rows.weighted_sum(factors)

    def of_place(place):
        x[place], y[place] = example, 1
        batch = {"x": x.copy(), "y": y.copy(), "real": np.ones(size, "float32")}
        batch = tf.nest.map_structure(tf.constant, batch)
        sums = weighted(batch, tf.one_hot(place, size))
        return np.concatenate([np.ravel(s) for s in sums])

    return of_place


class BySize(L.Layer):
    """A layer that reads how many examples it is given."""

    def call(self, x):
        return x * keras.ops.cast(keras.ops.shape(x)[0], x.dtype)


def test_models_that_read_the_size_have_passes_of_one():
    """Else the gradient of an example would tell how many were drawn."""
    model = compiled(BySize())
    sums_of(model, 30)
    assert model.training_step.implementation == "graph"
    assert model.training_step.pass_sizes == (32,)
