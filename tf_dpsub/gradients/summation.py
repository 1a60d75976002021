"""In which order this machine adds up what products of matrices consist of.

A product of matrices that adds up terms of several rows goes through partial
sums. One after another, these hold of one row at most a part. Some programs
have several partial sums at a time, of every other term, say, which then hold
parts of many rows: where terms cancel, these are much longer than their sum.
"""

import functools

import numpy as np
import tensorflow as tf

from tf_dpsub.gradients import precision, tracing

# Two terms of this size, of opposite signs, and terms of 1 that they absorb;
# multiples of `_EXACT` they do not.
_LARGE, _EXACT = 2.0**25, 4
# The distances of two such terms, in stretches of products as long as this.
_DISTANCES = (1, 2, 3, 5, 8, 13, 16, 31)
_STRETCH = 64
# Programs for larger matrices are those for matrices of about this size. What
# is left beyond a multiple of their tiles may take another one.
_LARGEST_SIDE, _TILE = 1024, 192


def is_in_order(products: int, sides: tuple, groups: int = 1) -> bool:
    """Whether a product of float32 matrices adds up one product after another.

    Blocks of them may begin anew. It is measured, for matrices of these sizes,
    once in a process; on a GPU, and where XLA compiles, the answer is no.

    Args:
        products: int, the number of them in an entry of the result.
        sides: pair of ints, the sizes of the result.
        groups: int, the number of such matrices. Defaults to `1`.
    """
    if precision.is_for_gpu() or tracing.is_in_xla():
        return False
    rows, columns = (
        min(side, _LARGEST_SIDE + (side - _LARGEST_SIDE) % _TILE)
        for side in sides
    )
    with tf.init_scope():
        return _is_exact(products, rows, columns, groups)


@functools.lru_cache(maxsize=1024)
def _is_exact(products, rows, columns, groups):
    """Whether large terms that cancel leave the sum of others as it is."""
    terms = _terms(products)
    left = np.broadcast_to(terms[:, None], [groups, products, rows])
    right = np.ones([groups, products, columns], np.float32)
    product = tf.function(
        functools.partial(precision.matmul, transpose_a=True), autograph=False
    )
    if groups == 1:
        left, right = left[0], right[0]
    total = product(tf.constant(left), tf.constant(right))
    return bool(tf.reduce_all(total == terms.sum(dtype=np.float64)))


def _terms(count):
    """Terms that only an addition of one after another adds up exactly."""
    terms = np.ones(count, np.float32)
    for k, begin in enumerate(range(0, count, _STRETCH)):
        end = begin + _DISTANCES[k % len(_DISTANCES)]
        if end < count:
            # So many that there is a multiple of `_EXACT` before the next.
            terms[begin : end + 1 + -(end + 1 - begin) % _EXACT] = 0
            terms[begin], terms[end] = _LARGE, -_LARGE
    return terms
