"""Labels and ids out of range: the example counts for nothing, quietly."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dpsub
from tf_dpsub.data import given_batches

L = keras.layers
BATCH, BAD, CLASSES, ENTRIES, STEPS = 4, 2, 3, 5, 6


def _vectors():
    return keras.Sequential([keras.Input((4,)), L.Dense(CLASSES)])


def _texts():
    return keras.Sequential(
        [
            keras.Input((STEPS,), dtype="int32"),
            L.Embedding(ENTRIES, 4),
            L.Dense(CLASSES),
        ]
    )


def _data(model):
    rng = np.random.default_rng(0)
    if model is _vectors:
        x = rng.normal(size=(BATCH, 4)).astype("float32")
        return x, rng.integers(0, CLASSES, BATCH)
    shape = BATCH, STEPS
    return rng.integers(0, ENTRIES, shape), rng.integers(0, CLASSES, shape)


def _private(plain, ignore_class=None, jit_compile=False, per_example="auto"):
    model = tf_dpsub.make_private(plain)
    model.compile(
        tf_dpsub.optimizers.DPSGD(
            keras.optimizers.SGD(0.0),
            l2_norm_clip=1.0,
            noise_multiplier=1.0,
            batch_size=BATCH,
            microbatch_size=BATCH,
            per_example=per_example,
        ),
        keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, ignore_class=ignore_class
        ),
        # On a CPU it would raise, too, and quote the labels.
        metrics=[keras.metrics.SparseCategoricalCrossentropy(from_logits=True)],
        jit_compile=jit_compile,
    )
    return model


def _sums(model, x, y, weights):
    batch = given_batches.named(
        *(tf.constant(t) for t in (x, y, weights.astype("float32")))
    )
    batch = given_batches.padded(batch, BATCH)
    model.prepare_training(
        tf.nest.map_structure(tf.type_spec_from_value, batch)
    )
    model.reset_metrics()
    sums = [s.numpy() for s in model.training_step(batch)]
    return sums, float(model._tallies.dropped.result())


ENGINES = {
    "graph": {},
    "compiled": {"jit_compile": True},
    "one by one": {"per_example": "vectorized_map"},
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("build", [_vectors, _texts])
def test_an_example_out_of_range_counts_for_nothing(build, engine):
    model = _private(build(), **ENGINES[engine])
    x, y = _data(build)
    ones = np.ones(BATCH)
    others = np.where(np.arange(BATCH) == BAD, 0.0, 1.0)
    without, dropped = _sums(model, x, y, others)
    assert dropped == 0.0
    spoilt = [(x, label) for label in (CLASSES, 2**20, -1)]
    if build is _texts:
        spoilt += [(token, y) for token in (ENTRIES, 2**20, -ENTRIES - 1)]
    for x_or_id, y_or_label in spoilt:
        bad_x, bad_y = x.copy(), y.copy()
        if np.ndim(x_or_id) == 0:
            bad_x[BAD].flat[-1] = x_or_id
        else:
            bad_y.reshape(BATCH, -1)[BAD, -1] = y_or_label
        sums, dropped = _sums(model, bad_x, bad_y, ones)
        assert dropped == 1.0
        for a, b in zip(sums, without):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        for value in model.get_metrics_result().values():
            assert np.isfinite(value)


def test_labels_that_are_ignored_are_in_range():
    model = _private(_texts(), ignore_class=-1)
    x, y = _data(_texts)
    y[BAD, 0] = -1
    _, dropped = _sums(model, x, y, np.ones(BATCH))
    assert dropped == 0.0


class Refusing(L.Layer):
    """Raises where it is given a number that it cannot take."""

    def call(self, x):
        with tf.control_dependencies([tf.debugging.assert_less(x, 1e3)]):
            return tf.identity(x)


def test_no_value_is_in_a_message():
    model = _private(
        keras.Sequential([keras.Input((4,)), Refusing(), L.Dense(CLASSES)])
    )
    x, y = _data(_vectors)
    x[BAD] = 123456.0
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        model.train_on_batch(x, y)
    assert "left out" in str(caught.value)
    assert "123456" not in str(caught.value)
    assert caught.value.__suppress_context__
