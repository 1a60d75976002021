"""Gaussian noise, and the keys it is drawn from."""

import functools
import math
import os
import secrets

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from tf_dpsub.optimizers import threefry

# Numbers drawn at a time on a CPU: what lies between random bits and noise
# stays in its cache.
AT_ONCE = 2**18

# From so many numbers on, XLA compiles the drawing, in pieces of this size: it
# takes two fifths of the time, and 75 MiB for itself.
COMPILED = 2**23
PIECE = 2**16

# Of the square of an angle within 45 degrees, highest power first; the sine is
# that times the angle (Moshier's Cephes library, `sinf.c`).
_COSINE = [2.44331571e-5, -1.38873163e-3, 4.166664568e-2, -0.5, 1.0]
_SINE = [-1.95152959e-4, 8.33216087e-3, -1.6666654611e-1, 1.0]


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

    Formal guarantees: draws are made in pairs, by the Box-Muller transform of
    63 random bits, which are Philox's or, where XLA compiles, ThreeFry's
    (Salmon et al. 2011), of a key and a counter of 64 secret bits each. Their
    radius ends at 6.66 standard deviations, beyond which a pair lies once in
    2^32; that of `tf.random.stateless_normal` ends at 5.68, once in 10^7. Each
    number is the sum of two independent draws, divided by sqrt(2): what is
    missing of its tail beyond 8 standard deviations is below 1e-15. With
    `secure`, it is the sum of four draws, divided by 2, of the operating
    system's cryptographic generator.

    Args:
        key: int64 tensor of shape `[2]`, used for this call alone.
        shapes: list of shapes.
        stddevs: list of floats, one for each shape.
        secure: bool. Defaults to `False`.

    Returns:
        List of float32 tensors.
    """
    shapes = [tf.TensorShape(shape) for shape in shapes]
    counts = [shape.num_elements() for shape in shapes]
    if secure:
        draws = [_secure_normal(count) for count in counts]
    else:
        draws = _normal(key, counts)
    return [
        stddev * tf.reshape(draw, shape)
        for stddev, draw, shape in zip(stddevs, draws, shapes, strict=True)
    ]


def _normal(key, counts):
    """Standard normal numbers; one draw serves all that are few."""
    if _is_in_xla():
        # There, splitting a key keeps but 32 bits of each half.
        return tf.split(_sums_of_two_for_xla(key, sum(counts)), counts)
    few = [k for k, count in enumerate(counts) if count <= AT_ONCE]
    many = [k for k, count in enumerate(counts) if count > AT_ONCE]
    parts = [few, *([k] for k in many)]
    keys = tf.unstack(tf.random.experimental.stateless_split(key, len(parts)))
    if tf.config.list_logical_devices("GPU"):
        drawn = _sums_of_two
    elif sum(counts) < COMPILED:
        drawn = functools.partial(_in_pieces, _sums_of_two, AT_ONCE)
    else:
        drawn = functools.partial(_in_pieces, _sums_of_two_by_xla, PIECE)
    draws = {}
    for part_key, part in zip(keys, parts, strict=True):
        sizes = [counts[k] for k in part]
        flat = drawn(part_key, sum(sizes))
        draws.update(zip(part, tf.split(flat, sizes) if sizes else ()))
    return [draws[k] for k in range(len(counts))]


def _in_pieces(drawn, size, key, count):
    if count <= size:
        return _sums_of_two(key, count)
    pieces = -(-count // size)
    numbers = tf.map_fn(
        lambda piece_key: drawn(piece_key, size),
        tf.random.experimental.stateless_split(key, pieces),
        fn_output_signature=tf.TensorSpec([size], tf.float32),
    )
    return tf.reshape(numbers, [-1])[:count]


def _is_in_xla():
    """Whether XLA compiles what is being traced."""
    graph = tf.compat.v1.get_default_graph()
    return control_flow_util.GraphOrParentsInXlaContext(graph)


def _sums_of_two(key, count):
    """Sums of two standard normal draws, divided by sqrt(2)."""
    half = (count + 1) // 2
    bits = tf.random.stateless_uniform([4, half], key, None, None, tf.int32)
    cosines, sines = [], []
    for size, direction in (tf.unstack(bits[:2]), tf.unstack(bits[2:])):
        radius = _radius(size)
        cosine, sine = _cosine_and_sine(direction)
        cosines.append(radius * cosine)
        sines.append(radius * sine)
    return tf.concat([tf.add_n(cosines), tf.add_n(sines)], 0)[:count]


def _sums_of_two_by_xla(key, count):
    """The same, compiled apart: `count` is even."""
    # What XLA concatenates it would draw once for each number.
    pairs = _compiled_pairs(key, count // 2)
    return tf.reshape(tf.bitcast(pairs, tf.float32), [-1])


def _sums_of_two_for_xla(key, count):
    """The same, within what XLA compiles, by pairs of which half is unused."""
    return tf.math.real(_pairs(key, count))


def _pairs(key, count):
    """Complex numbers, whose parts are sums of two draws, over sqrt(2).

    They are made of what XLA is quick at: ThreeFry bits and polynomials.
    """
    pairs = []
    for size, direction in _threefry_blocks(key, count, 2):
        radius = _radius(size)
        cosine, sine = _cosine_and_sine_by_polynomials(direction)
        pairs.append(tf.complex(radius * cosine, radius * sine))
    return tf.add_n(pairs)


_compiled_pairs = tf.function(_pairs, jit_compile=True, autograph=False)


def _threefry_blocks(key, count, blocks):
    """Pairs of int32 words `[count]`, as many as there are blocks.

    The first half of the key is the cipher's, the second one where it begins to
    count: the words of the counter of block j of number i are i and j more.
    """
    if count > 2**32:
        raise ValueError(
            f"Expected at most 2^32 numbers to draw at once, got {count:,}: "
            "the words of the counter would be used again."
        )
    *cipher, begin, block = tf.unstack(
        tf.reshape(tf.bitcast(key, tf.uint32), [4])
    )
    begin += tf.cast(tf.range(count), tf.uint32)
    for j in range(blocks):
        words = threefry.encrypt(cipher, [begin, tf.fill([count], block + j)])
        yield [tf.bitcast(word, tf.int32) for word in words]


def _radius(size):
    """Of a pair, over sqrt(2), by a uniform int32."""
    # In (0, 1], dense near 0, where the tails come from.
    uniform = (tf.abs(tf.cast(size, tf.float32)) + 0.5) * 2.0**-31
    return tf.sqrt(-tf.math.log(uniform))


def _cosine_and_sine(direction):
    """Of the angle pi * direction / 2^31."""
    angle = tf.cast(direction, tf.float32) * (math.pi * 2.0**-31)
    return tf.cos(angle), tf.sin(angle)


def _cosine_and_sine_by_polynomials(direction):
    """The same to 1e-7, where XLA would call a function for each number.

    The angle is a multiple of 90 degrees and the rest, which is within 45.
    """
    within = tf.bitwise.left_shift(direction, 2)
    angle = tf.cast(within, tf.float32) * (math.pi * 2.0**-33)
    square = angle * angle
    cosine = tf.math.polyval(_COSINE, square)
    sine = angle * tf.math.polyval(_SINE, square)
    eighths = tf.bitwise.right_shift(direction, 29)
    quarters = tf.bitwise.right_shift(eighths + 1, 1)
    is_odd = tf.equal(tf.bitwise.bitwise_and(quarters, 1), 1)
    sign = tf.cast(1 - tf.bitwise.bitwise_and(quarters, 2), tf.float32)
    return (
        sign * tf.where(is_odd, -sine, cosine),
        sign * tf.where(is_odd, cosine, sine),
    )


def _secure_normal(count):
    draw = tf.numpy_function(
        _normal_of_system, [tf.constant(count)], tf.float32
    )
    return tf.ensure_shape(draw, [count])


def _normal_of_system(count):
    """Standard normal numbers from the operating system's generator."""
    bits = np.frombuffer(os.urandom(32 * count), np.uint64).reshape(4, count)
    uniform = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    radius = np.sqrt(-2.0 * np.log1p(-uniform[:2]))  # [2, count]
    angle = 2.0 * np.pi * uniform[2:]
    total = np.sum(radius * np.cos(angle) + radius * np.sin(angle), axis=0)
    return (total / 2.0).astype(np.float32)
