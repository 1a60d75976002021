"""The block cipher ThreeFry-2x32, in operations that XLA fuses to one loop."""

import tensorflow as tf

_ROUNDS = 20
_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
# The constant that completes the key.
_PARITY = 0x1BD11BDA


def encrypt(key, words):
    """Encrypts pairs of words: consecutive ones become random bits.

    Args:
        key: list of two uint32 tensors.
        words: the same, of shapes that broadcast with the key's.

    Returns:
        Tuple of two uint32 tensors.

    Reference:
        - [Salmon et al., 2011](https://doi.org/10.1145/2063384.2063405)
    """
    keys = [*key, _xor(_xor(key[0], key[1]), _constant(_PARITY))]
    one, other = words[0] + key[0], words[1] + key[1]
    for k in range(_ROUNDS):
        one += other
        other = _xor(_rotated(other, _ROTATIONS[k % 8]), one)
        if k % 4 == 3:
            injected = k // 4 + 1
            one += keys[injected % 3]
            other += keys[(injected + 1) % 3] + _constant(injected)
    return one, other


def _rotated(word, bits):
    return tf.bitwise.bitwise_or(
        tf.bitwise.left_shift(word, _constant(bits)),
        tf.bitwise.right_shift(word, _constant(32 - bits)),
    )


def _xor(one, other):
    return tf.bitwise.bitwise_xor(one, other)


def _constant(word):
    return tf.constant(word, tf.uint32)
