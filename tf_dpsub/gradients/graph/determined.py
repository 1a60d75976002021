"""Operations whose outputs their inputs and attributes determine.

The list is of what may be public, so an operation that is not on it is refused
where that counts. Not on it are operations

- that read files, memory, Python's variables or other calls, or write to them,
  among them those for debugging, though TensorFlow declares them stateless;
- whose kernels leave parts of an output as memory happens to be: `Cholesky` of
  a matrix that is not positive definite, decompositions without vectors,
  `DynamicStitch` with gaps, `FusedBatchNorm` by given moments, gradients by
  depthwise filters over no images;
- whose outputs may be missing, as those of TensorFlow 1's control flow are;
- to which TensorFlow gives a static shape that their kernels do not return.
"""

import tensorflow as tf

_ELEMENTWISE = frozenset(
    """
    Abs Acos Acosh Add AddN AddV2 Angle ApproximateEqual AsString Asin Asinh
    Atan Atan2 Atanh BesselI0 BesselI0e BesselI1 BesselI1e BesselJ0 BesselJ1
    BesselK0 BesselK0e BesselK1 BesselK1e BesselY0 BesselY1 Betainc Bitcast
    BitwiseAnd BitwiseOr BitwiseXor Bucketize Cast Ceil ClipByValue Complex
    ComplexAbs Conj Cos Cosh Dawsn Digamma Div DivNoNan Elu EluGrad Equal Erf
    Erfc Erfinv Exp Expint Expm1 Floor FloorDiv FloorMod FresnelCos FresnelSin
    Greater GreaterEqual Identity IdentityN Igamma IgammaGradA Igammac Imag Inv
    InvGrad Invert IsFinite IsInf IsNan LeakyRelu LeakyReluGrad LeftShift Less
    LessEqual Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum
    Mod Mul MulNoNan Ndtri Neg NextAfter NotEqual OnesLike Polygamma
    PopulationCount Pow PreventGradient RandomGammaGrad Real RealDiv Reciprocal
    ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad RightShift Rint Round Rsqrt
    RsqrtGrad Select SelectV2 Selu SeluGrad Sigmoid SigmoidGrad Sign Sin Sinh
    Snapshot Softplus SoftplusGrad Softsign SoftsignGrad Spence Sqrt SqrtGrad
    Square SquaredDifference StopGradient Sub Tan Tanh TanhGrad TruncateDiv
    TruncateMod Xdivy Xlog1py Xlogy ZerosLike Zeta
    """.split()
)
_SHAPES_AND_PLACES = frozenset(
    """
    BatchToSpace BatchToSpaceND BroadcastArgs BroadcastGradientArgs BroadcastTo
    Concat ConcatOffset ConcatV2 ConjugateTranspose Const DataFormatDimMap
    DataFormatVecPermute DepthToSpace Diag DiagPart DynamicPartition
    EnsureShape ExpandDims ExtractImagePatches ExtractVolumePatches Fill Gather
    GatherNd GatherV2 InvertPermutation LinSpace ListDiff LowerBound
    MatrixBandPart MatrixDiag MatrixDiagPart MatrixDiagPartV2 MatrixDiagPartV3
    MatrixDiagV2 MatrixDiagV3 MatrixSetDiag MatrixSetDiagV2 MatrixSetDiagV3
    MirrorPad MirrorPadGrad NoOp OneHot Pack Pad PadV2 Range Rank Reshape
    Reverse ReverseSequence ReverseV2 Roll ScatterNd Shape ShapeN Size Slice
    SpaceToBatch SpaceToBatchND SpaceToDepth Split SplitV Squeeze StridedSlice
    StridedSliceGrad TensorScatterAdd TensorScatterMax TensorScatterMin
    TensorScatterSub TensorScatterUpdate TensorStridedSliceUpdate Tile TileGrad
    Transpose Unique UniqueV2 UniqueWithCounts UniqueWithCountsV2 Unpack
    UnravelIndex UpperBound Where
    """.split()
)
_REDUCTIONS = frozenset(
    """
    All Any ArgMax ArgMin Bincount Cumprod Cumsum CumulativeLogsumexp
    DenseBincount EuclideanNorm HistogramFixedWidth InTopK InTopKV2 L2Loss Max
    Mean Min NthElement Prod SegmentMax SegmentMaxV2 SegmentMean SegmentMin
    SegmentMinV2 SegmentProd SegmentProdV2 SegmentSum SegmentSumV2 Sum TopK
    TopKV2 UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd
    UnsortedSegmentSum
    """.split()
)
_LINEAR_ALGEBRA = frozenset(
    """
    BandedTriangularSolve BatchMatMul BatchMatMulV2 BatchMatMulV3 Cross Eig
    Einsum LogMatrixDeterminant Lu MatMul MatrixDeterminant MatrixExponential
    MatrixInverse MatrixLogarithm MatrixSolve MatrixSolveLs MatrixSquareRoot
    MatrixTriangularSolve Qr SelfAdjointEigV2 SparseMatMul Svd
    TridiagonalMatMul TridiagonalSolve
    """.split()
)
_LAYERS = frozenset(
    """
    AvgPool AvgPool3D AvgPool3DGrad AvgPoolGrad BiasAdd BiasAddGrad BiasAddV1
    CTCLoss CTCLossV2 Conv Conv2D Conv2DBackpropFilter Conv2DBackpropFilterV2
    Conv2DBackpropInput Conv2DBackpropInputV2 Conv3D Conv3DBackpropFilterV2
    Conv3DBackpropInputV2 DepthwiseConv2dNative
    DepthwiseConv2dNativeBackpropInput Dilation2D Dilation2DBackpropFilter
    Dilation2DBackpropInput
    FakeQuantWithMinMaxArgs FakeQuantWithMinMaxArgsGradient
    FakeQuantWithMinMaxVars FakeQuantWithMinMaxVarsGradient
    FakeQuantWithMinMaxVarsPerChannel FakeQuantWithMinMaxVarsPerChannelGradient
    FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3 LRN LRNGrad
    LogSoftmax MaxPool MaxPool3D MaxPool3DGrad MaxPool3DGradGrad MaxPoolGrad
    MaxPoolGradGrad
    MaxPoolGradGradV2 MaxPoolGradV2 MaxPoolGradWithArgmax MaxPoolV2
    MaxPoolWithArgmax QuantizeAndDequantizeV2 QuantizeAndDequantizeV3
    QuantizeAndDequantizeV4 QuantizeAndDequantizeV4Grad Softmax
    SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits
    """.split()
)
_IMAGES_AND_SIGNALS = frozenset(
    """
    AdjustContrastv2 AdjustHue AdjustSaturation CombinedNonMaxSuppression
    CropAndResize CropAndResizeGradBoxes CropAndResizeGradImage
    DrawBoundingBoxes DrawBoundingBoxesV2 FFT FFT2D FFT3D FFTND HSVToRGB IFFT
    IFFT2D IFFT3D IFFTND IRFFT IRFFT2D IRFFT3D IRFFTND
    ImageProjectiveTransformV2 ImageProjectiveTransformV3 NonMaxSuppression
    NonMaxSuppressionV2 NonMaxSuppressionV3 NonMaxSuppressionV4
    NonMaxSuppressionV5 NonMaxSuppressionWithOverlaps RFFT RFFT2D RFFT3D RFFTND
    RGBToHSV ResizeArea ResizeBicubic ResizeBicubicGrad ResizeBilinear
    ResizeBilinearGrad ResizeNearestNeighbor ResizeNearestNeighborGrad
    ScaleAndTranslate ScaleAndTranslateGrad
    """.split()
)
_TEXT = frozenset(
    """
    DecodeBase64 DecodePaddedRaw DecodeRaw EditDistance EncodeBase64
    Fingerprint ReduceJoin RegexFullMatch RegexReplace StaticRegexFullMatch
    StaticRegexReplace StringFormat StringJoin StringLength StringLower
    StringNGrams StringSplit StringSplitV2 StringStrip StringToHashBucket
    StringToHashBucketFast StringToHashBucketStrong StringToNumber StringUpper
    Substr UnicodeDecode UnicodeDecodeWithOffsets UnicodeEncode UnicodeScript
    UnicodeTranscode UnsortedSegmentJoin
    """.split()
)
_SPARSE_AND_RAGGED = frozenset(
    """
    DenseToDenseSetOperation DenseToSparseSetOperation RaggedBincount
    RaggedFillEmptyRows RaggedFillEmptyRowsGrad RaggedGather RaggedRange
    RaggedTensorFromVariant RaggedTensorToSparse RaggedTensorToTensor
    RaggedTensorToVariant RaggedTensorToVariantGradient SetSize SparseAdd
    SparseAddGrad SparseBincount SparseConcat SparseCross SparseDenseCwiseAdd
    SparseDenseCwiseDiv SparseDenseCwiseMul SparseFillEmptyRows
    SparseFillEmptyRowsGrad SparseReduceMax SparseReduceSum SparseReorder
    SparseReshape SparseSegmentMean SparseSegmentMeanGrad
    SparseSegmentMeanGradV2 SparseSegmentMeanWithNumSegments SparseSegmentSqrtN
    SparseSegmentSqrtNGrad SparseSegmentSqrtNGradV2
    SparseSegmentSqrtNWithNumSegments SparseSegmentSum SparseSegmentSumGrad
    SparseSegmentSumGradV2 SparseSegmentSumWithNumSegments SparseSlice
    SparseSliceGrad SparseSoftmax SparseSparseMaximum SparseSparseMinimum
    SparseSplit SparseTensorDenseAdd SparseTensorDenseMatMul SparseToDense
    SparseToSparseSetOperation
    """.split()
)
_LISTS = frozenset(
    """
    EmptyTensorList TensorListConcat TensorListConcatLists TensorListConcatV2
    TensorListElementShape TensorListFromTensor TensorListGather
    TensorListGetItem TensorListLength TensorListPopBack TensorListPushBack
    TensorListPushBackBatch TensorListReserve TensorListResize
    TensorListScatter TensorListScatterIntoExistingList TensorListScatterV2
    TensorListSetItem TensorListSplit TensorListStack
    """.split()
)
# Gradients of branches pass on what only one of them has computed.
_OPTIONALS = frozenset(
    {
        "OptionalFromValue",
        "OptionalGetValue",
        "OptionalHasValue",
        "OptionalNone",
    }
)
# What stands for an argument is looked at where it is given, and functions are,
# operation by operation, where they are named.
_LOOKED_AT_ELSEWHERE = frozenset({"Placeholder", "SymbolicGradient"})
_DETERMINED = (
    _ELEMENTWISE
    | _SHAPES_AND_PLACES
    | _REDUCTIONS
    | _LINEAR_ALGEBRA
    | _LAYERS
    | _IMAGES_AND_SIGNALS
    | _TEXT
    | _SPARSE_AND_RAGGED
    | _LISTS
    | _OPTIONALS
    | _LOOKED_AT_ELSEWHERE
)
# Without vectors their kernels leave outputs as memory is.
_WITH_VECTORS = {
    "Eig": "compute_v",
    "SelfAdjointEigV2": "compute_v",
    "Svd": "compute_uv",
}
# They write nothing but outputs, though not always all of these.
_UNDETERMINED = frozenset(
    {
        "Cholesky",
        "DepthwiseConv2dNativeBackpropFilter",
        "DynamicStitch",
        "FusedBatchNorm",
        "FusedBatchNormV2",
        "FusedBatchNormV3",
        *_WITH_VECTORS,
    }
)


