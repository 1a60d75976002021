"""Operations that `tf.vectorized_map` computes for each row alone.

It replaces each operation by one of all rows, as a converter of TensorFlow
says. Some converters let a row see others. In TensorFlow 2.21

- `Roll` along a negative axis moves rows, or shifts each as another one says;
- `StringFormat` writes all rows into one text;
- ids of `UnsortedSegmentSum`, its like and `SparseSegmentSum` that are out of
  range are in the range of another row, and gradients of the latter have the
  stride of another number of rows;
- `TensorListGather` returns its entries by row and rows by entry;
- `BatchMatMul` of matrices, without a batch, takes the rows for one matrix.

So the list is of those that were read. Some of them keep rows apart only where
TensorFlow could compute one row: an axis beyond the rank of a row may be that
of the rows. They are taken with axes that are known when they are traced, and
that TensorFlow has looked at then. Operations without a converter run in a
loop over the rows, one at a time.
"""

from collections.abc import Callable

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.parallel_for import pfor

from tf_dpsub.gradients.graph import effects, functions

_APART = frozenset(
    """
    Abs Acos Acosh Add AddN AddV2 AdjustContrastv2 AdjustHue AdjustSaturation
    All Angle Any ApproximateEqual ArgMax ArgMin Asin Asinh Atan Atan2 Atanh
    AvgPool AvgPool3D AvgPool3DGrad AvgPoolGrad BatchMatMulV2 BatchToSpaceND
    BesselI0 BesselI0e BesselI1 BesselI1e BesselJ0 BesselJ1 BesselK0 BesselK0e
    BesselK1 BesselK1e BesselY0 BesselY1 BiasAdd BiasAddGrad BitwiseAnd
    BitwiseOr BitwiseXor BroadcastTo Bucketize Case Cast Ceil CheckNumerics
    Cholesky ClipByValue Complex ComplexAbs ConcatV2 Conj ConjugateTranspose
    Conv2D Conv2DBackpropFilter Conv2DBackpropInput Cos Cosh Cross Cumprod
    Cumsum Dawsn DepthToSpace DepthwiseConv2dNative
    DepthwiseConv2dNativeBackpropFilter DepthwiseConv2dNativeBackpropInput Diag
    DiagPart Digamma Div DivNoNan Einsum Elu EluGrad EnsureShape Equal Erf Erfc
    Erfinv Exp ExpandDims Expint Expm1 FFT FFT2D FFT3D Fill Floor FloorDiv
    FloorMod FresnelCos FresnelSin FusedBatchNormGradV3 FusedBatchNormV3 Gather
    GatherNd GatherV2 Greater GreaterEqual IFFT IFFT2D IFFT3D IRFFT IRFFT2D
    IRFFT3D Identity IdentityN If Igamma IgammaGradA Igammac Imag Inv Invert
    IsFinite IsInf IsNan LeakyRelu LeakyReluGrad LeftShift Less LessEqual Lgamma
    Log Log1p LogMatrixDeterminant LogSoftmax LogicalAnd LogicalNot LogicalOr
    LogicalXor LowerBound MatMul MatrixBandPart MatrixDiag MatrixDiagPart
    MatrixDiagPartV2 MatrixDiagPartV3 MatrixDiagV2 MatrixDiagV3 MatrixInverse
    MatrixSetDiag MatrixSetDiagV2 MatrixSetDiagV3 MatrixSolve
    MatrixTriangularSolve Max MaxPool MaxPool3D MaxPool3DGrad MaxPoolGrad
    MaxPoolGradV2 MaxPoolV2 Maximum Mean Min Minimum Mod Mul MulNoNan
    Multinomial Ndtri Neg NotEqual OneHot OnesLike Pack Pad PadV2
    PartitionedCall Polygamma Pow Prod RFFT RFFT2D RFFT3D RandomGamma
    RandomPoissonV2 RandomStandardNormal RandomUniform RandomUniformInt Rank
    Real RealDiv Reciprocal ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad Reshape
    ReverseV2 RightShift Rint Round Rsqrt RsqrtGrad Select SelectV2
    SelfAdjointEigV2 Selu SeluGrad Shape ShapeN Sigmoid SigmoidGrad Sign Sin
    Sinh Size Slice Softmax SoftmaxCrossEntropyWithLogits Softplus SoftplusGrad
    Softsign SoftsignGrad SpaceToBatchND SpaceToDepth
    SparseSoftmaxCrossEntropyWithLogits Spence Split SplitV Sqrt SqrtGrad Square
    SquaredDifference Squeeze StatefulPartitionedCall StatelessCase StatelessIf
    StatelessMultinomial StatelessParameterizedTruncatedNormal
    StatelessRandomBinomial StatelessRandomGammaV2 StatelessRandomNormal
    StatelessRandomPoisson StatelessRandomUniform StatelessRandomUniformFullInt
    StatelessRandomUniformInt StatelessTruncatedNormal StatelessWhile
    StopGradient StridedSlice StridedSliceGrad Sub Sum Tan Tanh TanhGrad
    TensorListConcatV2 TensorListElementShape TensorListFromTensor
    TensorListGetItem TensorListLength TensorListPopBack TensorListPushBack
    TensorListReserve TensorListScatterIntoExistingList TensorListSetItem
    TensorListStack TensorScatterUpdate Tile TopK TopKV2 Transpose TruncateDiv
    TruncateMod TruncatedNormal Unpack UpperBound While Xdivy XlaEinsum
    XlaSharding Xlog1py Xlogy ZerosLike Zeta _EagerConst
    """.split()
)

