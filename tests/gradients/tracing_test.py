"""Traces: what is shared within one, and between several."""

import collections
import threading
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.util import tf_stack

import tf_dpsub
from tests import garbage
from tf_dpsub.gradients import selection
from tf_dpsub.gradients.tracing import shared_integers, trace, traced_by_shape


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
    assert garbage.ends(graph)
    assert total(tf.ones([2]), tf.ones([2])) == 4


class TestSharedIntegers:
    def constants(self, function):
        """Values of the constants of a graph, and what it computes."""
        traced = trace(function, tf.ones([6]))
        values = [
            tuple(np.ravel(tf.get_static_value(op.outputs[0])))
            for op in traced.graph.get_operations()
            if op.type == "Const"
        ]
        return collections.Counter(values), traced(tf.ones([6])).numpy()

    def test_a_shape_is_one_constant(self):
        def function(x):
            with shared_integers():
                return tf.reshape(x, [2, 3]) + tf.reshape(2 * x, [2, 3])

        found, total = self.constants(function)
        assert found == {(2, 3): 1, (2,): 1}
        np.testing.assert_array_equal(total, np.full([2, 3], 3))

    def test_numbers_that_are_differentiated_by_stay_two(self):
        def function(x):
            with shared_integers():
                a, b = tf.constant(2.0), tf.constant(2.0)
                return tf.stack(
                    tf.gradients(tf.reduce_sum(a * a * b * x), [a, b])
                )

        _, gradients = self.constants(function)
        np.testing.assert_array_equal(gradients, [48, 24])

    def test_types_are_told_apart(self):
        def function(x):
            with shared_integers():
                narrow, wide = tf.constant(1), tf.constant(1, tf.int64)
                assert (narrow.dtype, wide.dtype) == (tf.int32, tf.int64)
                return tf.cast(narrow, tf.int64) + wide

        assert self.constants(function)[1] == 2

    def test_arrays_from_outside_stay_inputs_of_their_own(self):
        """A function cannot be given the same input twice."""
        first, second = tf.constant(7), tf.constant(7)

        def function(x):
            with shared_integers():
                return first * second * tf.constant(7) * tf.cast(x[0], tf.int32)

        assert self.constants(function)[1] == 343

    def test_what_is_shared_waits_for_nothing(self):
        def function(x):
            with shared_integers():
                with tf.control_dependencies([x]):
                    late = tf.constant([5, 6])
                assert not late.op.control_inputs
                return late

        self.constants(function)

    def test_ends_with_its_context(self):
        def function(x):
            with shared_integers():
                tf.constant([5, 6])
            tf.constant([5, 6])
            return x

        assert self.constants(function)[0][5, 6] == 2


class TestStacks:
    @pytest.fixture
    def extracted(self, monkeypatch):
        """A list that grows with each stack that is extracted."""
        calls, extract = [], tf_stack.extract_stack

        def counted(stacklevel=1):
            calls.append(stacklevel)
            return extract(stacklevel)

        monkeypatch.setattr(tf_stack, "extract_stack", counted)
        return calls

    def test_what_is_thrown_away_has_one(self, extracted):
        counted = tf_stack.extract_stack
        traced = trace(lambda x: x * x + x, tf.ones([1]))
        assert len(traced.graph.get_operations()) > 2
        assert len(extracted) == 1
        assert tf_stack.extract_stack is counted

    def test_another_thread_has_its_own(self, extracted):
        def elsewhere():
            with tf.Graph().as_default():
                tf.zeros([])

        def function(x):
            before = len(extracted)
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            assert len(extracted) == before + 1
            return x

        trace(function, tf.ones([1]))

    def test_threads_end_in_any_order(self, extracted):
        """What one leaves in the other's place does nothing."""
        counted, inside, done = (
            tf_stack.extract_stack,
            threading.Event(),
            threading.Event(),
        )

        def function(x):
            inside.set()
            done.wait(60)
            return x

        thread = threading.Thread(target=trace, args=(function, tf.ones([1])))

        def outer(x):
            thread.start()
            inside.wait(60)
            return x

        trace(outer, tf.ones([1]))
        done.set()
        thread.join()
        before = len(extracted)
        with tf.Graph().as_default():
            tf.zeros([])
        assert len(extracted) == before + 1
        tf_stack.extract_stack = counted

    @pytest.mark.parametrize("jit_compile", [False, True])
    def test_private_steps_record_lines_for_xla_alone(
        self, extracted, jit_compile, monkeypatch
    ):
        # Else the second model is one that was checked before.
        monkeypatch.setattr(selection, "_CHECKED", {})
        grown = []

        class Counting(keras.layers.Layer):
            def call(self, x):
                before = len(extracted)
                x = 2 * x
                grown.append(len(extracted) > before)
                return x

        model = tf_dpsub.make_private(
            keras.Sequential(
                [keras.Input((3,)), Counting(), keras.layers.Dense(1)]
            )
        )
        model.compile(
            tf_dpsub.optimizers.DPSGD(
                keras.optimizers.SGD(0.1),
                l2_norm_clip=1.0,
                noise_multiplier=1.0,
                batch_size=4,
            ),
            "mse",
            jit_compile=jit_compile,
        )
        grown.clear()
        model.fit(np.ones([8, 3]), np.ones([8, 1]), batch_size=4, verbose=0)
        # What is known of its outputs needs no trace: the loss, its check and
        # the step.
        assert grown == [False, False, jit_compile]
