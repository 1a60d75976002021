"""Effects of operations that outlive a step, and what they may write."""

from collections.abc import Callable

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from tf_dpsub.gradients.graph import determined, functions
from tf_dpsub.gradients.graph.states import Unproven, UpdatesState

# Operations whose random numbers no variable determines.
DRAWS = frozenset(
    """
    AllCandidateSampler FixedUnigramCandidateSampler
    LogUniformCandidateSampler Multinomial NonDeterministicInts
    ParameterizedTruncatedNormal RandomCrop RandomGamma RandomPoisson
    RandomPoissonV2 RandomShuffle RandomStandardNormal RandomUniform
    RandomUniformInt SampleDistortedBoundingBox SampleDistortedBoundingBoxV2
    TruncatedNormal UniformCandidateSampler
    """.split()
)
# Their outputs follow from a variable or a table among their inputs.
_READS = (
    "LookupTableExport",
    "LookupTableFind",
    "LookupTableSize",
    "ReadVariableOp",
    "ResourceGather",
    "Stateless",
    "VarIsInitializedOp",
    "VariableShape",
)
# Declared stateful, but their outputs follow from their inputs.
_CHECKS = ("Assert", "CheckNumerics", "Print")
# Those that show what they were given, if only where they fail.
_TELL = ("Assert", "Print")
# TensorFlow 1's control flow: what hangs on these may run, or not, as a tensor
# says that is none of its inputs.
_MAY_NOT_RUN = frozenset(
    """
    Enter Exit LoopCond Merge NextIteration RefEnter RefExit RefMerge
    RefNextIteration RefSwitch Switch XlaMerge _SwitchN _XlaMerge
    """.split()
)
# Not declared stateful, but they write to the memory of their first input,
# which may be that of a weight.
_IN_PLACE = frozenset(
    {"InplaceAdd", "InplaceSub", "InplaceUpdate", "_ParallelConcatUpdate"}
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
# Draws that are allowed one example at a time: on a GPU, Keras runs recurrent
# layers as one operation, which could draw.
_FALLBACK_DRAWS = DRAWS | frozenset(
    """
    CudnnRNN CudnnRNNBackprop CudnnRNNBackpropV2 CudnnRNNBackpropV3 CudnnRNNV2
    CudnnRNNV3
    """.split()
)
_SEED_ATTRIBUTES = ("seed", "seed2")
# Python code is the user's, who sees the data anyway.
_PYTHON = ("EagerPyFunc", "PyFunc", "PyFuncStateless")


def require_none(
    operations,
    is_public: Callable,
    is_key: Callable = lambda tensor: False,
    allow_python: bool = False,
):
    """Checks that no effect of some operations depends on the batch.

    Args:
        operations: list of `tf.Operation`s of a graph.
        is_public: callable, true for a tensor that does not depend on the
            batch.
        is_key: callable, true for a tensor that is a secret key, or the
            variable of one. Defaults to no tensor.
        allow_python: bool, whether Python functions may see the batch.
            Defaults to `False`.

    Raises:
        UpdatesState: if a variable is assigned a value that depends on it, or
            a secret key that is to be forgotten, or if a tensor is changed.
        Unproven: if another operation with an effect reads such a value, or
            if operations may not run.
    """
    unproven = None
    for op in operations:
        _require_kinds(op)
        has_reference = any(i.dtype._is_ref_dtype for i in op.inputs)
        within = [
            (node.op, f"{op.name}/{node.name}")
            for definition in functions.called(op)
            for node in definition.node_def
            if _has_effect(node)
        ]
        has_effect = _has_effect(op.node_def) or has_reference
        # A call without a state may be given the handle of a variable.
        if not (has_effect or within):
            continue
        if all(is_public(i) for i in op.inputs):
            _require_no_secret_kept(op, within, is_key)
            continue
        # Within a function, what depends on the batch is not followed.
        names = [(op.type, op.name), *within] if has_effect else within
        for kind, name in names:
            if kind.startswith(_ASSIGNMENTS):
                raise UpdatesState(
                    f"{kind} '{name}' updates a state from the batch: what it "
                    "stores would be released without noise. Remove or freeze "
                    "the layer that does it (for BatchNormalization: "
                    "`layer.trainable = False`, or GroupNormalization)."
                )
            if _is_harmless(kind) and not has_reference:
                continue
            if kind in functions.CONTROL_FLOW:
                continue
            if not (allow_python and kind in _PYTHON):
                unproven = Unproven(
                    f"{kind} '{name}' may have an effect of its own"
                )
    if unproven is not None:
        raise unproven


def _require_no_secret_kept(op, within, is_key):
    """Checks that a secret of a step stays in it, or in a seed.

    Args:
        op: `tf.Operation` of public inputs and keys.
        within: list of pairs, types and names of the operations with a state
            in the functions that it runs.
        is_key: as for `require_none`.
    """
    if not (any(is_key(i) for i in op.inputs) or draws_within(op)):
        return
    if op.type.startswith(_ASSIGNMENTS):
        written = [op.inputs[0]]
    elif op.type in functions.CONTROL_FLOW:
        written = [
            functions.passed(inner.inputs[0])
            for inner in functions.operations_within(op, _ASSIGNMENTS)
        ]
    else:
        # It is not known to what it assigns.
        written = [None for _ in within]
    is_kept = any(w is None or not is_key(w) for w in written)
    names = [(op.type, op.name)] if _has_effect(op.node_def) else []
    for kind, name in [*names, *within]:
        if kind.startswith(_ASSIGNMENTS):
            if is_kept:
                raise UpdatesState(
                    f"{kind} '{name}' keeps a secret key of the step, or "
                    "random numbers, in a variable that is no seed of a "
                    "generator. Leave it out."
                )
        elif _is_secret_told(kind):
            raise UpdatesState(
                f"{kind} '{name}' passes on a secret key of the step, or "
                "random numbers. Leave it out."
            )


def _is_secret_told(kind):
    """Whether an operation with an effect may tell what it was given."""
    if kind.startswith(_TELL):
        return True
    return not (
        _is_harmless(kind) or kind in _PYTHON or kind in functions.CONTROL_FLOW
    )


def _require_kinds(op):
    """Checks that an operation, and what it calls, is of no forbidden kind."""
    kinds = [op.type] + [
        node.op
        for definition in functions.called(op)
        for node in definition.node_def
    ]
    for kind in _IN_PLACE.intersection(kinds):
        raise UpdatesState(
            f"{kind} in '{op.name}' changes a tensor that others may read, or "
            "a weight. Use `tf.tensor_scatter_nd_update`, which makes another."
        )
    for kind in _MAY_NOT_RUN.intersection(kinds):
        raise Unproven(
            f"{kind} in '{op.name}' is control flow of TensorFlow 1, which "
            "leaves operations out as the batch may say. Use `tf.cond` or "
            "`tf.while_loop`"
        )


def require_known(op, draws_are: bool = False, python_is: bool = False):
    """Checks that the outputs of an operation follow from its inputs.

    Args:
        op: `tf.Operation`.
        draws_are: bool, whether random numbers are accepted. Defaults to
            `False`.
        python_is: bool, whether outputs of Python functions are. Defaults to
            `False`.

    Raises:
        Unproven: if they may follow from what an earlier step has stored, or
            if nothing is known of it.
    """
    nodes = [] if determined.is_of_images(op) else [op.node_def]
    nodes += [
        node
        for definition in functions.called(op)
        for node in definition.node_def
        # A function is called by its name: it is among the others.
        if op.graph._get_function(node.op) is None
    ]
    for node in nodes:
        kind = node.op
        is_accepted = (draws_are and kind in _FALLBACK_DRAWS) or (
            python_is and kind in _PYTHON
        )
        if not (
            is_accepted
            or kind.startswith((*_READS, *_ASSIGNMENTS, *_CHECKS))
            or kind in functions.CONTROL_FLOW
            or determined.is_determined(node)
        ):
            raise Unproven("returns what its inputs do not determine")


def draws_with_public_seed(graph) -> list:
    """Names of the operations whose random numbers the program fixes."""
    names = []
    for op in graph.get_operations():
        if _has_seed(op.op_def) and _is_seeded(op.node_def):
            names.append(op.name)
        for definition in functions.called(op):
            names += [
                f"{op.name}/{node.name}"
                for node in definition.node_def
                if _is_seeded(node)
            ]
    return names


def calls_python(graph) -> bool:
    """Returns whether a graph runs Python functions."""
    return any(map(runs_python, graph.get_operations()))


def runs_python(op) -> bool:
    """Returns whether an operation runs a Python function."""
    return any(kind in _PYTHON for kind in kinds_of(op))


def _has_seed(definition):
    return any(
        a.name in _SEED_ATTRIBUTES and a.type == "int" for a in definition.attr
    )


def _is_seeded(node):
    return any(
        name in node.attr and node.attr[name].i for name in _SEED_ATTRIBUTES
    )


def _is_harmless(kind):
    """Returns whether nothing can read later what an operation was given."""
    return kind in DRAWS or kind.startswith((*_READS, *_CHECKS))


def draws_within(op) -> bool:
    """Returns whether a call draws random numbers."""
    return any(
        (node.op in DRAWS or node.op.startswith("Stateless"))
        and node.op not in functions.CONTROL_FLOW
        for definition in functions.called(op)
        for node in definition.node_def
    )


def _has_effect(node):
    """Whether a node may write, read or tell more than its inputs."""
    definition = op_def_registry.get(node.op)
    if definition is None:
        # It calls a function, whose own nodes are looked at as well.
        return False
    return definition.is_stateful or not (
        node.op in functions.CONTROL_FLOW
        or node.op.startswith(_READS)
        or determined.writes_nothing(node)
    )


def only_reads(kind: str) -> bool:
    """Returns whether an operation of a type only reads its variable."""
    return kind.startswith(_READS)


def writes(kind: str) -> bool:
    """Returns whether an operation of a type may itself write."""
    definition = op_def_registry.get(kind)
    return (
        definition is not None
        and definition.is_stateful
        and not _is_harmless(kind)
        and kind not in functions.CONTROL_FLOW
        and len(definition.input_arg) > 0
    )


def written_resources(graph):
    """Resources that operations of a graph may write.

    Returns:
        Set of references to tensors of the graph: the handles.
    """
    return written_by(graph.get_operations())


def written_by(operations) -> set:
    """Resources that some operations may write."""
    written: set = set()
    for op in operations:
        handles = [i for i in op.inputs if i.dtype == tf.resource]
        if not handles or _is_harmless(op.type):
            continue
        if op.type not in functions.CONTROL_FLOW:
            # What is passed on could be written under another name.
            if op.op_def.is_stateful or any(
                o.dtype == tf.resource for o in op.outputs
            ):
                written.update(h.ref() for h in handles)
            continue
        kinds = {
            node.op
            for definition in functions.called(op)
            for node in definition.node_def
            if _has_effect(node)
            and not _is_harmless(node.op)
            and node.op not in functions.CONTROL_FLOW
        }
        if not kinds:
            continue
        assigned = [
            functions.passed(inner.inputs[0])
            for inner in functions.operations_within(op, _ASSIGNMENTS)
        ]
        if all(kind.startswith(_ASSIGNMENTS) for kind in kinds) and all(
            any(h is handle for h in handles) for handle in assigned
        ):
            written.update(handle.ref() for handle in assigned)
        else:
            # It is not known which of them.
            written.update(h.ref() for h in handles)
    return written


def draws(graph, stateless: bool = False):
    """Returns whether a graph draws numbers that no variable determines.

    Args:
        graph: `tf.Graph`.
        stateless: bool, whether those count too that follow from a seed.
            Defaults to `False`.
    """
    return any(
        kind in DRAWS
        or (
            stateless
            and kind.startswith("Stateless")
            and kind not in functions.CONTROL_FLOW
        )
        for kind in kinds(graph)
    )


def kinds(graph):
    """Types of the operations of a graph, and of those of its functions."""
    for op in graph.get_operations():
        yield from kinds_of(op)


def kinds_of(op):
    """Types of an operation, and of those of the functions that it runs."""
    yield op.type
    for definition in functions.called(op):
        for node in definition.node_def:
            yield node.op
