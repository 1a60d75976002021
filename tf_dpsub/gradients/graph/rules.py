"""Rules: the state of an operation's outputs from the states of its inputs.

A rule is called with an `Application` of an operation of which at least one
input is per-example and none is mixed. It returns the state of the outputs
(one for all, or a list), raises `MixesExamples` where an output certainly
combines several examples, and `Unproven` where it cannot tell.
"""

import re
import string
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tf_dpsub.gradients.graph import lists
from tf_dpsub.gradients.graph.constants import static_shape
from tf_dpsub.gradients.graph.states import (
    PUBLIC,
    Mixed,
    MixesExamples,
    PerExample,
    Unproven,
)

_RULES: dict[str, Callable] = dict(lists.RULES)

# Outputs are functions of static shapes alone.
_EQUATION = re.compile(rb"[a-zA-Z,.]*->[a-zA-Z.]*")
_SHAPE_ONLY = frozenset("Shape ShapeN Size Rank ZerosLike OnesLike".split())


class Application:
    """One operation, with the states of its inputs.

    Attributes:
        op: the `tf.Operation`.
        states: list, the state of each input: `PUBLIC` or `PerExample`.
        batch_size: int.
        batched: list of int, positions of the inputs that are per-example.
        first: `PerExample`, the state of the first of them.
        public: list of int, positions of the public inputs of which each
            example may see a slice of its own.
    """

    def __init__(self, op, states, batch_size, constants, alike):
        self.op = op
        self.states = states
        self.batch_size = batch_size
        self.batched = [
            k for k, state in enumerate(states) if state is not PUBLIC
        ]
        self.first = states[self.batched[0]]
        self._constants = constants
        self._alike = alike
        self.public = [k for k in range(len(states)) if k not in self.batched]

    def shape(self, k):
        """Static shape of input `k`."""
        return static_shape(self.op.inputs[k])

    def out_shape(self, k=0):
        """Static shape of output `k`."""
        return static_shape(self.op.outputs[k])

    def constant(self, k):
        """Value of input `k`."""
        return self._constants(self.op.inputs[k])

    def entries(self, k):
        """Values in input `k`, a vector: None where one is not constant."""
        return self._constants.entries(self.op.inputs[k])

    def axes(self, k, rank):
        """Value of input `k`, a list of axes of a tensor of that rank."""
        return [int(a) % rank for a in np.ravel(self.constant(k))]

    def attr(self, name):
        return self.op.get_attr(name)

    def only(self, *positions, whole=()):
        """Requires that no input but these is per-example.

        Args:
            *positions: int, the inputs that may be.
            whole: tuple of int, others that are more than one number, of which
                every example sees all, whatever its place: sizes, axes or
                weights. Where one may meet the batch place by place, `alike`
                is required of it too. Defaults to `()`.

        Raises:
            Unproven: if another input is per-example, or another public one
                may differ by place.
        """
        for k in self.batched:
            if k not in positions:
                raise Unproven(f"has input {k} computed from the batch")
        for k in self.public:
            tensor = self.op.inputs[k]
            is_number = tensor.dtype == tf.resource or tensor.shape.rank == 0
            if k not in positions and k not in whole and not is_number:
                raise Unproven(f"has input {k}, which may differ by place")
        self.public = [k for k in self.public if k in positions]

    def alike(self, k, state):
        """Requires that a public input is the same at every place.

        Args:
            k: int, position of the input.
            state: `PerExample`, where the batch meets it.

        Raises:
            MixesExamples: if it is known to differ from place to place.
            Unproven: if it is not proved that it does not.
        """
        shape = self.shape(k)
        if self.op.inputs[k].dtype != tf.variant:
            if state.axis < 0 or shape[state.axis] == 1:
                return
            size = state.outer * self.batch_size * state.inner
            if shape[state.axis] != size:
                raise Unproven(
                    f"takes an input of shape {shape} beside the batch"
                )
        same = self._alike(self.op.inputs[k], state)
        if same is False:
            raise MixesExamples(
                f"takes an input of shape {shape} that differs from place to "
                "place in the batch: an example's place tells who else was "
                "drawn. Make it the same for all examples, or random"
            )
        if same is None:
            raise Unproven(
                f"takes an input of shape {shape} that is not proved to be "
                "the same at every place in the batch"
            )

    def common(self):
        """The one state of all per-example inputs, of equal rank."""
        self._require_one_state()
        ranks = {self.op.inputs[k].shape.rank for k in self.batched}
        if len(ranks) > 1 or None in ranks:
            raise Unproven("pairs tensors of the batch that differ in rank")
        (rank,) = ranks
        for k in self.public:
            if len(self.shape(k)) == rank:
                self.alike(k, self.first)
        return self.first

    def leading(self):
        """The one state of all, of any rank, which must be along axis 0."""
        self._require_one_state()
        state = self.first
        if state.axis != 0:
            raise Unproven("has the batch on an axis other than 0")
        size = self.op.inputs[self.batched[0]].shape[0]
        for k in self.public:
            shape = self.shape(k)
            if shape and shape[0] == size:
                self.alike(k, state)
        return state

    def _require_one_state(self):
        if any(self.states[k] != self.first for k in self.batched):
            raise MixesExamples("pairs the batch with another axis of it")


