"""Functions that a graph calls: their bodies, and calls of one operation."""

import functools
import weakref

import tensorflow as tf
from tensorflow.python.framework import function_def_to_graph, op_def_registry
from tensorflow.python.ops import handle_data_util

from tf_dpsub.gradients.graph.states import Unproven

CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
LOOPS = frozenset({"StatelessWhile", "While"})
CONTROL_FLOW = CALLS | LOOPS | {"Case", "If", "StatelessCase", "StatelessIf"}

# From graphs to the bodies of what they run. No value holds its graph.
_BODIES: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
# From the graphs of bodies to the bodies.
_OF_GRAPHS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class Body:
    """The graph of a function, with the shapes that a caller gives it.

    Args:
        call: the `tf.Operation` that runs it.
        definition: its `FunctionDef`.
        arguments: list of tensors of its graph, which it is given.
        shapes: list, the static shape of each argument.

    Attributes:
        graph: the `tf.Graph`.
        inputs: list of its placeholders, one for each argument.
        outputs: list of tensors.
    """

    def __init__(self, call, definition, arguments: list, shapes: list):
        self._call = weakref.ref(call.graph), call.name
        graph_def, flat_names = function_def_to_graph.function_def_to_graph_def(
            definition
        )
        names = [argument.name for argument in definition.signature.input_arg]
        for node in list(graph_def.node):
            if node.name in names:
                graph_def.node.remove(node)
            # The attribute would place it beside a node of another graph.
            node.attr.pop("_class", None)
        outputs = [
            flat_names[definition.ret[argument.name]]
            for argument in definition.signature.output_arg
        ]
        self.graph = tf.Graph()
        for function in call.graph._functions.values():
            self.graph._add_function(function)
        with self.graph.as_default():
            self.inputs = [
                placeholder_like(t, shape)
                for t, shape in zip(arguments, shapes)
            ]
            placeholders = {
                f"{name}:0": tensor for name, tensor in zip(names, self.inputs)
            }
            read = {name for node in graph_def.node for name in node.input}
            computed = iter(
                tf.graph_util.import_graph_def(
                    graph_def,
                    input_map={
                        n: t for n, t in placeholders.items() if n in read
                    },
                    return_elements=[
                        n for n in outputs if n not in placeholders
                    ],
                    name="",
                )
            )
        self.outputs = [
            placeholders[n] if n in placeholders else next(computed)
            for n in outputs
        ]
        _OF_GRAPHS[self.graph] = weakref.ref(self)

    @property
    def call(self):
        """The operation that runs it."""
        graph, name = self._call
        return graph().get_operation_by_name(name)


class TracedBody:
    """The graph of a function as TensorFlow traced it, before it is called.

    Args:
        call: the `tf.Operation` that runs it.
        graph: `FuncGraph`.

    Attributes:
        call: as given.
        inputs: list of its placeholders, one for each argument.
    """

    def __init__(self, call, graph):
        self.call, self.inputs = call, list(graph.inputs)
        _OF_GRAPHS[graph] = weakref.ref(self)


def around(graph):
    """The `Body`, or `TracedBody`, that a graph is of, or None."""
    reference = _OF_GRAPHS.get(graph)
    return reference and reference()


def placeholder_like(tensor, shape):
    """A placeholder of the type of a tensor, and of what its handle holds."""
    placeholder = tf.compat.v1.placeholder(tensor.dtype, shape)
    if tensor.dtype in (tf.resource, tf.variant):
        # The shape of a variable is that of what is read from it.
        handle_data_util.copy_handle_data(tensor, placeholder)
    return placeholder


def called(op):
    """Definitions of the functions an operation may run, nested ones too."""
    if not names_functions(op.type):
        return []
    names = _named_in(op.node_def)
    definitions = {}
    while names:
        name = names.pop()
        function = op.graph._get_function(name)
        if name in definitions or function is None:
            continue
        definitions[name] = function.cached_definition
        for node in definitions[name].node_def:
            # A node may have the name of a function for its operation.
            names += [node.op, *_named_in(node)]
    return list(definitions.values())


