"""Equality of the slices of a public tensor at all places of a batch."""

import numpy as np
import tensorflow as tf

from tf_dpsub.gradients.graph import functions, loops, rules
from tf_dpsub.gradients.graph.constants import static_shape
from tf_dpsub.gradients.graph.states import PUBLIC, Unproven

# Larger constants are not compared entry by entry.
_LARGEST_CONSTANT = 2**24

_FILLS = frozenset("Fill OnesLike ZerosLike".split())
_RESHAPES = frozenset("ExpandDims Reshape Squeeze".split())
_ZEROS = frozenset("EmptyTensorList TensorListReserve ZerosLike".split())
_READS = ("ReadVariableOp", "ResourceGather", "Range")


class Alike:
    """Decides whether the slices of a public tensor are all equal.

    Args:
        batch_size: int.
        constants: `ConstantFolder`.
        eager_value: callable of a tensor: the eager tensor that it captures,
            or None.
    """

    def __init__(self, batch_size, constants, eager_value):
        self._batch_size = batch_size
        self._constants = constants
        self._eager_value = eager_value
        self._answers: dict = {}
        self._outside: dict = {}

    def equate(self, placeholder, outside, tensor):
        """Records the outer tensor that an input of a function always equals.

        Args:
            placeholder: `tf.Tensor`, of the function. If it is a list, its
                elements are among those of the other one.
            outside: `Alike` of the graph that runs it.
            tensor: `tf.Tensor` of that graph.
        """
        self._outside[placeholder.ref()] = (outside, tensor, set())

    def asked(self, placeholder) -> set:
        """States for which an input was alike because its outer tensor is."""
        return set(self._outside[placeholder.ref()][2])

    def __call__(self, tensor, state):
        """Returns whether slices that different examples would see are equal.

        Args:
            tensor: `tf.Tensor`, public.
            state: `PerExample`, where the batch would be.

        Returns:
            bool; None where it is not known.
        """
        key = tensor.ref(), state
        if key not in self._answers:
            try:
                self._answers[key] = self._compute(tensor, state)
            except Unproven:
                self._answers[key] = None
        return self._answers[key]

    def uniform(self, tensor) -> bool:
        """Returns whether all entries are proved to be equal."""
        try:
            shape = static_shape(tensor)
            if np.prod(shape) == 1:
                return True
            op = tensor.op
            if op.type in _FILLS:
                return True
            if op.type == "BroadcastTo" or rules.is_elementwise(op):
                return all(
                    self.uniform(i)
                    for k, i in enumerate(op.inputs)
                    if not (op.type == "BroadcastTo" and k == 1)
                )
            if op.type in _RESHAPES or op.type in ("Transpose", "Tile"):
                return self.uniform(op.inputs[0])
            value = self._value(tensor)
        except Unproven:
            return False
        numbers = _bytes(value)
        return bool(np.all(numbers == numbers.reshape(value.size, -1)[0]))

    def _value(self, tensor):
        """NumPy value of a constant."""
        if np.prod(static_shape(tensor)) > _LARGEST_CONSTANT:
            raise Unproven("is a constant too large to look at")
        eager = self._eager_value(tensor)
        return self._constants(tensor) if eager is None else eager.numpy()

    def _compute(self, tensor, state):
        if tensor.ref() in self._outside:
            outside, equal, asked = self._outside[tensor.ref()]
            answer = outside(equal, state)
            if answer:
                asked.add(state)
            return answer
        op, axis = tensor.op, state.axis
        if op.type in functions.LOOPS:
            equal = loops.origins(op)[tensor.value_index]
            return None if equal is None else self(equal, state)
        if tensor.dtype == tf.variant:
            return self._of_list(tensor, state)
        if op.type in ("TensorListGetItem", "TensorListPopBack"):
            return self(op.inputs[0], state)
        shape = static_shape(tensor)
        if shape[axis] == 1 or op.type in _FILLS:
            return True
        if op.type in _READS:
            return False
        if op.type == "BroadcastTo" or rules.is_elementwise(op):
            inputs = op.inputs[:1] if op.type == "BroadcastTo" else op.inputs
            return _all(
                self._aligned(i, len(shape), state, shape) for i in inputs
            )
        if op.type in _RESHAPES:
            before = rules.find_batch(
                static_shape(op.inputs[0]),
                state.outer * int(np.prod(shape[:axis])),
                self._batch_size,
                state.inner * int(np.prod(shape[axis + 1 :])),
            )
            if before is None:
                return self._numeric(tensor, state)
            return self(op.inputs[0], before)
        if op.type == "Tile":
            before = static_shape(op.inputs[0])[axis]
            if state.inner % before == 0:
                return True
            if before == shape[axis]:
                return self(op.inputs[0], state)
            return None
        if op.type == "Pack" and op.get_attr("axis") % len(shape) == axis:
            if len({i.ref() for i in op.inputs}) == 1:
                return True
            return self._numeric(tensor, state)
        for k, before in self._followed(tensor, state):
            return self(op.inputs[k], before)
        return self._numeric(tensor, state)

    def _of_list(self, tensor, state):
        """Answer for the elements of a list; those never set are zeros."""
        op = tensor.op
        if op.type in _ZEROS:
            return True
        if op.type == "TensorListFromTensor":
            return self(op.inputs[0], state.moved_to(state.axis + 1))
        if op.type in ("Identity", "TensorListPopBack", "TensorListResize"):
            return self(op.inputs[0], state)
        if op.type == "AddN":
            return _all(self(i, state) for i in op.inputs)
        if op.type in ("TensorListPushBack", "TensorListSetItem"):
            return _all(self(op.inputs[k], state) for k in (0, -1))
        return None

    def _followed(self, tensor, state):
        """Inputs, each with a state that the rule turns into the tensor's."""
        op = tensor.op
        for k, input_tensor in enumerate(op.inputs):
            states: list = [PUBLIC] * len(op.inputs)
            for axis, size in enumerate(static_shape(input_tensor)):
                if size != static_shape(tensor)[state.axis]:
                    continue
                states[k] = state.moved_to(axis)
                application = rules.Application(
                    op, states, self._batch_size, self._constants, self
                )
                try:
                    result = rules.apply_rule(application)
                except Unproven:
                    continue
                if isinstance(result, list):
                    result = result[tensor.value_index]
                if result == state:
                    yield k, states[k]

    def _numeric(self, tensor, state):
        value = self._value(tensor)
        before = int(np.prod(value.shape[: state.axis]))
        parts = _bytes(value).reshape(
            before, state.outer, self._batch_size, state.inner, -1
        )
        return bool(np.all(parts == parts[:, :, :1]))

    def _aligned(self, tensor, rank, state, shape):
        """Answer for an input that is broadcast to a shape."""
        input_shape = static_shape(tensor)
        axis = state.axis - rank + len(input_shape)
        if axis < 0 or input_shape[axis] == 1:
            return True
        return self(tensor, state.moved_to(axis))


def _bytes(value):
    """An array of numbers as one of bytes, `[*shape, bytes of a number]`.

    Zero equals minus zero, of which the reciprocals differ.
    """
    value = np.asarray(value)
    if value.dtype == object:  # strings
        return value[..., None]
    flat = np.ascontiguousarray(value).reshape(-1)
    return flat.view(np.uint8).reshape(*value.shape, value.itemsize)


def _all(answers):
    """False if any answer is, else None if any is unknown, else True."""
    answers = list(answers)
    if False in answers:
        return False
    return None if None in answers else True
