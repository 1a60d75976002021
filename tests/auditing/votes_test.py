"""PATE keeps its claims; broken ones are caught, each by its check."""

import functools
import math

import numpy as np
import pytest

from tf_dpsub.auditing import VoteAudit
from tf_dpsub.pate import ConfidentGNMax

FEW = {"queries": 2000, "cases": 60, "runs": 400}


def failed(aggregator):
    # With the seed nothing is left to chance.
    audit = VoteAudit(functools.partial(aggregator, seed=0))
    return {f.check for f in audit.run(**FEW) if not f.passed}


def test_it_keeps_its_claims():
    audit = VoteAudit(functools.partial(ConfidentGNMax, seed=0))
    findings = {f.check: f for f in audit.run(**FEW)}
    assert all(f.passed for f in findings.values()), findings
    assert findings["sensitivity"].value == pytest.approx(1, abs=1e-12)
    assert findings["ledger"].value == pytest.approx(1, abs=1e-9)
    assert 0 <= findings["epsilon"].value <= 1
    assert 0.8 < findings["variance"].value < 1.25


def test_the_attack_proves_a_large_part_of_epsilon():
    audit = VoteAudit(functools.partial(ConfidentGNMax, seed=0))
    (finding,) = audit.check_epsilon(epsilon=8.0, runs=400)
    assert finding.passed
    assert 0.8 < finding.value < 8


class WithHalfTheNoise(ConfidentGNMax):
    def _noisy(self, counts, stddev):
        return super()._noisy(counts, stddev / 2)


class WithATenthOfTheNoiseOfAnswers(ConfidentGNMax):
    def _noisy(self, counts, stddev):
        return super()._noisy(counts, stddev / (10 if counts.ndim == 2 else 1))


class WithOneNoiseForAllQueries(ConfidentGNMax):
    def _noisy(self, counts, stddev):
        return counts + super()._noisy(0 * counts[:1], stddev)


class WithTheSensitivityOfOneCount(ConfidentGNMax):
    """Charges an answer as if one vote moved all counts by 1."""

    def entries(self):
        check, answer = super().entries()
        return check, type(answer)(
            **vars(answer)
            | {"noise_multiplier": math.sqrt(2) * answer.noise_multiplier}
        )


class WithoutAChargeForChecks(ConfidentGNMax):
    def _charge(self, queries, answers):
        super()._charge(0, answers)


class ChargesWhatWasAnswered(ConfidentGNMax):
    def aggregate(self, votes, answers=None):
        labels = super().aggregate(votes, answers)
        self.ledger = type(self.ledger)()
        self._charge(len(labels), int((labels >= 0).sum()))
        return labels


class CountsByWeight(ConfidentGNMax):
    """Teachers who vote for later classes count twice."""

    def counts(self, votes):
        return super().counts(votes) * (1 + np.arange(self.classes) // 2)


class CountsWhatIsNoClassForAll(ConfidentGNMax):
    def counts(self, votes):
        is_none = np.asarray(votes) >= self.classes
        return super().counts(votes) + is_none.sum(1)[:, None]


@pytest.mark.parametrize(
    "broken, checks",
    [
        (WithHalfTheNoise, {"variance"}),
        (WithATenthOfTheNoiseOfAnswers, {"variance", "epsilon"}),
        (WithOneNoiseForAllQueries, {"independence"}),
        (WithTheSensitivityOfOneCount, {"variance", "ledger"}),
        (WithoutAChargeForChecks, {"ledger"}),
        (ChargesWhatWasAnswered, {"ledger"}),
        (CountsByWeight, {"sensitivity"}),
        (CountsWhatIsNoClassForAll, {"sensitivity"}),
    ],
)
def test_a_broken_one_is_caught(broken, checks):
    assert checks <= failed(broken)
