"""What `tf.vectorized_map` may mix is computed one row at a time."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops.parallel_for import pfor

from tf_dpsub import gradients
from tf_dpsub.gradients import vectorized
from tf_dpsub.gradients.graph import converters, sources

ROWS = 6
X = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")


def rolled(x, v):
    return tf.roll(x, 1, axis=-1) * v


def rolled_by_the_row(x, v):
    return tf.roll(x, tf.cast(x[0, 0], tf.int32), axis=-1) * v


def formatted(x, v):
    text = tf.strings.format("{}", [x])
    place = tf.strings.to_hash_bucket_fast(text, 4)
    return x * tf.gather(v, place)[None]


def of_segments(x, v):
    ids = tf.constant([0, 5, 1, 7])
    return tf.math.unsorted_segment_sum(x[0] * v, ids, 2)[None]


def gathered_from_a_list(x, v):
    items = tf.TensorArray(tf.float32, size=4).unstack(x[0] * v)
    return items.gather([1, 0, 3, 2])[None]


def of_sparse_segments(x, v):
    ids = tf.constant([0, 1])
    return tf.sparse.segment_sum(x[0] * v, ids, ids * 0, num_segments=2)[None]


def nested(x, v):
    return tf.function(rolled, autograph=False)(x, v)


def in_a_loop(x, v):
    return tf.while_loop(
        lambda i, _: i < 2, lambda i, y: (i + 1, rolled(y, v)), (0, x)
    )[1]


def reversed_by_a_weight(x, v):
    """TensorFlow refuses the axis, -3 of 2, where it computes one row."""
    return tf.reverse(x, tf.cast(v[:1], tf.int32) - 4) * v


def added_by_a_weight(x, v):
    return tf.reduce_sum(x * v, tf.cast(v[:1], tf.int32) - 4, keepdims=True)


def vectors_of_labels(x, v):
    crossed = tf.raw_ops.SoftmaxCrossEntropyWithLogits(
        features=x * v, labels=x[0]
    )[0]
    return crossed[:, None]


def from_a_place_to_the_end(x, v):
    width = tf.cast(v[3], tf.int32)
    place = tf.cast(x[0, 0] > 0, tf.int32)
    tail = tf.slice((x * v)[:, :width], tf.stack([0, place]), [-1, -1])
    return tf.reduce_mean(tail, 1, keepdims=True)


MIXING = [
    reversed_by_a_weight,
    added_by_a_weight,
    vectors_of_labels,
    from_a_place_to_the_end,
    rolled,
    rolled_by_the_row,
    formatted,
    of_segments,
    gathered_from_a_list,
    of_sparse_segments,
    nested,
    in_a_loop,
]


def loss_of(function, variable):
    def loss(x):
        # As for a model with one of them: a batch of one.
        return tf.reduce_sum(function(x, variable) ** 2, -1), None

    return loss


@pytest.mark.parametrize("function", MIXING)
def test_mixing_operations_are_not_vectorized(function):
    variable = tf.Variable([1.0, 2.0, 3.0, 4.0])
    loss = loss_of(function, variable)
    spec = tf.TensorSpec(X.shape)
    assert not vectorized.vectorizes(loss, spec, [variable])
    apart = loss_of(lambda x, v: tf.reverse(x, [-1]) * v, variable)
    assert vectorized.vectorizes(apart, spec, [variable])


@pytest.mark.parametrize("function", [rolled, rolled_by_the_row, in_a_loop])
def test_a_row_follows_from_its_example(function):
    variable = tf.Variable([1.0, 2.0, 3.0, 4.0])
    loss = loss_of(function, variable)

    @tf.function(autograph=False)
    def rows(x):
        matrix, _ = vectorized.one_by_one(loss, x, [variable])
        return matrix.rows(variable)

    together = rows(tf.constant(X)).numpy()
    other = X.copy()
    other[1:] = 0.0
    alone = rows(tf.constant(other)).numpy()
    np.testing.assert_array_equal(alone[0], together[0])
    assert np.any(together[0])


def test_rows_of_an_embedding_are_vectorized():
    """Its ids are kept in range, where others' would reach other rows."""
    table = tf.Variable(tf.ones([3, 2]))

    def loss(ids):
        return tf.reduce_sum(tf.gather(table, ids) ** 2, [1, 2]), None

    spec = tf.TensorSpec([ROWS, 4], tf.int32)
    assert vectorized.vectorizes(loss, spec, [table])
    slices = tf.IndexedSlices(
        tf.ones([3, 2]), tf.constant([0, 3, -1]), tf.constant([3, 2])
    )
    made: list = []
    dense = tf.function(lambda: vectorized._dense(slices, [3, 2], made))()
    np.testing.assert_array_equal(dense, [[1, 1], [0, 0], [0, 0]])


