"""Traces of functions: those thrown away, and those that many calls share."""

import functools
from collections.abc import Callable

import tensorflow as tf


def trace(function: Callable, inputs):
    """Traces a function of one replica.

    Args:
        function: callable of one argument.
        inputs: structure of tensors or `tf.TensorSpec`s.

    Returns:
        The concrete function. Over several replicas, it returns what the first
        one does.
    """
    specs = tf.nest.map_structure(
        lambda t: tf.TensorSpec(t.shape, t.dtype), inputs
    )

    def first_replica(batch):
        strategy = tf.distribute.get_strategy()
        outputs = strategy.run(function, (batch,))
        return tf.nest.map_structure(
            lambda t: strategy.experimental_local_results(t)[0], outputs
        )

    over_replicas = tf.distribute.in_cross_replica_context()
    traced = tf.function(
        first_replica if over_replicas else function, autograph=False
    )
    return traced.get_concrete_function(specs)


def traced_by_shape(function: Callable):
    """A function that is traced once in a process for tensors of some shapes.

    To build many operations again for each of many layers takes most of the
    time before the first step; a call of what was traced is one.

    Args:
        function: callable of tensors of static shapes, of which alone its
            outputs depend.

    Returns:
        Callable of the same.
    """

    @functools.lru_cache(maxsize=1024)
    def traced(*specs):
        with tf.init_scope():
            return tf.function(function, autograph=False).get_concrete_function(
                *specs
            )

    @functools.wraps(function)
    def call(*tensors):
        return traced(*(tf.TensorSpec(t.shape, t.dtype) for t in tensors))(
            *tensors
        )

    return call
