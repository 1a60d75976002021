"""Functions that a graph calls: their bodies, and calls of one operation."""

import weakref

import tensorflow as tf
from tensorflow.python.framework import function_def_to_graph
from tensorflow.python.ops import handle_data_util

CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
CONTROL_FLOW = CALLS | {
    "Case",
    "If",
    "StatelessCase",
    "StatelessIf",
    "StatelessWhile",
    "While",
}

_BODIES: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class Body:
    """The graph of a function, with the shapes that a caller gives it.

    Attributes:
        graph: the `tf.Graph`.
        inputs: list of its placeholders, one for each argument.
        outputs: list of tensors.
    """

    def __init__(self, call, definition):
        graph_def, flat_names = function_def_to_graph.function_def_to_graph_def(
            definition
        )
        names = [argument.name for argument in definition.signature.input_arg]
        for node in list(graph_def.node):
            if node.name in names:
                graph_def.node.remove(node)
        outputs = [
            flat_names[definition.ret[argument.name]]
            for argument in definition.signature.output_arg
        ]
        self.graph = tf.Graph()
        for function in call.graph._functions.values():
            self.graph._add_function(function)
        with self.graph.as_default():
            self.inputs = [_placeholder_like(t) for t in call.inputs]
            self.outputs = tf.graph_util.import_graph_def(
                graph_def,
                input_map=dict(zip(names, self.inputs)),
                return_elements=outputs,
                name="",
            )


def _placeholder_like(tensor):
    placeholder = tf.compat.v1.placeholder(tensor.dtype, tensor.shape)
    if tensor.dtype in (tf.resource, tf.variant):
        # The shape of a variable is that of what is read from it.
        handle_data_util.copy_handle_data(tensor, placeholder)
    return placeholder


def called(op):
    """Definitions of all functions that an operation may run, nested too."""
    names = [
        op.get_attr(attribute.name).name
        for attribute in op.op_def.attr
        if attribute.type == "func"
    ]
    found = {}
    while names:
        name = names.pop()
        function = op.graph._get_function(name)
        if name in found or function is None:
            continue
        found[name] = function.cached_definition
        for node in found[name].node_def:
            names += [
                attribute.func.name
                for attribute in node.attr.values()
                if attribute.HasField("func")
            ]
    return list(found.values())


def body(op):
    """The `Body` of the function that a call runs."""
    name = op.get_attr("f").name
    known = _BODIES.setdefault(op.graph, {})
    key = (op, name)
    if key not in known:
        known[key] = Body(op, op.graph._get_function(name).cached_definition)
    return known[key]


class SingleOperation:
    """A call whose body is one operation, as if that stood in its place.

    Keras wraps grouped convolutions so, to have them compiled.

    Attributes:
        type, name, op_def: of the operation.
        inputs: list of the caller's tensors; None where the body has its own.
        outputs: the outputs of the call.
    """

    def __init__(self, call, inner, inputs):
        self.type, self.name, self.op_def = inner.type, call.name, inner.op_def
        self.inputs, self.outputs = inputs, call.outputs
        self.get_attr = inner.get_attr


def single_operation(call):
    """The `SingleOperation` that a call consists of, or None."""
    inside = body(call)
    inner = _behind(inside.outputs[0])
    at = {t.ref(): k for k, t in enumerate(inside.inputs)}
    inputs = []
    for tensor in inner.inputs:
        source = _behind(tensor, through=("Identity", "ReadVariableOp"))
        k = at.get(source.outputs[0].ref())
        inputs.append(None if k is None else call.inputs[k])
    if all(i is None for i in inputs):
        return None
    return SingleOperation(call, inner, inputs)


def _behind(tensor, through=("Identity",)):
    """The operation that computes a tensor."""
    op = tensor.op
    while op.type in through:
        op = op.inputs[0].op
    return op
