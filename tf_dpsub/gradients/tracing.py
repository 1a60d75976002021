"""Traces that are thrown away: to learn of a function without running it."""

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
