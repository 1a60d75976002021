"""Sites inside of loops, gathered over the steps.

A weight that is used in a loop has one gradient: a sum over the steps. Its use
becomes one site outside of the loop, as if the operation ran once, on a batch
that holds all steps: `[steps * batch, ...]`.

The inputs of the operation at each step are kept in a list. To its output, a
tensor of zeros is added, another one at each step: the gradients there are
those at the output of the operation. Both enter the loop as variables, by the
same calls that TensorFlow's own gradient of a loop uses to keep what it needs.
The numbers that the model computes stay what they were.
"""

import dataclasses

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.ops import (
    control_flow_util_v2,
    handle_data_util,
    list_ops,
    while_v2,
)

from tf_dpsub.gradients.graph import constants, functions, loops
from tf_dpsub.gradients.graph.constants import static_shape
from tf_dpsub.gradients.graph.states import PUBLIC, PerExample, Unproven

# Loops of more steps are not followed.
_MOST_STEPS = 100_000

# The gradient at their output equals that at an input of the same shape.
_ADDITIONS = ("AddV2", "BiasAdd", "Identity")


@dataclasses.dataclass(frozen=True)
class OverSteps:
    """Zeros at which the gradient of an operation in a loop is taken.

    Attributes:
        zeros: tensor added to the output, `[steps, *shape]`; its last slice at
            the first step.
        axis: int, the axis of the output that holds the batch.
    """

    zeros: tf.Tensor
    axis: int

    def merged(self, gradient):
        """The gradient at the output of the operation that runs once."""
        return _merged(tf.reverse(gradient, [0]), self.axis)


@dataclasses.dataclass(frozen=True)
class Opened:
    """Operations outside of loops that stand for those inside.

    Attributes:
        gathered: dict from an operation, which stands for one in the body of a
            loop, to `OverSteps`.
        entries: set of `(op, int)`, the loops and those of their inputs whose
            uses have all been gathered.
    """

    gathered: dict
    entries: set


def open_loops(graph, proof, variables: list, before_loss: set):
    """Gathers all uses of weights inside of loops over the batch.

    To be called before any gradient is taken.

    Args:
        graph: the `tf.Graph` that is being traced.
        proof: its `Provenance`.
        variables: list of tensors, the resources of the weights.
        before_loss: set of the operations on which the loss depends.

    Returns:
        An `Opened`.

    Raises:
        Unproven: if a weight is used in a way that cannot be gathered.
    """
    entries = _entries(proof, variables, before_loss)
    opened = Opened({}, set())
    for op in graph.get_operations():
        if op in entries:
            loop = _Loop(op, proof)
            covered = [k for k in entries[op] if loop.is_invariant(k)]
            opened.gathered.update(loop.gather(covered))
            opened.entries.update((op, k) for k in covered)
    return opened


def _entries(proof, variables, before_loss):
    """Loops over the batch that public values made of weights enter.

    Returns:
        Dict from an operation to a list of int, positions among its inputs.
    """
    entries: dict = {}
    seen = set()
    pending = list(variables)
    while pending:
        tensor = pending.pop()
        if tensor.ref() in seen:
            continue
        seen.add(tensor.ref())
        for op in dict.fromkeys(tensor.consumers()):
            if op not in before_loss:
                continue
            is_public = [proof(output) is PUBLIC for output in op.outputs]
            if op.type in functions.LOOPS and not all(is_public):
                positions = [k for k, i in enumerate(op.inputs) if i is tensor]
                entries.setdefault(op, []).extend(positions)
                pending += [op.outputs[k] for k in positions if is_public[k]]
            else:
                pending += [o for o, p in zip(op.outputs, is_public) if p]
    return entries


def _merged(stacked, axis):
    """`[steps, ...]` with the steps in front of the batch, on one axis."""
    shape = static_shape(stacked)
    order = [*range(1, axis + 1), 0, *range(axis + 1, len(shape))]
    if axis:
        stacked = tf.transpose(stacked, order)
    merged = [shape[k] for k in order]
    merged[axis : axis + 2] = [merged[axis] * merged[axis + 1]]
    return tf.reshape(stacked, merged)


