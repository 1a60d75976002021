"""Callbacks for private training."""

from tf_dpsub.callbacks.gradient_recorders import (
    PrivateSpectrumRecorder,
    ProjectionErrorRecorder,
    SpectrumRecorder,
)
from tf_dpsub.callbacks.privacy_budget import PrivacyBudget
from tf_dpsub.callbacks.private_gradient_recorder import PrivateGradientRecorder
from tf_dpsub.callbacks.private_validation import PrivateValidation
from tf_dpsub.callbacks.residual_recorder import ProjectionResidualRecorder
from tf_dpsub.callbacks.swap_ema_weights import SwapEMAWeights

__all__ = [
    "PrivacyBudget",
    "PrivateGradientRecorder",
    "PrivateSpectrumRecorder",
    "PrivateValidation",
    "ProjectionErrorRecorder",
    "ProjectionResidualRecorder",
    "SpectrumRecorder",
    "SwapEMAWeights",
]
