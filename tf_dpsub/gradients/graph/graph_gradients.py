"""Per-example gradients of any proven graph, without a registry of layers."""

import tensorflow as tf
from tensorflow.python.ops import handle_data_util

from tf_dpsub.gradients import precision, zero_terms
from tf_dpsub.gradients.graph import (
    converters,
    convolutions,
    functions,
    loop_sites,
    sites,
    sources,
    terms,
    tied,
)
from tf_dpsub.gradients.graph.provenance import PUBLIC, Provenance, handle
from tf_dpsub.gradients.graph.states import (
    Mixed,
    MixesExamples,
    PerExample,
    Unproven,
)
from tf_dpsub.gradients.graph.views import View
from tf_dpsub.gradients.per_example import (
    ROUNDING_MARGIN,
    PerExampleGradients,
    tf_variable,
)
from tf_dpsub.gradients.rows import add_in_order, combine_rows, mask_rows
from tf_dpsub.gradients.tracing import (
    is_in_xla,
    shared_integers,
    traced_by_shape,
)

# Squares of magnitudes beyond this might overflow when margins are added.
_LARGEST_SQUARE = 1e37
# So many clips long may be what is added up for all uses of tied weights.
_LENGTH_OF_USES = 2

# Site constructors, and the inputs at which a weight may stand.
_SITES = {
    "MatMul": (sites.contraction, (0, 1)),
    "BatchMatMulV2": (sites.contraction, (0, 1)),
    "BatchMatMulV3": (sites.contraction, (0, 1)),
    "Einsum": (sites.contraction, (0, 1)),
    "Conv2D": (convolutions.convolution, (1,)),
    "Conv3D": (convolutions.convolution, (1,)),
    "DepthwiseConv2dNative": (convolutions.convolution, (1,)),
    "Conv2DBackpropInput": (convolutions.convolution, (1,)),
    "Conv3DBackpropInputV2": (convolutions.convolution, (1,)),
    "BiasAdd": (sites.broadcast, (1,)),
    "AddV2": (sites.broadcast, (0, 1)),
    "Sub": (sites.broadcast, (0, 1)),
    "Mul": (sites.broadcast, (0, 1)),
    "SelectV2": (sites.broadcast, (1, 2)),
    "BroadcastTo": (sites.broadcast, (0,)),
    "Tile": (sites.broadcast, (0,)),
    "GatherV2": (sites.lookup, (0,)),
}
_REPEATS = ("BroadcastTo", "Tile")


