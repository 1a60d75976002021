"""Batches that the user gives, in the form that a private step takes."""

import math

import tensorflow as tf
from absl import logging
from keras import tree

from tf_dpsub import accounting

# Figures of a warning are for this one.
_DELTA = 1e-5


def named(x, y=None, sample_weight=None):
    parts = {"x": x, "y": y, "w": sample_weight}
    return {name: part for name, part in parts.items() if part is not None}


def padded(batch: dict, multiple: int, most: int | None = None):
    """Adds `real`, and rows of zeros up to a multiple of a microbatch.

    Args:
        batch: dict of structures of tensors.
        multiple: int, the size of a microbatch.
        most: int, the most rows that a batch may have; more raise. Defaults
            to `None`, any number.
    """
    batch = tree.map_structure(tf.convert_to_tensor, batch)
    if "w" in batch:
        batch["w"] = tree.map_structure(
            lambda w: tf.cast(w, tf.float32), batch["w"]
        )
    rows = tf.shape(tree.flatten(batch["x"])[0])[0]
    if most is not None:
        check = tf.debugging.assert_less_equal(
            rows,
            most,
            f"Expected batches of {most} examples at most, got a larger one. "
            "Clipping leaves room for rounding in sums of about as many "
            "examples as the optimizer's batch_size: set it to the size of "
            "the batches, or the microbatch_size to a smaller one.",
        )
        with tf.control_dependencies([] if check is None else [check]):
            rows = tf.identity(rows)
    batch["real"] = tf.ones([rows])
    missing = tf.maximum(multiple, -(-rows // multiple) * multiple) - rows

    def pad(t):
        shape = tf.concat([[missing], tf.shape(t)[1:]], 0)
        empty = (
            tf.fill(shape, "")
            if t.dtype == tf.string
            else tf.zeros(shape, t.dtype)
        )
        padded = tf.concat([t, empty], 0)
        padded.set_shape([None, *t.shape[1:]])
        return padded

    return tree.map_structure(pad, batch)


def cardinality(dataset):
    """Number of batches of a dataset, or None."""
    cardinality = int(dataset.cardinality())
    return cardinality if cardinality >= 0 else None


def element_spec(dataset):
    """Specs of a batch on one replica."""
    return tree.map_structure(
        lambda s: getattr(s, "_value_specs", [s])[0], dataset.element_spec
    )


def microbatch_spec(spec, size):
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


def warn_of_cost(dataset, optimizer, steps: int):
    """Says what batches cost that were not drawn by `PoissonBatches`.

    Args:
        dataset: `tf.data.Dataset` of batches.
        optimizer: private optimizer.
        steps: int, planned; 0 if not known.
    """
    sizes = {spec.shape[0] for spec in tree.flatten(dataset.element_spec)}
    sizes -= {None, optimizer.batch_size}
    also = ""
    if sizes:
        also = (
            f" Its batches have {min(sizes)} examples, and sums are divided by "
            f"batch_size={optimizer.batch_size}."
        )
    batches = cardinality(dataset)
    noise_multiplier = optimizer.effective_noise_multiplier
    if batches and steps > 0 and 0 < noise_multiplier < math.inf:
        # Its last batch may be smaller.
        examples = batches * min(sizes, default=optimizer.batch_size)
        given, drawn = (
            accounting.epsilon(
                noise_multiplier=noise_multiplier,
                sampling_rate=rate,
                steps=steps,
                delta=_DELTA,
            )
            for rate in (1.0, min(1.0, optimizer.batch_size / examples))
        )
        cost = (
            f"these {steps} steps cost epsilon = {given:.3g} at delta = "
            f"{_DELTA:.0e}, and {drawn:.3g} if each step drew its batch from "
            f"the about {examples:,} examples"
        )
    else:
        cost = "epsilon is much larger than if each step drew its batch"
    logging.warning(
        "Batches of a dataset are accounted for without amplification by "
        "sampling: %s. `fit` draws from arrays, and from "
        "`tf_dpsub.data.PoissonBatches(rows, map=...)`, whose `map` decodes "
        "and augments each row anew.%s",
        cost,
        also,
    )
