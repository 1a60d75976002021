import copy
import math
import pickle

import numpy as np
import pytest
from scipy import optimize, stats

from tf_dpsub import accounting
from tf_dpsub.pate import ConfidentGNMax

# Of the experiment of the paper on MNIST.
MNIST = {
    "teachers": 250,
    "classes": 10,
    "examples": 60_000,
    "threshold": 200,
    "threshold_noise": 150,
    "noise": 40,
}


def small(**changes):
    settings = {
        "teachers": 5,
        "classes": 3,
        "examples": 100,
        "threshold": 3.5,
        "threshold_noise": 0.01,
        "noise": 0.01,
        "seed": 0,
    }
    return ConfidentGNMax(**settings | changes)


VOTES = np.array(
    [
        [2, 2, 2, 2, 1],  # 4 of 5
        [0, 0, 0, 1, 2],  # 3 of 5
        [1, 1, 1, 1, 1],
        [0, 0, 0, 0, 7],
        [9, 9, 9, 9, 9],  # No class at all.
    ]
)


def test_with_little_noise_it_is_the_majority():
    np.testing.assert_array_equal(small().aggregate(VOTES), [2, -1, 1, 0, -1])


def test_the_first_that_pass_are_answered():
    np.testing.assert_array_equal(
        small().aggregate(VOTES, answers=2), [2, -1, 1, -1, -1]
    )
    np.testing.assert_array_equal(small().aggregate(VOTES, answers=0), [-1] * 5)


def gaussian_epsilon(mu, delta):
    """ε of a μ-GDP mechanism (Dong, Roth, Su, 2019, corollary 2.13)."""

    def excess(epsilon):
        return (
            stats.norm.cdf(-epsilon / mu + mu / 2)
            - math.exp(epsilon) * stats.norm.cdf(-epsilon / mu - mu / 2)
            - delta
        )

    return optimize.brentq(excess, 0, 50)


# Table 2 of the paper: numbers of queries and answers, δ, and ε by PLD.
@pytest.mark.parametrize(
    "threshold_noise, noise, queries, answers, delta, epsilon",
    [
        (150, 40, 640, 286, 1e-5, 2.543),
        (200, 40, 8500, 3098, 1e-6, 11.138),
        (200, 40, 1500, 524, 1e-5, 3.543),
    ],
)
def test_epsilon_of_the_papers_settings(
    threshold_noise, noise, queries, answers, delta, epsilon
):
    aggregator = ConfidentGNMax(
        **MNIST | {"threshold_noise": threshold_noise, "noise": noise}
    )
    aggregator._charge(queries, answers)
    spent = aggregator.ledger.epsilon(delta)
    assert spent == pytest.approx(epsilon, abs=5e-4)
    mu = math.sqrt(queries / threshold_noise**2 + 2 * answers / noise**2)
    assert spent == pytest.approx(gaussian_epsilon(mu, delta), rel=1e-6)


def test_what_is_charged_does_not_follow_from_votes():
    unanimous, split = np.zeros((20, 250), int), np.arange(250) % 10
    split = np.tile(split, (20, 1))
    ledgers = []
    for votes in (unanimous, split):
        aggregator = ConfidentGNMax(**MNIST, seed=0)
        labels = aggregator.aggregate(votes, answers=12)
        ledgers.append(aggregator.ledger.entries)
        assert (labels >= 0).sum() <= 12
    assert ledgers[0] == ledgers[1]
    check, answer = ledgers[0]
    assert (check.mechanism, check.steps) == ("PATE check", 20)
    assert (answer.mechanism, answer.steps) == ("PATE answer", 12)
    assert check.noise_multiplier == 150
    assert answer.noise_multiplier == pytest.approx(40 / math.sqrt(2))
    assert {e.examples for e in ledgers[0]} == {60_000}
    assert {e.sampler for e in ledgers[0]} == {"batches"}


def test_it_is_charged_before_a_draw(monkeypatch, tmp_path):
    ledger = accounting.PrivacyLedger(tmp_path / "ledger.json")
    aggregator = small(ledger=ledger)

    def fails(counts, stddev):
        written = accounting.PrivacyLedger(tmp_path / "ledger.json")
        assert [e.steps for e in written.entries] == [5, 3]
        raise KeyboardInterrupt

    monkeypatch.setattr(aggregator, "_noisy", fails)
    with pytest.raises(KeyboardInterrupt):
        aggregator.aggregate(VOTES, answers=3)
    assert accounting.PrivacyLedger(tmp_path / "ledger.json").steps == 8


