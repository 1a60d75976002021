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
