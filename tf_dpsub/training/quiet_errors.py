"""Errors of TensorFlow without the values of private examples in them."""

import re

import tensorflow as tf

# What this package says of shapes and settings, what the user's own Python
# code raised, and what XLA cannot compile: none tells of an example.
_TOLD = re.compile(
    r"^Expected |assertion failed: \[Expected |Error: Expected "
    r"|Traceback \(most recent call last\):\n\n? +File"
    "|Detected unsupported operations"
)
_NODE = re.compile(r"node '?([\w./\-]+)")


def without_values(error):
    """What is raised in place of an error that may hold private values.

    TensorFlow's messages quote what an operation was given, such as all labels
    of the batch.

    Args:
        error: `tf.errors.InvalidArgumentError`.

    Returns:
        `tf.errors.InvalidArgumentError`, of other words; None if `error` holds
        no values.
    """
    if _TOLD.search(error.message):
        return None
    node = _NODE.search(error.message)
    name = f"'{node[1]}'" if node else "an operation of the model"
    return tf.errors.InvalidArgumentError(
        None,
        None,
        f"Expected examples that the model can compute with, got one that "
        f"{name} refuses. What TensorFlow says of it is left out, as it may "
        "quote private examples. Check the ids, lengths and numbers of what "
        "the model is given; `model.model` raises the error in full.",
    )