class GraphGradients(PerExampleGradients):
    """Per-example gradients found and proved in the graph being traced.

    The few operations in which a weight meets the batch are found by a walk
    from the weight. There, the row of example i follows from what the
    operation multiplies the weight by and from the gradient at its output,
    once both are proved to be per-example.

    Args:
        losses: float tensor of shape `[batch]`, the loss of each example.
        inputs: list of the tensors, batch in front, that make the batch.
        variables: list of variables.
        loss_scale: float, the power of two by which the losses were multiplied
            for a low-precision backward pass. Defaults to `1.0`.
        may_read: `Sources`. Defaults to `None`, all variables are public.
        left_out: list of `zero_terms.ZeroTerm`, those that are not in the
            loss. Defaults to `()`.

    Attributes:
        left_out: as given.

    Raises:
        Unproven: if a row is not proved to depend on its example alone; names
            the operation.
        MixesExamples: if an operation was found that mixes examples.
        UpdatesState: if a variable is assigned a value that depends on the
            batch.
    """

    def __init__(
        self,
        losses,
        inputs: list,
        variables: list,
        loss_scale: float = 1.0,
        may_read: sources.Sources | None = None,
        left_out: list | tuple = (),
    ):
        if losses.shape.rank != 1 or losses.shape[0] is None:
            raise Unproven(
                f"the losses have shape {losses.shape}, which is not [batch]"
            )
        super().__init__(variables, losses.shape[0])
        if self.batch_size < 2:
            raise Unproven("a batch of one example has no batch axis to follow")
        self._proof = Provenance(
            losses.graph, inputs, self.batch_size, may_read
        )
        self.left_out = left_out
        ends = [losses.op, *(zero.term.op for zero in left_out)]
        self._before_loss = _ancestors(ends)
        # Operations that made the batch itself do not belong to the loss.
        reads = _ancestors(ends, until={t.op for t in inputs})
        self._proof.require_no_effect(losses.graph, reads)
        state = self._proof.require_per_example(losses, "the loss")
        if state != PerExample(0, 1, 1):
            raise Unproven(f"the losses are not one for each example: {state}")
        self._loss = tf.reduce_sum(tf.cast(losses, tf.float32))
        self._loops = loop_sites.open_loops(
            losses.graph,
            self._proof,
            [handle(v) for v in self.variables],
            self._before_loss,
        )
        self._before_loss |= _ancestors(self._loops.gathered)
        self._loss_scale = loss_scale
        self._gradients: dict = {}
        uses = [self._find_uses(v) for v in self.variables]
        self._build_sites(uses)
        # Checked again, as the backward pass may have effects of its own.
        self._proof.require_no_effect(losses.graph, reads)
        self._proof.settle()
        self._parts = {
            tf_variable(v).ref(): self._combine(v, uses_of)
            for v, uses_of in zip(self.variables, uses)
        }
        self._check_values()

    def _find_uses(self, variable) -> list | None:
        """Finds where a variable, or a value made of it, meets the batch.

        Returns:
            List of `(op, input position, View or None)`.
        """
        variable = tf_variable(variable)
        uses, reads = [], []
        for op in handle(variable).consumers():
            if op not in self._before_loss:
                continue
            returned = self._out_of_loop(op, handle(variable))
            if returned is not None and self._before_loss.isdisjoint(
                reader for t in returned for reader in t.consumers()
            ):
                continue
            if op.type == "ReadVariableOp":
                reads.append(op.outputs[0])
            elif (
                op.type in functions.CALLS
                and len(op.outputs) == 1
                and not functions.has_custom_gradient(op)
            ):
                # The function reads it: its operation is judged as a site.
                positions = [
                    k
                    for k, i in enumerate(op.inputs)
                    if i.ref() == handle(variable).ref()
                ]
                read = variable.read_value()
                uses += [(op, k, View(read, ())) for k in positions]
            else:
                raise Unproven(
                    f"{variable.name} is read by {op.type} '{op.name}'"
                )
        seen = set()
        pending = [(read, View(read, ())) for read in reads]
        while pending:
            tensor, view = pending.pop()
            if tensor.ref() in seen:
                continue
            seen.add(tensor.ref())
            for op in dict.fromkeys(tensor.consumers()):
                if op not in self._before_loss or op.type == "StopGradient":
                    continue
                returned = self._out_of_loop(op, tensor)
                if returned is not None:
                    pending += [(output, view) for output in returned]
                    continue
                if functions.has_custom_gradient(op):
                    raise Unproven(
                        f"{variable.name} enters {op.type} '{op.name}', which "
                        "has a custom gradient"
                    )
                if self._is_site(op):
                    positions = [
                        k
                        for k, i in enumerate(op.inputs)
                        if i.ref() == tensor.ref()
                    ]
                    uses += [(op, k, view) for k in positions]
                else:
                    after = view and view.through(op)
                    pending += [(output, after) for output in op.outputs]
        return uses

    def _out_of_loop(self, op, tensor):
        """Outputs of a loop that equal a public tensor which enters it.

        Returns:
            List of tensors; None if `op` is no loop over the batch.

        Raises:
            Unproven: if not all uses of it in the loop were gathered.
        """
        if op.type not in functions.LOOPS or all(
            self._proof(output) is PUBLIC for output in op.outputs
        ):
            return None
        positions = [k for k, i in enumerate(op.inputs) if i is tensor]
        if any((op, k) not in self._loops.entries for k in positions):
            raise Unproven(
                f"{op.type} '{op.name}' changes a weight from step to step"
            )
        return [op.outputs[k] for k in positions]

    def _is_site(self, op):
        if self._is_public(op):
            # A weight that is repeated along the batch is public still, but
            # the gradient there has the batch axis.
            if op.type not in _REPEATS:
                return False
            if op not in self._gradients:
                self._differentiate(self._candidates())
            gradient = self._gradients[op]
            return gradient is not None and isinstance(
                self._proof(tf.convert_to_tensor(gradient)), PerExample
            )
        for output in op.outputs:
            self._proof.require_per_example(
                output, f"{op.type} '{op.name}', which a weight enters"
            )
        return True

    def _is_public(self, op):
        return all(self._proof(output) is PUBLIC for output in op.outputs)

    def _candidates(self):
        """Operations that may be sites, where weights are repeated.

        One backward pass serves them all: a second one, to tell which of the
        repetitions are sites, would double the graph.

        Returns:
            List of operations: those in which what is made of weights alone is
            repeated, or meets the batch.
        """
        candidates = []
        seen = set()
        pending = [handle(variable) for variable in self.variables]
        while pending:
            for op in pending.pop().consumers():
                if op in seen or op not in self._before_loss:
                    continue
                seen.add(op)
                if not self._is_public(op):
                    if op.type in _SITES:
                        candidates.append(op)
                    continue
                pending += op.outputs
                if op.type in _REPEATS:
                    candidates.append(op)
        return candidates

    def _differentiate(self, ops):
        """Keeps the gradients at the outputs of operations that have none."""
        ops = [op for op in dict.fromkeys(ops) if op not in self._gradients]
        if ops:
            self._gradients.update(zip(ops, self._gradients_at(ops)))

    def _build_sites(self, uses):
        """Constructs the site of every operation in which a weight is used."""
        self._differentiate(op for uses_of in uses for op, _, _ in uses_of)
        self._sites = {}
        for op, k, _ in (use for uses_of in uses for use in uses_of):
            if (op, k) in self._sites or self._gradients[op] is None:
                continue
            gradient = tf.convert_to_tensor(self._gradients[op])
            what = f"{op.type} '{op.name}'"
            state = self._gradient_state(op, gradient, what)
            site_op, at = _in_place(op, k)
            if site_op is not op:
                gradient, state = self._reshaped(
                    gradient, state, site_op.out_shape
                )
            operand_state = next(
                (
                    s
                    for s in self._proof.input_states(site_op)
                    if isinstance(s, PerExample)
                ),
                None,
            )
            build, positions = _SITES.get(site_op.type, (None, ()))
            if at not in positions:
                raise Unproven(f"{what} has no rule for a weight at input {k}")
            if gradient.dtype.is_complex:
                raise Unproven(f"{what} has a complex weight")
            if self._loss_scale != 1:
                gradient = tf.cast(gradient, tf.float32) / self._loss_scale
            elif build is not sites.contraction:
                gradient = tf.cast(gradient, tf.float32)
            try:
                with sites.not_before(gradient):
                    self._sites[op, k] = build(
                        site_op,
                        at,
                        gradient,
                        operand_state,
                        state,
                        self.batch_size,
                    )
            except Unproven as e:
                raise Unproven(f"{what} {e}") from e

    def _reshaped(self, gradient, state, shape):
        """A gradient in another shape, and its state."""
        if gradient.shape == shape:
            return gradient, state
        reshaped = tf.reshape(gradient, shape)
        if self._proof(reshaped) is not PUBLIC:
            state = self._proof.require_per_example(reshaped, "a gradient")
        elif state.axis != 0 or gradient.shape[0] != shape[0]:
            raise Unproven("reshapes the batch axis of a public gradient")
        return reshaped, state

    def _gradients_at(self, ops):
        """Gradients at the outputs of operations, or None."""
        gathered = self._loops.gathered
        gradients = zero_terms.gradients(
            self._loss,
            [
                gathered[op].zeros if op in gathered else op.outputs[0]
                for op in ops
            ],
            self.left_out,
        )
        return [
            gathered[op].merged(gradient)
            if op in gathered and gradient is not None
            else gradient
            for op, gradient in zip(ops, gradients)
        ]

    def _gradient_state(self, op, gradient, what):
        """State of the gradient at an operation: that of its output."""
        output, state = self._proof(op.outputs[0]), self._proof(gradient)
        if output is PUBLIC or isinstance(state, Mixed):
            what = f"the gradient at {what}"
            return self._proof.require_per_example(gradient, what)
        if state == output:
            return output
        # The gradient of a loss that is linear in the output is public.
        if not isinstance(state, PerExample):
            if self._proof.is_alike(gradient, output):
                return output
            raise Unproven(
                f"the gradient at {what} is not proved to be the same at every "
                "place in the batch"
            )
        raise MixesExamples(
            f"{what} has the batch on another axis than the gradient there"
        )

    def _combine(self, variable, uses):
        """One site, and the view through which it sees the variable."""
        placed = []
        for op, k, view in uses:
            if (op, k) in self._sites:
                site = self._sites[op, k]
                # A function may reshape it before its one operation.
                is_call = op.type in functions.CALLS
                if view and is_call and site.weight is not op.inputs[k]:
                    view = view.through(site.weight.op) or view
                placed.append((site, view))
        placed = _joined(placed)
        shape = variable.shape
        if not placed:
            zeros = tf.zeros([self.batch_size, *shape])
            return sites.Stored(zeros[0], zeros), View(zeros[0], ())
        if len(placed) == 1 and placed[0][1] is not None:
            return placed[0]
        if tied.is_factored(placed):
            site = tied.Tied(placed)
            return site, View(site.weight, ())
        rows = tf.add_n(
            [self._pulled_back(variable, site, view) for site, view in placed]
        )
        return sites.Stored(rows[0], rows), View(rows[0], ())

    def _pulled_back(self, variable, site, view):
        """Rows of a variable from the rows of the weight made of it."""
        rows = site.rows()
        if view is not None:
            return view.pull_back_rows(rows)
        variable = tf_variable(variable)
        reads = [
            op.outputs[0]
            for op in handle(variable).consumers()
            if op.type == "ReadVariableOp"
        ]

        def pull_back(row):
            gradients = tf.gradients(
                site.weight, reads, tf.cast(row, site.weight.dtype)
            )
            parts = [
                tf.cast(tf.convert_to_tensor(g), tf.float32)
                for g in gradients
                if g is not None
            ]
            # Where it was rounded, or compared, there is none.
            return tf.add_n(parts) if parts else tf.zeros(variable.shape)

        try:
            return tf.vectorized_map(
                converters.keeping_rows_apart(pull_back), rows, warn=False
            )
        except converters.MixesRows:
            return tf.map_fn(pull_back, rows)

    def _check_values(self):
        """Zeroes the examples whose gradients cannot be squared safely."""
        all_sites = list(
            dict.fromkeys(site for site, _ in self._parts.values())
        )
        is_finite = True
        if is_in_xla():
            determinants = sites.tensors_of(all_sites, "determinants")
            is_finite, stored = _stored(determinants)
            sites.replace_tensors(all_sites, "determinants", stored)
        self._magnitudes = {site: site.sq_magnitudes() for site in all_sites}
        total = add_in_order(list(self._magnitudes.values()))
        self.valid = (total < _LARGEST_SQUARE) & is_finite
        self._sq_norms = {site: site.sq_norms() for site in all_sites}
        masked = _masked(self.valid, *sites.tensors_of(all_sites, "factors"))
        sites.replace_tensors(all_sites, "factors", masked)

    def _of(self, variables):
        variables = self.variables if variables is None else variables
        return [self._parts[tf_variable(v).ref()] for v in variables]

    def sq_norms(self, variables=None):
        return self._total(self._sq_norms, variables)

    def sq_norm_bounds(self, variables=None):
        return self._bound(self._sq_norms, variables)

    def _bound(self, sq_norms, variables):
        margins = {
            site: (ROUNDING_MARGIN + site.norm_margin) * m
            for site, m in self._magnitudes.items()
        }
        return precision.bound(
            self._total(sq_norms, variables) + self._total(margins, variables)
        )

    @property
    def merged_terms(self):
        return max([1, *(s.merged_terms for s in self._magnitudes)])

    @property
    def merged_length(self):
        most = max(
            (
                site.merged_uses
                for site in self._magnitudes
                if isinstance(site, tied.Tied)
            ),
            default=0,
        )
        # Of so many that have nothing to do with each other, the length.
        return max(_LENGTH_OF_USES, most**0.5) if most else 1

    def sq_levels(self, variables=None):
        most = self.merged_terms
        levels = self._total(
            {
                site: site.sq_level(most, m)
                for site, m in self._magnitudes.items()
            },
            variables,
        )
        if self.merged_length == 1:
            return levels
        lengths = {
            site: site.sq_length(norm) for site, norm in self._sq_norms.items()
        }
        scale = 4 * most / self.merged_length**2
        return tf.maximum(levels, scale * self._bound(lengths, variables))

    def _total(self, of_sites, variables):
        """Sums over the sites of variables; zero where not valid."""
        total = add_in_order([of_sites[s] for s, _ in self._of(variables)])
        return tf.where(self.valid, total, 0.0)

    def nonzero(self):
        flags = [site.nonzero() for site in self._magnitudes]
        return tf.reduce_any(tf.stack(flags), axis=0)

    def rows(self, variable):
        ((site, view),) = self._of([variable])
        return view.pull_back_rows(site.rows())

    def _pairs_of_terms(self, variable, matrix):
        """Pairs of `terms.Terms` along both sides of a matrix, or None."""
        ((site, view),) = self._of([variable])
        if not (matrix.keeps_order or matrix.is_transposed):
            return None
        inputs = matrix.inputs if matrix.keeps_order else matrix.outputs
        uses = site.uses if isinstance(site, tied.Tied) else [(site, view)]
        pairs = [tied.factored(*use, inputs) for use in uses]
        if None in pairs:
            return None
        return pairs if matrix.keeps_order else [pair[::-1] for pair in pairs]

    def factors(self, variable, matrix):
        pairs = self._pairs_of_terms(variable, matrix)
        if pairs is None or len(pairs) > 1:
            return None
        ((site, _),) = self._of([variable])
        if site.merged_terms < pairs[0][0].count:
            return None
        if not all(isinstance(side, terms.Dense) for side in pairs[0]):
            return None
        return tuple(side.vectors for side in pairs[0])

    def two_sided_products(self, variable, matrix, left, right):
        pairs = self._pairs_of_terms(variable, matrix)
        if pairs is None:
            return super().two_sided_products(variable, matrix, left, right)
        return terms.two_sided_products(pairs, left, right)

    def second_moment_products(self, variable, matrix, left, right, weights):
        pairs = self._pairs_of_terms(variable, matrix)
        if pairs is None:
            return super().second_moment_products(
                variable, matrix, left, right, weights
            )
        return [
            terms.second_moment_product(pairs, left, weights),
            terms.second_moment_product(
                [pair[::-1] for pair in pairs], right, weights
            ),
        ]

    def gram(self, variables=None):
        return tf.add_n([site.gram() for site, _ in self._of(variables)])

    def combinations(self, weights, variables=None):
        variables = self.variables if variables is None else variables
        return [
            site.combinations(weights)
            if view.keeps_order
            else combine_rows(weights, self.rows(variable))
            for variable, (site, view) in zip(variables, self._of(variables))
        ]

    def weighted_sum(self, c, variables=None):
        with shared_integers():
            return [
                view.pull_back(site.weighted_sum(c))
                for site, view in self._of(variables)
            ]


