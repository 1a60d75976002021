"""Products of float32 tensors that are computed as such, TensorFloat-32 or not.

GPUs multiply float32 matrices several times as fast if they may round them to
TensorFloat-32, numbers of 11 significant bits. That is fine for what a forward
and a backward pass have of one example. Of norms and sums of gradients it is
not: what is clipped has to be what is summed.

A product of numbers of 11 bits is the same with and without that rounding, as
the GPU adds products up in float32. So, where it may happen,

- the factors of per-example gradients are rounded to 11 bits once (`rounded`),
  before norms and sums are taken of them;
- other operands are sums of two tensors of 11 bits each, up to 2^-23 of an
  entry, and their products are sums of products of these; long sums of them are
  taken in float64.

Elsewhere nothing is done: products are those of TensorFlow. How many of them
are added up in float32 is limited on every device: `rows_at_a_time`.

Source of products in parts: Markidis et al., "NVIDIA Tensor Core
Programmability, Performance & Precision" (2018), section V. Of how these units
add up: Fasi et al., "Numerical behavior of NVIDIA tensor cores" (2021).
"""

import contextlib
import functools
import math
import threading
from collections.abc import Callable

import tensorflow as tf

# Clears the last 13 of the 24 significant bits of a float32 number.
_FIRST_BITS = -(2**13)

# Units of a GPU add four products or more at a time to a float32 number, and
# round towards zero: by at most 2^-23 of it, and half as much in the mean. This
# is twice the mean, for each product.
_ROUNDING = 2.0**-25

# Added to squared norms, in case of such units: sums have twice the rounding
# errors for which clipping leaves room.
_MARGIN = 2.0**-9

# Products that are added up in float32 at most, where sums over several rows
# depend on them. A sum that is just above or below a power of two rounds all
# that is added to it afterwards by half as much, or twice: with n rows of norm
# C, and m additions for each, by up to 2^-26 n^2 m C. A CPU adds up products of
# matrices in blocks of at most 512, each beginning at zero; a GPU may add one
# after another.
_LONGEST_SUM = 2**16
_LONGEST_SUM_ON_GPU = 448
# Of products of what is not of 11 bits, where units of a GPU round to zero.
_LONGEST_SUM_TO_ZERO = 2**9

# Products of which any order of addition rounds little enough, where squared
# norms follow from the sums.
SHORT_SUM = 2**9
# More parts than this are added up in a loop.
_MOST_PARTS = 16

_SHORT = (False, False)

_THREAD = threading.local()
# Whether a product was traced in a way that TensorFloat-32 would narrow.
_traced_as_is = False


def narrowed() -> bool:
    """Whether TensorFlow may round operands of float32 products.

    It is asked when a function is traced; see `require_as_traced`.
    """
    global _traced_as_is
    chosen = getattr(_THREAD, "narrowed", None)
    if chosen is not None:
        return chosen
    if not _has_gpu():
        return False
    is_on = tf.config.experimental.tensor_float_32_execution_enabled()
    _traced_as_is |= not is_on
    return is_on


def _has_gpu():
    return bool(tf.config.get_visible_devices("GPU"))


def is_for_gpu() -> bool:
    """Whether what is traced may run on a GPU, of this machine or another."""
    return getattr(_THREAD, "narrowed", None) is not None or _has_gpu()


def require_as_traced():
    """Refuses TensorFloat-32 where steps were, or are to be, traced without.

    On devices that are neither a CPU nor a GPU it is turned off: what it stands
    for there may be narrower.

    Raises:
        ValueError: if it was turned on after steps were traced.
    """
    kinds = {d.device_type for d in tf.config.get_visible_devices()}
    if not all(kind.endswith(("CPU", "GPU")) for kind in kinds):
        tf.config.experimental.enable_tensor_float_32_execution(False)
    if _traced_as_is and narrowed():
        raise ValueError(
            "Expected TensorFloat-32 to stay off, as it was when steps were "
            "traced, got it turned on: sums of clipped gradients would be "
            "narrowed. Turn it on before the first model is compiled, by "
            "tf.config.experimental.enable_tensor_float_32_execution(True), or "
            "leave it off."
        )


