"""Attacks on what was trained privately."""

from tf_dpsub.auditing.allocation import check_allocation
from tf_dpsub.auditing.canaries import (
    OneRun,
    audit_by_gradients,
    audit_one_run,
)
from tf_dpsub.auditing.checks import MechanismAudit
from tf_dpsub.auditing.lower_bounds import (
    clopper_pearson,
    epsilon_of_one_run,
    epsilon_of_rates,
)
from tf_dpsub.auditing.membership import (
    Membership,
    attack_features,
    classifier_attack,
    likelihood_ratio_attack,
    loss_threshold_attack,
)
from tf_dpsub.auditing.statistics import Finding
from tf_dpsub.auditing.step_audit import Claim, claims
from tf_dpsub.auditing.votes import VoteAudit

__all__ = [
    "Claim",
    "Finding",
    "MechanismAudit",
    "Membership",
    "OneRun",
    "VoteAudit",
    "attack_features",
    "audit_by_gradients",
    "audit_one_run",
    "check_allocation",
    "claims",
    "classifier_attack",
    "clopper_pearson",
    "epsilon_of_one_run",
    "epsilon_of_rates",
    "likelihood_ratio_attack",
    "loss_threshold_attack",
]
