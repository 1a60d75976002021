"""A trial keeps to the events that its search has recorded."""

import dataclasses

import pytest

from tf_dpsub.accounting import LedgerEntry
from tf_dpsub.tuning.trial_ledger import BreaksGuaranteeError, TrialLedger

BANDED = LedgerEntry(
    mechanism="DPSGD",
    noise_multiplier=2.0,
    l2_norm_clip=1.0,
    batch_size=10,
    examples=100,
    sampler="poisson",
    bands=4,
)
ALLOCATED = LedgerEntry(
    mechanism="DPSGD",
    noise_multiplier=2.0,
    l2_norm_clip=1.0,
    batch_size=10,
    examples=100,
    sampler="allocation",
    each_example_once_per_epoch=True,
    epoch_steps=10,
)


def planned(entry, steps, epochs=0):
    ledger = TrialLedger()
    ledger.plan([dataclasses.replace(entry, steps=steps, epochs=epochs)])
    return ledger


def test_a_cycle_of_bands_counts_once():
    ledger = planned(BANDED, 10)
    for _ in range(12):
        # Three cycles, of which the last one was not to be whole.
        ledger.charge(BANDED)
    with pytest.raises(BreaksGuaranteeError, match="more of DPSGD"):
        ledger.charge(BANDED)


def test_a_cycle_that_is_begun_anew_counts_again():
    ledger = planned(BANDED, 10)
    ledger.charge(BANDED, 5)
    ledger.end_entry()
    ledger.charge(BANDED, 4)
    # As many steps as planned, in four cycles instead of three.
    with pytest.raises(BreaksGuaranteeError, match="more of DPSGD"):
        ledger.charge(BANDED)


def test_an_epoch_counts_once():
    ledger = planned(ALLOCATED, 20, epochs=2)
    for _ in range(2):
        ledger.charge(ALLOCATED, 10, epochs=1)
    with pytest.raises(BreaksGuaranteeError, match="more of DPSGD"):
        ledger.charge(ALLOCATED, 1, epochs=1)


def test_nothing_without_a_plan():
    with pytest.raises(BreaksGuaranteeError, match="more of DPSGD"):
        TrialLedger().charge(ALLOCATED)