class _Loop:
    """A loop whose body may be given more variables.

    Args:
        op: the `tf.Operation`, one of `functions.LOOPS`.
        proof: the `Provenance` of its graph.
    """

    def __init__(self, op, proof):
        self._op = op
        self._body = while_v2._get_graph(op, "body", "_body_graph")
        self._condition = while_v2._get_graph(op, "cond", "_cond_graph")
        self._around = functions.TracedBody(op, self._body)
        self._inputs = {t.ref(): k for k, t in enumerate(self._body.inputs)}
        self._proof = proof.within(
            self._body,
            self._body.inputs,
            proof.inside_loop(op),
            loops.origins(op),
            records=False,
        )
        self._outside: dict = {}
        self._added: list = []

    def is_invariant(self, k):
        """Returns whether an input of the loop is the same at each step."""
        output = self._body.outputs[k]
        while output.op.type == "Identity":
            output = output.op.inputs[0]
        return output is self._body.inputs[k]

    def gather(self, entries: list) -> dict:
        """Makes operations outside that stand for those that read weights.

        Args:
            entries: list of int, the inputs by which weights enter.

        Returns:
            Dict from such an operation to `OverSteps`.
        """
        uses = self._uses(entries)
        if not uses:
            return {}
        steps = self._count_steps()
        read = {}
        inputs = {op: list(op.inputs) for op in uses}
        for op in uses:
            for tensor, state in zip(inputs[op], self._proof.input_states(op)):
                if isinstance(state, PerExample):
                    read[tensor.ref()] = state
                else:
                    self._moved_out(tensor)
        states = {op: self._proof(op.outputs[0]) for op in uses}
        ends = {op: self._end_of_sum(op.outputs[0]).ref() for op in uses}
        zeros = self._add_zeros(dict.fromkeys(ends.values()), steps)
        # No gradient is taken of the outputs that follow: lists of values.
        differentiated = len(self._body.outputs)
        positions = {ref: self._keep(ref.deref(), steps) for ref in read}
        self._replace(differentiated)
        for ref, k in positions.items():
            self._outside[ref] = self._all_steps(k, read[ref].axis, steps)
        return {
            self._run_once(op, inputs[op], states[op], steps): OverSteps(
                zeros[ends[op]], states[op].axis
            )
            for op in uses
        }

    def _uses(self, entries):
        """Operations of the body in which weights meet the batch.

        Returns:
            List of operations, in the order of the body.
        """
        uses, seen = set(), set()
        pending = [self._body.inputs[k] for k in entries]
        while pending:
            tensor = pending.pop()
            if tensor.ref() in seen:
                continue
            seen.add(tensor.ref())
            for op in tensor.consumers():
                if op.type == "StopGradient":
                    continue
                if functions.has_custom_gradient(op):
                    raise Unproven(
                        f"a weight enters {op.type} '{op.name}', which has a "
                        "custom gradient"
                    )
                if all(self._proof(o) is PUBLIC for o in op.outputs):
                    pending += op.outputs
                    continue
                for output in op.outputs:
                    self._proof.require_per_example(
                        output, f"{op.type} '{op.name}', which a weight enters"
                    )
                if len(op.outputs) > 1 or op.type in functions.CONTROL_FLOW:
                    raise Unproven(
                        f"{op.type} '{op.name}', in a loop, has no rule for a "
                        "weight"
                    )
                uses.add(op)
        for k, output in enumerate(self._body.outputs):
            if output.ref() in seen and not self.is_invariant(k):
                raise Unproven(
                    f"{self._op.type} '{self._op.name}' hands on a value made "
                    "of weights alone"
                )
        return [op for op in self._body.get_operations() if op in uses]

    def _count_steps(self):
        """Number of steps, an int.

        The values that the condition needs are computed step by step, from
        constants.
        """
        needed, pending = {}, [self._condition.outputs[0]]
        while pending:
            tensor = pending.pop()
            for k in _reached(tensor, self._condition, self._body):
                if k not in needed:
                    needed[k] = self._body.outputs[k]
                    pending.append(needed[k])
        outside = constants.ConstantFolder()
        values = {k: outside(self._op.inputs[k]) for k in needed}
        for step in range(_MOST_STEPS):
            within = constants.ConstantFolder(
                {self._condition.inputs[k].ref(): v for k, v in values.items()}
            )
            if not within(self._condition.outputs[0]):
                if not step:
                    break
                return step
            within = constants.ConstantFolder(
                {self._body.inputs[k].ref(): v for k, v in values.items()}
            )
            values = {k: within(output) for k, output in needed.items()}
        raise Unproven(
            f"{self._op.type} '{self._op.name}' takes no step, or too many"
        )

    def _moved_out(self, tensor):
        """A public value of the body, computed outside of the loop."""
        if tensor.ref() in self._outside:
            return self._outside[tensor.ref()]
        op, k = tensor.op, self._inputs.get(tensor.ref())
        if k is not None:
            if not self.is_invariant(k):
                raise Unproven(
                    f"{self._op.type} '{self._op.name}' changes a weight from "
                    "step to step"
                )
            outside = self._op.inputs[k]
        elif op.type in functions.CONTROL_FLOW or (
            op.op_def.is_stateful and op.type != "ReadVariableOp"
        ):
            raise Unproven(
                f"{op.type} '{op.name}', which makes a weight in a loop, "
                "cannot be moved out of it"
            )
        else:
            copy = _copy(op, [self._moved_out(i) for i in op.inputs])
            outside = copy.outputs[tensor.value_index]
        self._outside[tensor.ref()] = outside
        return outside

    @staticmethod
    def _end_of_sum(tensor):
        """A later tensor of the body with the same gradient, or the tensor."""
        while True:
            consumers = tensor.consumers()
            if len(consumers) != 1 or any(
                tensor is output for output in tensor.graph.outputs
            ):
                return tensor
            (op,) = consumers
            if (
                op.type not in _ADDITIONS
                or functions.has_custom_gradient(op)
                or sum(i is tensor for i in op.inputs) != 1
                or static_shape(op.outputs[0]) != static_shape(tensor)
            ):
                return tensor
            (tensor,) = op.outputs

    def _add_zeros(self, references, steps):
        """Adds zeros to tensors of the body, other ones at each step.

        Returns:
            Dict from the reference of each tensor to the zeros,
            `[steps, *shape]`.
        """
        added = {}
        for reference in references:
            tensor = reference.deref()
            consumers = tensor.consumers()
            with tf.control_dependencies(None):
                zeros = tf.zeros([steps, *static_shape(tensor)], tensor.dtype)
                all_zeros = list_ops.tensor_list_from_tensor(
                    zeros, element_shape=tensor.shape
                )
            with self._body.as_default():
                # The list enters the body as a variable.
                remaining, step_zeros = list_ops.tensor_list_pop_back(
                    all_zeros, element_dtype=tensor.dtype
                )
                step_zeros.set_shape(tensor.shape)
                shifted = tensor + step_zeros
            for op in consumers:
                for k, i in enumerate(op.inputs):
                    if i is tensor:
                        op._update_input(k, shifted)
            for k, output in enumerate(self._body.outputs):
                if output is tensor:
                    self._body.outputs[k] = shifted
            self._hand_on(all_zeros, remaining)
            added[reference] = zeros
        return added

    def _keep(self, tensor, steps):
        """Keeps a tensor of the body at each step, in a list.

        Returns:
            int, the position among the outputs of the loop.
        """
        with tf.control_dependencies(None):
            empty = list_ops.empty_tensor_list(
                element_shape=tensor.shape,
                element_dtype=tensor.dtype,
                max_num_elements=steps,
            )
        with self._body.as_default():
            longer = list_ops.tensor_list_push_back(empty, tensor)
        return self._hand_on(empty, longer)

    def _hand_on(self, outside, returned):
        """Makes a list that the body has read a variable of the loop."""
        with self._condition.as_default():
            self._condition.capture(outside)
        self._body.outputs.append(returned)
        self._added.append(outside)
        return len(self._body.outputs) - 1

    def _replace(self, differentiated):
        """Replaces the functions of the loop by the changed ones."""
        before = len(self._op.outputs)
        op, body = self._op, self._body
        for attribute, graph in ("cond", self._condition), ("body", body):
            graph.name += "_with_sites"
            name = control_flow_util_v2.create_new_tf_function(graph)
            op._set_func_attr(attribute, name)
        op._set_type_list_attr("T", body.output_types)
        op._set_shape_list_attr("output_shapes", body.output_shapes)
        op._add_while_inputs(self._added)
        added = body.outputs[before:]
        op._add_outputs([t.dtype for t in added], [t.shape for t in added])
        for inner, outer in zip(added, op.outputs[before:]):
            handle_data_util.copy_handle_data(inner, outer)
        op._set_attr(
            "_num_original_outputs", attr_value_pb2.AttrValue(i=differentiated)
        )

    def _all_steps(self, k, axis, steps):
        """Values kept at all steps, on one axis with the batch."""
        kept = self._body.outputs[k].op.inputs[1]
        stacked = list_ops.tensor_list_stack(
            self._op.outputs[k],
            element_dtype=kept.dtype,
            num_elements=steps,
            element_shape=kept.shape,
        )
        return _merged(stacked, axis)

    def _run_once(self, op, inputs, state, steps):
        """An operation outside that stands for one of the body."""
        shape = static_shape(op.outputs[0])
        shape[state.axis] *= steps
        try:
            copy = _copy(op, [self._outside[i.ref()] for i in inputs])
        except ValueError:
            copy = None
        if copy is None or copy.outputs[0].shape != shape:
            raise Unproven(
                f"{op.type} '{op.name}', in a loop, cannot run on all steps at "
                "once"
            )
        return copy


def _copy(op, inputs):
    """Copy of an operation on other inputs, in the graph that is traced."""
    attributes = {
        name: value
        for name, value in op.node_def.attr.items()
        if not name.startswith("_")
    }
    return tf.compat.v1.get_default_graph().create_op(
        op.type,
        inputs,
        [t.dtype for t in op.outputs],
        attrs=attributes,
        op_def=op.op_def,
    )


def _reached(tensor, *graphs):
    """Positions of the inputs of a graph on which its tensor depends."""
    positions = {
        t.ref(): k for graph in graphs for k, t in enumerate(graph.inputs)
    }
    reached, seen, pending = [], set(), [tensor]
    while pending:
        tensor = pending.pop()
        if tensor.ref() in seen:
            continue
        seen.add(tensor.ref())
        if tensor.ref() in positions:
            reached.append(positions[tensor.ref()])
        pending.extend(tensor.op.inputs)
    return reached
