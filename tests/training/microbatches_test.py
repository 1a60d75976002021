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


@pytest.mark.parametrize("size", [16, 60, 128, 250, 5000])
def test_rows_are_whole_vectors_of_a_processor(size):
    assert microbatches.default_size(small(), size) % 16 == 0


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
def test_large_models_stay_in_the_caches(name):
    model = LARGE[name]()
    assert microbatches.default_size(model, 250) == 64
    assert microbatches.default_size(model, 64) == 64
    assert microbatches.default_size(model, 32) == 32
    # One pass has room for what hardly any batch exceeds.
    assert microbatches.default_size(model, 1) == 4


def test_a_gpu_takes_many(monkeypatch):
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [kind])
    for model in (small(), LARGE["weights"]()):
        assert microbatches.default_size(model, 1000) == 512
        assert microbatches.default_size(model, 250) == 256


@pytest.mark.parametrize("given, expected", [(None, 32), (7, 7), (1, 2)])
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
        # 20 in whole vectors; 5 + 2.75 sqrt(5).
        own = expected if batch_size == 20 or given else 12
        assert model.microbatch_size == own


@pytest.mark.parametrize(
    "largest, expected, most",
    [
        (32, 32, 1.1),
        (8, 32, 1.1),
        (64, 64, 1.1),
        (256, 250, 1.05),
        (64, 250, 1.05),
        (512, 1000, 1.05),
        (64, 1000, 1.05),
        (512, 5000, 1.05),
    ],
)
def test_a_poisson_batch_takes_hardly_more_rows_than_it_has(
    largest, expected, most
):
    passes = microbatches.passes_of(largest, expected)
    assert passes.sizes[0] == largest
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
    passes = microbatches.passes_of(largest, expected)
    drawn = np.arange(4 * largest)
    whole = np.maximum(1, -(-drawn // largest)) * largest
    rows = rows_of(passes, drawn)
    assert np.all((drawn <= rows) & (rows <= whole))
    # An empty batch takes a pass, too.
    assert sum(passes.counts(0)) == 1
    counts = [passes.counts(tf.constant(int(n))) for n in drawn]
    assert np.array_equal(np.transpose(counts), passes.counts(drawn))


def test_small_batches_have_passes_of_one_size():
    assert microbatches.passes_of(12, 8).sizes == (12,)
    assert microbatches.passes_of(4, 40).sizes == (4,)


def sums_of(model, rows):
    """Clipped sums of so many examples of a batch of Poisson sampling."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 4)).astype("float32")
    batch = private_batches.padded(model, (x, np.ones([rows, 2], "float32")))
    model.prepare_training(
        tf.nest.map_structure(tf.type_spec_from_value, batch)
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
        tf_dpsub.optimizers.DPSGD(
            keras.optimizers.SGD(0.1),
            l2_norm_clip=0.1,
            noise_multiplier=1.0,
            batch_size=32,
            **arguments,
        ),
        loss="mse",
        jit_compile=jit_compile,
    )
    return model


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
