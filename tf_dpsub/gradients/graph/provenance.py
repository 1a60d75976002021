"""Proof that a tensor depends on one example only.

Every tensor of a traced graph gets one of three states:

- `PUBLIC`: it does not depend on the batch (weights, constants, random
  numbers, and whatever is computed from them);
- `PerExample`: along one axis, each slice depends on one example of the batch
  (and on public tensors), and on no other;
- `Mixed`: neither has been proved.

States are computed operation by operation, by the rules in
`tf_dpsub.gradients.graph.operations`. What has no rule is mixed: the proof can
be incomplete, which costs speed, but a state other than mixed is always right,
which is what privacy rests on.
"""

import tensorflow as tf

from tf_dpsub.gradients.graph import constants, effects, functions, operations
from tf_dpsub.gradients.graph.states import (
    PUBLIC,
    Mixed,
    MixesExamples,
    PerExample,
    Unproven,
)
from tf_dpsub.gradients.operator import tf_variable


class Provenance:
    """States of the tensors of one graph, computed on demand and kept.

    Args:
        graph: the `tf.Graph` in which the tensors live.
        inputs: list of tensors of static shape whose axis 0 is the batch.
        batch_size: int, the number of examples, at least 2.
    """

    def __init__(self, graph, inputs: list, batch_size: int):
        self.batch_size = batch_size
        self._constants = constants.ConstantFolder()
        self._calls: dict = {}
        self._states = {
            t.ref(): self._consistent(t, PerExample(0, 1, 1)) for t in inputs
        }
        self._captured = {
            inner.ref(): outer
            for outer, inner in getattr(graph, "captures", [])
        }

    def __call__(self, tensor):
        """The state of `tensor`."""
        stack = [tensor.op]
        while tensor.ref() not in self._states:
            op = stack[-1]
            waiting = [i.op for i in op.inputs if i.ref() not in self._states]
            if waiting:
                stack.extend(waiting)
                continue
            stack.pop()
            for output, state in zip(op.outputs, self._output_states(op)):
                state = self._consistent(output, state)
                self._states.setdefault(output.ref(), state)
        return self._states[tensor.ref()]

    def _output_states(self, op):
        states = [self._states[i.ref()] for i in op.inputs]
        if op.type in ("Placeholder", "PlaceholderWithDefault"):
            states = [self._placeholder_state(op)]
            return states * len(op.outputs)
        for state in states:
            if isinstance(state, Mixed):
                return [state] * len(op.outputs)
        if all(state is PUBLIC for state in states):
            return [PUBLIC] * len(op.outputs)
        if op.type in functions.CALLS:
            body, proof = self._inside(op)
            return [proof(output) for output in body.outputs]
        application = operations.Application(
            op, states, self.batch_size, self._constants
        )
        try:
            result = operations.apply_rule(application)
        except Unproven as e:
            mixes = isinstance(e, MixesExamples)
            result = Mixed(f"{op.type} '{op.name}' {e}", mixes)
        if not isinstance(result, list):
            result = [result] * len(op.outputs)
        return result

    def _consistent(self, tensor, state):
        """The state, or mixed where its axis cannot hold the batch."""
        if isinstance(state, PerExample):
            shape = tensor.shape
            size = state.outer * self.batch_size * state.inner
            if shape.rank is None or shape[state.axis] != size:
                return Mixed(
                    f"{tensor.op.type} '{tensor.op.name}' has shape {shape}, "
                    "which does not hold the batch where it should",
                    False,
                )
        return state

    def _inside(self, op):
        """The body of a function call, and the proof of its tensors."""
        body = functions.body(op)
        # A gradient taken later gives the call another body.
        key = (op, body)
        if key not in self._calls:
            proof = Provenance(body.graph, [], self.batch_size)
            for inner, outer in zip(body.inputs, op.inputs):
                proof._states[inner.ref()] = self(outer)
            self._calls[key] = proof
        return body, self._calls[key]

    def _placeholder_state(self, op):
        tensor = op.outputs[0]
        if tensor.dtype in (tf.resource, tf.variant):
            return PUBLIC
        outer = self._captured.get(tensor.ref())
        # An eager tensor existed before the batch did.
        if outer is not None and (
            hasattr(outer, "numpy") or outer.op.type == "Const"
        ):
            return PUBLIC
        return Mixed(
            f"Placeholder '{op.name}' is a tensor captured from outside", False
        )

    def require_per_example(self, tensor, what):
        """Returns the state of `tensor`, which must be `PerExample`.

        Raises:
            MixesExamples: if an operation before it mixes examples.
            Unproven: if an operation before it has no rule, or if the tensor
                does not depend on the batch.
        """
        state = self(tensor)
        if isinstance(state, PerExample):
            return state
        if state is PUBLIC:
            raise Unproven(f"{what} does not depend on the batch")
        raise (MixesExamples if state.mixes else Unproven)(
            f"{what}: {state.reason}"
        )

    def require_no_effect(self, graph):
        """Checks that nothing outlives the step that depends on the batch.

        Raises:
            UpdatesState: if a variable is assigned a value that is not public.
            Unproven: if another operation with an effect reads such a value.
        """
        effects.require_none(graph, lambda t: self(t) is PUBLIC)


def handle(variable):
    """The tensor for a variable's resource in the graph being traced."""
    variable = tf_variable(variable)
    read = tf.raw_ops.ReadVariableOp(
        resource=variable.handle, dtype=variable.dtype
    )
    return read.op.inputs[0]
