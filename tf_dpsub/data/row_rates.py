"""A sampling rate for each row: how often it is drawn."""

import numpy as np
import tensorflow as tf
from absl import logging

# For the statement.
ASSUMPTION = (
    "the largest sampling rate, that the rate of each example follows from "
    "this example alone and from public numbers, and that all rates add up to "
    "about the batch size"
)
# Sums of rates that miss the batch size by more are worth a warning.
_FACTOR = 2


def checked(sampling_rates, examples: int, batch_size: int):
    """Checks a probability for each example.

    Args:
        sampling_rates: array of floats, `[examples]`.
        examples: int, their number.
        batch_size: int, by which sums are divided.

    Returns:
        float64 array `[examples]`.

    Raises:
        ValueError: if it is not that.
    """
    rates = np.asarray(sampling_rates)
    if rates.shape != (examples,) or rates.dtype.kind not in "fiu":
        raise ValueError(
            f"Expected sampling_rates to hold one probability for each of "
            f"{examples} examples, got shape {list(rates.shape)} and dtype "
            f"{rates.dtype}. Look up the rate of each, as by "
            "`rate_of_class[labels]`."
        )
    rates = rates.astype(np.float64)
    if not np.all((rates > 0) & (rates <= 1)):
        raise ValueError(
            "Expected 0 < sampling_rates <= 1, got others among them. They are "
            "probabilities of each step, about batch_size / examples: leave "
            "out examples that are never to be drawn."
        )
    expected = float(rates.sum())
    if not batch_size / _FACTOR <= expected <= batch_size * _FACTOR:
        logging.warning(
            "A batch of these sampling_rates holds about %.3g examples, and "
            "sums of gradients are divided by batch_size=%d. The first number "
            "is private, if the rates are.",
            expected,
            batch_size,
        )
    return rates


def kept(drawn, shares, key, step):
    """Keeps of examples that were drawn with the largest rate those of theirs.

    Formal guarantees: each example is kept independently, with its share of the
    largest rate as probability: it is drawn with its own rate altogether.

    Args:
        drawn: int64 tensor `[drawn]`, numbers of examples.
        shares: float64 tensor `[examples]`, rates divided by the largest.
        key: int64 tensor `[2]`, secret.
        step: int64 scalar tensor.

    Returns:
        int64 tensor, some of `drawn` in their order.
    """
    # No distances are drawn by this number of a chunk.
    seed = key + tf.stack([tf.constant(-1, tf.int64), step])
    uniform = tf.random.stateless_uniform(
        tf.shape(drawn), seed, dtype=tf.float64
    )
    return tf.boolean_mask(drawn, uniform < tf.gather(shares, drawn))
