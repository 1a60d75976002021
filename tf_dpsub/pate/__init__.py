"""PATE: labels of public inputs by a noisy vote of teachers."""

from tf_dpsub.pate.confident_gnmax import ConfidentGNMax
from tf_dpsub.pate.data_dependent import (
    UnpublishableEpsilon,
    answer_rdp,
    check_rdp,
)
from tf_dpsub.pate.parts import disjoint_parts

__all__ = [
    "ConfidentGNMax",
    "UnpublishableEpsilon",
    "answer_rdp",
    "check_rdp",
    "disjoint_parts",
]