def test_calls_compose_with_what_the_ledger_holds():
    aggregator = small(threshold_noise=20.0, noise=20.0)
    aggregator.aggregate(VOTES)
    first = aggregator.ledger.epsilon(1e-5)
    other = small(threshold_noise=20.0, noise=20.0, ledger=aggregator.ledger)
    other.aggregate(VOTES)
    assert [e.steps for e in aggregator.ledger.entries] == [5, 5, 5, 5]
    mu = math.sqrt(2 * (5 + 2 * 5)) / 20
    assert aggregator.ledger.epsilon(1e-5) > 1.3 * first
    assert aggregator.ledger.epsilon(1e-5) == pytest.approx(
        gaussian_epsilon(mu, 1e-5), rel=1e-6
    )


def hostile_votes():
    """Votes of 7 teachers, in which the first one may vote for anything."""
    generator = np.random.default_rng(0)
    for dtype in (np.int8, np.uint8, np.int64, np.uint64):
        limits = np.iinfo(dtype)
        for _ in range(40):
            votes = generator.integers(0, 4, (6, 7)).astype(dtype)
            votes[:, 0] = generator.choice(
                np.array([limits.min, limits.max, 0, 1, 2, 3, 4], dtype), 6
            )
            yield votes


def test_one_vote_moves_counts_by_the_claim():
    aggregator = small(teachers=7, classes=4)
    largest = {"check": 0.0, "answer": 0.0}
    for votes, other in zip(hostile_votes(), hostile_votes()):
        other = votes.copy()
        other[:, 0] = np.roll(other[:, 0], 1)
        a, b = aggregator.counts(votes), aggregator.counts(other)
        assert (a.sum(1) <= 7).all() and (a >= 0).all()
        moved = np.abs(a.max(1) - b.max(1)).max()
        largest["check"] = max(largest["check"], moved)
        moved = np.linalg.norm(a - b, axis=1).max()
        largest["answer"] = max(largest["answer"], moved)
    check, answer = aggregator.entries()
    assert largest["check"] == check.l2_norm_clip == 1
    assert largest["answer"] == answer.l2_norm_clip == math.sqrt(2)


def test_noise_has_its_law_on_a_grid():
    aggregator = small(noise=3.0, threshold_noise=7.0)
    for stddev in (3.0, 7.0):
        noisy = aggregator._noisy(np.full((300, 30), 11), stddev)
        z = (noisy - 11) / stddev
        # With the seed nothing is left to chance.
        assert stats.kstest(z.ravel(), "norm").pvalue > 1e-6
        wholes = noisy * 2.0**30
        np.testing.assert_array_equal(wholes, np.round(wholes))


def test_checks_and_answers_have_their_noise():
    """Frequencies of outcomes, in 4,000 equal queries."""
    aggregator = small(
        teachers=20, threshold=12, threshold_noise=4.0, noise=5.0
    )
    votes = np.tile(np.repeat([0, 1, 2], [12, 8, 0]), (4000, 1))
    labels = aggregator.aggregate(votes)
    answered = labels >= 0
    assert answered.mean() == pytest.approx(0.5, abs=0.04)
    won = labels[answered & (labels < 2)] == 0
    # Of two classes; the third one, at 0, wins rarely where the first is high.
    assert won.mean() == pytest.approx(
        stats.norm.cdf(4 / (5 * math.sqrt(2))), abs=0.06
    )
    # New noise for each query, and for the answer after the check.
    assert 0.4 < np.mean(answered[1:] != answered[:-1]) < 0.6


def test_an_answer_does_not_reuse_the_noise_of_its_check():
    aggregator = small(noise=5.0, threshold_noise=5.0)
    counts = np.zeros((500, 1))
    first, second = (aggregator._noisy(counts, 5.0) for _ in range(2))
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.2


class TestBudget:
    def test_what_exceeds_it_is_refused_and_costs_nothing(self):
        aggregator = ConfidentGNMax(**MNIST, epsilon=2.0, delta=1e-5)
        votes = np.zeros((640, 250), int)
        with pytest.raises(ValueError, match="pass answers=178") as raised:
            aggregator.aggregate(votes, answers=286)
        assert "after which ε would be 2.543" in str(raised.value)
        assert aggregator.ledger.steps == 0
        assert aggregator.answers_within(640) == 178
        aggregator.aggregate(votes, answers=178)
        assert 1.99 < aggregator.ledger.epsilon(1e-5) <= 2.0
        with pytest.raises(ValueError, match="ask fewer queries"):
            aggregator.aggregate(votes, answers=1)
        assert aggregator.ledger.steps == 640 + 178

    def test_it_includes_what_the_ledger_holds(self):
        ledger = accounting.PrivacyLedger()
        ConfidentGNMax(**MNIST, ledger=ledger)._charge(640, 170)
        aggregator = ConfidentGNMax(
            **MNIST, ledger=ledger, epsilon=2.0, delta=1e-5
        )
        assert aggregator.answers_within(640) == -1
        assert aggregator.answers_within(0) == 0
        assert aggregator.answers_within(5) == 5

    def test_none(self):
        with pytest.raises(ValueError, match="Pass epsilon and delta"):
            small().answers_within(3)


