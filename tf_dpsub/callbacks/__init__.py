"""Callbacks for private training."""

from tf_dpsub.callbacks.gradient_recorders import (
    PrivateSpectrumRecorder,
    ProjectionErrorRecorder,
    SpectrumRecorder,
)
from tf_dpsub.callbacks.privacy_budget import PrivacyBudget

__all__ = [
    "PrivacyBudget",
    "PrivateSpectrumRecorder",
    "ProjectionErrorRecorder",
    "SpectrumRecorder",
]
