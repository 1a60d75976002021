"""Converts batches from the user to the form that private steps take."""

import tensorflow as tf
from keras import tree


def named(x, y=None, sample_weight=None):
    """Dict of inputs `x`, targets `y` and weights `w`, without missing ones."""
    parts = {"x": x, "y": y, "w": sample_weight}
    return {name: part for name, part in parts.items() if part is not None}


def padded(batch: dict, multiple: int, most: int | None = None):
    """Pads a batch with rows of zeros to a multiple of the microbatch size.

    The key `real` is added: 1 for examples, 0 for padding.

    Args:
        batch: dict of structures of tensors, as `named` returns it.
        multiple: int, the microbatch size.
        most: int, the largest batch; larger ones raise when they run.
            Defaults to `None`, no limit.
    """
    batch = tree.map_structure(tf.convert_to_tensor, batch)
    if "w" in batch:
        batch["w"] = tree.map_structure(
            lambda w: tf.cast(w, tf.float32), batch["w"]
        )
    rows = tf.shape(tree.flatten(batch["x"])[0])[0]
    if most is not None:
        # It may be too large for an int32.
        check = tf.debugging.assert_less_equal(
            tf.cast(rows, tf.int64),
            tf.constant(most, tf.int64),
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
