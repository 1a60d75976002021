"""Effects of operations that outlive a step, and what they may write."""

from collections.abc import Callable

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from tf_dpsub.gradients.graph import functions
from tf_dpsub.gradients.graph.states import Unproven, UpdatesState

# Random numbers that no variable determines.
_DRAWS = (
    "Multinomial",
    "ParameterizedTruncatedNormal",
    "Random",
    "TruncatedNormal",
)
# Stateful by name, but nothing later can read what they were given.
_HARMLESS = (
    *_DRAWS,
    "Assert",
    "LookupTableExport",
    "LookupTableFind",
    "LookupTableSize",
    "Print",
    "ReadVariableOp",
    "ResourceGather",
    "Stateless",
    "VarIsInitializedOp",
    "VariableShape",
)
_ASSIGNMENTS = (
    "Assign",
    "ResourceApply",
    "ResourceCountUpTo",
    "ResourceScatter",
    "ResourceSparseApply",
    "ResourceStrided",
    "RngReadAndSkip",
    "RngSkip",
)
# Python code is the user's, who sees the data anyway.
_PYTHON = ("EagerPyFunc", "PyFunc", "PyFuncStateless")


def require_none(graph, is_public: Callable, allow_python: bool = False):
    """Checks that no effect in a graph depends on the batch.

    Args:
        graph: `tf.Graph`.
        is_public: callable that tells of a tensor whether it does not depend
            on the batch.
        allow_python: bool, whether Python functions may see the batch.
            Defaults to `False`.

    Raises:
        UpdatesState: if a variable is assigned a value that depends on it.
        Unproven: if another operation with an effect reads such a value.
    """
    unproven = None
    for op in graph.get_operations():
        has_reference = any(i.dtype._is_ref_dtype for i in op.inputs)
        if not (op.op_def.is_stateful or has_reference):
            continue
        if all(is_public(i) for i in op.inputs):
            continue
        # Within a function, what depends on the batch is not followed.
        names = [(op.type, op.name)] + [
            (node.op, f"{op.name}/{node.name}")
            for definition in functions.called(op)
            for node in definition.node_def
            if _is_stateful(node)
        ]
        for kind, name in names:
            if kind.startswith(_ASSIGNMENTS):
                raise UpdatesState(
                    f"{kind} '{name}' updates a state from the batch: what it "
                    "stores would be released without noise. Remove or freeze "
                    "the layer that does it (for BatchNormalization: "
                    "`layer.trainable = False`, or GroupNormalization)."
                )
            if kind.startswith(_HARMLESS) and not has_reference:
                continue
            if kind in functions.CONTROL_FLOW:
                continue
            if not (allow_python and kind in _PYTHON):
                unproven = Unproven(f"{kind} '{name}' has an effect of its own")
    if unproven is not None:
        raise unproven


def _is_stateful(node):
    definition = op_def_registry.get(node.op)
    return definition is None or definition.is_stateful


def written_resources(graph):
    """Resources that operations of a graph may write.

    Returns:
        Set of references to tensors of the graph: the handles.
    """
    written = set()
    for op in graph.get_operations():
        handles = [i for i in op.inputs if i.dtype == tf.resource]
        if not handles or op.type.startswith(_HARMLESS):
            continue
        if op.type not in functions.CONTROL_FLOW:
            if op.op_def.is_stateful:
                written.update(h.ref() for h in handles)
            continue
        if any(
            _is_stateful(node)
            and not node.op.startswith(_HARMLESS)
            and node.op not in functions.CONTROL_FLOW
            for definition in functions.called(op)
            for node in definition.node_def
        ):
            written.update(h.ref() for h in handles)
    return written


def draws(graph):
    """Whether a graph draws random numbers that no variable determines."""
    return any(
        kind.startswith(_DRAWS)
        for op in graph.get_operations()
        for kind in (
            op.type,
            *(
                node.op
                for definition in functions.called(op)
                for node in definition.node_def
            ),
        )
    )
