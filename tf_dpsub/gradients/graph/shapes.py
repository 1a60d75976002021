"""Static shapes that TensorFlow found by itself.

`set_shape` may claim any shape where TensorFlow knows none, and nothing checks
it when the graph runs. Rules rest on shapes: so they are found again, for all
operations but those whose shape TensorFlow always finds.

A variable has the shape of its handle when a graph is traced, and keeps it:
TensorFlow assigns no other one, but by `tf.raw_ops`, which is seen in the
graph, and not where it is called in between.
"""

import itertools
import weakref

import numpy as np
import tensorflow as tf

from tf_dpsub.gradients.graph import functions, lists, rules
from tf_dpsub.gradients.graph.constants import ConstantFolder, static_shape
from tf_dpsub.gradients.graph.states import Unproven

# Shapes, axes and paddings have no more axes.
_MOST_AXES = 2
# Where shapes of inputs are known, and numbers that tell a shape, so are those
# of outputs. Found again, they would be the same: this saves time.
_DETERMINED = frozenset(
    """
    All Any ArgMax ArgMin AvgPool AvgPoolGrad BatchMatMul BatchMatMulV2
    BatchMatMulV3 BiasAdd BiasAddGrad BroadcastTo ConcatV2 Const Conv2D
    Conv2DBackpropFilter Conv2DBackpropInput DepthwiseConv2dNative
    DepthwiseConv2dNativeBackpropFilter DepthwiseConv2dNativeBackpropInput
    Einsum ExpandDims Fill GatherV2 InvertPermutation LogSoftmax MatMul Max
    MaxPool MaxPoolGrad Mean Min OneHot OnesLike Pack Pad PadV2 Prod Rank
    ReadVariableOp Reshape ResourceGather Shape ShapeN Size Slice Softmax
    SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits Split
    Squeeze StatelessRandomGetKeyCounter StatelessRandomUniformV2 StridedSlice
    StridedSliceGrad Sum Tile Transpose Unpack ZerosLike
    """.split()
)
# Takes its shape from an attribute, and fails where it has another one.
_LOOKS_AT_SHAPES = "EnsureShape"
# Where these return elements of a list. They are told a shape, and do not look
# at it; at that of the list all look that put something in.
_TAKE_ELEMENTS = {"TensorListGetItem": 0, "TensorListPopBack": 1}

# They return as many images and channels as the gradient has, and are said to
# return those of the second input.
_RESIZES_BACK = frozenset(
    {"ResizeBicubicGrad", "ResizeBilinearGrad", "ScaleAndTranslateGrad"}
)

_PROVED: weakref.WeakSet = weakref.WeakSet()
# Output shapes by all that they follow from: a graph has the same operations
# many times over, and is walked several times.
_DERIVED: dict = {}
_MOST_DERIVED = 10_000
_LARGEST_VALUE = 4096  # bytes


def require_inferred(op, constants):
    """Checks that the static shapes of what an operation returns are its own.

    Args:
        op: `tf.Operation`.
        constants: `ConstantFolder`.

    Raises:
        Unproven: if one of them says more than follows from the inputs.
    """
    if op.type in functions.CALLS:
        _require(op, op.outputs, _proved(functions.body(op)).outputs)
    elif op.type in functions.LOOPS:
        # By induction: before the first step, and after each.
        body = _proved(functions.body(op, "body"))
        for claimed in (op.outputs, body.inputs):
            _require(op, claimed, op.inputs)
            _require(op, claimed, body.outputs)
        _proved(functions.body(op, "cond"))
    elif op.type in functions.CONTROL_FLOW:
        for body in functions.branches(op):
            _require(op, op.outputs, _proved(body).outputs)
    elif op.type == "LookupTableFindV2":
        _require_shape(op, op.outputs[0].shape, _shape_looked_up(op))
    elif op.type in _RESIZES_BACK:
        _require_shape(op, op.outputs[0].shape, _shape_resized_back(op))
    elif op.type in _TAKE_ELEMENTS:
        _require(op, op.outputs, _again(op, constants))
        taken = op.outputs[_TAKE_ELEMENTS[op.type]]
        shape = lists.shape_of_elements(op.inputs[0])
        # Where nothing was put in, zeros are taken, of the shape it was told.
        if shape is not None:
            _require_shape(op, taken.shape, shape)
    elif (
        not (op.type in _DETERMINED or rules.is_elementwise(op))
        or any(_may_tell_shapes(t) or _is_open(t) for t in op.inputs)
        or any(t.dtype == tf.resource for t in op.outputs)
    ):
        _require(op, op.outputs, _again(op, constants))