def _joined(placed):
    """Merges uses of an unchanged weight, such as those by loops' steps."""
    alike, rest = {}, []
    for site, view in placed:
        if isinstance(site, sites.OuterProducts) and view and not view.ops:
            alike.setdefault(site.kind, []).append((site, view))
        else:
            rest.append((site, view))
    joined = [
        (sites.OuterProducts.joined([site for site, _ in uses]), uses[0][1])
        if len(uses) > 1
        else uses[0]
        for uses in alike.values()
    ]
    return joined + rest


def _ancestors(ops, until=frozenset()):
    """Operations on which some depend, these included.

    Args:
        ops: iterable of operations.
        until: set of operations that are not followed. Defaults to none.
    """
    ancestors, pending = set(), list(ops)
    while pending:
        op = pending.pop()
        if op not in ancestors:
            ancestors.add(op)
            if op not in until:
                pending.extend(i.op for i in op.inputs)
    return ancestors


def _stored(tensors):
    """Tensors that XLA computes once, and which rows of them are finite.

    XLA may compute the same numbers in several loops, and round them otherwise
    in each: where numbers nearly cancel, the rows whose norms are taken are
    then other rows than those that are added up. It has to store what leaves a
    loop that it cannot foresee, such as one until all rows are finite.
    """

    def of_rows(tensors):
        flags = [
            tf.reduce_all(tf.math.is_finite(t), list(range(1, t.shape.rank)))
            for t in tensors
            if t.dtype.is_floating
        ]
        return tf.reduce_all(tf.stack(flags), 0)

    def zeroed(is_finite, *tensors):
        rows = of_rows(tensors)
        return [is_finite & rows, *mask_rows(rows, tensors)]

    is_finite, *stored = tf.while_loop(
        lambda _, *tensors: ~tf.reduce_all(of_rows(tensors)),
        zeroed,
        [tf.ones([tensors[0].shape[0]], tf.bool), *tensors],
        parallel_iterations=1,
    )
    return is_finite, stored


