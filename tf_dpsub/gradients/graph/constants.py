"""Values of graph tensors that are known while the graph is traced."""

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context, execute

from tf_dpsub.gradients.graph.states import Unproven


def static_shape(tensor):
    """The shape of `tensor` as a list of ints.

    Raises:
        Unproven: if a dimension is not known.
    """
    shape = tensor.shape
    if shape.rank is None or None in shape.as_list():
        raise Unproven(f"has an input of shape {shape}, which is not static")
    return shape.as_list()


class ConstantFolder:
    """Evaluates axes, permutations and shapes, and remembers them.

    `tf.get_static_value` gives up on shapes that went through arithmetic, as
    gradients of broadcasts do: operations without a constant value are run,
    outside of the graph, on the values of their inputs.
    """

    def __init__(self):
        self._values = {}

    def __call__(self, tensor):
        """The value of `tensor`, a NumPy array.

        Raises:
            Unproven: if it is not a constant.
        """
        key = tensor.ref()
        if key not in self._values:
            value = tf.get_static_value(tensor)
            self._values[key] = self._fold(tensor) if value is None else value
        return self._values[key]

    def _fold(self, tensor):
        op = tensor.op
        dtype = tensor.dtype.as_numpy_dtype
        if op.type in ("Shape", "ShapeN"):
            return np.array(static_shape(op.inputs[tensor.value_index]), dtype)
        if op.type == "Size":
            return np.array(np.prod(static_shape(op.inputs[0])), dtype)
        if not op.inputs or op.op_def.is_stateful or op.type == "Placeholder":
            raise Unproven(
                f"depends on {op.type} '{op.name}', which is not a constant"
            )
        return _run(op, [self(i) for i in op.inputs])[tensor.value_index]


def _run(op, values):
    """Runs `op` on NumPy values, outside of the graph that holds it."""
    attributes = []
    for attribute in op.op_def.attr:
        value = op.get_attr(attribute.name)
        is_type = isinstance(value, tf.DType)
        attributes += [
            attribute.name,
            value.as_datatype_enum if is_type else value,
        ]
    with tf.init_scope():
        outputs = execute.execute(
            op.type,
            len(op.outputs),
            [
                tf.constant(value, i.dtype)
                for value, i in zip(values, op.inputs)
            ],
            tuple(attributes),
            context.context(),
        )
    return [t.numpy() for t in outputs]
