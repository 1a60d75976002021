"""Errors of TensorFlow: the cure, and no values of private examples."""

import functools
import re

import tensorflow as tf

# What this package says of shapes and settings, what the user's own Python
# code raised, and what XLA cannot compile: none tells of an example.
_WITHOUT_VALUES = re.compile(
    r"^Expected |assertion failed: \[Expected |Error: Expected "
    r"|Traceback \(most recent call last\):\n\n? +File"
    "|Detected unsupported operations"
)
_NODE = re.compile(r"node '?([\w./\-]+)")
# ResourceExhausted also stands for a full disk.
_OUT_OF_MEMORY = re.compile(".*(OOM|out of memory|alloc).*", re.IGNORECASE)


def explained(method):
    """Wraps a method so that its errors name a cure, and no private values.

    Formal guarantees: no error of TensorFlow that leaves it quotes examples.
    """

    @functools.wraps(method)
    def wrapped(self, *args, **kwargs):
        try:
            return method(self, *args, **kwargs)
        except tf.errors.ResourceExhaustedError as error:
            quoted = _OUT_OF_MEMORY.search(error.message)
            if quoted is None:
                raise
            size = self.microbatch_size
            advice = (
                f"Pass microbatch_size={size // 2} to the optimizer: less is "
                "held at a time, and the result is the same."
                if size > 2
                else "Freeze layers, or take shorter inputs."
            )
            raise MemoryError(
                "Expected enough memory for a step that works through "
                f"{size} examples at a time, got: {quoted[0].strip()} {advice}"
            ) from error
        except tf.errors.InvalidArgumentError as error:
            quiet = without_values(error)
            if quiet is None:
                raise
            raise quiet from None

    return wrapped


def without_values(error):
    """Error that stands for one that may hold private values.

    TensorFlow's messages quote what an operation was given, such as all labels
    of the batch.

    Args:
        error: `tf.errors.InvalidArgumentError`.

    Returns:
        `tf.errors.InvalidArgumentError`, of other words; None if `error` holds
        no values.
    """
    if _WITHOUT_VALUES.search(error.message):
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