def require_held(handle):
    """Checks that a variable has the shape that its handle tells.

    Args:
        handle: `tf.Tensor` of the graph, which stands for the handle of a
            variable, or of a table.

    Raises:
        Unproven: if it has another one.
    """
    outermost = functions.origin(handle)
    (held, *_) = lists.shapes_held(handle)
    if held.rank is None or not hasattr(outermost, "numpy"):
        return
    try:
        with tf.init_scope():
            shape = tf.raw_ops.VariableShape(input=outermost).numpy().tolist()
    except tf.errors.OpError:
        # It has no value yet, or the handle is of something else.
        return
    if not _says_as_much(shape, held):
        raise Unproven(f"reads a variable of shape {shape}, told to be {held}")


def require_kept(graph):
    """Checks that variables keep their shapes when they are assigned.

    Raises:
        Unproven: if one may get another shape than its handle has.
    """
    for op in functions.operations(graph, "AssignVariableOp"):
        (held,) = lists.shapes_held(op.inputs[0]) or [tf.TensorShape(None)]
        if not _says_as_much(op.inputs[1].shape, held):
            raise Unproven(
                f"{op.type} '{op.name}' assigns a value of shape "
                f"{op.inputs[1].shape} to a variable of shape {held}. Use "
                "`tf.ensure_shape`"
            )


def _proved(body):
    """The body of a function, after its own shapes were checked."""
    if body.graph not in _PROVED:
        constants = ConstantFolder()
        inputs = {tensor.op for tensor in body.inputs}
        waiting, seen = [tensor.op for tensor in body.outputs], set(inputs)
        while waiting:
            op = waiting.pop()
            if op not in seen:
                seen.add(op)
                require_inferred(op, constants)
                waiting.extend(tensor.op for tensor in op.inputs)
        _PROVED.add(body.graph)
    return body


def _is_open(tensor):
    """Whether TensorFlow does not know the shape of a tensor or a variable."""
    if tensor.dtype == tf.resource:
        return not all(s.is_fully_defined() for s in lists.shapes_held(tensor))
    return tensor.dtype != tf.variant and not tensor.shape.is_fully_defined()


def _may_tell_shapes(tensor):
    # Of all that are not constants: `tf.get_static_value` tells other values of
    # some than TensorFlow does.
    return (
        tensor.dtype.is_integer
        and (tensor.shape.rank is None or tensor.shape.rank <= _MOST_AXES)
        and tensor.op.type != "Const"
    )


def _require(op, claimed, derived):
    """Checks that tensors claim no more than follows from those found."""
    for one, other in zip(claimed, derived):
        if one.dtype == tf.resource and not op.inputs:
            # Looked up by its name: `effects.require_known` refuses it.
            continue
        if one.dtype not in (tf.resource, tf.variant):
            _require_shape(op, one.shape, other.shape)
        elif one is not other:
            for shape, of_other in itertools.zip_longest(
                lists.shapes_held(one),
                lists.shapes_held(other),
                fillvalue=tf.TensorShape(None),
            ):
                _require_shape(op, shape, of_other)


def _require_shape(op, claimed, derived):
    if not _says_as_much(derived, claimed):
        raise Unproven(
            f"has a shape that was set, {claimed}, where TensorFlow finds "
            f"{derived}: a shape that it cannot check may be another one. Use "
            "`tf.ensure_shape`"
        )


def _shape_resized_back(op):
    """Shape of the gradient of a resized image, at the image."""
    gradient, image = (t.shape.with_rank(4) for t in op.inputs[:2])
    return tf.TensorShape([gradient[0], *image[1:3], gradient[3]])