@functools.cache
def names_functions(kind) -> bool:
    """Returns whether operations of a type have attributes that name some."""
    definition = op_def_registry.get(kind)
    return definition is None or any(
        "func" in attribute.type for attribute in definition.attr
    )


def _named_in(node):
    """Names of the functions in the attributes of a node."""
    return [
        function.name
        for attribute in node.attr.values()
        for function in (
            [attribute.func]
            if attribute.HasField("func")
            else attribute.list.func
        )
    ]


def body(op, attribute="f"):
    """The `Body` of a function that an operation runs.

    Args:
        op: a `tf.Operation`.
        attribute: string, names the function: `"f"` of a call, `"cond"` and
            `"body"` of a loop, whose variables may lose their first shape.
            Defaults to `"f"`.
    """
    like = op.inputs if attribute == "f" else op.outputs
    return _body(op, op.get_attr(attribute).name, op.inputs, like)


def operations(graph, kinds):
    """Operations in a graph, and in the functions that it runs.

    Args:
        graph: `tf.Graph`.
        kinds: string, or a tuple of them, with which their types begin.

    Yields:
        `tf.Operation`s, some of them of the graph of a `Body`.
    """
    for op in graph.get_operations():
        if op.type.startswith(kinds):
            yield op
        else:
            yield from operations_within(op, kinds)


def operations_within(op, kinds):
    """Operations in the functions that one of `CONTROL_FLOW` runs."""
    if op.type not in CONTROL_FLOW or not any(
        node.op.startswith(kinds)
        for definition in called(op)
        for node in definition.node_def
    ):
        return
    if op.type in CALLS:
        bodies = [body(op)]
    elif op.type in LOOPS:
        bodies = [body(op, "cond"), body(op, "body")]
    else:
        bodies = branches(op)
    for inner in bodies:
        yield from operations(inner.graph, kinds)


def argument(placeholder):
    """The call for which a placeholder stands for an argument, and which.

    Returns:
        Pair of the operation and of the position among its inputs; None if
        nothing is known of a call.
    """
    enclosing = around(placeholder.graph)
    if enclosing is None or placeholder.op.type != "Placeholder":
        return None
    (k,) = (k for k, t in enumerate(enclosing.inputs) if t is placeholder)
    call = enclosing.call
    is_branch = call.type not in CALLS | LOOPS
    return call, k + is_branch


def passed(handle):
    """The handle that the caller of a function gave, or None."""
    while True:
        if handle.op.type == "Identity":
            handle = handle.op.inputs[0]
            continue
        position = argument(handle)
        if position is None:
            return handle
        call, k = position
        if call.type in LOOPS:
            # At a later step it might be another one.
            inside = body(call, "body")
            returned = inside.outputs[k]
            while returned.op.type == "Identity":
                returned = returned.op.inputs[0]
            if returned is not inside.inputs[k]:
                return None
        handle = call.inputs[k]


def origin(tensor):
    """The tensor of the outermost graph, or eager one, that was captured."""
    while not hasattr(tensor, "numpy"):
        outer = next(
            (
                outer
                for outer, inner in getattr(tensor.graph, "captures", [])
                if inner is tensor
            ),
            None,
        )
        if outer is None:
            break
        tensor = outer
    return tensor


def require_fixed(op):
    """Checks that TensorFlow runs the function that an operation names.

    Raises:
        Unproven: if it may choose another one, or change it by shapes that it
            was traced with and is not given.
    """
    if any("api_implements" in d.attr for d in called(op)):
        raise Unproven(
            "calls a function with `api_implements`, in whose place TensorFlow "
            "may run another one"
        )
    for name, arguments in _run_by(op):
        definition = op.graph._get_function(name).cached_definition
        for k, argument in enumerate(arguments):
            if argument.dtype in (tf.resource, tf.variant):
                continue
            if not _is_of(argument.shape, _traced_shape(definition, k)):
                raise Unproven(
                    f"gives a function shape {argument.shape}, which was "
                    f"traced with {_traced_shape(definition, k)}"
                )


def _run_by(op):
    """Names of the functions that an operation runs, and their arguments."""
    if op.type in CALLS:
        return [(op.get_attr("f").name, op.inputs)]
    if op.type in LOOPS:
        return [(op.get_attr(f).name, op.outputs) for f in ("cond", "body")]
    if op.type in CONTROL_FLOW:
        return [(name, op.inputs[1:]) for name in _branch_names(op)]
    return []


