"""Checks of what a graph does to the seeds that it draws from."""

import contextlib
import weakref

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from tf_dpsub.gradients.graph import effects, functions
from tf_dpsub.gradients.graph.states import UpdatesState

# The increment of `keras.random.SeedGenerator.next`. With another one, a seed
# could come back to a key that was used.
_INCREMENT = (0, 1)

# By graph, the names of the operations that set keys and remove them again.
_KEY_WRITES: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def own_writes():
    """Context in which keys may be set and removed."""
    graph = tf.compat.v1.get_default_graph()
    count = len(graph.get_operations())
    yield
    _KEY_WRITES.setdefault(graph, set()).update(
        op.name for op in graph.get_operations()[count:]
    )


def require_kept(graph, handles: list):
    """Checks that a graph only moves seeds on, as a generator's `next` does.

    Formal guarantees: after a key was set, no two reads of a seed with a write
    between them give the same key, and no seed gets the key of another, or one
    that the program tells.

    Args:
        graph: `tf.Graph`.
        handles: list of its tensors, the handles of seeds.

    Raises:
        UpdatesState: if a seed is written in another way.
    """
    key_writes = _KEY_WRITES.get(graph, ())
    order: dict = {}
    for handle in handles:
        writers = [
            op for op in handle.consumers() if not effects.only_reads(op.type)
        ]
        if writers and not order:
            order = {op.name: k for k, op in enumerate(graph.get_operations())}
        places = sorted(order[op.name] for op in writers)
        for op in writers:
            if op.type in functions.CONTROL_FLOW:
                _require_kept_in_call(op)
            elif op.name not in key_writes:
                _require_next(
                    op.node_def,
                    lambda name: graph.get_operation_by_name(name).node_def,
                    order,
                    places,
                    op.name,
                )


def _require_kept_in_call(op):
    """Checks the functions of a call, any of whose inputs may be a seed."""
    definitions = functions.called(op)
    calls = [(op.node_def, op.name)]
    for definition in definitions:
        _require_kept_within(definition, op.name)
        calls += [
            (node, f"{op.name}/{node.name}") for node in definition.node_def
        ]
    # A seed of two names could be read by one and written by the other.
    if any(effects.writes(n.op) for d in definitions for n in d.node_def):
        for node, name in calls:
            if _names_again(node):
                raise _error(f"{node.op} '{name}', which names one again")


def _names_again(node):
    """Returns whether a node gives a resource a second name."""
    definition = op_def_registry.get(node.op)
    inputs = [name for name in node.input if not name.startswith("^")]
    if definition is not None and node.op not in functions.CONTROL_FLOW:
        returned = _types(node, definition.output_arg)
        return bool(inputs) and tf.resource.as_datatype_enum in returned
    if definition is not None:
        types = _types(node, definition.input_arg)
        inputs = [
            name
            for name, kind in zip(inputs, types, strict=True)
            if kind == tf.resource.as_datatype_enum
        ]
    return len(set(inputs)) < len(inputs)


def _types(node, arguments):
    """Data types of the inputs or the outputs of a node, as enumerated."""
    types = []
    for argument in arguments:
        if argument.type_list_attr:
            types += node.attr[argument.type_list_attr].list.type
        else:
            kind = argument.type or node.attr[argument.type_attr].type
            repeats = argument.number_attr
            types += [kind] * (node.attr[repeats].i if repeats else 1)
    return types


def _require_kept_within(definition, name):
    """Checks one function."""
    nodes = {node.name: node for node in definition.node_def}
    order = {node.name: k for k, node in enumerate(definition.node_def)}
    for node in definition.node_def:
        if not effects.writes(node.op):
            continue
        places = [
            order[other.name]
            for other in definition.node_def
            if node.input[0] in other.input and not effects.only_reads(other.op)
        ]
        _require_next(node, nodes.get, order, places, f"{name}/{node.name}")


def _require_next(node, producer, order, writes, name):
    """Checks that a node writes what `SeedGenerator.next` does.

    Args:
        node: `NodeDef`.
        producer: callable from the name of a node to the node, or None.
        order: dict from the names of nodes to their places.
        writes: list of the places of nodes that may write the same seed.
        name: string, for the error.
    """
    if node.op == "AssignVariableOp":
        value = producer(_node_name(node.input[1]))
        if value is not None and value.op in ("Add", "AddV2"):
            read, added = (producer(_node_name(i)) for i in value.input[:2])
            if (
                _is_increment(added)
                and read is not None
                and read.op == "ReadVariableOp"
                and read.input[0] == node.input[0]
                # A write in between would be undone.
                and not any(
                    order[read.name] < k < order[node.name] for k in writes
                )
            ):
                return
    if node.op == "AssignAddVariableOp" and _is_increment(
        producer(_node_name(node.input[1]))
    ):
        return
    raise _error(f"{node.op} '{name}', which sets one")


def _error(got):
    return UpdatesState(
        "Expected seeds that `SeedGenerator.next` alone changes, got "
        f"{got}: draws would not be secret, or would be the same twice. "
        "Leave it out, or use another SeedGenerator."
    )


def _node_name(tensor_name):
    return tensor_name.split(":")[0]


def _is_increment(node):
    if node is None or node.op != "Const":
        return False
    value = tf.make_ndarray(node.attr["value"].tensor)
    return np.array_equal(value, _INCREMENT)
