"""Of what dimension gradients are: tools for a user's own model."""

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
from tf_dpsub.analysis.planner import Candidate, Plan, plan
from tf_dpsub.analysis.signals import Signal
from tf_dpsub.analysis.spectra import (
    DecayFit,
    Spectrum,
    decay_exponent,
    explained_energy,
    stable_rank,
    top_singular_values,
)
from tf_dpsub.analysis.step_cost import StepCost

__all__ = [
    "Candidate",
    "DecayFit",
    "GradientStore",
    "Plan",
    "Signal",
    "Spectrum",
    "StepCost",
    "averaged_sgd",
    "decay_exponent",
    "excess_loss_bound",
    "explained_energy",
    "plan",
    "principal_angles",
    "projection_residual",
    "restricted_lipschitz",
    "stable_rank",
    "subspace_distance",
    "top_singular_values",
]