@traced_by_shape
def _masked(valid, *factors):
    """Factors, with zeros in the rows that are not valid, where any is not."""
    masked = tf.cond(
        tf.reduce_all(valid),
        lambda: [tf.identity(f) for f in factors],
        lambda: mask_rows(valid, factors),
    )
    # A branch may have forgotten static shapes.
    return [
        m if m.shape == f.shape else tf.ensure_shape(m, f.shape)
        for m, f in zip(masked, factors)
    ]


def _in_place(op, k):
    """The operation at a site, and the position of the weight in its inputs.

    That is `op` and `k`, unless `op` calls a function of one operation.
    """
    if op.type not in functions.CALLS:
        return op, k
    inner = functions.single_operation(op)
    if inner is None:
        return op, k
    inputs = list(inner.inputs)
    at = next((j for j, i in enumerate(inputs) if i is op.inputs[k]), None)
    if at is None or any(i is None for i in inputs):
        return op, k
    weight = inputs[at]
    if weight.dtype == tf.resource:
        shape_and_type = handle_data_util.get_resource_handle_data(weight)
        dtype = tf.as_dtype(shape_and_type.shape_and_type[0].dtype)
        inputs[at] = tf.raw_ops.ReadVariableOp(resource=weight, dtype=dtype)
    inner.inputs = [
        i if i.shape == shape else tf.reshape(i, shape)
        for i, shape in zip(inputs, inner.shapes)
    ]
    return inner, at