# Inputs that have to be known: axes, blocks and diagonals.
_KNOWN = {
    "All": 1,
    "Any": 1,
    "ArgMax": 1,
    "ArgMin": 1,
    "BatchToSpaceND": 1,
    "ConcatV2": -1,
    "Cumprod": 1,
    "Cumsum": 1,
    "ExpandDims": 1,
    "GatherV2": 2,
    "MatrixDiagV2": 1,
    "MatrixDiagV3": 1,
    "Max": 1,
    "Mean": 1,
    "Min": 1,
    "Prod": 1,
    "ReverseV2": 1,
    "SpaceToBatchND": 1,
    "Split": 0,
    "SplitV": 2,
    "Sum": 1,
}
_CHECKED = (*_KNOWN, "Slice", "SoftmaxCrossEntropyWithLogits")


class MixesRows(ValueError):
    """A converter of `tf.vectorized_map` may let a row see others."""


def keeping_rows_apart(row_of: Callable, in_range=()) -> Callable:
    """Wraps a function of one row for `tf.vectorized_map`.

    Formal guarantees: with what it returns, the map computes each row as if it
    were alone, as far as the converters that are listed here do.

    Args:
        row_of: function of one row.
        in_range: container of operations, as they are made, that add up
            segments by ids that are in range.

    Returns:
        A function of one row that raises `MixesRows` when it is traced with
        other operations.
    """

    # Converted, it would raise errors of another type.
    @tf.autograph.experimental.do_not_convert
    def checked(row):
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        outputs = row_of(row)
        # Others may have added converters of their own.
        mixing = pfor._pfor_converter_registry.keys() - _APART
        for op in graph.get_operations()[before:]:
            kinds = set() if op in in_range else set(effects.kinds_of(op))
            if kinds & mixing:
                raise _mixes(min(kinds & mixing), op)
            within = functions.operations_within(op, _CHECKED)
            for inner in [op, *within]:
                if not _keeps_rows_apart(inner):
                    raise _mixes(inner.type, op)
        return outputs

    return checked


def _mixes(kind, op):
    return MixesRows(f"tf.vectorized_map may mix rows in {kind} '{op.name}'")


def _keeps_rows_apart(op):
    """Whether one of the operations that are listed keeps rows apart."""
    if op.type in _KNOWN:
        axes = op.inputs[_KNOWN[op.type]]
        # Those of a gradient are axes of a row.
        return axes.op.type == "BroadcastGradientArgs" or (
            _known(axes) is not None
        )
    if op.type == "SoftmaxCrossEntropyWithLogits":
        # A vector would be added to a matrix of other rows.
        return all(i.shape.rank == 2 for i in op.inputs)
    if op.type == "Slice":
        # To the end is as far as in the row where that is farthest.
        begin, size = map(_known, op.inputs[1:])
        return begin is not None or (size is not None and np.all(size >= 0))
    return True


def _known(tensor):
    """The value of a tensor, or None where a trace does not tell."""
    for known in (tensor, functions.passed(tensor), functions.origin(tensor)):
        if known is not None:
            value = tf.get_static_value(known)
            if value is not None:
                return value
    return None
