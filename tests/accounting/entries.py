"""Ledger entries of each kind, and ledgers that hold them."""

import dataclasses
import math

from tf_dpsub.accounting import LedgerEntry, PrivacyLedger

POISSON = LedgerEntry(
    mechanism="DPSGD",
    noise_multiplier=1.3,
    l2_norm_clip=1.0,
    batch_size=150,
    examples=60000,
    sampler="poisson",
)
BATCHES = dataclasses.replace(
    POISSON, noise_multiplier=18.0, examples=None, sampler="batches"
)
ONCE = dataclasses.replace(BATCHES, each_example_once_per_epoch=True)
ALLOCATION = dataclasses.replace(
    POISSON,
    sampler="allocation",
    each_example_once_per_epoch=True,
    epoch_steps=400,
)
PLAIN = dataclasses.replace(
    POISSON, noise_multiplier=0.0, l2_norm_clip=math.inf
)


def changed(entry, **changes):
    return dataclasses.replace(entry, **changes)


def ledger_of(*charges):
    ledger = PrivacyLedger()
    for charge in charges:
        ledger.charge(*charge)
    return ledger
