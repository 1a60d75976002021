"""A matrix that is used several times, whose rows are too large to keep."""

import tensorflow as tf

from tf_dpsub.gradients import precision
from tf_dpsub.gradients.graph import sites, terms
from tf_dpsub.gradients.graph.constants import static_shape
from tf_dpsub.gradients.per_example import ROUNDING_MARGIN
from tf_dpsub.gradients.rows import add_in_order

# Operations of a view that keep the order of all numbers.
_SAME_ORDER = (
    "Cast",
    "EnsureShape",
    "ExpandDims",
    "Identity",
    "Reshape",
    "Squeeze",
)


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


def _of_uses(kind):
    """Property: the tensors of a kind that the sites of all uses have."""
    return property(
        lambda self: sites.tensors_of(self._sites, kind),
        lambda self, tensors: sites.replace_tensors(self._sites, kind, tensors),
    )


class Tied(sites.Site):
    """Rows that are sums over several uses of one matrix.

    Every use is a sum of outer products of a term along axis 0 of the matrix
    and one along axis 1, so the norm of the sum follows from the inner
    products of all terms of all uses.

    Args:
        uses: list of `(site, view)`, for which `is_factored` holds.

    Attributes:
        uses: as given.
    """

    def __init__(self, uses: list):
        self.uses = uses
        super().__init__(uses[0][1].source, self.factors)

    factors = _of_uses("factors")
    determinants = _of_uses("determinants")

    @property
    def _sites(self):
        return [site for site, _ in self.uses]

    def nonzero(self):
        flags = [site.nonzero() for site, _ in self.uses]
        return tf.reduce_any(tf.stack(flags), axis=0)

    def sq_magnitudes(self):
        magnitudes = [tf.sqrt(site.sq_magnitudes()) for site, _ in self.uses]
        return tf.square(add_in_order(magnitudes))

    def sq_norms(self):
        factors = [_factors(site, view) for site, view in self.uses]
        total = tf.zeros([self.batch_size], tf.float64)
        self._sq_norms_of_uses = []
        for j, (rows_j, columns_j) in enumerate(factors):
            for k, (rows_k, columns_k) in enumerate(factors[: j + 1]):
                products = terms.inner(rows_j, rows_k) * terms.inner(
                    columns_j, columns_k
                )
                product = tf.reduce_sum(products, [1, 2])
                total += (1.0 if j == k else 2.0) * product
                if j == k:
                    self._sq_norms_of_uses.append(tf.cast(product, tf.float32))
        total = tf.cast(total, tf.float32)
        magnitudes = self.sq_magnitudes()
        cancelled = total < sites.CANCELLATION * magnitudes
        return tf.cond(
            tf.reduce_any(cancelled),
            lambda: tf.where(cancelled, self._sq_norms_one_by_one(), total),
            lambda: total,
        )

    @property
    def merged_terms(self):
        return max(site.merged_terms for site in self._sites)

    @property
    def merged_uses(self) -> int:
        """Number of uses that add up terms with those of other rows."""
        return sum(site.merged_terms > 1 for site in self._sites)

    # All uses round the same coordinates: lengths add up, not their squares.

    def sq_level(self, most, sq_magnitudes):
        levels = [
            tf.sqrt(site.sq_level(most, site.sq_magnitudes()))
            for site in self._sites
        ]
        return tf.square(add_in_order(levels))

    def sq_length(self, sq_norms):
        if self.merged_uses == 0:
            return sq_norms
        margin = ROUNDING_MARGIN + self.norm_margin
        lengths = [
            # Where terms of a use cancel, it may come out below zero.
            tf.sqrt(tf.nn.relu(sq_norm) + margin * site.sq_magnitudes())
            for site, sq_norm in zip(self._sites, self._sq_norms_of_uses)
            if site.merged_terms > 1
        ]
        return tf.square(add_in_order(lengths))

    @property
    def longest_sum(self):
        return 2 * sum(_factors(*use)[0].count for use in self.uses)

    @property
    def norm_margin(self):
        return super().norm_margin + precision.gram_margin(*self.shape)

    def _sq_norms_one_by_one(self):
        def sq_norm(i):
            row = tf.add_n(
                [
                    view.pull_back_rows(site.example(i).rows())
                    for site, view in self.uses
                ]
            )
            return tf.reduce_sum(tf.square(row))

        return tf.map_fn(
            sq_norm, tf.range(self.batch_size), fn_output_signature=tf.float32
        )

    def rows(self):
        return tf.add_n(
            [view.pull_back_rows(site.rows()) for site, view in self.uses]
        )

    def weighted_sum(self, c):
        # Uses may cancel: for those that add up terms in float32, factors hold
        # what one adds up to a length. Rows that are formed may be longer.
        sums = []
        for site, view in self.uses:
            factors = c if site.merged_terms > 1 else tf.cast(c, tf.float64)
            total = view.pull_back(site.weighted_sum(factors))
            sums.append(tf.cast(total, tf.float64))
        return tf.add_n(sums)


def _factors(site, view):
    """Terms of a site along axis 0 and axis 1 of the variable, or None.

    None, too, where their inner products are not known.
    """
    pair = factored(site, view, view.source.shape[0])
    if pair is None or any(isinstance(t, terms.Patches) for t in pair):
        return None
    return pair


def factored(site, view, inputs: int):
    """Terms of a site, as matrices of the numbers of a variable in order.

    Args:
        site: `sites.Site`.
        view: `View`, through which the site sees the variable.
        inputs: int, the rows of a matrix.

    Returns:
        Pair of `terms.Terms`, along the rows of a matrix and along its columns;
        None where rows are no such sum.
    """
    rows, is_swapped = inputs, False
    for op in view.ops:
        if op.type == "Transpose":
            shape = static_shape(op.inputs[0])
            if len(shape) != 2 or shape[0] != rows:
                return None
            if view.permutation(op) == [1, 0]:
                rows, is_swapped = shape[1], not is_swapped
        elif op.type not in _SAME_ORDER:
            return None
    pair = site.factored(rows)
    return pair[::-1] if pair and is_swapped else pair
