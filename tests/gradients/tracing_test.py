"""What is traced for tensors of some shapes is not traced for them again."""

import gc
import weakref

import numpy as np
import tensorflow as tf

from tf_dpsub.gradients.tracing import trace, traced_by_shape


def _counted():
    shapes = []

    @traced_by_shape
    def total(a, b):
        shapes.append((a.shape, b.dtype))
        return tf.reduce_sum(a) + tf.cast(tf.reduce_sum(b), a.dtype)

    return total, shapes


def test_is_traced_once_for_each_shape_and_type():
    total, shapes = _counted()
    ones = tf.ones([2, 3])
    for b in (ones, ones + 1, tf.ones([2]), tf.ones([2, 3], tf.int32)):
        total(ones, b)
    assert len(shapes) == 3


def test_is_shared_by_graphs_and_by_branches():
    total, shapes = _counted()

    def branches(x):
        first = total(x, x)
        return tf.cond(first > 0, lambda: total(x, x + 1), lambda: total(x, -x))

    for x in (tf.ones([4]), -tf.ones([4])):
        found = trace(branches, x)(x)
        expected = tf.reduce_sum(x) + tf.reduce_sum(x + 1 if x[0] > 0 else -x)
        np.testing.assert_array_equal(found, expected)
    assert len(shapes) == 1


def test_is_compiled_by_xla():
    total, _ = _counted()

    @tf.function(autograph=False, jit_compile=True)
    def compiled(x):
        return total(x, 2 * x)

    assert compiled(tf.ones([3])) == 9


def test_keeps_no_graph_that_called_it():
    total, _ = _counted()
    traced = trace(lambda x: total(x, x), tf.ones([2]))
    graph = weakref.ref(traced.graph)
    del traced
    gc.collect()
    assert graph() is None
    assert total(tf.ones([2]), tf.ones([2])) == 4
