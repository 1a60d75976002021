"""The HTML of a privacy statement keeps its words and its parts."""

import dataclasses
import html
import math
import re

import pytest

from tf_dpsub.accounting import LedgerEntry, PrivacyLedger, statement
from tf_dpsub.launchers.reports import html_statement

ENTRY = LedgerEntry(
    mechanism="DPSGD",
    noise_multiplier=1.3,
    l2_norm_clip=0.75,
    batch_size=150,
    examples=60000,
    sampler="poisson",
)
CHANGES = {
    "poisson": {},
    "batches": {"sampler": "batches", "examples": None},
    "warnings": {"fixed_seed": 1, "private_selection": True},
    "not private": {"noise_multiplier": 0.0},
    "unbounded": {"noise_multiplier": 0.0, "l2_norm_clip": math.inf},
    "a description": {
        "mechanism": "GEP, with a residual clipped at 2 and multipliers 1.5 "
        "and 2.5, which make one σ"
    },
    "a rank": {"mechanism": "DPPowerSGD of rank 16"},
    "notes": {"notes": ("500 <public> examples & their labels",)},
}


def stated(**changes):
    ledger = PrivacyLedger()
    ledger.charge(dataclasses.replace(ENTRY, **changes), 40, 1)
    return statement(ledger, delta=1e-5, model_name="a <model>")


def words(text):
    """Without the punctuation that parts of a page make superfluous."""
    return re.sub(r"[.:,](?=\s|$)", "", html.unescape(text)).split()


@pytest.mark.parametrize("kind", CHANGES)
def test_every_word_is_there(kind):
    text = stated(**CHANGES[kind])
    section = html_statement.section(text)
    page = re.sub(r"<[^>]*>", " ", section.body)
    assert words(f"{section.heading} {page}") == words(text)
    assert "<model>" not in section.body and "<public>" not in section.body


@pytest.mark.parametrize("kind", CHANGES)
def test_parts_have_names(kind):
    body = html_statement.section(stated(**CHANGES[kind])).body
    names = re.findall(r"<dt[^>]*>(.*?)</dt>", body)
    mechanism = CHANGES[kind].get("mechanism", "DPSGD")
    assert names[-6:] == [
        mechanism.partition(",")[0],
        *("Unit", "Adjacency", "Covered", "Counted", "Taken as public"),
    ]
    warned = {"warnings": ["WARNING"] * 2, "not private": ["NOT PRIVATE"]}
    warned["unbounded"] = warned["not private"]
    *found, attacks = names[:-6] if "Attacks" in names else [*names[:-6], None]
    assert found == warned.get(kind, [])
    # Nothing bounds attacks without noise, or with a known seed.
    assert (attacks is None) == bool(found)
    assert body.count('<dt class="warning">') == len(found)


def test_figures_are_a_table():
    body = html_statement.section(stated()).body
    rows = re.findall(r"<tr>(.*?)</tr>", body)
    texts = [re.findall(r">([^<]+)<", row) for row in rows]
    assert texts[0] == ["ε", "RDP", "PLD"]
    assert texts[1][0] == "with Poisson sampling"
    assert all(len(row) == 3 for row in texts) and len(texts) == 3
