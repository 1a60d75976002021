"""Effects of operations that outlive a step, and what they may write."""

from collections.abc import Callable

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from tf_dpsub.gradients.graph import functions
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
# Not declared stateful, but their outputs follow from files, memory, Python's
# variables, or other calls.
_UNDECLARED = (
    "BarrierReadySize",
    "BatchFunction",
    "FakeParam",
    "FractionalAvgPool",
    "FractionalMaxPool",
    "ImmutableConst",
    "MatchingFiles",
    "PyFuncStateless",
    "ReadFile",
    "Reader",
    "Snapshot",
    "Unbatch",
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
    graph,
    is_public: Callable,
    is_key: Callable = lambda tensor: False,
    allow_python: bool = False,
):
    """Checks that no effect in a graph depends on the batch.

    Args:
        graph: `tf.Graph`.
        is_public: callable, true for a tensor that does not depend on the
            batch.
        is_key: callable, true for a tensor that is a secret key, or the
            variable of one. Defaults to no tensor.
        allow_python: bool, whether Python functions may see the batch.
            Defaults to `False`.

    Raises:
        UpdatesState: if a variable is assigned a value that depends on it, or
            a secret key that is to be forgotten, or if a tensor is changed.
        Unproven: if another operation with an effect reads such a value.
    """
    unproven = None
    for op in graph.get_operations():
        _require_not_in_place(op)
        has_reference = any(i.dtype._is_ref_dtype for i in op.inputs)
        within = [
            (node.op, f"{op.name}/{node.name}")
            for definition in functions.called(op)
            for node in definition.node_def
            if _is_stateful(node)
        ]
        # A call without a state may be given the handle of a variable.
        if not (op.op_def.is_stateful or has_reference or within):
            continue
        if all(is_public(i) for i in op.inputs):
            _require_no_secret_kept(op, within, is_key)
            continue
        # Within a function, what depends on the batch is not followed.
        names = within
        if op.op_def.is_stateful or has_reference:
            names = [(op.type, op.name), *within]
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
                unproven = Unproven(f"{kind} '{name}' has an effect of its own")
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
            _passed(inner.inputs[0])
            for inner in functions.operations_within(op, _ASSIGNMENTS)
        ]
    else:
        # It is not known to what it assigns.
        written = [None for _ in within]
    is_kept = any(w is None or not is_key(w) for w in written)
    for kind, name in [(op.type, op.name), *within]:
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
    """Whether an operation may tell others what it was given."""
    if kind.startswith("Print"):
        return True
    is_known = _is_harmless(kind) or kind in _PYTHON
    return not (
        is_known
        or kind in functions.CONTROL_FLOW
        or not op_def_registry.get(kind).is_stateful
    )


def _passed(handle):
    """The handle that the caller of a function gave, or None."""
    while True:
        if handle.op.type == "Identity":
            handle = handle.op.inputs[0]
            continue
        known = functions.argument(handle)
        if known is None:
            return handle
        call, k = known
        if call.type in functions.LOOPS:
            # At a later step it might be another one.
            body = functions.body(call, "body")
            returned = body.outputs[k]
            while returned.op.type == "Identity":
                returned = returned.op.inputs[0]
            if returned is not body.inputs[k]:
                return None
        handle = call.inputs[k]


def _require_not_in_place(op):
    """Checks that an operation, and what it calls, changes no tensor."""
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


def require_known(op, draws_are: bool = False, python_is: bool = False):
    """Checks that the outputs of an operation follow from its inputs.

    Args:
        op: `tf.Operation`.
        draws_are: bool, whether random numbers are accepted. Defaults to
            `False`.
        python_is: bool, whether outputs of Python functions are. Defaults to
            `False`.

    Raises:
        Unproven: if they may follow from what an earlier step has stored.
    """
    nodes = [(op.node_def, op.op_def.is_stateful)] + [
        (node, _is_stateful(node))
        for definition in functions.called(op)
        for node in definition.node_def
    ]
    for node, is_stateful in nodes:
        kind = node.op
        if kind == "Empty" and node.attr["init"].b:
            # Zeros. Otherwise it has what memory happens to hold.
            continue
        if (draws_are and kind in _FALLBACK_DRAWS) or (
            python_is and kind in _PYTHON
        ):
            continue
        is_known = (
            kind.startswith((*_READS, *_ASSIGNMENTS, *_CHECKS))
            or kind in functions.CONTROL_FLOW
        )
        is_undeclared = kind == "Batch" or kind.startswith(_UNDECLARED)
        # It names a variable, as `VarHandleOp` does, or holds a list.
        is_undeclared |= _makes_handle(node)
        if is_undeclared or (is_stateful and not is_known):
            raise Unproven("returns what its inputs do not determine")


def _makes_handle(node):
    """Whether an operation makes a handle of what is no handle."""
    definition = op_def_registry.get(node.op)
    is_passed = node.op == "Placeholder" or node.op in functions.CONTROL_FLOW
    if definition is None or is_passed:
        return False
    made, given = (
        {
            kind
            for argument in arguments
            for kind in (
                argument.type or node.attr[argument.type_attr].type,
                *node.attr[argument.type_list_attr].list.type,
            )
        }
        for arguments in (definition.output_arg, definition.input_arg)
    )
    resource, variant = (
        dtype.as_datatype_enum for dtype in (tf.resource, tf.variant)
    )
    return (resource in made and not {resource, variant} & given) or (
        # What an attribute holds.
        variant in made and node.op in ("Const", "HostConst")
    )


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
    return any(kind in _PYTHON for kind in _kinds(graph))


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


def _is_stateful(node):
    definition = op_def_registry.get(node.op)
    # Without one, it calls a function, whose own nodes are looked at as well.
    return definition is not None and definition.is_stateful


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
        if any(
            _is_stateful(node)
            and not _is_harmless(node.op)
            and node.op not in functions.CONTROL_FLOW
            for definition in functions.called(op)
            for node in definition.node_def
        ):
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
        for kind in _kinds(graph)
    )


def _kinds(graph):
    """Types of the operations of a graph, and of those of its functions."""
    for op in graph.get_operations():
        yield op.type
        for definition in functions.called(op):
            for node in definition.node_def:
                yield node.op
