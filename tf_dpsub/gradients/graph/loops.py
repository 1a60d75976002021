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

LOOPS = frozenset({"StatelessWhile", "While"})


def origins(op):
    """What the variables of a loop are at every step, where that is known.

    Args:
        op: a `tf.Operation`, one of `LOOPS`.

    Returns:
        List, for each variable the input of the loop that it always is, or
        None. Of a list, elements may have been taken since.
    """
    body = functions.body(op, "body")
    return [
        given if _is_handed_on(within, returned) else None
        for given, within, returned in zip(op.inputs, body.inputs, body.outputs)
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
        op: a `tf.Operation`, one of `LOOPS`.
        proof: `Provenance` of its graph.

    Returns:
        List of the states of the outputs.
    """
    body = functions.body(op, "body")
    known = origins(op)
    states = [proof(given) for given in op.inputs]
    # What enters is taken for an example of what comes: zeros, say, are the
    # same at every place. Where that was used it is proved, or given up.
    hoped = [k for k, origin in enumerate(known) if origin is None]
    is_settled = False
    while True:
        equal_to = [
            op.inputs[k] if k in hoped else origin
            for k, origin in enumerate(known)
        ]
        # How random numbers are used is counted once states are final.
        inside = proof.within(
            body.graph, body.inputs, states, equal_to, records=is_settled
        )
        wider = [
            _joined(op, k, state, body, proof, inside)
            for k, state in enumerate(states)
        ]
        broken = _not_kept(hoped, states, body, inside)
        if wider == states and not broken:
            if is_settled:
                break
            is_settled = True
        states = wider
        hoped = [k for k in hoped if k not in broken]
    condition = functions.body(op, "cond")
    inside = proof.within(condition.graph, condition.inputs, states, known)
    if inside(condition.outputs[0]) is not PUBLIC:
        reason = f"how often {op.type} '{op.name}' repeats depends on the batch"
        return [Mixed(reason, False)] * len(states)
    return states


def _not_kept(hoped, states, body, inside):
    """Public variables that a step may make differ from place to place.

    Args:
        hoped: list of int, those that were taken not to.
        states: list, the states of the variables.
        body: `functions.Body`.
        inside: `Provenance` of the body.

    Returns:
        List of int.
    """
    kept: set = set()
    while True:
        used = {
            (k, state)
            for k in hoped
            if states[k] is PUBLIC
            for state in inside.taken_as_alike(body.inputs[k])
        }
        broken = [
            k
            for k, state in used - kept
            if not inside.is_alike(body.outputs[k], state)
        ]
        # What was asked for now may itself rest on other variables.
        if broken or used == kept:
            return broken
        kept = used


def _joined(op, k, before, body, proof, inside):
    """A state that holds for variable `k` at a step, and after it."""
    given, within, returned = op.inputs[k], body.inputs[k], body.outputs[k]
    after = inside(returned)
    for state in (before, after):
        if isinstance(state, Mixed):
            return state
    if given.dtype == tf.variant and _elements(given) != _elements(returned):
        return Mixed(f"{op.type} '{op.name}' exchanges its lists", False)
    if not (_is_at_most(given, within) and _is_at_most(returned, within)):
        return Mixed(f"{op.type} '{op.name}' changes a shape", False)
    if before == after:
        return before
    if not isinstance(before, PerExample):
        if isinstance(after, PerExample) and proof.is_alike(given, after):
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
    """Whether a tensor has the static shape of another, where that is known."""
    shape, general = tensor.shape, other.shape
    return general.rank is None or (
        shape.rank == general.rank
        and all(m in (None, n) for n, m in zip(shape, general))
    )


def _elements(tensor):
    """What is known of the elements of a list."""
    data = handle_data_util.get_resource_handle_data(tensor)
    if data is None or not data.is_set:
        return None
    return [
        (element.dtype, tf.TensorShape(element.shape).as_list())
        for element in data.shape_and_type
    ]
