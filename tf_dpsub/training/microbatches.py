"""Microbatches: the examples that a step works through at a time."""

import math

import tensorflow as tf
from keras import tree

from tf_dpsub.primitives.clipping import LARGEST_MICROBATCH

# What larger microbatches work on leaves the caches of a CPU...
_ON_CPU = 64
_ON_GPU = 512
# ...unless weights and outputs of all layers are at most so many numbers for an
# example: beginning with a microbatch would take longer than working on it.
_FEW_NUMBERS = 2**17
# The last rows of a batch, where it is no multiple of what instructions work on
# at a time, may be rounded otherwise than all others.
_AT_ONCE = 16


def default_size(
    model, batch_size: int, replicas: int = 1, views: int = 1
) -> int:
    """The microbatch size of those who choose none.

    A small model on a CPU works through the whole batch at once, or in a few
    equal parts: there is room for what hardly any Poisson batch exceeds. It
    changes speed and memory, never the result.

    Args:
        model: `keras.Model` that is built.
        batch_size: int, the expected batch size.
        replicas: int, how many share the batch. Defaults to `1`.
        views: int, how many of each example the model is given. Defaults to
            `1`.

    Returns:
        int, two at least: a batch of one has no axis to follow.
    """
    if tf.config.list_logical_devices("GPU"):
        return max(2, min(_ON_GPU // views, batch_size))
    if _numbers(model) * views > _FEW_NUMBERS:
        return max(2, min(_ON_CPU // views, batch_size))
    expected = batch_size / replicas
    most = expected + 3 * math.sqrt(expected)
    parts = math.ceil(most / LARGEST_MICROBATCH)
    size = math.ceil(most / parts)
    return max(2, size if size < _AT_ONCE else -(-size // _AT_ONCE) * _AT_ONCE)


def spec_of(spec, size: int):
    """The spec of a microbatch.

    Args:
        spec: structure of `tf.TensorSpec` of a batch.
        size: int, the number of examples in a microbatch.

    Returns:
        Structure of `tf.TensorSpec`.

    Raises:
        ValueError: if a shape is not known, but for the batch axis.
    """
    return tree.map_structure(lambda s: _microbatch_spec(s, size), spec)


def _microbatch_spec(spec, size):
    if spec.shape.rank == 0:
        raise ValueError(
            "Expected a dataset of batches, got one of single examples. Batch "
            "it: `dataset.batch(size)`."
        )
    if spec.shape.rank is None or None in spec.shape[1:]:
        raise ValueError(
            "Expected batches whose shape is known but for the batch axis, got "
            f"{spec.shape}. Pad to one length, or set the shape in the dataset "
            "with `tf.ensure_shape`."
        )
    return tf.TensorSpec([size, *spec.shape[1:]], spec.dtype)


def _numbers(model):
    """Numbers held for an example: weights and outputs; inf if unknown."""
    total = model.count_params()
    for layer in model._flatten_layers(include_self=False):
        if layer._layers:
            continue
        try:
            outputs = tree.flatten(layer.output)
        except (AttributeError, ValueError):
            # Within another layer: nothing tells what it puts out.
            return math.inf
        for output in outputs:
            if None in output.shape[1:]:
                return math.inf
            total += math.prod(output.shape[1:])
    return total
