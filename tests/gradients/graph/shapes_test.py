"""Shapes of outputs are found again, and once for all alike."""

import pytest
import tensorflow as tf

from tf_dpsub.gradients.graph import shapes
from tf_dpsub.gradients.graph.constants import ConstantFolder
from tf_dpsub.gradients.graph.states import Unproven


@pytest.fixture(autouse=True)
def made(monkeypatch):
    """Types of the operations that were made to find shapes."""
    types = []
    made_of = shapes._made_of
    monkeypatch.setattr(shapes, "_DERIVED", {})
    monkeypatch.setattr(
        shapes,
        "_made_of",
        lambda op, *args: types.append(op.type) or made_of(op, *args),
    )
    return types


def require(*tensors):
    for tensor in tensors:
        shapes.require_inferred(tensor.op, ConstantFolder())


def test_alike_operations_are_made_once(made):
    for _ in range(2):
        with tf.Graph().as_default():
            x = tf.compat.v1.placeholder(tf.int32, [4])
            require(x + 1, x + 1)
    assert made == ["AddV2"]


def test_others_are_made_anew(made):
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.int32, [4])
        of_two = tf.compat.v1.placeholder(tf.int32, [2])
        wide = tf.compat.v1.placeholder(tf.int64, [4])
        require(x + 1, of_two + 1, wide + 1, x + x)
        for multiples in ([2, 3], [3, 2]):
            require(tf.tile(tf.cast(x, tf.int32)[:, None], multiples))
    assert made[:4] == ["AddV2"] * 4
    assert made.count("Tile") == 2


def test_a_shape_that_is_set_is_refused_beside_one_that_is_not():
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.int32, [None])
        honest, told = x + 1, x + 1
        told.set_shape([4])
        require(honest)
        with pytest.raises(Unproven, match="was set"):
            require(told)
        require(honest)


def test_lists_are_made_each_time(made):
    """Their shapes follow from what was put in, too."""
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [4, 2])
        elements = tf.raw_ops.TensorListFromTensor(tensor=x, element_shape=[2])
        require(elements, elements)
    assert made == ["TensorListFromTensor"] * 2
