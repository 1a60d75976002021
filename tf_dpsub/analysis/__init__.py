"""Spectral analysis of gradients: tools for a user's own model."""

import importlib
import warnings

from tf_dpsub.analysis.convex import averaged_sgd
from tf_dpsub.analysis.distances import (
    principal_angles,
    projection_residual,
    subspace_distance,
)
from tf_dpsub.analysis.gradient_store import GradientStore
from tf_dpsub.analysis.lipschitz import (
    excess_loss_bound,
    restricted_lipschitz,
)
from tf_dpsub.analysis.spectra import (
    DecayFit,
    Spectrum,
    decay_exponent,
    explained_energy,
    stable_rank,
    top_singular_values,
)

__all__ = [
    "DecayFit",
    "GradientStore",
    "Spectrum",
    "averaged_sgd",
    "decay_exponent",
    "excess_loss_bound",
    "explained_energy",
    "principal_angles",
    "projection_residual",
    "restricted_lipschitz",
    "stable_rank",
    "subspace_distance",
    "top_singular_values",
]

# Until version 0.2, what `tf_dpsub.planning` has.
_PLANNING = ("Candidate", "Plan", "Signal", "StepCost", "plan")


def __getattr__(name):
    if name in _PLANNING:
        warnings.warn(
            f"tf_dpsub.analysis.{name} is now tf_dpsub.planning.{name}; the "
            "old name goes in version 0.2.",
            FutureWarning,
            stacklevel=2,
        )
        return getattr(importlib.import_module("tf_dpsub.planning"), name)
    raise AttributeError(
        f"module 'tf_dpsub.analysis' has no attribute {name!r}"
    )
