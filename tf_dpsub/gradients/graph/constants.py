"""Values of graph tensors that are known while the graph is traced."""

import itertools

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context, execute

from tf_dpsub.gradients.graph import determined
from tf_dpsub.gradients.graph.states import Unproven

# Their numbers follow from constant keys.
_DRAWS = ("StatelessRandom", "StatelessTruncated")
# NumPy is faster than running each operation. Of integers and booleans alone:
# kernels take the smallest floating-point numbers as zero, NumPy does not.
_ARITHMETIC = {
    "AddV2": np.add,
    "Greater": np.greater,
    "GreaterEqual": np.greater_equal,
    "Identity": np.asarray,
    "Less": np.less,
    "LessEqual": np.less_equal,
    "LogicalAnd": np.logical_and,
    "Sub": np.subtract,
}


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

    Operations are run, outside of the graph, on the values of their inputs.
    `tf.get_static_value` gives up on shapes that went through arithmetic, as
    gradients of broadcasts do, and takes no notice of attributes, such as that
    by which a `Cast` truncates.

    Args:
        values: dict from references of tensors to their values. Defaults to
            `None`, no tensor.
    """

    def __init__(self, values: dict | None = None):
        self._values = dict(values or {})

    def __call__(self, tensor):
        """The value of `tensor`, a NumPy array.

        Raises:
            Unproven: if it is not a constant.
        """
        key = tensor.ref()
        if tensor.dtype in (tf.resource, tf.variant):
            op = tensor.op
            raise Unproven(
                f"depends on {op.type} '{op.name}', which is no array"
            )
        if key not in self._values:
            self._values[key] = self._fold(tensor)
        return self._values[key]

    def entries(self, tensor):
        """The values of a vector, each by itself: None where not a constant.

        Raises:
            Unproven: if it is not known how many there are.
        """
        try:
            return list(np.ravel(self(tensor)))
        except Unproven:
            if tensor.op.type != "Pack":
                raise
        values = []
        for entry in tensor.op.inputs:
            try:
                values.append(self(entry))
            except Unproven:
                values.append(None)
        return values

    def clamped_to(self, op):
        """The input to which an operation clamps all numbers, or None.

        `tf.math.bincount` chooses a size from its input and then limits it.
        How often the value is there follows from the shape of the input.
        """
        if op.type != "Minimum" or not op.outputs[0].dtype.is_integer:
            return None
        for limit, other in itertools.permutations(op.inputs):
            if other.op.type != "Maximum":
                continue
            for least in other.op.inputs:
                try:
                    if np.all(self(least) >= self(limit)):
                        return limit
                except Unproven:
                    pass
        return None

    def stitches_all(self, op) -> bool:
        """Whether an operation is a `DynamicStitch` that leaves no gap.

        Its kernel leaves a gap as memory happens to be.
        """
        if op.type != "DynamicStitch":
            return False
        try:
            indices = [
                np.ravel(self(i)) for i in op.inputs[: len(op.inputs) // 2]
            ]
        except Unproven:
            return False
        filled = np.unique(np.concatenate(indices))
        return np.array_equal(filled, np.arange(filled.size))

    def _fold(self, tensor):
        op = tensor.op
        dtype = tensor.dtype.as_numpy_dtype
        if op.type == "Const":
            return tf.get_static_value(tensor)
        if op.type in ("Shape", "ShapeN"):
            return np.array(static_shape(op.inputs[tensor.value_index]), dtype)
        if op.type == "Size":
            return np.array(np.prod(static_shape(op.inputs[0])), dtype)
        if op.type == "Rank" and op.inputs[0].shape.rank is not None:
            return np.array(op.inputs[0].shape.rank, dtype)
        is_known = determined.is_determined(op.node_def) or op.type.startswith(
            _DRAWS
        )
        if not op.inputs or not (is_known or self.stitches_all(op)):
            raise Unproven(
                f"depends on {op.type} '{op.name}', which is not a constant"
            )
        values = [self(i) for i in op.inputs]
        if op.type in _ARITHMETIC and not any(
            i.dtype.is_floating or i.dtype.is_complex for i in op.inputs
        ):
            return _ARITHMETIC[op.type](*values)
        value = _run(op, values)[tensor.value_index]
        if any(_is_near_zero(v) for v in (*values, value)):
            raise Unproven(
                f"depends on {op.type} '{op.name}' of numbers that some "
                "kernels take as zero"
            )
        return value


def _is_near_zero(value):
    """Whether floating-point numbers are too small to be normalised."""
    value = np.asarray(value)
    if value.dtype.kind not in "fc" and "float" not in value.dtype.name:
        return False
    numbers = np.abs(value.astype("complex128"))
    tiny = np.finfo("float32").tiny
    return bool(np.any((numbers > 0) & (numbers < tiny)))


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