def _shape_looked_up(op):
    """Shape of what is found in a table, which the table knows alone."""
    handle, keys, default = op.inputs
    if default.shape.rank != 0 and default.shape == keys.shape:
        raise Unproven("may have a default for each key, or vectors as values")
    if not _has_scalar_keys(handle, keys.dtype, default):
        raise Unproven("may have vectors as keys")
    return keys.shape.concatenate(default.shape)


def _has_scalar_keys(handle, dtype, default):
    """Whether a table that exists outside of the graph takes scalars as keys.

    No key at all is looked up: a table of vectors fails, because that is of
    another shape. A table that is filled later has scalars.
    """
    passed = functions.passed(handle)
    table = None if passed is None else functions.origin(passed)
    if not hasattr(table, "numpy") or not default.shape.is_fully_defined():
        return False
    try:
        with tf.init_scope():
            tf.raw_ops.LookupTableFindV2(
                table_handle=table,
                keys=tf.zeros([0], dtype),
                default_value=tf.zeros(default.shape, default.dtype),
            )
    except tf.errors.FailedPreconditionError:
        return True
    except tf.errors.InvalidArgumentError:
        return False
    return True


def _says_as_much(derived, claimed):
    if claimed.rank is None:
        return True
    derived = tf.TensorShape(derived)
    if derived.rank != claimed.rank:
        return False
    return all(b is None or a == b for a, b in zip(derived, claimed))


def _again(op, constants):
    """Outputs of the same operation of constants and placeholders.

    Where an attribute says what their shapes are, these are not known.
    """
    is_told = functions.names_functions(op.type) or any(
        "shape" in attribute.type for attribute in op.op_def.attr
    )
    if is_told and op.type != _LOOKS_AT_SHAPES:
        return [tf.TensorSpec(None, t.dtype) for t in op.outputs]
    values = [_value(tensor, constants) for tensor in op.inputs]
    attributes = {
        key: value
        for key, value in op.node_def.attr.items()
        if key not in ("_class", "_output_shapes")
    }
    if not _tells_all([*op.inputs, *op.outputs], values):
        return _made_of(op, values, attributes)
    key = (
        op.type,
        tuple((t.dtype, str(t.shape)) for t in op.inputs),
        tuple(None if v is None else (v.shape, v.tobytes()) for v in values),
        tuple(
            (key, value.SerializeToString(deterministic=True))
            for key, value in sorted(attributes.items())
        ),
    )
    specs = _DERIVED.get(key)
    if specs is None:
        if len(_DERIVED) >= _MOST_DERIVED:
            _DERIVED.clear()
        specs = _DERIVED[key] = [
            tf.TensorSpec(t.shape, t.dtype)
            for t in _made_of(op, values, attributes)
        ]
    return specs


def _tells_all(tensors, values):
    """Whether types, shapes and values are all that shapes follow from."""
    return not any(
        tensor.dtype in (tf.resource, tf.variant, tf.string)
        for tensor in tensors
    ) and all(v is None or v.nbytes <= _LARGEST_VALUE for v in values)


def _made_of(op, values, attributes):
    """Outputs of such an operation, of constants where values are given."""
    with tf.Graph().as_default() as graph:
        inputs = [
            functions.placeholder_like(tensor, tensor.shape)
            if value is None
            else tf.constant(value, tensor.dtype)
            for tensor, value in zip(op.inputs, values)
        ]
        made = graph.create_op(
            op.type,
            inputs,
            [t.dtype for t in op.outputs],
            attrs=attributes,
            op_def=op.op_def,
        )
    return made.outputs


def _value(tensor, constants):
    """The value of a tensor that may tell a shape, or None."""
    if tensor.dtype.is_integer and tensor.op.type == "Const":
        return tf.get_static_value(tensor)
    # As integers, or where `Range` starts and ends.
    if not tensor.dtype.is_integer and tensor.shape.rank != 0:
        return None
    limit = constants.clamped_to(tensor.op)
    try:
        if limit is None:
            return constants(tensor)
        return np.broadcast_to(constants(limit), static_shape(tensor))
    except Unproven:
        return None
