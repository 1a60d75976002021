"""Rows are decoded and augmented one by one, with draws of their own."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.training.plain_models import FEATURES, dpsgd, linear, private
from tf_dpsub.data import PoissonBatches
from tf_dpsub.gradients import ReadsState

N = 12
X = np.arange(N, dtype="float32")[:, None] * np.ones([1, 3], "float32")
Y = np.arange(N)


def batches(function, *data, batch_size=N, seed=0):
    # Each row is in each batch, unless a smaller batch is asked for.
    return PoissonBatches(
        *(data or (X, Y)), batch_size=batch_size, map=function, seed=seed
    )


def drawn(sampler, steps=1):
    steps_drawn = []
    for batch in sampler.dataset(multiple_of=4).take(steps):
        real = batch["real"].numpy() == 1
        steps_drawn.append(
            keras.tree.map_structure(lambda t: t.numpy()[real], batch)
        )
    return steps_drawn


def test_decodes_rows():
    texts = np.array([f"{i} {i + 1}" for i in range(N)])

    def decode(text):
        numbers = tf.strings.to_number(tf.strings.split(text))
        numbers = tf.ensure_shape(numbers, [2])
        if numbers[0] > 5:  # as `tf.data` takes it, by AutoGraph
            numbers = -numbers
        return {"a": numbers}, numbers[1], 2.0

    sampler = batches(decode, texts, batch_size=6)
    assert sampler.inputs is None
    (batch,) = drawn(sampler)
    assert 0 < len(batch["y"]) < N
    expected = np.array([[i, i + 1] for i in range(N)], "float32")
    expected[6:] *= -1
    for row, label in zip(batch["x"]["a"], batch["y"]):
        np.testing.assert_array_equal(row, expected[int(abs(label)) - 1])
    assert set(batch["w"]) == {2.0}
    assert sampler.dataset().element_spec["x"]["a"].shape == [None, 2]


TWO = keras.Sequential(
    [keras.layers.GaussianNoise(1.0), keras.layers.GaussianNoise(1.0)]
)
RANDOM = {
    "seed": lambda x, y, seed: (tf.random.stateless_normal([3], seed), y),
    "keras": lambda x, y: (keras.random.normal([3]), y),
    "layers": lambda x, y: (TWO(0 * x[None], training=True)[0], y),
}


@pytest.mark.parametrize("kind", RANDOM)
def test_draws(kind):
    """Draws are fresh for each row and step, secret, and of the row alone."""
    function = RANDOM[kind]
    first, second = (b["x"] for b in drawn(batches(function), 2))
    numbers = np.concatenate([first, second]).flatten()
    assert len(set(numbers)) == len(numbers)
    # The same seed, the same draws.
    np.testing.assert_array_equal(drawn(batches(function))[0]["x"], first)
    # Nothing depends on which others are in the batch, nor on the place.
    (fewer,) = drawn(batches(function, X[:-3], Y[:-3], batch_size=N - 3))
    np.testing.assert_array_equal(fewer["x"], first[:-3])
    # Seeds that are public, as Keras's are, do not tell them.
    keras.utils.set_random_seed(0)
    fresh = drawn(batches(function, seed=None))[0]["x"]
    keras.utils.set_random_seed(0)
    again = drawn(batches(function, seed=None))[0]["x"]
    assert not np.isin(fresh, again).any()


def test_several_layers_draw_differently():
    first, second = TWO.layers

    def both(x, y):
        x = 0 * x[None]
        return first(x, training=True)[0] - second(x, training=True)[0], y

    assert (drawn(batches(both))[0]["x"] != 0).all()


def test_an_empty_draw_has_rows_of_padding():
    sampler = PoissonBatches(
        np.zeros([1000, 2]), batch_size=1, seed=0, map=lambda x: x + 1
    )
    empty = sampler.dataset(multiple_of=2).filter(
        lambda batch: tf.reduce_sum(batch["real"]) == 0
    )
    (batch,) = empty.take(1)
    np.testing.assert_array_equal(batch["x"], np.zeros(batch["x"].shape))


class TestRefused:
    def test_draws_without_a_seed(self):
        with pytest.raises(ValueError, match="argument `seed`"):
            batches(lambda x, y: (tf.image.random_brightness(x, 0.1), y))

    def test_state(self):
        count = tf.Variable(0.0)
        with pytest.raises(ValueError, match="assigns to a variable"):
            batches(lambda x, y: (x + count.assign_add(1.0), y))
        norm = keras.layers.BatchNormalization()
        norm.build((None, 3))
        with pytest.raises(ValueError, match="keeps no state.*moving_mean"):
            batches(lambda x, y: (norm(x[None], training=True)[0], y))
        generator = tf.random.Generator.from_seed(0)
        with pytest.raises(ValueError, match="argument `seed`"):
            batches(lambda x, y: (x + generator.normal([3]), y))

    def test_unknown_shape(self):
        with pytest.raises(ValueError, match="known shape.*ensure_shape"):
            batches(lambda x, y: (x[: tf.cast(y, tf.int32)], y))


@pytest.mark.parametrize("kind", RANDOM)
def test_views(kind):
    """Each view has draws of its own, whoever else is in the batch."""
    views = 3

    def batch(count):
        (batch,) = (
            batches(RANDOM[kind], X[:count], Y[:count], batch_size=count)
            .dataset(multiple_of=5, views=views)
            .take(1)
        )
        return {k: v.numpy() for k, v in batch.items()}

    all_rows, fewer = batch(N), batch(N - 3)
    assert all_rows["x"].shape == (15, views, 3)
    assert all_rows["y"].shape == (15, views)
    assert all_rows["real"].shape == (15,)
    np.testing.assert_array_equal(all_rows["x"][N:], 0)
    numbers = all_rows["x"][:N].flatten()
    assert len(set(numbers)) == len(numbers)
    np.testing.assert_array_equal(
        all_rows["y"][:N], np.repeat(Y[:, None], views, 1)
    )
    np.testing.assert_array_equal(fewer["x"][: N - 3], all_rows["x"][: N - 3])


def test_views_without_a_map():
    """They are equal: one is enough."""
    sampler = PoissonBatches(X, Y, batch_size=N)
    (batch,) = sampler.dataset(multiple_of=N, views=3).take(1)
    np.testing.assert_array_equal(batch["x"], X[:, None])
    assert not sampler.map_may_draw
    with pytest.raises(ValueError, match="views"):
        sampler.dataset(views=0)


def test_an_empty_draw_of_views():
    def shift(x, y, seed):
        return x + tf.random.stateless_normal([3], seed), y

    sampler = PoissonBatches(X, Y, batch_size=1, map=shift, seed=0)
    assert sampler.map_may_draw
    sizes = set()
    for batch in sampler.dataset(multiple_of=4, views=2).take(30):
        assert batch["x"].shape[1:] == (2, 3)
        sizes.add(int(tf.reduce_sum(batch["real"])))
    assert 0 in sizes


def test_whether_a_map_may_draw():
    def calls_python(x, y):
        x = tf.numpy_function(lambda a: a, [x], tf.float32)
        return tf.ensure_shape(x, [3]), y

    for function in (*RANDOM.values(), calls_python):
        assert batches(function).map_may_draw
    assert not batches(lambda x, y: (2 * x, y)).map_may_draw


def test_what_python_functions_keep_is_an_assumption():
    def python(x, y):
        outputs = tf.numpy_function(np.negative, [x], tf.float32)
        return tf.ensure_shape(outputs, x.shape), y

    (assumption,) = batches(python).assumptions
    assert "Python functions of `map`" in assumption
    assert batches(lambda x, y: (-x, y)).assumptions == ()


class TestVariables:
    def test_what_they_hold_is_an_assumption(self):
        factor = tf.Variable(2.0)
        (assumption,) = batches(lambda x, y: (factor * x, y)).assumptions
        assert "variables hold that `map` reads" in assumption
        table = tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer(np.arange(N), np.arange(N)), -1
        )
        looks_up = batches(lambda x, y: (x, table.lookup(y)))
        assert looks_up.assumptions == ()

    def test_a_metric_is_not_read(self):
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        model = private(linear(), dpsgd(), metrics=[accuracy])
        x = np.zeros([N, FEATURES], "float32")

        def flipped(x, y):
            return tf.where(accuracy.total.value > 0.5, -x, x), y

        with pytest.raises(ReadsState, match="reads the metric"):
            model.fit(batches(flipped, x, Y % 3, batch_size=4), verbose=0)
        assert model.ledger.steps == 0
