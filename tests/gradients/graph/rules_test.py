"""Rules of single operations: what they claim of an axis holds bit for bit.

All axes have the size of the batch, which is put on each of them in turn.
"""

import numpy as np
import pytest
import tensorflow as tf

from tf_dpsub.gradients.graph.provenance import Provenance
from tf_dpsub.gradients.graph.rules import Application
from tf_dpsub.gradients.graph.states import PUBLIC, PerExample, Unproven

SIZE = 6
IDS = [0, 3, 3, 5, 1, 0]
START = tf.Variable(0.0)
PAIRS = [[k, (2 * k) % SIZE] for k in IDS]


def _as_ids(x):
    return tf.cast(tf.math.abs(x) * 4.0, tf.int32) % SIZE


def _clipped_ids(x):
    return tf.clip_by_value(tf.where(x > 0, 1, 0), 0, SIZE - 1)


def _numbers():
    return tf.reshape(tf.range(SIZE**SIZE), [SIZE] * SIZE)


def _projected(x):
    return tf.raw_ops.ImageProjectiveTransformV3(
        images=x,
        transforms=[[1.0, 0.2, 1.0, 0.0, 1.0, 0.5, 0.0, 0.0]],
        output_shape=[SIZE, SIZE],
        fill_value=0.0,
        interpolation="BILINEAR",
        fill_mode="WRAP",
    )


def _counted(x):
    counts = tf.math.bincount(
        _clipped_ids(x), minlength=SIZE, maxlength=SIZE, axis=-1
    )
    counts.set_shape([SIZE, SIZE])
    return counts


def _sliced(x):
    at = tf.cast(START, tf.int32)
    return tf.ensure_shape(x[:, at : at + 3], [SIZE, 3, SIZE])


# The operation, the rank of its input, and on how many of its axes a batch
# is proved to be kept apart.
CASES = {
    "select": (lambda x: tf.compat.v1.where(x > 0, x, 2 * x), 3, 3),
    "select_by_vector": (
        lambda x: tf.compat.v1.where(x[:, 0, 0] > 0, x, 2 * x),
        3,
        1,
    ),
    "fft": (lambda x: tf.signal.rfft(x), 3, 2),
    "fft2d": (lambda x: tf.signal.fft2d(tf.cast(x, tf.complex64)), 3, 1),
    "irfft": (lambda x: tf.signal.irfft(tf.signal.rfft(x)), 3, 2),
    "hsv": (lambda x: tf.image.rgb_to_hsv(x[..., :3]), 3, 2),
    "contrast": (lambda x: tf.image.adjust_contrast(x, 2.0), 4, 1),
    "band_part": (lambda x: tf.linalg.band_part(x, 0, -1), 3, 1),
    "projective_transform": (_projected, 4, 1),
    "bincount": (_counted, 2, 1),
    "segment_sum": (
        lambda x: tf.math.unsorted_segment_sum(x, IDS, SIZE),
        3,
        2,
    ),
    "segments_of_pairs": (
        lambda x: tf.math.unsorted_segment_max(x, [IDS] * SIZE, SIZE),
        4,
        2,
    ),
    "gather_nd": (lambda x: tf.gather_nd(x, PAIRS), 4, 2),
    "gather_nd_by_batch": (
        lambda x: tf.gather_nd(_numbers(), _clipped_ids(x)),
        3,
        2,
    ),
    "scatter_nd": (
        lambda x: tf.scatter_nd(PAIRS, x, [SIZE] * 4),
        3,
        2,
    ),
    "gather": (lambda x: tf.gather(x, IDS, axis=1), 3, 2),
    "gather_by_batch": (
        lambda x: tf.gather(x, _clipped_ids(x), axis=1, batch_dims=1),
        2,
        1,
    ),
    "slice_that_begins_anywhere": (_sliced, 3, 2),
    "bits": (lambda x: tf.bitwise.right_shift(_clipped_ids(x), 1), 2, 2),
    "bucketize": (
        lambda x: tf.raw_ops.Bucketize(input=x, boundaries=[-1.0, 0.5]),
        2,
        2,
    ),
    "hash": (
        lambda x: tf.strings.to_hash_bucket_fast(tf.strings.as_string(x), 9),
        2,
        2,
    ),
}


def _slices(output, state, i):
    """Slices that belong to an example."""
    shape = list(output.shape)
    axis = state.axis
    parts = output.reshape(
        shape[:axis] + [state.outer, SIZE, state.inner] + shape[axis + 1 :]
    )
    return np.take(parts, i, axis + 1)


@pytest.mark.parametrize("name", CASES)
def test_an_example_keeps_to_its_slices(name):
    function, rank, expected = CASES[name]
    clean = np.random.default_rng(0).normal(size=[SIZE] * rank)
    clean = clean.astype("float32")
    proved = 0
    for axis in range(rank):
        order = [*range(1, axis + 1), 0, *range(axis + 1, rank)]

        @tf.function(autograph=False)
        def moved(x, order=order):
            return function(tf.transpose(x, order))

        traced = moved.get_concrete_function(
            tf.TensorSpec(clean.shape, tf.float32)
        )
        graph = traced.graph
        state = Provenance(graph, graph.inputs[:1], SIZE)(graph.outputs[0])
        if not isinstance(state, PerExample):
            continue
        proved += 1
        outputs = traced(tf.constant(clean)).numpy()
        for i in range(SIZE):
            for factor in np.float32("nan"), np.float32(1e9):
                tainted = clean * factor
                tainted[i] = clean[i]
                others = traced(tf.constant(tainted)).numpy()
                np.testing.assert_array_equal(
                    _slices(others, state, i), _slices(outputs, state, i)
                )
    assert proved == expected


def test_rule_says_which_inputs_every_example_sees_whole():
    """An input that no rule names might differ from place to place."""
    with tf.Graph().as_default():
        op = tf.nn.bias_add(tf.zeros([2, SIZE]), tf.zeros([SIZE])).op
    states = [PerExample(1, 1, 1), PUBLIC]
    Application(op, states, SIZE, None, None).only(0, whole=(1,))
    with pytest.raises(Unproven, match="input 1, which may differ by place"):
        Application(op, states, SIZE, None, None).only(0)