def apply_rule(application):
    """The states of the outputs of an operation.

    Raises:
        Unproven: if there is no rule, or if it cannot tell.
        MixesExamples: if the operation mixes examples.
    """
    op = application.op
    if op.type in _SHAPE_ONLY:
        for k in range(len(op.inputs)):
            application.shape(k)
        return PUBLIC
    if op.type not in _RULES:
        # On a GPU, recurrent layers may run in one operation.
        is_fused = op.type.startswith("Cudnn")
        cure = ": use_cudnn=False makes recurrent layers fast"
        raise Unproven(f"has no rule{cure if is_fused else ''}")
    return _RULES[op.type](application)


def _rule(names):
    def register(function):
        for name in names.split():
            _RULES[name] = function
        return function

    return register


@_rule("""
Abs Acos Acosh Add AddN AddV2 Angle AsString Asin Asinh Atan Atan2 Atanh
BesselI0 BesselI0e BesselI1 BesselI1e BitwiseAnd BitwiseOr BitwiseXor Bucketize
Cast Ceil ClipByValue Complex ComplexAbs Conj Cos Cosh Digamma Div DivNoNan Elu
EluGrad Equal Erf Erfc Erfinv Exp Expm1 Floor FloorDiv FloorMod
Greater GreaterEqual Identity Igamma Igammac Imag Inv InvGrad Invert IsFinite
IsInf IsNan LeakyRelu LeakyReluGrad LeftShift Less LessEqual Lgamma Log Log1p
LogicalAnd LogicalNot LogicalOr Maximum Minimum Mod Mul MulNoNan Ndtri Neg
NextAfter NotEqual Polygamma Pow PreventGradient Real RealDiv Reciprocal
ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad RightShift Rint Round Rsqrt
RsqrtGrad SelectV2 Selu SeluGrad Sigmoid SigmoidGrad Sign Sin Sinh Snapshot
Softplus SoftplusGrad Softsign SoftsignGrad Sqrt SqrtGrad Square
SquaredDifference StaticRegexReplace StopGradient StringJoin StringLength
StringLower StringStrip StringToHashBucket StringToHashBucketFast
StringToHashBucketStrong StringToNumber StringUpper Sub Tan Tanh TanhGrad
TruncateDiv TruncateMod Xdivy Xlog1py Xlogy Zeta
""")
def _elementwise(a):
    if a.op.outputs[0].dtype == tf.variant:
        a.only(*(range(len(a.states)) if a.op.type == "AddN" else [0]))
        return lists.together(a)
    if _pairs_by_order(a.op):
        raise Unproven("pairs tensors of different shapes, number by number")
    out = a.out_shape()
    result = None
    for k in a.batched:
        shape, state = a.shape(k), a.states[k]
        axis = state.axis - len(shape) + len(out)
        if shape[state.axis] != out[axis]:
            raise Unproven("broadcasts the batch axis")
        if result is not None and state.moved_to(axis) != result:
            raise MixesExamples("pairs the batch with another axis of it")
        result = state.moved_to(axis)
    for k in a.public:
        a.alike(k, result.moved_to(result.axis - len(out) + len(a.shape(k))))
    return result


