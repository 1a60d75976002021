"""What may be public: a list of operations, and what is not on it."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from tf_dpsub import gradients
from tf_dpsub.gradients.graph import determined

BATCH = 4
_KINDS = sorted(
    determined._DETERMINED - determined._LOOKED_AT_ELSEWHERE  # noqa: SLF001
)


def test_no_operation_of_the_list_has_a_state():
    """TensorFlow declares which do; others are looked at one by one."""
    definitions = [op_def_registry.get(kind) for kind in _KINDS]
    assert all(d is not None for d in definitions)
    assert not [d.name for d in definitions if d.is_stateful]


def _rows(loss_fn, implementation="graph"):
    weight = tf.Variable(np.ones(3, "float32"))

    @tf.function(autograph=False)
    def compute(x):
        per_example, _ = gradients.per_example_gradients(
            lambda x: (loss_fn(x, weight), None), x, [weight], implementation
        )
        return per_example.rows(weight)

    return compute(tf.ones([BATCH, 3])).numpy()


def _switched():
    """Runs where another operation did; so it may wait for the batch."""
    is_false, _ = tf.raw_ops.Switch(data=tf.ones([]), pred=False)
    return tf.raw_ops.Merge(inputs=[is_false, is_false]).output


def _remapped():
    return tf.cast(
        tf.raw_ops.GenerateVocabRemapping(
            new_vocab_file="vocabulary",
            old_vocab_file="vocabulary",
            new_vocab_offset=0,
            num_new_vocab=1,
        ).num_present,
        tf.float32,
    )


def _stitched(indices):
    return tf.dynamic_stitch([indices], [tf.ones(len(indices))])


def _made_in(kind):
    """Numbers that a function makes."""

    def make():
        return tf.function(_UNDETERMINED[kind], autograph=False)()

    return make


# Scalars of operations that read something else, or not all of which is
# written, in a loss that would be that of a public factor.
_UNDETERMINED = {
    "Cholesky": lambda: tf.linalg.cholesky(-tf.eye(2))[1, 1],
    "Svd": lambda: tf.raw_ops.Svd(input=tf.eye(2), compute_uv=False).u,
    "SelfAdjointEigV2": lambda: (
        tf.raw_ops.SelfAdjointEigV2(input=tf.eye(2), compute_v=False).v
    ),
    "DynamicStitch": lambda: _stitched([0, 2]),
    "Empty": lambda: tf.raw_ops.Empty(shape=[1], dtype=tf.float32)[0],
    "ApproxTopK": lambda: tf.raw_ops.ApproxTopK(
        input=tf.range(3.0), k=2
    ).values[0],
    "DebugIdentity": lambda: tf.raw_ops.DebugIdentityV3(input=tf.ones([])),
    "GenerateVocabRemapping": _remapped,
    "Switch": _switched,
}


@pytest.mark.parametrize("kind", _UNDETERMINED)
@pytest.mark.parametrize("is_called", [False, True])
def test_what_inputs_do_not_determine(kind, is_called):
    make = _made_in(kind) if is_called else _UNDETERMINED[kind]

    def loss_fn(x, w):
        return tf.reduce_sum(x * w, 1) * tf.reduce_sum(make())

    with pytest.raises(
        gradients.Unproven, match="do not determine|control flow of TensorFlow"
    ):
        _rows(loss_fn)


@pytest.mark.parametrize("is_of_batch", [False, True])
def test_dilations_that_a_kernel_takes_no_notice_of(is_of_batch):
    """The output is larger than its static shape says."""

    def loss_fn(x, w):
        images = tf.ones([BATCH, 5, 5, 1])
        images *= x[:, :1, None, None] if is_of_batch else 1.0
        filtered = tf.raw_ops.DepthwiseConv2dNative(
            input=images,
            filter=tf.ones([3, 3, 1, 1]),
            strides=[1, 1, 1, 1],
            padding="VALID",
            dilations=[1, 2, 2, 1],
        )
        return tf.reduce_sum(x * w, 1) * filtered[:, 0, 0, 0]

    with pytest.raises(
        gradients.Unproven, match="an effect of its own|do not determine"
    ):
        _rows(loss_fn)


@pytest.mark.parametrize("kind", ["Cholesky", "Svd", "SelfAdjointEigV2"])
def test_what_is_computed_beside_the_loss(kind):
    """It enters no row, and writes nothing."""
    beside = []

    def loss_fn(x, w):
        scale = tf.reduce_sum(tf.abs(x)) + tf.eye(2)
        kinds = {
            "Cholesky": lambda: tf.linalg.cholesky(scale),
            "Svd": lambda: tf.linalg.svd(scale, compute_uv=False),
            "SelfAdjointEigV2": lambda: tf.linalg.eigvalsh(scale),
        }
        beside.append(kinds[kind]())
        return tf.reduce_sum(x * w, 1)

    np.testing.assert_array_equal(_rows(loss_fn), np.ones([BATCH, 3]))


@pytest.mark.parametrize("implementation", ["graph", "map_fn"])
def test_a_stitch_without_gaps(implementation):
    def loss_fn(x, w):
        return tf.reduce_sum(x * w, -1) * tf.reduce_sum(_stitched([1, 0]))

    rows = _rows(loss_fn, implementation)
    np.testing.assert_array_equal(rows, np.full([BATCH, 3], 2.0))


def _one_of_two(x, w):
    return tf.cond(
        x[0, 0] > 0.0,
        lambda: tf.reduce_sum(tf.square(tf.tanh(x * w))),
        lambda: tf.reduce_sum(tf.exp(x * w)),
    )


def _one_of_many(x, w):
    branches = [lambda: tf.reduce_sum(tf.square(x * w)), lambda: 0.0]
    return tf.switch_case(tf.cast(x[0, 0] < 0.0, tf.int32), branches)


@pytest.mark.parametrize(
    "loss_fn, expected",
    [
        (_one_of_two, 2 * np.tanh(1) * (1 - np.tanh(1) ** 2)),
        (_one_of_many, 2.0),
    ],
)
@pytest.mark.parametrize("implementation", ["vectorized_map", "map_fn"])
def test_branches_one_example_at_a_time(loss_fn, expected, implementation):
    """Their gradients pass on what was computed in one branch alone."""
    rows = _rows(loss_fn, implementation)
    np.testing.assert_allclose(rows, np.full([BATCH, 3], expected), rtol=1e-6)


def test_the_gradient_of_a_pooling_that_tells_places():
    def loss_fn(x, w):
        images = tf.reshape(tf.tanh(x * w), [1, 1, 3, 1])
        pooled, _ = tf.nn.max_pool_with_argmax(images, [1, 3], [1, 3], "VALID")
        return tf.reduce_sum(pooled)

    rows = _rows(loss_fn, "map_fn")
    np.testing.assert_allclose(rows.sum(1), [1 - np.tanh(1) ** 2] * 4, 1e-6)
