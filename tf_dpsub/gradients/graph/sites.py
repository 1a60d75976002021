"""Sites: the operations in which a weight meets the batch.

A site knows the per-example gradients with respect to the tensor that enters
the operation (`weight`), from two per-example tensors: what the operation
multiplies it by, and the gradient of the loss at its output. It keeps them
with the batch in front, as float32.

Source of the norm of a sum of outer products by Gram matrices: Li, Tramèr,
Liang, Hashimoto, "Large Language Models Can Be Strong Differentially Private
Learners" (2022), section 4.
"""

import abc
import string

import numpy as np
import tensorflow as tf

from tf_dpsub.gradients import precision
from tf_dpsub.gradients.graph import rules, terms
from tf_dpsub.gradients.graph.constants import ConstantFolder, static_shape
from tf_dpsub.gradients.graph.states import PerExample, Unproven
from tf_dpsub.gradients.rows import (
    add_in_order,
    any_nonzero,
    combine_rows,
    inner_products,
    merged_terms,
    outer_sums,
    reshape,
    scale_rows,
    sum_squares,
    weighted_products,
)
from tf_dpsub.gradients.tracing import traced_by_shape

# Rows of at most this many floats are kept: the weighted sum reuses them.
KEPT_ROWS = 2**22

# Copies of this many floats or more are made only when they are needed: those
# of all inputs of all layers would be in memory at the peak of a step. Smaller
# ones may be made while a core is idle.
LARGE = 2**18

# Below this share of the magnitudes in it, a norm computed from Gram matrices
# has lost too many digits: rows are formed instead.
CANCELLATION = 2.0**-12

# Nothing else is on the axis of the batch, as in most layers.
_PLAIN = PerExample(0, 1, 1)

# Squares of entries below 2^-63 may be flushed to zero: no factor counts as
# smaller than it would be with this mean square.
UNDERFLOW = 2.0**-100


def size(shape):
    """Number of entries, an int."""
    return int(np.prod(shape, dtype=np.int64))


def not_before(gradient):
    """Context whose operations wait for the gradient at a site, if large."""
    is_large = size(gradient.shape) >= LARGE
    return tf.control_dependencies([gradient] if is_large else [])


def batch_first(tensor, state, batch_size, dtype=tf.float32):
    """`tensor` as `[batch, outer, inner, ...]`, of a type if it is a float.

    The axis that holds the batch is taken apart, and `outer` and `inner` stay
    in its place.
    """
    if tensor.dtype.is_floating:
        tensor = tf.cast(tensor, dtype)
    shape, axis = static_shape(tensor), state.axis
    split = [state.outer, batch_size, state.inner]
    if axis or state.outer > 1:
        tensor = reshape(tensor, shape[:axis] + split + shape[axis + 1 :])
        rank = len(shape) + 2
        others = [k for k in range(rank) if k != axis + 1]
        tensor = tf.transpose(tensor, [axis + 1, *others])
    return reshape(
        tensor,
        [
            batch_size,
            *shape[:axis],
            state.outer,
            state.inner,
            *shape[axis + 1 :],
        ],
    )