def is_elementwise(op) -> bool:
    """Returns whether output entries depend on inputs at their own place."""
    return _RULES.get(op.type) is _elementwise and not _pairs_by_order(op)


def _pairs_by_order(op):
    """Whether a gradient pairs numbers of different shapes by their order."""
    return op.type.endswith("Grad") and not all(
        t.shape.is_fully_defined() and t.shape == op.outputs[0].shape
        for t in op.inputs
    )


@_rule("EnsureShape")
def _ensure_shape(a):
    """That of its input, whose shape need not be known: it is looked at."""
    return a.first


@_rule("Select")
def _select(a):
    condition, branch = len(a.shape(0)), len(a.shape(1))
    if condition == 1 and branch > 1:
        # Not broadcasting: a vector chooses among slices of the first axis.
        return a.leading()
    return a.common()


@_rule("IdentityN")
def _identity_n(a):
    return list(a.states)


@_rule("Sum Mean Max Min Prod All Any EuclideanNorm ArgMax ArgMin")
def _reduce(a):
    a.only(0, whole=(1,))
    axes = a.axes(1, len(a.shape(0)))
    if a.first.axis in axes:
        raise MixesExamples("reduces over the batch axis")
    if not a.op.type.startswith("Arg") and a.attr("keep_dims"):
        return a.first
    return a.first.moved_to(
        a.first.axis - sum(axis < a.first.axis for axis in axes)
    )


def is_reduction(op) -> bool:
    """Returns whether an operation reduces over the axes in its input 1."""
    return _RULES.get(op.type) is _reduce


@_rule("Reshape Squeeze ExpandDims")
def _reshape(a):
    a.only(0, whole=(1,))
    shape, state = a.shape(0), a.first
    if 0 in shape:
        raise Unproven("reshapes a tensor without elements")
    outer = state.outer * int(np.prod(shape[: state.axis]))
    inner = state.inner * int(np.prod(shape[state.axis + 1 :]))
    result = find_batch(a.out_shape(), outer, a.batch_size, inner)
    if result is None:
        raise Unproven(
            f"reshapes {shape} to {a.out_shape()}, which splits the batch axis"
        )
    return result


def find_batch(shape, outer, batch_size, inner):
    """State of a batch reshaped to `shape`, or None where that splits it."""
    below = 1  # elements per step along the axis
    for axis in reversed(range(len(shape))):
        size = shape[axis]
        whole = (
            inner % below == 0 and (below * size) % (inner * batch_size) == 0
        )
        if size > 1 and whole:
            return PerExample(
                axis, below * size // (inner * batch_size), inner // below
            )
        below *= size
    return None


@_rule("Transpose")
def _transpose(a):
    a.only(0, whole=(1,))
    return a.first.moved_to(a.axes(1, len(a.shape(0))).index(a.first.axis))


@_rule("MatMul")
def _matmul(a):
    if len(a.batched) > 1:
        raise MixesExamples("multiplies two matrices of the batch")
    k = a.batched[0]
    transposed = a.attr("transpose_b" if k else "transpose_a")
    if a.first.axis != (k if not transposed else 1 - k):
        raise MixesExamples("sums over the batch axis")
    return a.first.moved_to(k)


BATCH_PRODUCTS = ("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")