def _traced_shape(definition, k):
    """The shape that a function claims of its argument k."""
    if k in definition.arg_attr:
        claimed = definition.arg_attr[k].attr
        if "_output_shapes" in claimed:
            return tf.TensorShape(claimed["_output_shapes"].list.shape[0])
    return tf.TensorShape(None)


def _is_of(shape, claimed):
    """Returns whether nothing is claimed of a shape but what is known."""
    return claimed.rank is None or (
        shape.rank == claimed.rank
        and all(c in (None, d) for c, d in zip(claimed, shape))
    )


def is_compiled(graph) -> bool:
    """Returns whether XLA compiles the function whose body a graph is."""
    while (enclosing := around(graph)) is not None:
        call, graph = enclosing.call, enclosing.call.graph
        nodes = [call.node_def]
        if call.type in CALLS:
            function = graph._get_function(call.get_attr("f").name)
            nodes.append(function.cached_definition)
        if any(
            "_XlaMustCompile" in node.attr and node.attr["_XlaMustCompile"].b
            for node in nodes
        ):
            return True
    return False


def branches(op) -> list:
    """The `Body` of each branch that an operation may take.

    Args:
        op: a `tf.Operation` that takes one, whose first input chooses.
    """
    inputs = list(op.inputs)[1:]
    return [_body(op, name, inputs, inputs) for name in _branch_names(op)]


def _branch_names(op):
    if "branches" in op.node_def.attr:
        return [f.name for f in op.node_def.attr["branches"].list.func]
    return [op.get_attr(b).name for b in ("then_branch", "else_branch")]


def _body(op, name, inputs, like):
    """The body of a function of a name, with shapes of tensors like these."""
    bodies = _BODIES.setdefault(op.graph, {})
    # Gradients add variables to a loop, and give it another function.
    key = (op.name, name)
    if key not in bodies:
        definition = op.graph._get_function(name).cached_definition
        bodies[key] = Body(op, definition, inputs, [t.shape for t in like])
    return bodies[key]


class SingleOperation:
    """A call whose body is one operation, as if that stood in its place.

    Keras wraps grouped convolutions in a call, to have them compiled. In one
    dimension their tensors get an axis of size 1 around the operation.

    Attributes:
        type, name, op_def: of the operation.
        inputs: list of the caller's tensors; None where the body has its own.
        outputs: the outputs of the call.
        shapes: list, the static shapes of the operation's inputs.
        out_shape: the static shape of its output.
    """

    def __init__(self, call, inner, inputs):
        self.type, self.name, self.op_def = inner.type, call.name, inner.op_def
        self.inputs, self.outputs = inputs, call.outputs
        self.shapes = [i.shape for i in inner.inputs]
        self.out_shape = inner.outputs[0].shape
        self.get_attr = inner.get_attr


def single_operation(call):
    """The `SingleOperation` that a call consists of, or None."""
    inside = body(call)
    inner = _behind(inside.outputs[0], through=("Identity", "Squeeze"))
    positions = {t.ref(): k for k, t in enumerate(inside.inputs)}
    inputs = []
    for tensor in inner.inputs:
        source = _behind(
            tensor, through=("ExpandDims", "Identity", "ReadVariableOp")
        )
        k = positions.get(source.outputs[0].ref())
        inputs.append(None if k is None else call.inputs[k])
    if all(i is None for i in inputs):
        return None
    return SingleOperation(call, inner, inputs)


def _behind(tensor, through):
    """The operation that computes a tensor."""
    op = tensor.op
    while op.type in through:
        op = op.inputs[0].op
    return op


def has_custom_gradient(op):
    """Returns whether a user defined the gradient of an operation."""
    try:
        gradient = op.get_attr("_gradient_op_type").decode()
    except ValueError:
        return False
    if op.type not in CALLS or "PartitionedCall-" not in gradient:
        return True
    # TensorFlow registers a gradient for every call: that of its body.
    return any(
        has_custom_gradient(inner) for inner in body(op).graph.get_operations()
    )