class Site(abc.ABC):
    """One use of a weight by the batch.

    Attributes:
        weight: the public tensor that enters the operation.
        shape: its static shape.
        factors: list of tensors `[batch, ...]`; all results follow from them.
            They are `precision.rounded`.
    """

    def __init__(self, weight, factors):
        self.weight = weight
        self.shape = static_shape(weight)
        self.factors = [precision.rounded(f) for f in factors]
        self.batch_size = factors[0].shape[0]
        self._computed: dict = {}

    @property
    def determinants(self):
        """All tensors that the rows follow from, a list."""
        return self.factors

    @determinants.setter
    def determinants(self, tensors):
        self.factors = list(tensors)

    def _once(self, function):
        """What a function of the factors returns, built once in each graph.

        A tensor of a branch or a loop cannot be used outside of it.
        """
        graph = tf.compat.v1.get_default_graph()
        key = function, graph, *(f.ref() for f in self.factors)
        if key not in self._computed:
            self._computed[key] = function()
        return self._computed[key]

    def factored(self, inputs: int):
        """Terms of the rows, as matrices of the weight's numbers in order.

        Args:
            inputs: int, the rows of a matrix.

        Returns:
            Pair of `terms.Terms`, along the rows of a matrix and along its
            columns; None where rows are no such sum.
        """
        return None

    @abc.abstractmethod
    def sq_magnitudes(self):
        """Squared bounds of a row's norm and of all sums formed for it.

        Returns:
            Float32 `[batch]`: not finite where the row may not be.
        """

    @abc.abstractmethod
    def sq_norms(self):
        """Squared norms of the rows, `[batch]`."""

    @property
    @abc.abstractmethod
    def longest_sum(self) -> int:
        """Number of products that are added up in `sq_norms`, at most."""

    @property
    def norm_margin(self) -> float:
        """Share of `sq_magnitudes` that `sq_norms` may lack, of long sums."""
        return precision.norm_margin(self.longest_sum)

    @property
    def merged_terms(self) -> int:
        """Terms of a row that `weighted_sum` adds up with those of others.

        That is in float32; of rows that are formed first, it is 1.
        """
        return 1

    def sq_level(self, most: int, sq_magnitudes):
        """The share of a site in `PerExampleGradients.sq_levels`.

        Args:
            most: int, the most merged terms of any site.
            sq_magnitudes: what `sq_magnitudes` returned.
        """
        if self.merged_terms == 1:
            return tf.zeros_like(sq_magnitudes)
        return (self.merged_terms / most) ** 2 * sq_magnitudes

    def sq_length(self, sq_norms):
        """Squared norms of all that is added up for a row in float32.

        Args:
            sq_norms: what `sq_norms` returned: they are longer only where a
                row is a sum of several that are added up apart.
        """
        return sq_norms

    def nonzero(self):
        """Which rows may not be zero, bool `[batch]`.

        A row is a sum of products of numbers of all its factors.
        """
        flags = [any_nonzero([f]) for f in self.factors if f.dtype.is_floating]
        return tf.reduce_all(tf.stack(flags), axis=0)

    @abc.abstractmethod
    def rows(self):
        """`[batch, *shape]`."""

    def gram(self):
        """Inner products of the rows, `[batch, batch]`."""
        return inner_products(self.rows())

    @abc.abstractmethod
    def weighted_sum(self, c):
        """Sum of `c[i]` times row i, of shape `shape`.

        Its type is that of `c`, or float64.
        """

    def combinations(self, weights):
        """Sums of `weights[i]` times row i, of shape `[size, k]`."""
        return combine_rows(weights, self.rows())


def tensors_of(all_sites, kind: str) -> list:
    """The `"factors"`, or `"determinants"`, of some sites."""
    return [t for site in all_sites for t in getattr(site, kind)]


def replace_tensors(all_sites, kind: str, tensors):
    """Replaces the tensors that `tensors_of` returns, in their order."""
    tensors = iter(tensors)
    for site in all_sites:
        setattr(site, kind, [next(tensors) for _ in getattr(site, kind)])


class Stored(Site):
    """Rows that are formed in any case, such as those of a bias.

    Args:
        weight: the tensor that enters the operation.
        rows: `[batch, *axes]`, or a list of them, the parts along one more
            axis in front of `axes`.
        order: list of int, the transposition of `axes` that gives, up to a
            reshape, the weight's. Defaults to `None`, no transposition.
    """

    def __init__(self, weight, rows, order: list | None = None):
        self._is_whole = not isinstance(rows, list)
        super().__init__(weight, [rows] if self._is_whole else rows)
        self._order = order or list(range(rows.shape.rank - 1))

    def nonzero(self):
        return any_nonzero(self.factors)

    def sq_magnitudes(self):
        return self.sq_norms()

    @property
    def longest_sum(self):
        return 0

    def sq_norms(self):
        return self._once(self._compute_sq_norms)

    def _compute_sq_norms(self):
        return add_in_order([sum_squares(part) for part in self.factors])

    def rows(self):
        order = [0] + [axis + 1 for axis in self._order]
        rows = _transpose(self._whole(self.factors, 1), order)
        return reshape(rows, [self.batch_size, *self.shape])

    def weighted_sum(self, c):
        totals = [
            reshape(_weighted_sum(c, part), part.shape[1:])
            for part in self.factors
        ]
        total = _transpose(self._whole(totals, 0), self._order)
        return reshape(total, self.shape)

    def _whole(self, parts, axis):
        return parts[0] if self._is_whole else tf.stack(parts, axis)


def _weighted_sum(c, rows):
    """Sum of `c[i]` times row i, as `[1, size]`."""
    rows = reshape(rows, [rows.shape[0], size(rows.shape[1:])])
    return precision.matmul(
        tf.expand_dims(c, 0), tf.cast(rows, c.dtype), short=(False, True)
    )