@_rule(" ".join(BATCH_PRODUCTS))
def _batch_matmul(a):
    out = a.out_shape()
    result = None
    for k in a.batched:
        shape, state = a.shape(k), a.states[k]
        rank = len(shape)
        if state.axis < rank - 2:
            axis = state.axis - rank + len(out)
            if shape[state.axis] != out[axis]:
                raise Unproven("broadcasts the batch axis")
        else:
            is_row = (state.axis == rank - 2) != a.attr(
                "adj_y" if k else "adj_x"
            )
            if is_row == bool(k):
                raise MixesExamples("sums over the batch axis")
            if len(a.batched) > 1:
                raise MixesExamples("multiplies two matrices of the batch")
            axis = len(out) - 1 if k else len(out) - 2
        if result is not None and state.moved_to(axis) != result:
            raise MixesExamples("pairs the batch with another axis of it")
        result = state.moved_to(axis)
    if result.axis < len(out) - 2:
        for k in a.public:
            axis = result.axis - len(out) + len(a.shape(k))
            a.alike(k, result.moved_to(axis))
    return result


@_rule("Einsum")
def _einsum(a):
    terms, out = einsum_terms(a.op)
    labels = {terms[k][a.states[k].axis] for k in a.batched}
    if len(labels) > 1 or len({a.states[k].moved_to(0) for k in a.batched}) > 1:
        raise MixesExamples("pairs the batch with another axis of it")
    label = labels.pop()
    if label not in out:
        raise MixesExamples("sums over the batch axis")
    if any(len(set(term)) < len(term) for term in [*terms, out]):
        raise Unproven("takes a diagonal")
    for k in a.public:
        if label in terms[k]:
            a.alike(k, a.first.moved_to(terms[k].index(label)))
    return a.first.moved_to(out.index(label))


def einsum_terms(op):
    """Labels of the axes of an Einsum: of each input, and of the output.

    The axes of an ellipsis are given capital letters that are not used.
    """
    equation = op.get_attr("equation")
    if not _EQUATION.fullmatch(equation):
        # The kernel takes every byte for a label.
        raise Unproven("has labels that are no letters")
    operands, out = equation.decode().split("->")
    terms = operands.split(",")
    unused = [c for c in string.ascii_uppercase if c not in operands]
    ranks = [
        len(static_shape(i)) - len(term.replace("...", ""))
        for i, term in zip(op.inputs, terms)
        if "..." in term
    ]
    names = "".join(unused[: max(ranks, default=0)])

    def expanded(term, rank):
        spanned = rank - len(term.replace("...", ""))
        return term.replace("...", names[len(names) - spanned :])

    terms = [
        expanded(term, len(static_shape(i)))
        for i, term in zip(op.inputs, terms)
    ]
    return terms, expanded(out, len(static_shape(op.outputs[0])))


@_rule("Conv2D Conv3D DepthwiseConv2dNative")
def _convolution(a):
    a.only(0, whole=(1,))
    return a.leading()


@_rule("""
Conv2DBackpropInput Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput
""")
def _convolution_input_gradient(a):
    a.only(2, whole=(0, 1))
    return a.leading()


@_rule("MaxPool AvgPool MaxPool3D AvgPool3D MaxPoolGrad MaxPool3DGrad")
def _pool(a):
    if a.attr("ksize")[0] != 1 or a.attr("strides")[0] != 1:
        raise MixesExamples("pools over the batch axis")
    return a.leading()


