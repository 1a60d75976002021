"""The field `bands` of a config: the optimizer that it makes."""

import numpy as np
import pytest

from tests.launchers.training.configs import changed
from tf_dpsub import accounting, data
from tf_dpsub.launchers.training import config_checks, objects

EXAMPLES, BATCH = 1000, 50
BUDGET = {"noise_multiplier": None, "epsilon": 4.0, "epochs": 3}


def optimizer_of(**changes):
    config = changed(batch_size=BATCH, **changes)
    config_checks.check(config)
    batches = data.PoissonBatches(np.zeros(EXAMPLES), batch_size=BATCH)
    return objects.private_optimizer(config, batches)


def test_noise_keeps_the_budget_in_whole_cycles():
    optimizer = optimizer_of(bands=8, **BUDGET)
    spent = accounting.epsilon(
        noise_multiplier=optimizer.noise_multiplier,
        sampling_rate=8 * BATCH / EXAMPLES,
        # Of 60 steps, 8 cycles.
        steps=8,
        delta=1e-5,
    )
    assert optimizer.bands == 8
    assert 0.999 * 4 < spent <= 4


def test_rows_of_a_person_have_no_amplification():
    """They may be in several groups."""
    optimizer = optimizer_of(bands=8, rows_per_person=2, **BUDGET)
    spent = accounting.epsilon(
        noise_multiplier=optimizer.noise_multiplier,
        sampling_rate=1,
        steps=8,
        delta=1e-5,
        rows_per_person=2,
    )
    assert 0.999 * 4 < spent <= 4


def test_auto_is_the_best_number(monkeypatch):
    asked = []
    monkeypatch.setattr(
        accounting, "best_bands", lambda *run: asked.append(run) or 2
    )
    assert optimizer_of(bands="auto", **BUDGET).bands == 2
    assert asked == [(EXAMPLES, BATCH, 60, 4.0, 1e-5)]
    assert optimizer_of(**BUDGET).bands == 1


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"bands": 0}, 'Expected bands >= 1, or "auto", got 0'),
        ({"bands": "best"}, "got 'best'"),
        ({"bands": "auto"}, "Set epsilon, or bands to a number"),
        (
            {**BUDGET, "bands": "auto", "rows_per_person": 2},
            "several rows of a person have no amplification",
        ),
        ({"bands": 2, "optimizer": "DPPowerSGD"}, "Leave bands out"),
        ({"bands": 2, "recipe": "full_batch"}, "Leave bands out"),
        (
            {**BUDGET, "bands": "auto", "sampling": "once_per_epoch"},
            "Leave one of them out",
        ),
        ({"optimizer_kwargs": {"bands": 2}}, "Set the field `bands`"),
        ({"bands": 21}, "Expected at most 20 groups"),
    ],
)
def test_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        optimizer_of(**changes)