class OuterProducts(Site):
    """Rows that are sums of outer products, in groups.

    `row[b, g] = sum over t of left[b, g, t] outer right[b, g, t]`, reshaped to
    `parts` (the axes of groups, left and right) and transposed by `order`.

    Args:
        weight: the tensor that enters the operation.
        left: `[batch, groups, t, k]`.
        right: `[batch, groups, t, n]`.
        parts: list of int, the axes of a row before the transposition.
        order: list of int, the transposition that gives the weight's axes.
    """

    def __init__(self, weight, left, right, parts: list, order: list):
        super().__init__(weight, [left, right])
        self._parts = parts
        self._order = order
        _, self.groups, self.terms, self.left_size = left.shape.as_list()
        self.right_size = right.shape[3]

    def stored_if_small(self):
        """Converts the site to one with stored rows, where that is cheapest.

        Factors of low precision are multiplied in it, one example at a time,
        or cast up: either way, norms and sums see the same float32 numbers.
        """
        if self.terms > 1 and not self._prefers_gram:
            if self.batch_size * size(self.shape) <= KEPT_ROWS:
                rows = tf.cast(outer_sums(*self.factors), tf.float32)
                rows = reshape(rows, [self.batch_size, *self._parts])
                return Stored(self.weight, rows, self._order)
        self.factors = [tf.cast(f, tf.float32) for f in self.factors]
        return self

    @property
    def kind(self):
        """Key, equal for those sites of a weight that `joined` can merge."""
        return self.groups, tuple(self._parts), tuple(self._order)

    @staticmethod
    def joined(uses: list):
        """Merges sites of one kind: all their terms become its terms.

        Args:
            uses: list of `OuterProducts` of one weight.
        """
        first = uses[0]
        left, right = (
            tf.concat(parts, 2) for parts in zip(*(s.factors for s in uses))
        )
        return OuterProducts(
            first.weight, left, right, first._parts, first._order
        ).stored_if_small()

    @property
    def _prefers_gram(self):
        by_rows = self.left_size * self.right_size
        return self.terms * (self.left_size + self.right_size) < by_rows

    def sq_magnitudes(self):
        return self._once(self._norms)[1]

    def sq_norms(self):
        if self.terms > 1 and not self._prefers_gram:
            return self._sq_norms_by_rows()
        return self._once(self._norms)[0]

    @property
    def longest_sum(self):
        if self.terms == 1:
            return 0
        # Rows are formed where inner products of terms cancel, too.
        return 2 * self.terms

    @property
    def norm_margin(self):
        margin = super().norm_margin
        if self.terms > 1 and self._prefers_gram:
            margin += precision.gram_margin(self.left_size, self.right_size)
        return margin

    def _norms(self):
        """Squared norms of the rows, and their bounds, as `[batch]` each."""
        if self.terms > 1 and self._prefers_gram:
            return _norms_by_gram(*self.factors)
        left, right = _sq_sizes(
            self.factors,
            [tf.reduce_sum(tf.square(f), [2, 3]) for f in self.factors],
        )
        bounds = tf.reduce_sum(left, 1) * tf.reduce_sum(right, 1)
        return tf.reduce_sum(left * right, 1), bounds

    def gram(self):
        if self.terms > 1 or self.groups > 1:
            return super().gram()
        left, right = map(inner_products, self.factors)
        return left * right

    def _sq_norms_by_rows(self):
        if self.batch_size * size(self.shape) > 8 * KEPT_ROWS:
            return _sq_norms_one_by_one(*self.factors)
        return sum_squares(outer_sums(*self.factors))

    def factored(self, inputs):
        if self.groups > 1 or not self._parts:
            return None
        pair = [terms.Dense(tf.squeeze(f, 1)) for f in self.factors]
        first = self._order[0]
        if self._order != [*range(first, len(self._parts)), *range(first)]:
            return None
        if first > 0:
            if size(self._parts[:first]) != self.left_size:
                return None
            pair = pair[::-1]
        return pair if pair[0].size == inputs else None

    def example(self, i):
        """The site of example `i` alone, as a batch of one."""
        left, right = (f[i][None] for f in self.factors)
        return OuterProducts(self.weight, left, right, self._parts, self._order)

    def rows(self):
        rows = reshape(
            outer_sums(*self.factors), [self.batch_size, *self._parts]
        )
        order = [0] + [axis + 1 for axis in self._order]
        return reshape(_transpose(rows, order), [self.batch_size, *self.shape])

    @property
    def merged_terms(self):
        return merged_terms(*self.factors)

    def weighted_sum(self, c):
        total = reshape(weighted_products(c, *self.factors), self._parts)
        return reshape(_transpose(total, self._order), self.shape)

    def combinations(self, weights):
        count = weights.shape[1]
        if (
            self.terms > 1
            or self.groups > 1
            or self._order != sorted(self._order)
            or count > self.left_size
        ):
            return super().combinations(weights)
        left, right = (tf.squeeze(f, [1, 2]) for f in self.factors)
        right = right[:, :, None] * weights[:, None, :]
        right = tf.reshape(right, [self.batch_size, -1])
        total = precision.matmul(
            left, right, transpose_a=True, short=(True, False)
        )
        return tf.reshape(total, [-1, count])


