"""Static shapes that TensorFlow found by itself.

`set_shape` may claim any shape where TensorFlow knows none, and nothing checks
it when the graph runs. Rules rest on shapes: so those of operations that are
told a shape, or axes, by numbers which are not plain constants are found again.
"""

import tensorflow as tf
from tensorflow.python.ops import handle_data_util

from tf_dpsub.gradients.graph import functions, loops
from tf_dpsub.gradients.graph.states import Unproven

# Shapes, axes and paddings have no more axes.
_MOST_AXES = 2


def require_inferred(op, constants):
    """Checks that the static shapes of what an operation returns are its own.

    Args:
        op: `tf.Operation`.
        constants: `ConstantFolder`.

    Raises:
        Unproven: if one of them says more than follows from the inputs.
    """
    if op.type in functions.CALLS:
        _require(op, functions.body(op).outputs)
    elif op.type in loops.LOOPS:
        # By induction: before the first step, and after each.
        _require(op, op.inputs)
        _require(op, functions.body(op, "body").outputs)
    elif op.type in functions.CONTROL_FLOW:
        for body in functions.branches(op):
            _require(op, body.outputs)
    elif op.type == "LookupTableFindV2":
        _require_shapes(op, [_shape_looked_up(op)])
    elif any(_may_tell_shapes(t) or _is_open(t) for t in op.inputs):
        _require(op, _again(op, constants))


def _is_open(tensor):
    """Whether TensorFlow does not know the shape of a tensor or a variable."""
    if tensor.dtype == tf.resource:
        data = handle_data_util.get_resource_handle_data(tensor)
        return data.is_set and not all(
            tf.TensorShape(content.shape).is_fully_defined()
            for content in data.shape_and_type
        )
    return tensor.dtype != tf.variant and not tensor.shape.is_fully_defined()


def _may_tell_shapes(tensor):
    return (
        tensor.dtype.is_integer
        and (tensor.shape.rank is None or tensor.shape.rank <= _MOST_AXES)
        and tf.get_static_value(tensor) is None
    )


def _require(op, outputs):
    _require_shapes(op, [found.shape for found in outputs])


def _require_shapes(op, shapes):
    for claimed, shape in zip(op.outputs, shapes):
        if claimed.dtype in (tf.resource, tf.variant):
            continue
        if not _says_as_much(shape, claimed.shape):
            raise Unproven(
                f"has a shape that was set, {claimed.shape}, where TensorFlow "
                f"finds {shape}: a shape that it cannot check may be another "
                "one. Use `tf.ensure_shape`"
            )


def _shape_looked_up(op):
    """Shape of what is found in a table, which the table knows alone."""
    _, keys, default = (tensor.shape for tensor in op.inputs)
    if default.rank != 0 and default == keys:
        raise Unproven("may have a default for each key, or vectors as values")
    return keys if default.rank == 0 else keys.concatenate(default)


def _says_as_much(found, claimed):
    if claimed.rank is None:
        return True
    if found.rank != claimed.rank:
        return False
    return all(b is None or a == b for a, b in zip(found, claimed))


def _again(op, constants):
    """Outputs of the same operation of constants and placeholders."""
    values = [_value(tensor, constants) for tensor in op.inputs]
    with tf.Graph().as_default() as graph:
        inputs = [
            functions.placeholder_like(tensor, tensor.shape)
            if value is None
            else tf.constant(value, tensor.dtype)
            for tensor, value in zip(op.inputs, values)
        ]
        attributes = {
            key: value
            for key, value in op.node_def.attr.items()
            if key not in ("_class", "_output_shapes")
        }
        made = graph.create_op(
            op.type,
            inputs,
            [t.dtype for t in op.outputs],
            attrs=attributes,
            op_def=op.op_def,
        )
    return made.outputs


def _value(tensor, constants):
    """The value of integers that may tell a shape, or None."""
    if not tensor.dtype.is_integer:
        return None
    if not _may_tell_shapes(tensor):
        return tf.get_static_value(tensor)
    # All numbers are clamped to the limit, which is known.
    is_clamped = constants.is_clamped(tensor.op)
    for known in tensor.op.inputs if is_clamped else [tensor]:
        try:
            return constants(known)
        except Unproven:
            continue
    return None