class TestDataDependent:
    def test_agreement_costs_less(self):
        spent = []
        for agreeing in (250, 130):
            aggregator = ConfidentGNMax(**MNIST, seed=0)
            votes = np.zeros((100, 250), int)
            votes[:, agreeing:] = 1
            aggregator.aggregate(votes)
            spent.append(aggregator.data_dependent_epsilon(1e-5))
            assert spent[-1].epsilon < aggregator.ledger.epsilon(1e-5)
        assert 0 < spent[0].epsilon < spent[1].epsilon

    def test_before_a_query(self):
        assert small().data_dependent_epsilon(1e-5).epsilon == 0


class TestCopies:
    @pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
    def test_are_refused(self, copied):
        """The two would compose nowhere, and draw the same noise by a seed."""
        with pytest.raises(TypeError, match="PrivacyLedger.path"):
            copied(small())

    def test_two_with_one_file_compose(self, tmp_path):
        def one():
            ledger = accounting.PrivacyLedger(tmp_path / "ledger.json")
            return small(
                threshold_noise=20.0, noise=20.0, ledger=ledger, seed=None
            )

        first, at_once = one(), one()
        first.aggregate(VOTES)
        # It does not see what the other has answered: nothing is drawn.
        with pytest.raises(RuntimeError, match="must not share a ledger"):
            at_once.aggregate(VOTES)
        second = one()
        second.aggregate(VOTES)
        mu = math.sqrt(2 * (5 + 2 * 5)) / 20
        for ledger in (second.ledger, one().ledger):
            assert ledger.epsilon(1e-5) == pytest.approx(
                gaussian_epsilon(mu, 1e-5), rel=1e-6
            )


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"teachers": 0}, "teachers"),
        ({"examples": 4}, "examples=4 and teachers=5"),
        ({"classes": 1}, "classes >= 2"),
        ({"threshold": math.nan}, "finite threshold"),
        ({"noise": 0}, "<= noise <="),
        ({"noise": math.inf}, "<= noise <="),
        ({"threshold_noise": math.nan}, "<= threshold_noise <="),
        ({"epsilon": 1.0}, "both or neither"),
        ({"epsilon": -1.0, "delta": 1e-5}, "epsilon"),
        ({"epsilon": 1.0, "delta": 2.0}, "delta"),
        ({"seed": -1}, "seed"),
    ],
)
def test_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        small(**changes)


@pytest.mark.parametrize(
    "votes, answers, message",
    [
        (VOTES.T[:, :4], None, "Transpose votes"),
        (VOTES[0], None, "votes \\[queries, 5\\]"),
        (np.eye(3)[VOTES % 3], None, "votes that are ints, got float64"),
        (VOTES.astype(float), None, "votes that are ints"),
        (VOTES > 1, None, "votes that are ints, got bool"),
        (VOTES.astype(str), None, "votes that are ints"),
        (VOTES, 6, "at most 5 answers"),
        (VOTES, -1, "answers"),
        (VOTES, 2.0, "answers"),
    ],
)
def test_bad_votes_cost_nothing(votes, answers, message):
    aggregator = small()
    with pytest.raises(ValueError, match=message):
        aggregator.aggregate(votes, answers)
    assert aggregator.ledger.entries == ()
    assert aggregator.data_dependent_epsilon(1e-5).epsilon == 0


def test_no_query_costs_nothing():
    aggregator = small()
    assert aggregator.aggregate(np.zeros((0, 5), int)).shape == (0,)
    assert aggregator.ledger.steps == 0


def test_secure_noise_draws_from_the_system():
    votes = np.tile(np.arange(5) % 3, (50, 1))
    first, second = (
        small(noise=5.0, threshold=-100, secure_noise=True).aggregate(votes)
        for _ in range(2)
    )
    assert (first != second).any()


def test_statement():
    aggregator = ConfidentGNMax(**MNIST, seed=0)
    aggregator.aggregate(np.zeros((6, 250), int), answers=4)
    text = accounting.statement(aggregator.ledger, delta=1e-5)
    text = " ".join(text.split())
    assert "6 checks with noise of standard deviation 150 votes" in text
    assert "4 answers with noise of standard deviation 40 votes" in text
    assert "in the part of one teacher" in text
    assert "Covered: the answers" in text
    assert "weights at every step" not in text
    assert "The batches were the user's own" not in text
    assert "does not cover the teachers; nor their votes" in text
    assert "noise or sampling came from a fixed seed" in text
