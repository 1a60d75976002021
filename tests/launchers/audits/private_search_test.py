"""A private search passes its audit, and no broken twin of one does."""

import dataclasses
import gc
import json

import numpy as np
import pytest

from tf_dpsub import accounting
from tf_dpsub.launchers.audits import mechanism, private_search
from tf_dpsub.training.private_evaluation import PrivateEvaluation
from tf_dpsub.tuning import PrivateRandomSearch
from tf_dpsub.tuning.random_oracle import RandomOracle

SIZES = mechanism.Sizes(steps=300, cases=40, runs=200, canaries=40)


@pytest.fixture(autouse=True)
def no_collection(monkeypatch):
    """KerasTuner collects garbage twice for each model: half of the time."""
    monkeypatch.setattr(gc, "collect", lambda *_: 0)


class WithHalfTheNoise(PrivateEvaluation):
    def __init__(self, *args, noise_multiplier, **kwargs):
        super().__init__(*args, noise_multiplier=noise_multiplier / 2, **kwargs)


class WithoutNoise(PrivateEvaluation):
    def released(self, values, confidence=0.95):
        released = super().released(values, confidence)
        means = dict(zip(self.names, values.mean(0) * self._bounds))
        return {
            name: estimate._replace(value=means[name])
            for name, estimate in released.items()
        }


class WithoutBound(PrivateEvaluation):
    def checked(self):
        return 2 * super().checked()


class SeesOtherRows(PrivateEvaluation):
    def checked(self):
        values = super().checked()
        return values * (0.5 if len(values) % 2 else 1.0)


class FixedNumber(RandomOracle):
    """Runs as many trials as are expected, always."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.max_trials = round(self.mean_trials)


class ManyTrials(RandomOracle):
    """Has a fixed number of trials, and claims a few."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.max_trials = 200


class ChargesOneTrial(PrivateRandomSearch):
    """Counts a search as one of its trials."""

    def begin(self, trial, model):
        super().begin(trial, model)
        self.ledger = accounting.PrivacyLedger()
        for number, entry in enumerate(self.oracle.entry.trial):
            self.ledger.add(str(number), entry)


class ForgetsReleases(PrivateRandomSearch):
    """Counts the steps of a trial, and not its scores."""

    def begin(self, trial, model):
        super().begin(trial, model)
        entry = self.oracle.entry
        self.ledger = accounting.PrivacyLedger()
        self.ledger.add(
            "search", dataclasses.replace(entry, trial=entry.trial[:1])
        )


TWINS = {
    "half the noise": ("evaluation", WithHalfTheNoise, "variance"),
    "no noise": ("evaluation", WithoutNoise, "epsilon"),
    "no bound": ("evaluation", WithoutBound, "sensitivity"),
    "sees other rows": ("evaluation", SeesOtherRows, "sensitivity"),
    "a fixed number": ("oracle", FixedNumber, "trials"),
    "many trials": ("oracle", ManyTrials, "trials"),
    "charges one trial": ("tuner", ChargesOneTrial, "ledger"),
    "forgets releases": ("tuner", ForgetsReleases, "ledger"),
}


def _check(name, parts):
    if name == "variance":
        return private_search.noise(parts, SIZES.steps)[0]
    if name == "sensitivity":
        return private_search.sensitivity(parts, SIZES.cases)
    if name == "trials":
        return private_search.trials(parts, SIZES.runs)
    if name == "epsilon":
        return private_search.attack(parts, 40, mechanism.STEP_EPSILON)
    return private_search.ledger(parts)


def test_a_search_keeps_its_claims():
    result = mechanism.audited(private_search.NAME, SIZES)
    assert result["passed"], result["findings"]
    assert result["mechanism"] in mechanism.NAMES
    assert json.dumps(result)
    assert {check for _, _, check in TWINS.values()} <= {
        finding["check"] for finding in result["findings"]
    }


@pytest.mark.parametrize("name", TWINS)
def test_broken_twin_is_caught(name):
    part, twin, check = TWINS[name]
    parts = dataclasses.replace(private_search.parts(), **{part: twin})
    assert not _check(check, parts).passed


def test_shares_of_numbers_of_trials():
    """That of one trial is that of Papernot and Steinke."""
    from tf_dpsub.accounting import selection

    gamma = selection._gamma(private_search.MEAN_TRIALS, 0.0)
    shares = private_search._shares([1, 2])
    assert shares.sum() == pytest.approx(1)
    assert shares[0] == pytest.approx((1 - gamma) / -np.log(gamma), rel=1e-4)
