"""Rules for lists of tensors, in which loops keep what each step computes.

A list has the state of its elements: it is per-example if each of them is,
along one axis that is the same in all. How many they are is public, because no
rule lets the batch decide whether one is added or taken.
"""

from tf_dpsub.gradients.graph.states import PUBLIC, Unproven


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