@_rule("AvgPoolGrad AvgPool3DGrad")
def _average_pool_gradient(a):
    a.only(1, whole=(0,))
    lost = 0 if a.attr("padding") == b"SAME" else 1
    pooled = [
        -(-(n - lost * (k - 1)) // s)
        for n, k, s in zip(
            static_shape(a.op.outputs[0]), a.attr("ksize"), a.attr("strides")
        )
    ]
    if pooled != a.shape(1):
        # The kernel pairs its numbers with places by their order.
        raise Unproven("has a gradient of another shape than the pooled one")
    return _pool(a)


@_rule("""
DepthToSpace LRN ResizeBicubic ResizeBilinear ResizeNearestNeighbor SpaceToDepth
ResizeNearestNeighborGrad
""")
def _image(a):
    a.only(0, whole=(1,))
    return a.leading()


@_rule("ResizeBilinearGrad ResizeBicubicGrad LRNGrad")
def _image_gradient(a):
    return a.leading()


@_rule("ImageProjectiveTransformV2 ImageProjectiveTransformV3")
def _projective_transform(a):
    # Image by image, each with its own transform or with a common one.
    a.only(0, 1, whole=(2,))
    if 0 not in a.batched:
        raise Unproven("transforms images that do not depend on the batch")
    return a.leading()


@_rule("AdjustContrastv2")
def _adjust_contrast(a):
    a.only(0)
    if a.first.axis >= len(a.shape(0)) - 3:
        raise MixesExamples("takes the mean over the batch axis")
    return a.first


@_rule("ExtractImagePatches")
def _patches(a):
    a.only(0)
    if a.attr("ksizes")[0] != 1 or a.attr("strides")[0] != 1:
        raise MixesExamples("takes patches over the batch axis")
    return a.leading()


@_rule("SparseSoftmaxCrossEntropyWithLogits SoftmaxCrossEntropyWithLogits")
def _cross_entropy(a):
    # Features without a batch axis would count as those of one example.
    ranks = len(a.shape(0)), len(a.shape(1))
    if ranks != (2, 1 if a.op.type.startswith("Sparse") else 2):
        raise Unproven("takes other tensors than rows of logits and labels")
    return a.leading()


@_rule("FusedBatchNormV3")
def _batch_norm(a):
    if a.attr("is_training"):
        raise MixesExamples("normalises over the batch")
    a.only(0, whole=(1, 2, 3, 4))
    unwritten = Mixed(f"{a.op.type} '{a.op.name}' does not write it", False)
    states = [a.leading()] + [PUBLIC] * (len(a.op.outputs) - 1)
    return [unwritten if k in (3, 4) else s for k, s in enumerate(states)]


@_rule("FusedBatchNormGradV3")
def _batch_norm_gradient(a):
    if a.attr("is_training"):
        raise MixesExamples("normalises over the batch")
    a.only(0, 1, whole=(2, 3, 4, 5))
    summed = Mixed(f"{a.op.type} '{a.op.name}' sums over the batch axis", True)
    return [a.leading()] + [summed] * (len(a.op.outputs) - 1)


@_rule("""
AdjustHue AdjustSaturation FFT HSVToRGB IFFT IRFFT LogSoftmax RFFT RGBToHSV
Softmax TopKV2
""")
def _last_axis(a, count=1):
    a.only(0, whole=(1,))
    if a.first.axis >= len(a.shape(0)) - count:
        raise MixesExamples("works along the batch axis")
    return a.first


@_rule("FFT2D IFFT2D IRFFT2D RFFT2D")
def _last_two_axes(a):
    return _last_axis(a, 2)


@_rule("FFT3D IFFT3D IRFFT3D RFFT3D")
def _last_three_axes(a):
    return _last_axis(a, 3)


@_rule("MatrixSolve")
def _solve(a):
    if a.first.axis >= len(a.shape(a.batched[0])) - 2:
        raise Unproven("has the batch on an axis of its matrices")
    return a.common()


@_rule("LookupTableFindV2")
def _look_up(a):
    # A key is one entry: `shapes.require_inferred` refuses tables of vectors.
    a.only(1, whole=(2,))
    # The default for missing keys is one value, or one for each key.
    if len(a.shape(2)) == a.op.outputs[0].shape.rank:
        a.alike(2, a.first)
    return a.first


@_rule("DenseBincount")
def _count(a):
    a.only(0, 2)
    if len(a.shape(0)) == 1:
        raise MixesExamples("counts over the batch axis")
    return a.leading()


@_rule("BiasAdd")
def _bias_add(a):
    a.only(0, whole=(1,))
    is_second = a.attr("data_format") == b"NCHW"
    if a.first.axis == (1 if is_second else len(a.shape(0)) - 1):
        a.alike(1, a.first.moved_to(0))
    return a.first


@_rule("GatherV2")
def _gather(a):
    batch_dims = a.attr("batch_dims")
    if batch_dims < 0:
        raise Unproven("counts its batch axes from the end")
    params, indices = a.shape(0), a.shape(1)
    axis = int(a.constant(2)) % len(params)
    if a.batched == [1]:
        at = a.first.axis
        if at < batch_dims:
            a.alike(0, a.first)
        return a.first.moved_to(
            at if at < batch_dims else axis + at - batch_dims
        )
    if a.batched == [0]:
        at = a.first.axis
        if at == axis:
            raise MixesExamples("gathers along the batch axis")
        if at < batch_dims:
            a.alike(1, a.first)
        if at < axis:
            return a.first
        return a.first.moved_to(at + len(indices) - 1 - batch_dims)
    a.only(0, 1)
    if any(s.outer * s.inner > 1 for s in a.states[:2]):
        raise Unproven("may gather from other examples")
    if a.states[0] != a.states[1]:
        raise MixesExamples("pairs the batch with another axis of it")
    if a.first.axis >= batch_dims:
        raise MixesExamples("gathers from other examples")
    return a.first


@_rule("""
UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd UnsortedSegmentSum
""")
def _unsorted_segments(a):
    a.only(0, whole=(1,))
    indexed = len(a.shape(1))
    if a.first.axis < indexed:
        raise Unproven("may put several examples into one segment")
    return a.first.moved_to(a.first.axis - indexed + 1)


@_rule("GatherNd")
def _gather_nd(a):
    *indices, depth = a.shape(1)
    if a.batched == [0] and a.first.axis >= depth:
        return a.first.moved_to(a.first.axis - depth + len(indices))
    a.only(1, whole=(0,))
    if a.first.axis == len(indices):
        raise MixesExamples("gathers by indices that are of several examples")
    return a.first


@_rule("ScatterNd")
def _scatter_nd(a):
    a.only(1, whole=(0, 2))
    *indices, depth = a.shape(0)
    if a.first.axis < len(indices):
        raise Unproven("may scatter several examples to one place")
    return a.first.moved_to(a.first.axis - len(indices) + depth)


@_rule("OneHot")
def _one_hot(a):
    a.only(0)
    return _insert_axis(a.first, a.attr("axis") % len(a.out_shape()))


def _insert_axis(state, axis):
    return state if state.axis < axis else state.moved_to(state.axis + 1)


@_rule("ConcatV2")
def _concat(a):
    if int(a.constant(-1)) % len(a.out_shape()) == a.common().axis:
        raise MixesExamples("concatenates along the batch axis")
    return a.first


@_rule("Pack")
def _pack(a):
    return _insert_axis(a.common(), a.attr("axis") % len(a.out_shape()))


@_rule("Unpack")
def _unpack(a):
    axis = a.attr("axis") % len(a.shape(0))
    if axis == a.first.axis:
        raise MixesExamples("takes the batch axis apart")
    return a.first.moved_to(a.first.axis - (axis < a.first.axis))


@_rule("Split")
def _split(a):
    a.only(1)
    return _unsplit(a, a.axes(0, len(a.shape(1))))


@_rule("SplitV")
def _split_v(a):
    a.only(0, whole=(1,))
    return _unsplit(a, a.axes(2, len(a.shape(0))))


def _unsplit(a, axes):
    if a.first.axis in axes:
        raise MixesExamples("splits the batch axis")
    return a.first


@_rule("Slice")
def _slice(a):
    a.only(0, whole=(1, 2))
    axis = a.first.axis
    size, kept = (t.shape[axis] for t in (a.op.inputs[0], a.op.outputs[0]))
    if kept is None:
        raise Unproven("may slice the batch axis")
    if kept != size:
        raise MixesExamples("slices the batch axis")
    return a.first


@_rule("StridedSlice")
def _strided_slice(a):
    a.only(0, whole=(1, 2, 3))
    axes = _kept_axes(a, a.op.inputs[0].shape.as_list(), 1)
    if a.first.axis not in axes:
        if None in a.entries(1) + a.entries(2) + a.entries(3):
            raise Unproven("may slice the batch axis")
        raise MixesExamples("slices the batch axis")
    return a.first.moved_to(axes[a.first.axis])


@_rule("StridedSliceGrad")
def _strided_slice_gradient(a):
    a.only(4, whole=(0, 1, 2, 3))
    shape = [int(d) for d in a.constant(0)]
    axes = _kept_axes(a, shape, 1)
    for before, after in axes.items():
        if after == a.first.axis:
            return a.first.moved_to(before)
    raise MixesExamples("slices the batch axis")


def _kept_axes(a, shape, first):
    """Axes that a strided slice keeps whole: {axis before: axis after}.

    Args:
        a: `Application`.
        shape: list of int, the sliced shape; None where it is not known.
        first: int, the input with the begin of the slice; its end and its
            strides are the next two.
    """
    begin, end, strides = (a.entries(first + k) for k in range(3))
    masks = {
        name: a.attr(f"{name}_mask")
        for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    count = len(begin)
    # A bit of the mask beyond the entries, or at the ellipsis, has no effect.
    added = sum(
        masks["new_axis"] >> k & ~masks["ellipsis"] >> k & 1
        for k in range(count)
    )
    spanned = len(shape) - (count - added - (masks["ellipsis"] != 0))
    kept, before, after = {}, 0, 0
    for k in range(count):
        if masks["ellipsis"] >> k & 1:
            for _ in range(spanned):
                kept[before] = after
                before, after = before + 1, after + 1
        elif masks["new_axis"] >> k & 1:
            after += 1
        elif masks["shrink_axis"] >> k & 1:
            before += 1
        else:
            from_start = masks["begin"] >> k & 1 or begin[k] == 0
            to_end = masks["end"] >> k & 1 or (
                None not in (end[k], shape[before]) and end[k] >= shape[before]
            )
            if from_start and to_end and strides[k] == 1:
                kept[before] = after
            before, after = before + 1, after + 1
    if before > len(shape):
        raise Unproven("has more entries than axes")
    while before < len(shape):
        kept[before] = after
        before, after = before + 1, after + 1
    return kept


@_rule("Pad PadV2 MirrorPad MirrorPadGrad")
def _pad(a):
    a.only(0, whole=(1,))
    if any(a.constant(1)[a.first.axis]):
        raise Unproven("pads the batch axis")
    return a.first


@_rule("Tile")
def _tile(a):
    a.only(0, whole=(1,))
    if a.constant(1)[a.first.axis] != 1:
        raise Unproven("repeats the batch axis")
    return a.first


@_rule("BroadcastTo")
def _broadcast_to(a):
    a.only(0, whole=(1,))
    return _elementwise(a)


@_rule("Cumsum Cumprod CumulativeLogsumexp")
def _cumulate(a):
    a.only(0, whole=(1,))
    if a.first.axis in a.axes(1, len(a.shape(0))):
        raise MixesExamples("accumulates along the batch axis")
    return a.first


@_rule("ReverseV2")
def _reverse(a):
    a.only(0, whole=(1,))
    if a.first.axis in a.axes(1, len(a.shape(0))):
        raise MixesExamples("reverses the batch axis")
    return a.first


@_rule("Roll")
def _roll(a):
    a.only(0, whole=(1, 2))
    if a.first.axis in a.axes(2, len(a.shape(0))):
        raise MixesExamples("rolls the batch axis")
    return a.first


@_rule("MatrixBandPart")
def _band_part(a):
    a.only(0)
    if a.first.axis >= len(a.shape(0)) - 2:
        raise Unproven("has the batch on an axis of its matrices")
    return a.first


@_rule("SpaceToBatchND")
def _space_to_batch(a):
    a.only(0, whole=(1, 2))
    state = a.leading()
    blocks = int(np.prod(a.constant(1)))
    return PerExample(0, state.outer * blocks, state.inner)


@_rule("BatchToSpaceND")
def _batch_to_space(a):
    a.only(0, whole=(1, 2))
    state = a.leading()
    blocks = int(np.prod(a.constant(1)))
    if state.outer % blocks:
        raise MixesExamples("moves the batch axis into space")
    return PerExample(0, state.outer // blocks, state.inner)
