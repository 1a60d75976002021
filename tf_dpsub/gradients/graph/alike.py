"""Whether a public tensor is the same at every place of a batch."""

import numpy as np
import tensorflow as tf

from tf_dpsub.gradients.graph import loops, rules
from tf_dpsub.gradients.graph.constants import static_shape
from tf_dpsub.gradients.graph.states import PUBLIC, Unproven

# Larger constants are not compared entry by entry.
_LARGEST_CONSTANT = 2**24

_FILLS = frozenset("Fill OnesLike ZerosLike".split())
_RESHAPES = frozenset("ExpandDims Reshape Squeeze".split())
_ZEROS = frozenset("EmptyTensorList TensorListReserve ZerosLike".split())
_READS = ("ReadVariableOp", "ResourceGather", "Range")


class Alike:
    """Tells whether the slices of a public tensor are all equal.

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
        self._known: dict = {}
        self._equal: dict = {}

    def equate(self, placeholder, outside, tensor):
        """Tells what an input of a function always is.

        Args:
            placeholder: `tf.Tensor`, of the function. If it is a list, its
                elements are among those of the other one.
            outside: `Alike` of the graph that runs it.
            tensor: `tf.Tensor` of that graph.
        """
        self._equal[placeholder.ref()] = (outside, tensor, set())

    def asked(self, placeholder) -> set:
        """Where the slices of an input were found equal by what it is."""
        return set(self._equal[placeholder.ref()][2])

    def __call__(self, tensor, state):
        """Whether slices are equal that would belong to different examples.

        Args:
            tensor: `tf.Tensor`, public.
            state: `PerExample`, where the batch would be.

        Returns:
            bool; None where it is not known.
        """
        key = tensor.ref(), state
        if key not in self._known:
            try:
                self._known[key] = self._compute(tensor, state)
            except Unproven:
                self._known[key] = None
        return self._known[key]

    def uniform(self, tensor) -> bool:
        """Whether all entries are proved to be equal."""
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
        return bool(np.all(value == value.flat[0]))

    def _value(self, tensor):
        """NumPy value of a constant."""
        if np.prod(static_shape(tensor)) > _LARGEST_CONSTANT:
            raise Unproven("is a constant too large to look at")
        eager = self._eager_value(tensor)
        return self._constants(tensor) if eager is None else eager.numpy()

    def _compute(self, tensor, state):
        if tensor.ref() in self._equal:
            outside, equal, asked = self._equal[tensor.ref()]
            answer = outside(equal, state)
            if answer:
                asked.add(state)
            return answer
        op, axis = tensor.op, state.axis
        if op.type in loops.LOOPS:
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
        """For the elements of a list; those never set are zeros."""
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
        """Inputs whose slices those of a tensor follow, by its rule."""
        op = tensor.op
        for k, of_input in enumerate(op.inputs):
            states: list = [PUBLIC] * len(op.inputs)
            for axis, n in enumerate(static_shape(of_input)):
                if n != static_shape(tensor)[state.axis]:
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
        parts = value.reshape(
            before, state.outer, self._batch_size, state.inner, -1
        )
        same = (parts == parts[:, :, :1]) | (
            (parts != parts) & (parts[:, :, :1] != parts[:, :, :1])
        )
        return bool(np.all(same))

    def _aligned(self, tensor, rank, state, shape):
        """For an input that is broadcast to a shape."""
        own = static_shape(tensor)
        axis = state.axis - rank + len(own)
        if axis < 0 or own[axis] == 1:
            return True
        return self(tensor, state.moved_to(axis))


def _all(answers):
    """False if any is, else None if any is not known, else True."""
    answers = list(answers)
    if False in answers:
        return False
    return None if None in answers else True
