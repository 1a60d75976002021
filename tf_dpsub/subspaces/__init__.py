"""Subspaces of few dimensions that gradients are projected on."""

from tf_dpsub.subspaces.fixed_subspace import FixedSubspace
from tf_dpsub.subspaces.kronecker_subspace import KroneckerSubspace
from tf_dpsub.subspaces.public_subspace import PublicSubspace
from tf_dpsub.subspaces.random_subspace import RandomSubspace
from tf_dpsub.subspaces.subspace import Subspace

__all__ = [
    "FixedSubspace",
    "KroneckerSubspace",
    "PublicSubspace",
    "RandomSubspace",
    "Subspace",
]
