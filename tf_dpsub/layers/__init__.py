"""Layers of fixed features, standardised kernels, and gradient carriers."""

from tf_dpsub.layers.carriers import Carriers, Reparametrized
from tf_dpsub.layers.conv2d import RGPConv2D
from tf_dpsub.layers.conversion import (
    merge,
    reparametrize,
    reparametrized_layers,
)
from tf_dpsub.layers.dense import RGPDense
from tf_dpsub.layers.einsum_dense import RGPEinsumDense
from tf_dpsub.layers.frozen_features import FrozenFeatures
from tf_dpsub.layers.multi_head_attention import RGPMultiHeadAttention
from tf_dpsub.layers.patch_dictionary import PatchDictionary
from tf_dpsub.layers.public_statistics import (
    PublicNormalization,
    PublicProjection,
)
from tf_dpsub.layers.scattering2d import Scattering2D
from tf_dpsub.layers.weight_standardized_conv2d import WeightStandardizedConv2D

__all__ = [
    "Carriers",
    "FrozenFeatures",
    "PatchDictionary",
    "PublicNormalization",
    "PublicProjection",
    "RGPConv2D",
    "RGPDense",
    "RGPEinsumDense",
    "RGPMultiHeadAttention",
    "Reparametrized",
    "Scattering2D",
    "WeightStandardizedConv2D",
    "merge",
    "reparametrize",
    "reparametrized_layers",
]
