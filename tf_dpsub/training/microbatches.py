"""Microbatches: the examples that a step works through at a time."""

import math

import keras
import numpy as np
import tensorflow as tf
from keras import tree
from scipy import stats

from tf_dpsub.primitives.clipping import LARGEST_MICROBATCH

# What a microbatch costs beside its rows, in rows, where each row takes long:
# on a CPU, a model with more weights and outputs of layers for an example.
_FEW_NUMBERS = 2**17
_START_BESIDE_LONG_ROWS = 3
# Of sequences it is less from so many places on: there is more to do for each
# weight, and what fewer rows work on stays in the caches.
_SHORT_SEQUENCE = 64
# A recurrent layer starts again at each step.
_START_OF_LOOPS = 9
# What larger microbatches of such rows work on leaves the caches.
_MOST_LONG_ROWS = 64
_START = 128
# The last rows of a batch, where it is no multiple of what instructions work on
# at a time, may be rounded otherwise than all others.
_SIZES = (2, 4, 8, *range(16, LARGEST_MICROBATCH + 1, 16))


def default_size(
    model,
    batch_size: int,
    replicas: int = 1,
    views: int = 1,
    places: int | None = None,
) -> int:
    """The microbatch size of those who choose none.

    It is the size that works through Poisson batches in the shortest time,
    rows that only pad them included. A small model takes hardly any batch in
    more than one part; a large one on a CPU takes the expected batch in four
    parts or so. It changes speed and memory, never the result.

    Args:
        model: `keras.Model` that is built.
        batch_size: int, the expected batch size.
        replicas: int, how many share the batch. Defaults to `1`.
        views: int, how many of each example the model is given. Defaults to
            `1`.
        places: int, what `places_of` returned of an example. Defaults to
            `None`, what the model tells of its inputs.

    Returns:
        int, two at least: a batch of one has no axis to follow.
    """
    start, most = _START, LARGEST_MICROBATCH
    is_on_gpu = tf.config.list_logical_devices("GPU")
    if not is_on_gpu and _numbers(model) * views > _FEW_NUMBERS:
        if _is_recurrent(model):
            start = _START_OF_LOOPS
        else:
            start = _start_beside_long_rows(model, places)
            most = _MOST_LONG_ROWS
    return min(
        [size for size in _SIZES if size <= max(2, most // views)],
        key=lambda size: (
            expected_number(batch_size / replicas, size)
            * (size + start / views)
        ),
    )


def _is_recurrent(model):
    return any(
        isinstance(layer, keras.layers.RNN)
        for layer in model._flatten_layers(include_self=False)
    )


def _start_beside_long_rows(model, places):
    """What a microbatch costs beside its rows, in rows that take long."""
    if places is None:
        inputs = tree.flatten(getattr(model, "inputs", None) or [])
        places = places_of(
            [tf.TensorSpec(t.shape[1:], t.dtype) for t in inputs]
        )
    return _START_BESIDE_LONG_ROWS * min(1, _SHORT_SEQUENCE / places) ** 1.5


def places_of(inputs) -> int:
    """Length of the longest sequence in an example; 1 if none is known.

    Args:
        inputs: structure of `tf.TensorSpec`s or tensors of the example.
    """
    lengths = [
        tensor.shape[0] or 1
        for tensor in tree.flatten(inputs)
        # Of tokens, or of vectors.
        if len(tensor.shape) == (1 if tensor.dtype.is_integer else 2)
    ]
    return max([1, *lengths])


def expected_number(expected_size: float, size: int) -> float:
    """The number of microbatches that a Poisson batch takes, in the mean.

    Args:
        expected_size: float, of the batch.
        size: int, the rows of a microbatch. An empty batch takes one.
    """
    most = stats.poisson.isf(1e-12, expected_size)
    multiples = [size * k for k in range(1, math.ceil(most / size) + 1)]
    return 1 + float(np.sum(stats.poisson.sf(multiples, expected_size)))


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
