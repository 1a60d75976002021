"""Steps that share noise pass their audit, and no broken twin does."""

import numpy as np
import pytest

from tests.auditing.audited_mechanisms import (
    CHECKS,
    Underhand,
    audit_of,
    dpsgd,
)
from tf_dpsub import optimizers
from tf_dpsub.auditing import banded_steps
from tf_dpsub.data import PoissonBatches
from tf_dpsub.optimizers import PrivateOptimizer

BANDS = 3


def banded(make=optimizers.DPSGD, **changes):
    return lambda inner, weights: dpsgd(
        inner, weights, make, bands=BANDS, **changes
    )


@pytest.fixture(scope="module")
def audit():
    return audit_of(banded())


def test_it_passes(audit):
    found = audit.run(steps=400, cases=40, runs=200)
    failed = [f"{f.check}: {f.detail}" for f in found if not f.passed]
    assert not failed
    assert [f.check for f in found] == [*CHECKS, "groups"]


def test_an_attack_sees_all_steps_of_an_example():
    """It proves a loss, with a wide margin for chance, and no more than is."""
    (found,) = audit_of(banded(noise_multiplier=0.5)).check_epsilon(runs=500)
    assert found.passed
    assert 0.7 < found.value < 10.6


def test_what_is_shared_is_taken_out():
    ratios = (1.0, 0.5, 0.25)
    column = np.array([1.0, 0.5, 0.25, 0.0, 0.0])
    mixing = np.array([np.roll(column, k) for k in range(5)]).T * np.tri(5)
    values = np.random.default_rng(0).normal(size=(5, 4))
    norm = np.linalg.norm(ratios)
    expected = mixing @ values / norm
    fresh = banded_steps.fresh(values, ratios)
    assert np.allclose(fresh, expected)
    # Of fresh noise, the matched sum has the spread of one step's.
    weights = sum(r * mixing[k, :3] for k, r in enumerate(ratios)) / norm**2
    matched = banded_steps.matched(list(values[:3]), ratios)
    assert np.allclose(matched, weights @ values[:3])
    assert np.linalg.norm(weights @ np.linalg.inv(mixing[:3, :3])) * norm == (
        pytest.approx(1)
    )


class WithoutTheNorm(optimizers.DPSGD):
    """Fresh noise is that of a step that shares none."""

    def _noises(self, sums):
        return PrivateOptimizer._noises(self, sums)


class TakesNothingBack(optimizers.DPSGD):
    def add_noise(self, key, sums, dtype):
        self.banded_noise.forget()
        return super().add_noise(key, sums, dtype)


class TakesBackOfAnotherMatrix(optimizers.DPSGD):
    def add_noise(self, key, sums, dtype):
        noise = self.banded_noise
        advance = noise._carried.advance
        noise._carried.advance = lambda key, ratios, *others: advance(
            key, (1.0, *(-r for r in ratios[1:])), *others
        )
        try:
            return super().add_noise(key, sums, dtype)
        finally:
            del noise._carried.advance


class WithHardlyAnyNoise(Underhand, optimizers.DPSGD):
    def drawn(self, claimed):
        return [s / 20 for s in claimed]


@pytest.mark.parametrize(
    "twin, check",
    [
        (WithoutTheNorm, "variance"),
        (TakesNothingBack, "independence"),
        (TakesBackOfAnotherMatrix, "independence"),
        (WithHardlyAnyNoise, "epsilon"),
    ],
)
def test_broken_twin_is_caught(twin, check):
    audit = audit_of(banded(twin))
    if check == "epsilon":
        found = audit.check_epsilon(runs=300)
    else:
        found = audit.check_noise(600)
    assert check in {f.check for f in found if not f.passed}


def test_groups_that_are_not_respected_are_caught(audit, monkeypatch):
    monkeypatch.setattr(PoissonBatches, "in_groups", lambda self, groups: self)
    (found,) = audit.check_groups()
    assert not found.passed
    assert found.value > 1
