"""The cipher encrypts as its authors' own program does."""

import numpy as np
import pytest
import tensorflow as tf

from tf_dpsub.primitives import threefry

ONES = 2**32 - 1


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize(
    "key, words, expected",
    [
        # Random123, kat_vectors, threefry2x32 of 20 rounds.
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((ONES, ONES), (ONES, ONES), (0x1CB996FC, 0xBB002BE7)),
        (
            (0x13198A2E, 0x03707344),
            (0x243F6A88, 0x85A308D3),
            (0xC4923A9C, 0x483DF7A0),
        ),
    ],
)
def test_known_answers(key, words, expected, jit_compile):
    arguments = tf.constant([key, words], tf.uint32)
    encrypt = tf.function(
        lambda key, words: threefry.encrypt(tf.unstack(key), tf.unstack(words)),
        jit_compile=jit_compile,
    )
    np.testing.assert_array_equal(encrypt(*tf.unstack(arguments)), expected)


def test_words_broadcast():
    many = tf.constant(range(5), tf.uint32)
    one = tf.constant(7, tf.uint32)
    together = threefry.encrypt([one, one], [many, one])
    for k, word in enumerate(tf.unstack(many)):
        alone = threefry.encrypt([one, one], [word, one])
        np.testing.assert_array_equal([t[k] for t in together], alone)
