"""Gaussian noise for the sums of a step, and the keys of its draws."""

import functools
import os
import secrets

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from tf_dpsub.primitives import grid, threefry

# From COMPILED numbers on, XLA compiles the draw on a CPU: it takes a quarter
# of the time, and a second to compile. To compile few shapes, it draws equal
# pieces of at most PIECE numbers, a multiple of PIECES_MULTIPLE.
COMPILED = 2**14
PIECE = 2**16
PIECES_MULTIPLE = 2**12
# From so many pieces on they have PIECE numbers, whatever is left of the last.
_MANY_PIECES = 8
# Of which a compiled program keeps all numbers, not the rule.
_LONGEST_RANGE = 2**12


class NoiseKey:
    """A secret key, which each step replaces by another.

    Formal guarantees: the key comes from the operating system and lives in
    memory only. It is a variable that Keras does not track, so it is in no
    checkpoint, config or model file, and it enters a traced step as a tensor.
    Each `advance` replaces it by one that does not tell its predecessor's
    draws, so no key serves twice, and a resumed process starts from new
    entropy. A copy has a key of its own, and a pickle has none: two releases
    with the same noise would tell their difference. A process that was forked
    has the key of its parent, and is refused: `require_own_process`. It does
    not depend on Keras's global seed. With a fixed `seed` whoever knows the
    seed can subtract the noise: for experiments only.

    Args:
        seed: int or None. Defaults to `None`, fresh entropy.
    """

    def __init__(self, seed: int | None = None):
        self._seed = seed
        self._process = os.getpid()
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

    def __reduce__(self):
        # What is copied or unpickled draws other noise.
        return type(self), (self._seed,)

    def require_own_process(self):
        """Refuses to draw in a process that was forked since.

        Raises:
            RuntimeError: if this process is not the one that made the key. A
                fixed seed is no secret, and is not refused.
        """
        if self._seed is None and self._process != os.getpid():
            raise RuntimeError(
                "Expected the process that made the key of the noise, got one "
                "that was forked from it: both would release with the same "
                "noise, and their difference without any. Make the object in "
                'this process, or start it by `multiprocessing.get_context("'
                'spawn")`.'
            )

    def advance(self):
        """Moves to the next key.

        Returns:
            Int64 tensor of shape `[2]`, for one step only.

        Raises:
            RuntimeError: as `require_own_process`. A traced step does not see
                it: whoever charges its steps has to ask.
        """
        self.require_own_process()
        following, key = tf.unstack(
            tf.random.experimental.stateless_split(self._variable, 2)
        )
        self._variable.assign(following)
        return key


def noisy(
    key, sums: list, noises: list, secure: bool = False, dtype: str = "float32"
) -> list:
    """Rounds sums to grids, and adds Gaussian noise to them.

    Formal guarantees: each result is the exact sum of a rounded sum and of
    noise on the same grid, as `grid.GridNoise` says, cast to `dtype` at the
    end. All numbers are independent. Their random bits are Philox's or, where
    XLA compiles, ThreeFry's (Salmon et al. 2011), of a key and a counter of 64
    secret bits each. With `secure`, they are those of the operating system's
    cryptographic generator.

    Args:
        key: int64 tensor of shape `[2]`, used for this call alone.
        sums: list of float32 or float64 tensors.
        noises: list of `grid.GridNoise`, one for each sum; None for one that
            is only cast.
        secure: bool. Defaults to `False`.
        dtype: string, of the results, `"float32"` or `"float64"`. Defaults to
            `"float32"`.

    Returns:
        List of tensors of the shapes of `sums`.
    """
    if not sums:
        return []
    total = sum(s.shape.num_elements() for s in sums)
    parts = _parts([s.shape.num_elements() for s in sums], noises)
    if secure:
        keys = [None] * len(parts)
        draw = _noisy_by_system
    elif _is_in_xla():
        # In XLA, splitting a key keeps only 32 bits of each half. So all
        # numbers share one key, and each part has its own range of counters.
        keys = _keys_of_one_count(key, parts, sums)
        draw = _noisy_by_threefry
    else:
        keys = tf.unstack(
            tf.random.experimental.stateless_split(key, len(parts))
        )
        is_on_gpu = tf.config.list_logical_devices("GPU")
        if is_on_gpu or total < COMPILED:
            draw = _noisy_by_philox
        else:
            draw = _noisy_in_pieces
    results: list = [None] * len(sums)
    for part, part_key in zip(parts, keys, strict=True):
        flat = [tf.reshape(sums[k], [-1]) for k in part]
        vector = flat[0]
        if len(flat) > 1:
            vector = tf.concat([tf.cast(f, tf.float64) for f in flat], 0)
        if noises[part[0]] is None:
            drawn = tf.cast(vector, dtype)
        else:
            drawn = draw(noises[part[0]], part_key, vector, dtype)
        pieces = tf.split(drawn, [f.shape[0] for f in flat])
        for k, piece in zip(part, pieces, strict=True):
            results[k] = tf.reshape(piece, sums[k].shape)
    return results


def _parts(counts, noises):
    """Indices of sums that are drawn together: small, of one distribution."""
    few: dict = {}
    many = []
    for k, (count, noise) in enumerate(zip(counts, noises, strict=True)):
        if count > PIECE:
            many.append([k])
        else:
            few.setdefault(noise, []).append(k)
    return [*few.values(), *many]