@pytest.mark.parametrize("axis", [0, -1])
def test_rows_of_a_rolled_weight(axis):
    """Its rows are pulled back to the variable, behind the proof."""
    variable = tf.Variable([1.0, 2.0, 3.0, 4.0])

    def loss(x):
        weight = tf.roll(variable, 1, axis=axis)
        # Each use of its own: there is no view of the variable.
        return tf.reduce_sum(tf.nn.relu(x - 0.2) * tf.exp(weight), 1), None

    @tf.function(autograph=False)
    def rows(x):
        matrix, _ = gradients.per_example_gradients(loss, x, [variable])
        return matrix.rows(variable)

    of_weight = np.maximum(X - 0.2, 0) * np.exp(np.roll(variable, 1))
    expected = np.roll(of_weight, -1, 1)
    np.testing.assert_allclose(rows(tf.constant(X)), expected, rtol=1e-5)


def test_another_trace_is_checked_again():
    """A layer that changes after it was proved is not mapped."""
    variable = tf.Variable([1.0, 2.0, 3.0, 4.0])
    traced = []

    def loss(x):
        traced.append(x)
        x = rolled(x, variable) if len(traced) > 1 else x * variable
        return tf.reduce_sum(x**2, -1), None

    @tf.function(autograph=False)
    def rows(x):
        # As in a step: that it can be mapped was found before.
        vectorized.one_by_one(loss, x, [variable], is_vectorizable=True)

    with pytest.raises(gradients.Unproven, match="Roll.*compile it again"):
        rows(tf.constant(X))


@pytest.mark.parametrize("function", ["vectorized_map", "map_fn"])
def test_what_another_trace_reads_is_checked_again(function):
    variable, metric = tf.Variable([1.0, 2.0, 3.0, 4.0]), tf.Variable(1.0)
    traced = []

    def loss(x):
        traced.append(x)
        x = x * (metric if len(traced) > 1 else 1.0) * variable
        return tf.reduce_sum(x**2, -1), None

    @tf.function(autograph=False)
    def rows(x):
        vectorized.one_by_one(
            loss,
            x,
            [variable],
            may_read=sources.Sources([variable]),
            map_function=getattr(tf, function),
            is_vectorizable=True,
        )

    with pytest.raises(gradients.ReadsState):
        rows(tf.constant(X))


def test_converters_of_others_are_not_taken(monkeypatch):
    assert "Qr" not in pfor._pfor_converter_registry
    registry = dict(pfor._pfor_converter_registry, Qr=None)
    monkeypatch.setattr(pfor, "_pfor_converter_registry", registry)

    row = converters.keeping_rows_apart(lambda x: tf.linalg.qr(x)[0])
    with pytest.raises(converters.MixesRows, match="Qr"):
        tf.function(row, autograph=False)(tf.eye(2))


def test_those_that_were_read_are_those_that_are_converted():
    """Others, of a later TensorFlow, are not taken as right."""
    registered = set(pfor._pfor_converter_registry)
    assert converters._APART <= registered
    assert {"Roll", "StringFormat", "UnsortedSegmentSum"} <= (
        registered - converters._APART
    )