@traced_by_shape
def _sq_norms_one_by_one(left, right):
    return tf.map_fn(
        lambda pair: tf.reduce_sum(tf.square(outer_sums(*pair))),
        (left, right),
        fn_output_signature=tf.float32,
    )


def _sq_sizes(factors, squares):
    """Squared norms of factors, `[batch, groups]`, never too low.

    An underflowing square must not hide a factor from the other one.
    """
    return [s + UNDERFLOW * size(f.shape[2:]) for s, f in zip(squares, factors)]


@traced_by_shape
def _norms_by_gram(left, right):
    """`OuterProducts._norms`, from the products of the terms of a factor."""
    factors = left, right
    grams = [
        precision.matmul_in_parts(
            f, f, transpose_b=True, short=(True, True), dtype=tf.float64
        )
        for f in factors
    ]
    traces = [tf.cast(tf.linalg.trace(g), tf.float32) for g in grams]
    sizes = _sq_sizes(factors, traces)
    bounds = tf.reduce_sum(sizes[0], 1) * tf.reduce_sum(sizes[1], 1)
    norms = tf.reduce_sum(grams[0] * grams[1], [1, 2, 3])
    norms = tf.cast(norms, tf.float32)
    is_tiny = tf.reduce_any(
        (sizes[0] < 2 * UNDERFLOW * size(left.shape[2:]))
        | (sizes[1] < 2 * UNDERFLOW * size(right.shape[2:])),
        1,
    )
    norms = tf.where(is_tiny, bounds, norms)
    cancelled = norms < CANCELLATION * bounds
    norms = tf.cond(
        tf.reduce_any(cancelled),
        lambda: tf.where(cancelled, _sq_norms_one_by_one(left, right), norms),
        lambda: norms,
    )
    return norms, bounds


def _transpose(x, order):
    return x if order == sorted(order) else tf.transpose(x, order)


class Lookup(Site):
    """Rows of a table gathered by per-example indices.

    Args:
        weight: the table, `[entries, ...]`.
        indices: `[batch, t]`, int.
        gradients: `[batch, t, d]`, at the gathered rows.
    """

    def __init__(self, weight, indices, gradients):
        super().__init__(weight, [gradients])
        self.indices = indices

    @property
    def determinants(self):
        return [*self.factors, self.indices]

    @determinants.setter
    def determinants(self, tensors):
        *self.factors, self.indices = tensors

    def _same_entry(self):
        return tf.cast(
            self.indices[:, :, None] == self.indices[:, None, :], tf.float32
        )  # [batch, t, t]

    def sq_magnitudes(self):
        (gradients,) = self.factors
        return gradients.shape[1] * sum_squares(gradients)

    def sq_norms(self):
        # At each term stands the sum over all terms of the same entry, which
        # is then counted as often as the entry occurs.
        same = self._same_entry()  # that of two terms is symmetric
        sums = outer_sums(same, self.factors[0])  # [batch, t, d]
        counts = tf.reduce_sum(same, 2)  # [batch, t]
        return tf.reduce_sum(tf.reduce_sum(tf.square(sums), 2) / counts, 1)

    @property
    def longest_sum(self):
        return 2 * self.indices.shape[1]

    def factored(self, inputs):
        if inputs != self.shape[0]:
            return None
        indices = terms.OneHot(self.indices, inputs)
        return [indices, terms.Dense(self.factors[0])]

    def example(self, i):
        """The site of example `i` alone, as a batch of one."""
        return Lookup(
            self.weight, self.indices[i][None], self.factors[0][i][None]
        )

    def rows(self):
        (gradients,) = self.factors
        entries, width = self.shape[0], gradients.shape[2]
        offsets = entries * tf.range(self.batch_size, dtype=self.indices.dtype)
        is_entry = (self.indices >= 0) & (self.indices < entries)
        # Sums leave out what is below zero, and with an offset it may not be.
        flat = tf.where(is_entry, self.indices + offsets[:, None], -1)
        rows = tf.math.unsorted_segment_sum(
            tf.reshape(gradients, [-1, width]),
            tf.reshape(flat, [-1]),
            entries * self.batch_size,
        )
        return reshape(rows, [self.batch_size, *self.shape])

    def weighted_sum(self, c):
        # One after another: in float64, sums round nothing that matters.
        scaled = tf.cast(scale_rows(c, self.factors[0]), tf.float64)
        total = tf.math.unsorted_segment_sum(
            tf.reshape(scaled, [-1, scaled.shape[2]]),
            tf.reshape(self.indices, [-1]),
            self.shape[0],
        )
        return reshape(total, self.shape)


