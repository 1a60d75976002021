"""Privacy accounting: accountants, the ledger, and the privacy statement."""

from tf_dpsub.accounting.accountants import (
    delta,
    epsilon,
    noise_multiplier,
    selection_epsilon,
    steps,
)
from tf_dpsub.accounting.banded_factorization import best_bands
from tf_dpsub.accounting.entry import LedgerEntry
from tf_dpsub.accounting.ledger import PrivacyLedger
from tf_dpsub.accounting.statement import statement
from tf_dpsub.accounting.uniform_sampling import (
    uniform_epsilon,
    uniform_noise_multiplier,
)

__all__ = [
    "LedgerEntry",
    "PrivacyLedger",
    "best_bands",
    "delta",
    "epsilon",
    "noise_multiplier",
    "selection_epsilon",
    "statement",
    "steps",
    "uniform_epsilon",
    "uniform_noise_multiplier",
]
