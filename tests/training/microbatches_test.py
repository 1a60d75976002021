"""How many examples a step works through at a time, if nobody says."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dpsub
from tf_dpsub.training import microbatches

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


@pytest.mark.parametrize("expected", [0.5, 8, 250, 5000])
def test_the_expected_number_is_that_of_poisson_batches(expected):
    drawn = np.random.default_rng(0).poisson(expected, 200_000)
    for size in (2, 16, 448):
        numbers = np.maximum(1, -(-drawn // size))
        assert np.isclose(
            microbatches.expected_number(expected, size),
            numbers.mean(),
            rtol=0.005,
        )


@pytest.mark.parametrize("size", [8, 250, 400, 1000])
def test_small_models_take_hardly_more_parts_than_a_poisson_batch_needs(size):
    found = microbatches.default_size(small(), size)
    assert 2 <= found <= 448
    parts = microbatches.expected_number(size, found)
    # Nearly all batches take the same few parts.
    assert parts < np.ceil((size + 3 * size**0.5) / 448) + 0.1


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
    assert microbatches.default_size(model, 10_000) == 64
    assert microbatches.default_size(model, 1) == 2


@pytest.mark.parametrize("size", [8, 16, 32])
def test_long_sequences_are_worked_on_in_small_parts(size):
    """There is more to do for each weight: a part costs little beside them."""
    model = LARGE["any length"]()
    sizes = [
        microbatches.default_size(model, size, places=places)
        for places in (1, 64, 128, 256, 512)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == sizes[1] == microbatches.default_size(model, size)
    rows = [s * microbatches.expected_number(size, s) for s in sizes]
    assert rows[-1] <= 1.1 * size < rows[0]


@pytest.mark.parametrize(
    "inputs, expected",
    [
        ([tf.TensorSpec([7], tf.int32), tf.TensorSpec([9], tf.float32)], 7),
        ({"a": tf.TensorSpec([5, 9]), "b": tf.TensorSpec([2], tf.int64)}, 5),
        (tf.TensorSpec([28, 28, 1]), 1),
        (tf.TensorSpec([None, 4]), 1),
        (tf.TensorSpec([], tf.int32), 1),
    ],
)
def test_places_of_sequences(inputs, expected):
    assert microbatches.places_of(inputs) == expected


def test_loops_are_run_few_times():
    model = keras.Sequential([keras.Input((20, 300)), L.LSTM(64)])
    found = microbatches.default_size(model, 64)
    assert microbatches.expected_number(64, found) < 1.1


@pytest.mark.parametrize("method", ["fit", "train_on_batch"])
def test_the_data_tell_how_long_sequences_are(method):
    plain = keras.Sequential(
        [
            keras.Input((None,), dtype="int32"),
            L.Embedding(1000, 200),
            L.GlobalAveragePooling1D(),
            L.Dense(2),
        ]
    )
    model = tf_dpsub.make_private(plain)
    model.compile(
        tf_dpsub.optimizers.DPSGD(
            "sgd", noise_multiplier=1.0, l2_norm_clip=1.0, batch_size=16
        ),
        "mse",
    )
    assert model.microbatch_size == 8
    arguments = {"verbose": 0} if method == "fit" else {}
    getattr(model, method)(
        np.zeros([16, 512], int), np.zeros([16, 2]), **arguments
    )
    assert model.microbatch_size == 2
    assert model.ledger.steps == 1


@pytest.mark.parametrize("size", [16, 32, 64, 128, 250, 1000])
def test_large_models_work_on_few_rows_of_padding(size):
    model = LARGE["weights"]()
    found = microbatches.default_size(model, size)
    rows = found * microbatches.expected_number(size, found)
    assert rows <= (1.25 if size < 64 else 1.16) * size


def test_a_gpu_takes_many(monkeypatch):
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [kind])
    for model in (small(), LARGE["weights"]()):
        assert microbatches.default_size(model, 1000) == 352
        # Rather rows of padding than a second pass for half of all batches.
        assert microbatches.default_size(model, 250) == 288


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
        own = expected if batch_size == 20 or given else 16
        assert model.microbatch_size == own


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
def test_rows_are_rounded_alike_at_all_places(name):
    """Also in microbatches of other sizes."""
    gradients = []
    for size in (48, 16, 8, 4):
        of_place = gradient_of_place(name, size)
        for place in (0, 1, size // 2 + 1, size - 1):
            gradients.append(of_place(place))
    expected, *others = gradients
    for found in others:
        difference = np.linalg.norm(found - expected)
        assert difference <= 2.0**-20 * np.linalg.norm(expected)


def dpsgd_of(**arguments):
    return tf_dpsub.optimizers.DPSGD(
        keras.optimizers.SGD(0.1),
        l2_norm_clip=0.1,
        noise_multiplier=1.0,
        batch_size=32,
        **arguments,
    )


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
