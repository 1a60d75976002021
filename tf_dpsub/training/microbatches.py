"""Microbatches: the examples that a step works through at a time."""

import dataclasses
import functools
import math

import numpy as np
import tensorflow as tf
from keras import tree
from scipy import stats

from tf_dpsub.primitives.clipping import LARGEST_MICROBATCH, largest_draw

# What larger microbatches work on leaves the caches of a CPU...
_ON_CPU = 64
_ON_GPU = 512
# ...unless weights and outputs of all layers are at most so many numbers for an
# example: beginning with a microbatch would take longer than working on it.
_FEW_NUMBERS = 2**17
# Beginning with a pass takes as long as working on so many examples.
_BEGINNING = 4
# Passes of several sizes are traced until a Poisson batch takes, in the mean,
# as much longer than one of the expected size.
_WASTE = 0.05
_MOST_SIZES = 4
# A pass has room for the expected rows and so many standard deviations.
_DEVIATIONS = 2.75
# Smaller batches take one pass or two, and all else takes longer.
_SMALL_BATCH = 16
# Sizes to choose from are so many parts of the largest.
_PARTS = 16
# The last rows of a batch, where it is no multiple of what instructions work on
# at a time, may be rounded otherwise than all others.
_AT_ONCE = 16


def default_size(
    model, batch_size: int, replicas: int = 1, views: int = 1
) -> int:
    """The microbatch size of those who choose none.

    A small model on a CPU works through the whole batch at once, or in a few
    equal parts: there is room for what hardly any Poisson batch exceeds; and so
    does a large one, if the batch is small. It changes speed and memory, never
    the result.

    Args:
        model: `keras.Model` that is built.
        batch_size: int, the expected batch size.
        replicas: int, how many share the batch. Defaults to `1`.
        views: int, how many of each example the model is given. Defaults to
            `1`.

    Returns:
        int, two at least: a batch of one has no axis to follow.
    """
    expected = batch_size / replicas
    most = expected + _DEVIATIONS * math.sqrt(expected)
    if tf.config.list_logical_devices("GPU"):
        return max(2, min(_ON_GPU // views, _in_vectors(most)))
    if _numbers(model) * views > _FEW_NUMBERS:
        limit = _ON_CPU // views
        if expected <= limit:
            # One pass is better than two, of which one is nearly empty.
            limit += limit // 2
        return max(2, min(limit, _in_vectors(most)))
    parts = math.ceil(most / LARGEST_MICROBATCH)
    return max(2, _in_vectors(most / parts))


def _in_vectors(rows):
    """A number of rows, rounded up to whole vectors of a processor."""
    size = math.ceil(rows)
    return size if size < _AT_ONCE else -(-size // _AT_ONCE) * _AT_ONCE


@dataclasses.dataclass(frozen=True)
class Passes:
    """Sizes of the passes in which a step works through a batch.

    Attributes:
        sizes: tuple of int, from the largest down.
        counts: int array `[rows + 1, sizes]`: for each number of rows, up to
            one that hardly any batch exceeds, the number of passes of each
            size that hold them with the least work, at least one.
    """

    sizes: tuple
    counts: np.ndarray


def one_size(size: int) -> Passes:
    """Passes of one size."""
    return Passes((size,), np.ones([size + 1, 1], np.int32))


@functools.cache
def passes_of(largest: int, expected: float) -> Passes:
    """The sizes of passes for Poisson batches.

    A pass of one size would be half empty at the end of a batch. How many sizes
    there are, and which, follows from public numbers.

    Args:
        largest: int, the largest size: what memory suffices for.
        expected: float, the expected number of rows.

    Returns:
        `Passes`, of four sizes at most.
    """
    sizes = (largest,)
    if expected < _SMALL_BATCH or largest / 2 <= _WASTE * expected:
        return one_size(largest)
    rows = np.arange(max(largest, math.ceil(largest_draw(expected))) + 1)
    shares = stats.poisson.pmf(rows, expected)
    unit = next(u for u in (16, 8, 4, 2, 1) if u * 6 <= expected or u == 1)
    choices = {-(-k * largest // _PARTS) for k in range(1, _PARTS)}
    choices = {
        c for c in (-(-c // unit) * unit for c in choices) if c < largest
    }
    if not choices:
        return one_size(largest)
    least = expected + _BEGINNING * math.ceil(expected / largest)

    def work_of(sizes):
        return float(shares @ _least_work(sizes, len(rows))[0]), sizes

    def with_best(sizes):
        """The sizes, and the one more with which batches take least work."""
        return min(
            work_of(tuple(sorted({*sizes, choice}, reverse=True)))
            for choice in choices
        )

    work, sizes = work_of(sizes)
    while len(sizes) < _MOST_SIZES and work > (1 + _WASTE) * least:
        before = work
        work, sizes = with_best(sizes)
        for size in sizes[1:]:
            # A size that was chosen first may not be best beside others.
            rest = tuple(s for s in sizes if s != size)
            work, sizes = min((work, sizes), with_best(rest))
        if work == before:
            break
    return Passes(sizes, _counts(sizes, len(rows)))


def _least_work(sizes, rows):
    """Work for each number of rows, and the size of a first pass of it."""
    work = np.zeros(rows)
    first = np.full(rows, len(sizes) - 1)
    step = sizes[-1]
    for start in range(0, rows, step):
        held = np.arange(max(start, 1), min(start + step, rows))
        if not len(held):
            continue
        options = [
            size + _BEGINNING + work[np.maximum(held - size, 0)]
            for size in sizes
        ]
        first[held] = np.argmin(options, 0)
        work[held] = np.min(options, 0)
    # An empty batch takes a pass, too.
    work[0] = sizes[-1] + _BEGINNING
    return work, first


def _counts(sizes, rows):
    _, first = _least_work(sizes, rows)
    counts = np.zeros([rows, len(sizes)], np.int32)
    for k in range(rows):
        before = max(0, k - sizes[first[k]])
        if before:
            counts[k] = counts[before]
        counts[k, first[k]] += 1
    return counts


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
