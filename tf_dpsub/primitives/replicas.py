"""Replicas of a step: which of them is the first, and sums over all."""

import tensorflow as tf


def are_several() -> bool:
    """Tells whether a step runs on more than one replica."""
    return tf.distribute.get_strategy().num_replicas_in_sync > 1


def is_first() -> bool:
    """Tells whether what is traced runs on the first replica.

    Raises:
        NotImplementedError: if the distribution strategy does not tell.
    """
    return _index() == 0


def is_first_of_worker() -> bool:
    """Tells whether it runs on the first replica of this worker.

    Raises:
        NotImplementedError: as `is_first`.
    """
    if not are_several():
        return True
    extended = tf.distribute.get_strategy().extended
    return _index() % len(extended.worker_devices) == 0


def _index():
    context = tf.distribute.get_replica_context()
    index = tf.get_static_value(context.replica_id_in_sync_group)
    if index is None:
        raise NotImplementedError(
            "The distribution strategy does not tell which replica a step is "
            "traced for. Use MirroredStrategy or MultiWorkerMirroredStrategy."
        )
    return int(index)


def summed(tensors: list) -> list:
    """Adds up what the replicas have, in one reduction.

    Args:
        tensors: list of tensors.

    Returns:
        List of tensors, the same on all replicas.
    """
    if not are_several():
        return tensors
    context = tf.distribute.get_replica_context()
    return context.all_reduce(tf.distribute.ReduceOp.SUM, tensors)
