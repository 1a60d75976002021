"""Microbatches: the examples that a step works through at a time."""

import dataclasses
import functools
import math

import numpy as np
import tensorflow as tf
from keras import tree
from scipy import stats

from tf_dpsub.primitives.clipping import LARGEST_MICROBATCH

# What larger microbatches work on leaves the caches of a CPU...
_ON_CPU = 64
_ON_GPU = 512
# ...unless weights and outputs of all layers are at most so many numbers for an
# example: beginning with a microbatch would take longer than working on it.
_FEW_NUMBERS = 2**17
# Beginning with a pass takes as long as working on so many examples: of a large
# model, of a small one, on a GPU.
_BEGINNING_OF_LARGE, _BEGINNING_OF_SMALL, _BEGINNING_ON_GPU = 2, 16, 64
# Smaller batches take one pass, with room for so many standard deviations.
_SMALL_BATCH, _DEVIATIONS = 16, 3
# The last rows of a batch, where it is no multiple of what instructions work on
# at a time, may be rounded otherwise than all others.
_AT_ONCE = 16
# Where passes of whole vectors would have a third more rows than are drawn.
_HALF_VECTOR = 8
_FEW_ROWS = 96
# Passes of a second size are traced where they take so much off the work, in
# runs of so many steps: else tracing them would take longer than they save.
_LEAST_GAIN = 0.02
_MANY_STEPS = 300
# Up to this size, an eighth of what clipping leaves for rounding in sums, 2^-20
# of the clip for a row, is there for rows that another pass rounds otherwise.
_LARGEST_OF_TWO = LARGEST_MICROBATCH * 7 // 8
# In work as good as the best. Large passes serve if there can be one size only.
_AS_GOOD = 0.01


def is_long(steps: int | None) -> bool:
    """Whether a run has so many steps that passes of two sizes pay."""
    return steps is not None and steps >= _MANY_STEPS


def default_size(
    model,
    batch_size: int,
    replicas: int = 1,
    views: int = 1,
    sizes: int = 1,
) -> int:
    """The microbatch size of those who choose none.

    A small model on a CPU works through the whole batch at once, or in a few
    equal parts: there is room for what hardly any Poisson batch exceeds. With
    passes of a second size for the rest of a batch, it is the size that takes
    the least work in the mean, by the cost of beginning with a pass. It changes
    speed and memory, never the result.

    Args:
        model: `keras.Model` that is built.
        batch_size: int, the expected batch size.
        replicas: int, how many share the batch. Defaults to `1`.
        views: int, how many of each example the model is given. Defaults to
            `1`.
        sizes: int, 1 or 2, how many sizes passes may have. Defaults to `1`.

    Returns:
        int, two at least: a batch of one has no axis to follow.
    """
    expected = batch_size / replicas
    most = expected + _DEVIATIONS * math.sqrt(expected)
    on_gpu = bool(tf.config.list_logical_devices("GPU"))
    is_small = beginning(model, views) != _BEGINNING_OF_LARGE
    limit = LARGEST_MICROBATCH
    if on_gpu or not is_small:
        limit = max(2, (_ON_GPU if on_gpu else _ON_CPU) // views)
    if sizes == 1 or expected < _SMALL_BATCH or limit < _AT_ONCE:
        if on_gpu or not is_small:
            return max(2, min(limit, batch_size))
        parts = math.ceil(most / limit)
        return max(2, _in_vectors(most / parts))
    limit = min(limit, _LARGEST_OF_TWO)
    candidates = [
        passes_of(size, sizes, expected, beginning(model, views))
        for size in range(_AT_ONCE, limit + 1, _AT_ONCE)
        if size < most + _AT_ONCE
    ]
    works = [
        _work(passes, expected, beginning(model, views))
        for passes in candidates
    ]
    return max(
        passes.sizes[0]
        for passes, work in zip(candidates, works)
        if work <= (1 + _AS_GOOD) * min(works)
    )


def beginning(model, views: int = 1) -> int:
    """How many examples take as long as beginning with a pass.

    Args:
        model: `keras.Model` that is built.
        views: int, how many of each example it is given. Defaults to `1`.
    """
    if tf.config.list_logical_devices("GPU"):
        return _BEGINNING_ON_GPU
    is_large = _numbers(model) * views > _FEW_NUMBERS
    return _BEGINNING_OF_LARGE if is_large else _BEGINNING_OF_SMALL


def _in_vectors(rows):
    """A number of rows, rounded up to whole vectors of a processor."""
    size = math.ceil(rows)
    return size if size < _AT_ONCE else -(-size // _AT_ONCE) * _AT_ONCE


@dataclasses.dataclass(frozen=True)
class Passes:
    """Sizes of the passes in which a step works through a batch.

    Attributes:
        sizes: tuple of int: that of a microbatch, and perhaps a smaller one.
        most: int, how many of the smaller ones there are before another whole
            microbatch takes less work.
    """

    sizes: tuple
    most: int = 0

    def counts(self, drawn):
        """How many passes of each size there are for a number of rows.

        Args:
            drawn: int, or integer array or tensor.

        Returns:
            List of the same, one for each size. One pass at least.
        """
        largest, *smaller = self.sizes
        whole = drawn // largest
        rest = drawn - whole * largest
        if not smaller:
            return [whole + _as_number((rest > 0) | (drawn == 0), drawn)]
        (size,) = smaller
        parts = -(-rest // size)
        is_more = _as_number(parts > self.most, drawn)
        is_empty = _as_number(drawn == 0, drawn)
        return [whole + is_more, parts * (1 - is_more) + is_empty]


def _as_number(truth, like):
    """1 where something is true and 0 where not, of the type of numbers."""
    return tf.cast(truth, like.dtype) if tf.is_tensor(truth) else truth * 1


@functools.cache
def passes_of(
    largest: int, sizes: int, expected: float, beginning: int
) -> Passes:
    """The sizes of passes for Poisson batches.

    In passes of one size, the last would be half empty. A second size follows
    from public numbers.

    Args:
        largest: int, the size of a microbatch: what memory suffices for.
        sizes: int, 1 or 2, how many there may be.
        expected: float, the expected number of rows.
        beginning: int, what a pass costs beside its rows, in rows.

    Returns:
        `Passes`, of two sizes at most.
    """
    one = Passes((largest,))
    if (
        sizes == 1
        or expected < _SMALL_BATCH
        or largest < _LEAST_GAIN * expected
        or largest > _LARGEST_OF_TWO
    ):
        return one
    unit = _HALF_VECTOR if expected < _FEW_ROWS else _AT_ONCE
    choices = [
        Passes((largest, size), (largest + beginning - 1) // (size + beginning))
        for size in range(unit, largest, unit)
    ]
    work, best = min(
        ((_work(passes, expected, beginning), passes) for passes in choices),
        key=lambda choice: choice[0],
        default=(math.inf, one),
    )
    least = (1 - _LEAST_GAIN) * _work(one, expected, beginning)
    return best if work < least else one


def _work(passes, expected, beginning):
    """Rows of a Poisson batch in the mean, with what passes cost beside."""
    drawn, shares = _draws(expected)
    counts = np.transpose(passes.counts(drawn))
    return float(shares @ counts @ (np.array(passes.sizes) + beginning))


@functools.cache
def _draws(expected):
    """Sizes that hardly any Poisson batch exceeds, and how often each is."""
    drawn = np.arange(int(stats.poisson.isf(1e-9, expected)) + 1)
    return drawn, stats.poisson.pmf(drawn, expected)


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