def _keys_of_one_count(key, parts, sums):
    """Pairs of the key and the count of the numbers in earlier parts."""
    keys, before = [], 0
    for part in parts:
        keys.append((key, before))
        before += sum(sums[k].shape.num_elements() for k in part)
    if before > 2**32:
        raise ValueError(
            f"Expected at most 2^32 numbers to draw at once, got {before:,}: "
            "the words of the counter would be used again."
        )
    return keys


def _noisy_in_pieces(noise, key, vector, dtype):
    """The noisy vector, in pieces that XLA has compiled for a CPU.

    A few are drawn apart from the sums, so that nothing waits for these.
    """
    count = vector.shape[0]
    pieces = -(-count // PIECE)
    size = PIECE
    if pieces < _MANY_PIECES:
        size = -(-count // (pieces * PIECES_MULTIPLE)) * PIECES_MULTIPLE
    keys = tf.random.experimental.stateless_split(key, pieces)
    if pieces < _MANY_PIECES:
        vector = tf.pad(vector, [[0, pieces * size - count]])
        numbers = [_compiled_numbers(noise, size)(k) for k in tf.unstack(keys)]
        results = _compiled_sum(noise, dtype)(vector, tf.concat(numbers, 0))
        return results[:count]
    drawn = _compiled(noise, size, dtype)

    def piece(k):
        # One at a time is copied, not all of a long vector.
        numbers = vector[k * size : (k + 1) * size]
        missing = size - tf.size(numbers)
        padded = tf.pad(numbers, [[0, missing]])
        return drawn(keys[k], tf.ensure_shape(padded, [size]))

    results = tf.map_fn(
        piece,
        tf.range(pieces, dtype=tf.int64),
        fn_output_signature=tf.TensorSpec([size], dtype),
    )
    return tf.reshape(results, [-1])[:count]


def _is_in_xla():
    """Returns whether XLA compiles the graph that is traced."""
    graph = tf.compat.v1.get_default_graph()
    return control_flow_util.GraphOrParentsInXlaContext(graph)


def _noisy_by_philox(noise, key, vector, dtype):
    words = tf.unstack(
        tf.random.stateless_uniform(
            [2 * noise.blocks, vector.shape[0]], key, None, None, tf.uint32
        )
    )
    return _noisy(noise, list(zip(words[::2], words[1::2])), vector, dtype)


def _noisy_by_threefry(noise, key, vector, dtype):
    words = list(_threefry_blocks(*key, vector.shape[0], noise.blocks))
    return _noisy(noise, words, vector, dtype)


@functools.lru_cache(maxsize=256)
def _compiled(noise, count, dtype):
    """A compiled function of a key and a vector of `count` numbers."""

    def draw(key, vector):
        return _noisy_by_threefry(noise, (key, 0), vector, dtype)

    return tf.function(draw, jit_compile=True, autograph=False)


@functools.lru_cache(maxsize=256)
def _compiled_numbers(noise, count):
    """A compiled function of a key: `count` numbers of the noise."""

    def draw(key):
        words = list(_threefry_blocks(key, 0, count, noise.blocks))
        return _numbers(noise, words)

    return tf.function(draw, jit_compile=True, autograph=False)


@functools.lru_cache(maxsize=256)
def _compiled_sum(noise, dtype):
    """A compiled function of a vector and of numbers: the noisy vector."""

    def add(vector, numbers):
        return _with_numbers(noise, vector, numbers, dtype)

    return tf.function(add, jit_compile=True, autograph=False)


def _noisy_by_system(noise, key, vector, dtype):
    """The noisy vector, by the system's generator: `key` is not used."""
    count = vector.shape[0]
    words = tf.numpy_function(
        _words_of_system, [2 * noise.blocks, count], tf.uint32
    )
    words = tf.unstack(tf.ensure_shape(words, [2 * noise.blocks, count]))
    return _noisy(noise, list(zip(words[::2], words[1::2])), vector, dtype)


def _words_of_system(rows, count):
    """Random words from the operating system's generator."""
    bits = secrets.token_bytes(4 * rows * count)
    return np.frombuffer(bits, np.uint32).reshape(rows, count)


def _noisy(noise, words, vector, dtype):
    return _with_numbers(noise, vector, _numbers(noise, words), dtype)


def _numbers(noise, words):
    thresholds, aliases = grid.table(noise)
    return noise.numbers(words, (tf.constant(thresholds), tf.constant(aliases)))


def _with_numbers(noise, vector, numbers, dtype):
    # Cast here, where XLA makes no float64 copy of all numbers.
    vector = tf.cast(vector, tf.float64)
    return tf.cast(noise.noisy(vector, numbers), dtype)


def _threefry_blocks(key, before, count, blocks):
    """Yields pairs of uint32 words `[count]`, one for each block.

    The first half of the key is the cipher's; the second half is the first
    counter: that of block j of number i has `before + i` and j more in its two
    words.
    """
    *cipher, begin, block = tf.unstack(
        tf.reshape(tf.bitcast(key, tf.uint32), [4])
    )
    begin = _numbers_from(begin + tf.constant(before, tf.uint32), count)
    for j in range(blocks):
        yield threefry.encrypt(cipher, [begin, tf.fill([count], block + j)])


def _numbers_from(begin, count):
    """Consecutive uint32 numbers `[count]`, of a scalar that is no constant.

    As the sum of two short ranges: TensorFlow would store a long one in the
    compiled program, as many bytes as the weights have.
    """
    width = max(1, min(count, _LONGEST_RANGE))
    rows = -(-count // width)
    starts = begin + width * tf.cast(tf.range(rows), tf.uint32)
    numbers = starts[:, tf.newaxis] + tf.cast(tf.range(width), tf.uint32)
    return tf.reshape(numbers, [-1])[:count]