def contraction(op, k, gradient, operand_state, gradient_state, batch_size):
    """Site of the weight at input `k` of a MatMul, BatchMatMul or Einsum."""
    weight, operand = op.inputs[k], op.inputs[1 - k]
    labels, out = _labels(op)
    weight_labels, operand_labels = list(labels[k]), list(labels[1 - k])
    # Axes of size 1 that are repeated carry no index of their own.
    sizes = dict(zip(out, static_shape(gradient)))

    def without_repeated(labels, tensor):
        return [
            "" if d == 1 and sizes.get(label, 1) > 1 else label
            for label, d in zip(labels, static_shape(tensor))
        ]

    weight_labels = without_repeated(weight_labels, weight)
    operand_labels = without_repeated(operand_labels, operand)
    batch_label = operand_labels[operand_state.axis]
    if batch_label in weight_labels:
        raise Unproven("has a weight with an axis of the batch")
    is_low = {operand.dtype, gradient.dtype} == {tf.bfloat16}
    dtype = tf.bfloat16 if is_low else tf.float32
    is_plain = operand_state == gradient_state == _PLAIN
    left, right = (
        _Labelled(*factor, batch_size, dtype, is_plain)
        for factor in (
            (operand, operand_labels, operand_state),
            (gradient, list(out), gradient_state),
        )
    )
    for label in weight_labels:
        if label and label not in left.labels and label not in right.labels:
            raise Unproven("sums over an axis of the weight alone")
    left.sum_over(set(left.labels) - set(weight_labels) - set(right.labels))
    right.sum_over(set(right.labels) - set(weight_labels) - set(left.labels))
    shared = set(left.labels) & set(right.labels)
    groups = [x for x in weight_labels if x in shared]
    summed = [x for x in left.labels if x in shared and x not in groups]
    lefts = [x for x in weight_labels if x in left.labels and x not in shared]
    rights = [x for x in weight_labels if x in right.labels and x not in shared]
    present = groups + lefts + rights
    sizes = {**left.sizes, **right.sizes}
    return OuterProducts(
        weight,
        left.arranged(groups, summed, lefts),
        right.arranged(groups, summed, rights),
        [sizes[x] for x in present],
        [present.index(x) for x in weight_labels if x],
    ).stored_if_small()


def _labels(op):
    """Labels of the axes of the two inputs and of the output."""
    if op.type == "Einsum":
        return rules.einsum_terms(op)
    if op.type == "MatMul":
        transposed = op.get_attr("transpose_a"), op.get_attr("transpose_b")
    else:
        transposed = op.get_attr("adj_x"), op.get_attr("adj_y")
    batch = string.ascii_uppercase[: len(static_shape(op.outputs[0])) - 2]
    terms = []
    for tensor, matrix, swap in zip(op.inputs, ("mk", "kn"), transposed):
        rank = len(static_shape(tensor))
        batch_labels = batch[len(batch) - (rank - 2) :] if rank > 2 else ""
        terms.append(batch_labels + (matrix[::-1] if swap else matrix))
    return terms, batch + "mn"


