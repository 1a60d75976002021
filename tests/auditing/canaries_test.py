"""Canaries in one run: what they prove of right and of wrong claims."""

import json
import math

import numpy as np
import pytest

from tests.auditing.audited_mechanisms import WithHalfTheNoise
from tf_dpsub import optimizers
from tf_dpsub.auditing import audit_by_gradients, audit_one_run
from tf_dpsub.auditing.canaries import OneRun
from tf_dpsub.data import PoissonBatches
from tf_dpsub.data.person_batches import PersonBatches
from tf_dpsub.subspaces import RandomSubspace
from tf_dpsub.training import private_batches, run
from tf_dpsub.training.private_model import PrivateModel

CANARIES = 400


def test_json_can_hold_whether_it_passed():
    """Also where NumPy computed what is compared."""
    found = OneRun(
        bound=np.float64(0.5),
        claimed=np.float64(1.0),
        delta=1e-5,
        confidence=0.95,
        correct=9,
        guesses=10,
        canaries=20,
    )
    assert json.dumps(found.passed) == "true"


def settings(**changes):
    return {
        "noise_multiplier": 1.0,
        "l2_norm_clip": 0.5,
        "batch_size": CANARIES,
    } | changes


def randomized_response(epsilon):
    def train(is_in):
        generator = np.random.default_rng(1)
        right = generator.random(len(is_in)) < 1 / (1 + math.exp(-epsilon))
        said = np.where(right, is_in, ~is_in)
        return said + 1e-3 * generator.random(len(is_in)), epsilon

    return train


class TestOneRun:
    def test_proves_most_of_what_randomized_response_tells(self):
        found = audit_one_run(randomized_response(2.0), 20_000, delta=0.0)
        assert found.passed
        assert 1.8 < found.bound <= 2.0

    def test_a_wrong_claim_is_caught(self):
        def train(is_in):
            return randomized_response(2.0)(is_in)[0], 1.0

        assert not audit_one_run(train, 20_000, delta=0.0).passed

    def test_abstaining_leaves_the_sure_ones(self):
        def train(is_in):
            """Sure of a tenth, and guessing about the others."""
            sure = np.arange(len(is_in)) % 10 == 0
            signs = np.where(is_in, 1.0, -1.0)
            noise = np.random.default_rng(2).normal(size=len(is_in))
            return np.where(sure, 9 * signs, noise), math.inf

        all_of_them = audit_one_run(train, 1000, delta=0.0)
        few = audit_one_run(train, 1000, delta=0.0, guesses=80)
        assert few.correct == few.guesses == 80
        assert few.bound > 3 > 1 > all_of_them.bound

    def test_coins_are_fair_and_seeded(self):
        seen = []

        def train(is_in):
            seen.append(is_in)
            return np.zeros(len(is_in)), 1.0

        for seed in (0, 0, 1):
            audit_one_run(train, 10_000, delta=0.0, seed=seed)
        np.testing.assert_array_equal(seen[0], seen[1])
        assert np.mean(seen[0]) == pytest.approx(0.5, abs=0.02)
        assert np.mean(seen[0] == seen[2]) == pytest.approx(0.5, abs=0.02)

    @pytest.mark.parametrize("guesses", [1, 11])
    def test_wrong_guesses(self, guesses):
        with pytest.raises(ValueError, match="Expected 2 <= guesses"):
            audit_one_run(
                randomized_response(1.0), 10, delta=0.0, guesses=guesses
            )

    def test_wrong_scores(self):
        with pytest.raises(ValueError, match="Expected a score for each"):
            audit_one_run(lambda is_in: ([0.0], 1.0), 10, delta=0.0)