def is_determined(node) -> bool:
    """Returns whether a node's outputs follow from its inputs and attributes.

    Args:
        node: `NodeDef` of an operation of TensorFlow.
    """
    if node.op in _WITH_VECTORS:
        return node.attr[_WITH_VECTORS[node.op]].b
    if node.op.startswith("DepthwiseConv2d"):
        # Static shapes follow from dilations, of which the kernel for CPU takes
        # no notice.
        is_dilated = not set(node.attr["dilations"].list.i) <= {1}
        return node.op in _DETERMINED and not is_dilated
    if node.op == "Empty":
        # Zeros. Otherwise it has what memory happens to hold.
        return node.attr["init"].b
    if node.op == "Const":
        # It may name a variable, or hold a list.
        return node.attr["dtype"].type not in (
            tf.resource.as_datatype_enum,
            tf.variant.as_datatype_enum,
        )
    return node.op in _DETERMINED


def is_of_images(op) -> bool:
    """Returns whether it is a filter's gradient, and there are images.

    Args:
        op: `tf.Operation`.
    """
    return op.type == "DepthwiseConv2dNativeBackpropFilter" and all(
        tensor.shape.is_fully_defined() and tensor.shape.num_elements()
        for tensor in (op.inputs[0], op.inputs[2])
    )


def writes_nothing(node) -> bool:
    """Returns whether a node is known to have no effect but its outputs.

    Args:
        node: `NodeDef` of an operation of TensorFlow.
    """
    return node.op in _UNDETERMINED or is_determined(node)
