"""Subspaces of few dimensions that gradients are projected on."""

from tf_dpsub.subspaces.fixed_subspace import FixedSubspace
from tf_dpsub.subspaces.public_subspace import PublicSubspace
from tf_dpsub.subspaces.random_subspace import RandomSubspace
from tf_dpsub.subspaces.subspace import Subspace

__all__ = ["FixedSubspace", "PublicSubspace", "RandomSubspace", "Subspace"]
