"""Gaussian noise, and the keys it is drawn from."""

import os
import secrets

import numpy as np
import tensorflow as tf


class NoiseKey:
    """A secret key that is used up, one step after another.

    Formal guarantees: the key comes from the operating system and lives in
    memory only. It is a variable that Keras does not track, so it is in no
    checkpoint, config or model file, and it enters a traced step as a tensor.
    Each `advance` replaces it by one that does not tell its predecessor's
    draws, so no key serves twice, and a resumed process starts from new
    entropy. It does not depend on Keras's global seed. With a fixed `seed`
    whoever knows the seed can subtract the noise: for experiments only.

    Args:
        seed: int or None. Defaults to `None`, fresh entropy.
    """

    def __init__(self, seed: int | None = None):
        if seed is None:
            entropy = [secrets.randbits(64) - 2**63 for _ in range(2)]
        else:
            entropy = [seed, 0]
        with tf.init_scope():
            self._variable = tf.Variable(
                tf.constant(entropy, tf.int64),
                trainable=False,
                name="noise_key",
                aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
            )

    def advance(self):
        """Moves to the next key.

        Returns:
            Int64 tensor of shape `[2]`, for one step only.
        """
        following, key = tf.unstack(
            tf.random.experimental.stateless_split(self._variable, 2)
        )
        self._variable.assign(following)
        return key


def gaussian(key, shapes: list, stddevs: list, secure: bool = False) -> list:
    """Draws independent Gaussian noise of several shapes.

    Formal guarantees: `tf.random.stateless_normal` is bounded by 5.7 standard
    deviations. Each number is therefore the sum of two independent draws,
    divided by sqrt(2): what is missing of the tail beyond 8 standard deviations
    is below 1e-15. With `secure`, it is the sum of four draws, divided by 2, of
    the operating system's cryptographic generator by the Box-Muller transform.

    Args:
        key: int64 tensor of shape `[2]`, used for this call alone.
        shapes: list of shapes.
        stddevs: list of floats, one for each shape.
        secure: bool. Defaults to `False`.

    Returns:
        List of float32 tensors.
    """
    keys = tf.unstack(
        tf.random.experimental.stateless_split(key, 2 * len(shapes))
    )
    draws = []
    for k, (shape, stddev) in enumerate(zip(shapes, stddevs, strict=True)):
        if secure:
            draw = tf.numpy_function(
                _secure_normal, [tf.constant(list(shape), tf.int32)], tf.float32
            )
            draws.append(stddev * tf.ensure_shape(draw, shape))
        else:
            first, second = (
                tf.random.stateless_normal(shape, key)
                for key in keys[2 * k : 2 * k + 2]
            )
            draws.append((stddev * 2**-0.5) * (first + second))
    return draws


def _secure_normal(shape):
    """Standard normal numbers from the operating system's generator."""
    count = int(np.prod(shape))
    bits = np.frombuffer(os.urandom(32 * count), np.uint64).reshape(4, count)
    uniform = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    radius = np.sqrt(-2.0 * np.log1p(-uniform[:2]))  # [2, count]
    angle = 2.0 * np.pi * uniform[2:]
    total = np.sum(radius * np.cos(angle) + radius * np.sin(angle), axis=0)
    return (total / 2.0).astype(np.float32).reshape(shape)