@contextlib.contextmanager
def tensor_float_32(is_on: bool):
    """A context for programs of a GPU on which it is on, or off.

    Another thread that traces meanwhile is not in it.
    """
    switch = tf.config.experimental
    before = (
        switch.tensor_float_32_execution_enabled(),
        getattr(_THREAD, "narrowed", None),
    )
    switch.enable_tensor_float_32_execution(is_on)
    _THREAD.narrowed = is_on
    try:
        yield
    finally:
        was_on, _THREAD.narrowed = before
        switch.enable_tensor_float_32_execution(was_on)


def rounded(x):
    """`x` with 11 significant bits, where float32 products are narrowed.

    Numbers halfway go away from zero. What is not finite stays so, and the
    largest numbers become infinite. Other types are returned as they are.
    """
    if x.dtype != tf.float32 or not narrowed():
        return x
    # Twice the last bits reach the next number of 11 bits, if they are at least
    # half of the way to it.
    return _first_bits(x + (x - _first_bits(x)))


def _first_bits(x):
    bits = tf.bitwise.bitwise_and(tf.bitcast(x, tf.int32), _FIRST_BITS)
    return tf.bitcast(bits, tf.float32)


def _parts(x, is_short):
    if is_short:
        return [x]
    first = rounded(x)
    return [first, rounded(x - first)]


def bilinear(function: Callable, a, b, short: tuple = _SHORT):
    """A product of two tensors, as precise as float32 is.

    Args:
        function: callable of two tensors, linear in both: one operation.
        a, b: tensors of one type.
        short: pair of bools, whether each is `rounded` already, or made of such
            numbers alone. Defaults to neither.

    Returns:
        Tensor.
    """
    if a.dtype != tf.float32 or not narrowed():
        return function(a, b)
    of_a, of_b = (_parts(x, is_short) for x, is_short in zip((a, b), short))
    # The small ones first.
    pairs = [(i, j) for i in reversed(of_a) for j in reversed(of_b)]
    return functools.reduce(tf.add, (function(*pair) for pair in pairs))


