"""Callbacks for private training."""

from tf_dpsub.callbacks.privacy_budget import PrivacyBudget

__all__ = ["PrivacyBudget"]