class _Labelled:
    """A per-example tensor, batch in front, whose other axes have names.

    The parts that were merged with the batch axis are named "<" and ">".
    """

    def __init__(self, tensor, labels, state, batch_size, dtype, is_plain):
        axis = state.axis
        if is_plain:
            self.tensor = tf.cast(tensor, dtype)
            self.labels = labels[1:]
        else:
            self.tensor = batch_first(tensor, state, batch_size, dtype)
            self.labels = [*labels[:axis], "<", ">", *labels[axis + 1 :]]
        # Axes without a name have size 1.
        shape = self.tensor.shape.as_list()[1:]
        named = [k for k, label in enumerate(self.labels) if label]
        self.labels = [self.labels[k] for k in named]
        self._set(
            reshape(self.tensor, [batch_size, *(shape[k] for k in named)])
        )

    def _set(self, tensor):
        self.tensor = tensor
        self.sizes = dict(zip(self.labels, tensor.shape.as_list()[1:]))

    def sum_over(self, labels):
        axes = [k + 1 for k, label in enumerate(self.labels) if label in labels]
        if axes:
            self.labels = [
                label for label in self.labels if label not in labels
            ]
            total = tf.reduce_sum(tf.cast(self.tensor, tf.float32), axes)
            self._set(tf.cast(total, self.tensor.dtype))

    def arranged(self, *parts):
        """`[batch, ...]` with the axes of each part merged into one."""
        order = [
            self.labels.index(label) + 1 for part in parts for label in part
        ]
        shape = [size([self.sizes[label] for label in part]) for part in parts]
        tensor = _transpose(self.tensor, [0, *order])
        return reshape(tensor, [self.tensor.shape[0], *shape])


def broadcast(op, k, gradient, operand_state, gradient_state, batch_size):
    """Site of a weight that is added, multiplied, selected or repeated."""
    weight = op.inputs[k]
    shape, out = static_shape(weight), static_shape(gradient)
    gradient = tf.cast(gradient, tf.float32)
    if op.type == "Mul":
        gradient *= tf.cast(op.inputs[1 - k], tf.float32)
    elif op.type == "Sub" and k == 1:
        gradient = -gradient
    elif op.type == "SelectV2":
        chosen = op.inputs[0] if k == 1 else ~op.inputs[0]
        gradient = tf.where(chosen, gradient, tf.zeros_like(gradient))
    if op.type == "BiasAdd" and op.get_attr("data_format") == b"NCHW":
        shape = [shape[0]] + [1] * (len(out) - 2)
    aligned = [1] * (len(out) - len(shape)) + shape
    if op.type == "Tile" and any(d not in (1, n) for d, n in zip(aligned, out)):
        raise Unproven("repeats a weight")
    axis = gradient_state.axis
    if aligned[axis] != 1:
        rows = batch_first(gradient, gradient_state, batch_size)
        return Stored(
            weight, _on_own_slice(rows, axis, aligned, static_shape(weight))
        )
    rows, kept = gradient, aligned[1:]
    if gradient_state != _PLAIN:
        rows = batch_first(gradient, gradient_state, batch_size)
        kept = [*aligned[:axis], 1, 1, *aligned[axis + 1 :]]
    summed = [n + 1 for n, d in enumerate(kept) if d == 1]
    if summed:
        rows = tf.reduce_sum(rows, summed)
    return Stored(weight, reshape(rows, [batch_size, *static_shape(weight)]))


def _on_own_slice(rows, axis, aligned, shape):
    """Rows of a weight that has an axis of the batch: zero but in one slice."""
    batch_size = rows.shape[0]
    kept = [*aligned[:axis], None, None, *aligned[axis + 1 :]]
    summed = [n + 1 for n, d in enumerate(kept) if d == 1]
    rows = tf.reduce_sum(rows, summed, keepdims=True)
    # [batch, ..., outer, inner, ...] -> [batch, ..., outer, batch, inner, ...]
    rows = tf.expand_dims(rows, axis + 2)
    mask = [batch_size] + [1] * (rows.shape.rank - 1)
    mask[axis + 2] = batch_size
    return tf.reshape(
        rows * tf.reshape(tf.eye(batch_size), mask), [batch_size, *shape]
    )


def lookup(op, k, gradient, operand_state, gradient_state, batch_size):
    """Site of a table at input 0 of a GatherV2."""
    axis = int(ConstantFolder()(op.inputs[2]))
    if op.get_attr("batch_dims") != 0 or axis != 0:
        raise Unproven("gathers along an axis other than 0")
    indices = op.inputs[1]
    if indices.dtype not in (tf.int32, tf.int64):
        # TensorFlow gathers by these, and has few other kernels for them.
        indices = tf.cast(indices, tf.int64)
    indices = batch_first(indices, operand_state, batch_size)
    gradient = batch_first(gradient, gradient_state, batch_size)
    count = size(indices.shape[1:])
    return Lookup(
        op.inputs[0],
        reshape(indices, [batch_size, count]),
        tf.reshape(gradient, [batch_size, count, -1]),
    )