def rows_at_a_time(terms: int) -> int:
    """The number of rows whose products may be added up in float32, >= 1.

    Formal guarantees: what one row more or less changes in the rounding of a
    sum is then within what clipping leaves for it, whatever is added up.

    Args:
        terms: int, the number of products of a row in each entry of a sum.
    """
    longest = _LONGEST_SUM_ON_GPU if is_for_gpu() else _LONGEST_SUM
    return max(longest // terms, 1)


def matmul(a, b, transpose_a=False, transpose_b=False, short: tuple = _SHORT):
    """`tf.matmul`, as `bilinear` computes it."""
    return _of_terms(
        a.shape[-2 if transpose_a else -1],
        functools.partial(
            tf.matmul, transpose_a=transpose_a, transpose_b=transpose_b
        ),
        a,
        b,
        short,
    )


def matmul_in_parts(
    a,
    b,
    transpose_a=False,
    transpose_b=False,
    short: tuple = _SHORT,
    longest: int = SHORT_SUM,
    dtype=tf.float32,
):
    """`matmul` of short float32 sums, which are added up in float64.

    Formal guarantees: the error of an entry is at most `2^-24 longest` times
    the sum of its products' magnitudes, in whatever order products are added
    up; on a GPU with TensorFloat-32, of two `short` tensors, twice as much.

    Args:
        a, b, transpose_a, transpose_b, short: as for `matmul`.
        longest: int, products that are added up in float32. Defaults to
            `SHORT_SUM`.
        dtype: the type of the result. Defaults to float32.

    Returns:
        Tensor of that type.
    """
    a, b = tf.convert_to_tensor(a), tf.convert_to_tensor(b)
    axes = a.shape.rank - 1 - transpose_a, b.shape.rank - 2 + transpose_b
    count = a.shape[axes[0]]

    number = max(1, -(-count // longest))
    if number == 1:
        return tf.cast(matmul(a, b, transpose_a, transpose_b, short), dtype)

    def product(a, b):
        part = matmul(a, b, transpose_a, transpose_b, short)
        return tf.cast(part, tf.float64)

    size = -(-count // number)

    # Slices take two thirds of the time of `tf.split` and of its parts.
    def product_from(begin, size):
        return product(
            *(_slice(x, axis, begin, size) for x, axis in zip((a, b), axes))
        )

    if number <= _MOST_PARTS:
        parts = (
            product_from(begin, min(size, count - begin))
            for begin in range(0, count, size)
        )
        return tf.cast(functools.reduce(tf.add, parts), dtype)
    sides = (
        a.shape[-1 if transpose_a else -2],
        b.shape[-2 if transpose_b else -1],
    )
    # One at a time: all parts behind one another would be a copy.
    whole, rest = divmod(count, size)
    _, total = tf.while_loop(
        lambda i, _: i < whole,
        lambda i, total: (i + 1, total + product_from(i * size, size)),
        (tf.constant(0), tf.zeros([*a.shape[:-2], *sides], tf.float64)),
        parallel_iterations=1,
    )
    if rest:
        total += product_from(count - rest, rest)
    return tf.cast(total, dtype)


def _slice(x, axis, begin, size):
    """So many entries along an axis, from a place that may be a tensor."""
    begins = [0] * x.shape.rank
    sizes = [-1 if d is None else d for d in x.shape]
    begins[axis], sizes[axis] = begin, size
    return tf.slice(x, begins, sizes)


def einsum(equation: str, a, b):
    """`tf.einsum` of two tensors, as `bilinear` computes it."""
    inputs, output = equation.split("->")
    labels = inputs.split(",")[0]
    summed = [n for label, n in zip(labels, a.shape) if label not in output]
    return _of_terms(
        math.prod(summed), functools.partial(tf.einsum, equation), a, b
    )


def tensordot(a, b, axes, short: tuple = _SHORT):
    """`tf.tensordot`, as `bilinear` computes it."""
    return bilinear(functools.partial(tf.tensordot, axes=axes), a, b, short)


def matvec(a, b, transpose_a=False):
    """`tf.linalg.matvec`, as `bilinear` computes it."""
    return bilinear(
        functools.partial(tf.linalg.matvec, transpose_a=transpose_a), a, b
    )


def _of_terms(terms, function, a, b, short=_SHORT):
    """`bilinear`, of products that are added up by so many."""
    is_long = terms > _LONGEST_SUM_TO_ZERO and not all(short)
    if a.dtype != tf.float32 or not is_long or not narrowed():
        return bilinear(function, a, b, short)
    product = function(tf.cast(a, tf.float64), tf.cast(b, tf.float64))
    return tf.cast(product, tf.float32)


def norm_margin(terms: int) -> float:
    """Share of the magnitudes that a squared norm may lack.

    It is what sums of products lose on a GPU that rounds their operands.

    Args:
        terms: int, the largest number of products that are added up in it.
    """
    return terms * _ROUNDING if narrowed() else 0.0


def gram_margin(*sizes: int) -> float:
    """Share of the squared magnitudes that a norm by inner products may lack.

    A squared norm of a sum of outer products adds up products of two inner
    products, one of each side; `matmul_in_parts` computes these.

    Args:
        *sizes: ints, the lengths of the vectors of each side.
    """
    unit = 2.0**-23 if narrowed() else 2.0**-24
    return unit * sum(min(size, SHORT_SUM) + 4 for size in sizes)


def bound(sq_norms):
    """Squared norms, larger by what longer sums of rows need of the clip."""
    return (1 + _MARGIN) * sq_norms if narrowed() else sq_norms
