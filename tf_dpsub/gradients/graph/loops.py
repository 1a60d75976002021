"""Loops: one proof of the body holds for every step.

A `While` hands its variables from step to step. Their states are a fixed point:
those of the inputs, widened until the body, proved once, returns no wider ones.
That is an induction over the steps. How many steps there are must not depend on
the batch.
"""

import tensorflow as tf
from tensorflow.python.ops import handle_data_util

from tf_dpsub.gradients.graph import functions
from tf_dpsub.gradients.graph.states import PUBLIC, Mixed, PerExample


def origins(op):
    """Inputs that the variables of a loop equal at every step.

    Args:
        op: a `tf.Operation`, one of `functions.LOOPS`.

    Returns:
        List, for each variable the input of the loop that it always equals, or
        None. If that is a list, elements may have been taken from it since.
    """
    body = functions.body(op, "body")
    return [
        first if _is_handed_on(within, returned) else None
        for first, within, returned in zip(op.inputs, body.inputs, body.outputs)
    ]


def _is_handed_on(within, returned):
    while returned.op.type == "Identity" or (
        returned.op.type == "TensorListPopBack" and returned.value_index == 0
    ):
        returned = returned.op.inputs[0]
    return returned is within


def fixed_point(op, proof):
    """States of the variables of a loop, which hold at every step.

    Formal guarantees: a state other than mixed is right before the first step
    and, if it is before a step, after it.

    Args:
        op: a `tf.Operation`, one of `functions.LOOPS`.
        proof: `Provenance` of its graph.

    Returns:
        List of the states of the outputs.
    """
    body = functions.body(op, "body")
    invariant = origins(op)
    states = [proof(first) for first in op.inputs]
    # The other variables are assumed to be alike where their first values are,
    # as zeros are. Where that was used, it is proved or given up.
    assumed = [k for k, origin in enumerate(invariant) if origin is None]
    is_settled = False
    while True:
        equal_to = [
            op.inputs[k] if k in assumed else origin
            for k, origin in enumerate(invariant)
        ]
        # How random numbers are used is counted once states are final.
        inside = proof.within(
            body.graph, body.inputs, states, equal_to, records=is_settled
        )
        wider = [
            _joined(op, k, state, body, proof, inside)
            for k, state in enumerate(states)
        ]
        broken = _not_kept(assumed, states, body, inside)
        if wider == states and not broken:
            if is_settled:
                break
            is_settled = True
        states = wider
        assumed = [k for k in assumed if k not in broken]
    condition = functions.body(op, "cond")
    inside = proof.within(condition.graph, condition.inputs, states, invariant)
    if inside(condition.outputs[0]) is not PUBLIC:
        reason = f"how often {op.type} '{op.name}' repeats depends on the batch"
        return [Mixed(reason, False)] * len(states)
    return states


def _not_kept(assumed, states, body, inside):
    """Public variables that a step may make differ from place to place.

    Args:
        assumed: list of int, those that were assumed not to.
        states: list, the states of the variables.
        body: `functions.Body`.
        inside: `Provenance` of the body.

    Returns:
        List of int.
    """
    checked: set = set()
    while True:
        used = {
            (k, state)
            for k in assumed
            if states[k] is PUBLIC
            for state in inside.taken_as_alike(body.inputs[k])
        }
        broken = [
            k
            for k, state in used - checked
            if not inside.is_alike(body.outputs[k], state)
        ]
        # The answers may themselves rest on other variables.
        if broken or used == checked:
            return broken
        checked = used


def _joined(op, k, before, body, proof, inside):
    """State that holds for variable `k` before a step and after it."""
    first, within, returned = op.inputs[k], body.inputs[k], body.outputs[k]
    after = inside(returned)
    for state in (before, after):
        if isinstance(state, Mixed):
            return state
    if first.dtype == tf.variant and _elements(first) != _elements(returned):
        return Mixed(f"{op.type} '{op.name}' exchanges its lists", False)
    if not (_is_at_most(first, within) and _is_at_most(returned, within)):
        return Mixed(f"{op.type} '{op.name}' changes a shape", False)
    if before == after:
        return before
    if not isinstance(before, PerExample):
        if isinstance(after, PerExample) and proof.is_alike(first, after):
            return after
    elif not isinstance(after, PerExample):
        if inside.is_alike(returned, before):
            return before
    return Mixed(
        f"{op.type} '{op.name}' is not proved to keep examples apart at every "
        "step alike",
        False,
    )


def _is_at_most(tensor, other):
    """Returns whether a tensor has the known static shape of another."""
    shape, general = tensor.shape, other.shape
    return general.rank is None or (
        shape.rank == general.rank
        and all(m in (None, n) for n, m in zip(shape, general))
    )


def _elements(tensor):
    """Types and static shapes of the elements of a list, or None."""
    data = handle_data_util.get_resource_handle_data(tensor)
    if data is None or not data.is_set:
        return None
    return [
        (element.dtype, repr(tf.TensorShape(element.shape)))
        for element in data.shape_and_type
    ]
