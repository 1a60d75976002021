"""Of what dimension gradients are: tools for a user's own model.

What trains is loaded when it is first used: the rest needs no TensorFlow.
"""

import importlib

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

_WITH_TENSORFLOW = {
    "Candidate": "planner",
    "Plan": "planner",
    "Signal": "signals",
    "StepCost": "step_cost",
    "plan": "planner",
}


def __getattr__(name):
    if name in _WITH_TENSORFLOW:
        module = importlib.import_module(
            f"tf_dpsub.analysis.{_WITH_TENSORFLOW[name]}"
        )
        return getattr(module, name)
    raise AttributeError(
        f"module 'tf_dpsub.analysis' has no attribute {name!r}"
    )


def __dir__():
    return sorted([*globals(), *__all__])
