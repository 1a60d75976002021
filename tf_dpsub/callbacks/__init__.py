"""Callbacks for private training."""

from tf_dpsub.callbacks.gradient_recorders import (
    PrivateSpectrumRecorder,
    ProjectionErrorRecorder,
    SpectrumRecorder,
)
from tf_dpsub.callbacks.privacy_budget import PrivacyBudget
from tf_dpsub.callbacks.residual_recorder import ProjectionResidualRecorder

__all__ = [
    "PrivacyBudget",
    "PrivateSpectrumRecorder",
    "ProjectionErrorRecorder",
    "ProjectionResidualRecorder",
    "SpectrumRecorder",
]
