"""Privacy accounting: epsilon, delta, noise, steps, and what was spent."""

from tf_dpsub.accounting.accountants import delta
from tf_dpsub.accounting.accountants import epsilon
from tf_dpsub.accounting.accountants import noise_multiplier
from tf_dpsub.accounting.accountants import steps
from tf_dpsub.accounting.ledger import LedgerEntry
from tf_dpsub.accounting.ledger import PrivacyLedger
from tf_dpsub.accounting.statement import statement

__all__ = [
    "LedgerEntry",
    "PrivacyLedger",
    "delta",
    "epsilon",
    "noise_multiplier",
    "statement",
    "steps",
]
