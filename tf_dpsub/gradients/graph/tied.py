"""A matrix that is used several times, whose rows are too large to keep."""

import tensorflow as tf

from tf_dpsub.gradients.graph import sites
from tf_dpsub.gradients.rows import add_in_order


def is_factored(uses: list):
    """Returns whether uses of a variable can be combined without its rows.

    Args:
        uses: list of `(site, view)`.
    """
    if any(view is None for _, view in uses):
        return False
    batch_size = uses[0][0].batch_size
    shape = uses[0][1].source.shape
    if len(shape) != 2 or batch_size * sites.size(shape) <= sites.KEPT_ROWS:
        return False
    return all(_factors(site, view) is not None for site, view in uses)


class Tied(sites.Site):
    """Rows that are sums over several uses of one matrix.

    Every use is a sum of outer products of a term along axis 0 of the matrix
    and one along axis 1, so the norm of the sum follows from the inner
    products of all terms of all uses.

    Args:
        uses: list of `(site, view)`, for which `is_factored` holds.
    """

    def __init__(self, uses: list):
        self._uses = uses
        super().__init__(uses[0][1].source, self.factors)

    @property
    def factors(self):
        return [f for site, _ in self._uses for f in site.factors]

    @factors.setter
    def factors(self, factors):
        factors = iter(factors)
        for site, _ in self._uses:
            site.factors = [next(factors) for _ in site.factors]

    def nonzero(self):
        flags = [site.nonzero() for site, _ in self._uses]
        return tf.reduce_any(tf.stack(flags), axis=0)

    def sq_magnitudes(self):
        magnitudes = [tf.sqrt(site.sq_magnitudes()) for site, _ in self._uses]
        return tf.square(add_in_order(magnitudes))

    def sq_norms(self):
        factors = [_factors(site, view) for site, view in self._uses]
        total = tf.zeros([self.batch_size])
        for j, (rows_j, columns_j) in enumerate(factors):
            for k, (rows_k, columns_k) in enumerate(factors[: j + 1]):
                products = _inner(rows_j, rows_k) * _inner(columns_j, columns_k)
                total += (1.0 if j == k else 2.0) * tf.reduce_sum(
                    products, [1, 2]
                )
        magnitudes = self.sq_magnitudes()
        cancelled = total < sites.CANCELLATION * magnitudes
        return tf.cond(
            tf.reduce_any(cancelled),
            lambda: tf.where(cancelled, self._sq_norms_one_by_one(), total),
            lambda: total,
        )

    def _sq_norms_one_by_one(self):
        def sq_norm(i):
            row = tf.add_n(
                [
                    view.pull_back_rows(site.example(i).rows())
                    for site, view in self._uses
                ]
            )
            return tf.reduce_sum(tf.square(row))

        return tf.map_fn(
            sq_norm, tf.range(self.batch_size), fn_output_signature=tf.float32
        )

    def rows(self):
        return tf.add_n(
            [view.pull_back_rows(site.rows()) for site, view in self._uses]
        )

    def weighted_sum(self, c):
        return tf.add_n(
            [view.pull_back(site.weighted_sum(c)) for site, view in self._uses]
        )


class _OneHot:
    """Terms that are unit vectors, given by their indices `[batch, t]`."""

    def __init__(self, indices):
        self.indices = indices


def _factors(site, view):
    """Terms of a site along axis 0 and axis 1 of the variable, or None.

    Each is `[batch, t, size of the axis]`, or `_OneHot`.
    """
    swapped = False
    for op in view.ops:
        if op.type == "Transpose":
            swapped = not swapped
        elif op.type not in ("Cast", "Identity", "EnsureShape"):
            return None
    pair = site.matrix_factors()
    if pair is None:
        return None
    pair = [_OneHot(f) if f.dtype.is_integer else f for f in pair]
    return pair[::-1] if swapped else pair


def _inner(a, b):
    """Inner products of all terms of `a` and `b`, `[batch, t of a, t of b]`."""
    if isinstance(a, _OneHot) and isinstance(b, _OneHot):
        same = a.indices[:, :, None] == b.indices[:, None, :]
        return tf.cast(same, tf.float32)
    if isinstance(b, _OneHot):
        return tf.gather(a, b.indices, axis=2, batch_dims=1)
    if isinstance(a, _OneHot):
        return tf.linalg.matrix_transpose(_inner(b, a))
    return tf.matmul(a, b, transpose_b=True)
