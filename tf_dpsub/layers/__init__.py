"""Layers whose gradients are learned through low-rank carriers."""

from tf_dpsub.layers.carriers import Carriers, Reparametrized
from tf_dpsub.layers.conv2d import RGPConv2D
from tf_dpsub.layers.conversion import (
    merge,
    reparametrize,
    reparametrized_layers,
)
from tf_dpsub.layers.dense import RGPDense
from tf_dpsub.layers.einsum_dense import RGPEinsumDense
from tf_dpsub.layers.multi_head_attention import RGPMultiHeadAttention

__all__ = [
    "Carriers",
    "RGPConv2D",
    "RGPDense",
    "RGPEinsumDense",
    "RGPMultiHeadAttention",
    "Reparametrized",
    "merge",
    "reparametrize",
    "reparametrized_layers",
]
