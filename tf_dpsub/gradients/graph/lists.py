"""Rules for lists of tensors, in which loops keep what each step computes.

A list has the state of its elements: it is per-example if each of them is,
along one axis that is the same in all. How many they are is public, because no
rule lets the batch decide whether one is added or taken.
"""

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import handle_data_util

from tf_dpsub.gradients.graph import functions
from tf_dpsub.gradients.graph.constants import ConstantFolder
from tf_dpsub.gradients.graph.states import PUBLIC, Unproven

# Operations that put an element into a list, and which of their inputs it is.
_PUT = {"TensorListPushBack": 1, "TensorListSetItem": 2}
# Those whose lists have the elements of their first inputs, or of all.
_HAND_ON = frozenset(
    "AddN Identity TensorListPopBack TensorListResize ZerosLike".split()
)
_NEW = frozenset({"EmptyTensorList", "TensorListReserve"})
_OF_TENSORS = frozenset({"TensorListFromTensor", "TensorListScatterV2"})


def shapes_held(handle) -> list:
    """Static shapes of what a variable holds, or of the elements of a list."""
    if isinstance(handle, tf.TensorSpec):
        return [tf.TensorShape(None)]
    data = handle_data_util.get_resource_handle_data(handle)
    if data is None or not data.is_set:
        return [tf.TensorShape(None)]
    return [tf.TensorShape(held.shape) for held in data.shape_and_type]


def shape_of_elements(handle):
    """Static shape that all elements of a list have which were put in.

    If all lists that it was before were made for one shape, TensorFlow looks at
    it when they are put in. Otherwise these are looked at.

    Returns:
        `tf.TensorShape`, or `None` if none were put in.
    """
    made_for, put, waiting, seen = [], [], [handle], set()
    while waiting:
        tensor = waiting.pop()
        if tensor.ref() in seen:
            continue
        seen.add(tensor.ref())
        op = tensor.op
        if op.type in _NEW:
            made_for.append(_made_for(op))
        elif op.type in _PUT:
            put.append(op.inputs[_PUT[op.type]].shape)
            waiting.append(op.inputs[0])
        elif op.type in _HAND_ON:
            waiting += op.inputs if op.type == "AddN" else [op.inputs[0]]
        else:
            before = _before(tensor)
            waiting += before
            if not before:
                made_for.append(tf.TensorShape(None))
                is_stack = op.type in _OF_TENSORS
                shape = op.inputs[0].shape[1:] if is_stack else None
                put.append(tf.TensorShape(shape))
    if _one_of(made_for) is not None:
        return _one_of(made_for)
    return (_one_of(put) or tf.TensorShape(None)) if put else None


def _made_for(op):
    """The shape that elements of a new list must have, as far as is known."""
    try:
        shape = ConstantFolder()(op.inputs[0])
    except Unproven:
        return tf.TensorShape(None)
    if np.ndim(shape) != 1 or np.any(shape < 0):
        return tf.TensorShape(None)
    return tf.TensorShape(shape)


def _one_of(shapes):
    """The shape that all of some have, or None."""
    is_one = shapes and all(
        s.is_fully_defined() and s == shapes[0] for s in shapes
    )
    return shapes[0] if is_one else None


def _before(tensor):
    """Tensors that one equals which enters, or leaves, a function or a loop."""
    op, k = tensor.op, tensor.value_index
    if op.type == "Placeholder":
        position = functions.argument(tensor)
        if position is None:
            return []
        op, k = position
        if op.type not in functions.LOOPS:
            return [op.inputs[k]]
    if op.type in functions.LOOPS:
        return [op.inputs[k], functions.body(op, "body").outputs[k]]
    if op.type in functions.CALLS:
        return [functions.body(op).outputs[k]]
    if op.type in functions.CONTROL_FLOW:
        return [body.outputs[k] for body in functions.branches(op)]
    return []


def _sizes(a):
    return PUBLIC


def _put(a):
    """State of a list after an item was put in, at a public position."""
    a.only(0, len(a.states) - 1, whole=(1,))
    return together(a)


def together(a):
    """Common state of lists, or of a list and an item."""
    if any(a.states[k] != a.first for k in a.batched):
        raise Unproven("has the batch on different axes of a list's elements")
    for k in a.public:
        a.alike(k, a.first)
    return a.first


def _take(a):
    a.only(0, whole=(1, 2))
    return a.first


def _from_tensor(a):
    a.only(0, whole=(1, 2, 3))
    if a.first.axis == 0:
        raise Unproven("takes the batch axis apart")
    return a.first.moved_to(a.first.axis - 1)


def _stack(a):
    a.only(0, whole=(1, 2))
    return a.first.moved_to(a.first.axis + 1)


RULES = {
    "TensorListElementShape": _sizes,
    "TensorListFromTensor": _from_tensor,
    "TensorListGather": _stack,
    "TensorListGetItem": _take,
    "TensorListLength": _sizes,
    "TensorListPopBack": _take,
    "TensorListPushBack": _put,
    "TensorListResize": _take,
    "TensorListScatterV2": _from_tensor,
    "TensorListSetItem": _put,
    "TensorListStack": _stack,
}