class TestGradients:
    """Every batch holds all examples: a step has epsilon 4.4."""

    def test_a_run_is_attacked_with_success(self):
        found = audit_by_gradients(
            lambda inner, weights: optimizers.DPSGD(inner, **settings()),
            canaries=CANARIES,
            guesses=100,
        )
        assert found.passed
        assert found.claimed == pytest.approx(4.38, abs=0.02)
        assert found.bound > 0.7

    def test_half_the_noise_proves_more(self):
        """Of the same claim; by five deviations of what chance does."""
        found, honest = (
            audit_by_gradients(
                lambda inner, weights, kind=kind: kind(inner, **settings()),
                canaries=4000,
                guesses=400,
            )
            for kind in (WithHalfTheNoise, optimizers.DPSGD)
        )
        assert honest.passed
        assert found.claimed == honest.claimed
        assert found.bound > honest.bound

    def test_sampling_counts(self):
        """Of what a tenth of the batches tell little is proved."""
        found = audit_by_gradients(
            lambda inner, weights: optimizers.DPSGD(
                inner, **settings(batch_size=40)
            ),
            canaries=CANARIES,
            epochs=2,
        )
        assert found.passed
        assert found.claimed < 5

    @pytest.mark.parametrize("method", ["ProjectedDPSGD", "GEP", "B-GEP"])
    def test_subspaces(self, method):
        def make(inner, weights):
            subspace = RandomSubspace(rank=weights // 2)
            own = settings(batch_size=weights)
            if method == "ProjectedDPSGD":
                return optimizers.ProjectedDPSGD(
                    inner, subspace=subspace, **own
                )
            if method == "B-GEP":
                return optimizers.GEP(
                    inner, subspace=subspace, residual=False, **own
                )
            return optimizers.GEP(
                inner, subspace=subspace, residual_norm_clip=0.1, **own
            )

        found = audit_by_gradients(make, canaries=100)
        assert found.passed

    def test_carriers(self):
        found = audit_by_gradients(
            lambda inner, weights: optimizers.RGP(
                inner, **settings(), carriers="random"
            ),
            canaries=CANARIES,
            carrier_rank=1,
        )
        assert found.passed
        assert found.claimed == pytest.approx(4.38, abs=0.02)


class ClipsEachRow(PersonBatches):
    """Draws rows, which are clipped one by one, and calls them persons."""

    rows_per_step = 1

    def __init__(self, batches, person_ids, rows_per_step):
        vars(self).update(vars(batches))

    _drawn_parts = PoissonBatches._drawn_parts
    _draws_of_rows = False


class TestPersons:
    """Canaries of several rows, whose gradients point alike."""

    ROWS = 16

    def audited(self, draws_persons, batch_size, noise_multiplier=8.0):
        return audit_by_gradients(
            lambda inner, weights: optimizers.DPSGD(
                inner,
                **settings(
                    noise_multiplier=noise_multiplier, batch_size=batch_size
                ),
            ),
            canaries=CANARIES,
            guesses=100,
            rows_per_person=self.ROWS,
            draws_persons=draws_persons,
        )

    def test_persons_that_are_drawn_keep_their_claim(self):
        found = self.audited(True, CANARIES, 1.0)
        assert found.passed
        assert found.claimed == pytest.approx(4.38, abs=0.02)
        # The claim is nearly tight: each person moves the sum by the clip.
        assert found.bound > 0.7

    def test_rows_that_are_clipped_one_by_one_are_caught(self, monkeypatch):
        monkeypatch.setattr(
            private_batches.person_batches, "PersonBatches", ClipsEachRow
        )
        found = self.audited(True, CANARIES * self.ROWS)
        assert found.claimed == pytest.approx(0.43, abs=0.02)
        assert not found.passed

    def test_rows_count_together(self, monkeypatch):
        found = self.audited(False, CANARIES * self.ROWS)
        assert found.passed
        assert 8 < found.claimed < 12

        def of_one_row(model, delta, accountant, rows_per_person):
            return model.ledger.epsilon(delta, accountant)

        monkeypatch.setattr(PrivateModel, "epsilon", of_one_row)
        assert not self.audited(False, CANARIES * self.ROWS).passed


def test_rates_that_are_counted_as_their_mean_are_caught(monkeypatch):
    # Rounding of sums of so many is not what this is about.
    monkeypatch.setattr(private_batches, "_check_size", lambda *_: None)

    def audited():
        return audit_by_gradients(
            lambda inner, weights: optimizers.DPSGD(
                inner, **settings(noise_multiplier=4.0, batch_size=20)
            ),
            canaries=CANARIES,
            guesses=100,
            # Each takes part in about all of 20 steps.
            sampling_rates=np.full(CANARIES, 0.99),
        )

    assert audited().passed
    sampling_of = run.sampling_of
    monkeypatch.setattr(
        run,
        "sampling_of",
        lambda *arguments: sampling_of(*arguments) | {"largest_rate": None},
    )
    found = audited()
    assert found.claimed < 0.5
    assert not found.passed
