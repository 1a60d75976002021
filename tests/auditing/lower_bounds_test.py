"""Bounds on epsilon, against mechanisms whose epsilon is known."""

import math

import numpy as np
import pytest
from scipy import stats

from tf_dpsub.auditing import (
    clopper_pearson,
    epsilon_of_one_run,
    epsilon_of_rates,
)


class TestClopperPearson:
    @pytest.mark.parametrize("successes", [0, 1, 7, 19, 20])
    def test_ends_are_where_tails_are_as_small_as_said(self, successes):
        low, high = clopper_pearson(successes, 20, 0.9)
        assert low <= successes / 20 <= high
        if successes:
            assert stats.binom.sf(successes - 1, 20, low) == pytest.approx(0.05)
        else:
            assert low == 0
        if successes < 20:
            assert stats.binom.cdf(successes, 20, high) == pytest.approx(0.05)
        else:
            assert high == 1

    @pytest.mark.parametrize(
        "arguments", [(3, 2), (-1, 2), (0, 0), (1.5, 2), (1, 2, 1.0)]
    )
    def test_wrong_arguments(self, arguments):
        with pytest.raises(ValueError, match="Expected"):
            clopper_pearson(*arguments)


def randomized_response(epsilon, runs, generator):
    """Right answers with probability e^eps / (1 + e^eps): all of the budget."""
    truth = generator.integers(0, 2, runs)
    is_right = generator.random(runs) < 1 / (1 + math.exp(-epsilon))
    return truth, np.where(is_right, truth, 1 - truth)


def rates(truth, said, **kwargs):
    return epsilon_of_rates(
        int(said[truth == 1].sum()),
        int((truth == 1).sum()),
        int(said[truth == 0].sum()),
        int((truth == 0).sum()),
        **{"delta": 0.0} | kwargs,
    )


class TestRates:
    def test_is_tight_for_randomized_response(self):
        generator = np.random.default_rng(0)
        bound = rates(*randomized_response(2.0, 200_000, generator))
        assert 1.9 < bound < 2.0

    @pytest.mark.parametrize("confidence", [0.5, 0.9])
    def test_exceeds_the_truth_as_seldom_as_said(self, confidence):
        generator = np.random.default_rng(0)
        wrong = [
            rates(
                *randomized_response(1.0, 200, generator),
                confidence=confidence,
            )
            > 1.0
            for _ in range(400)
        ]
        assert np.mean(wrong) <= 1 - confidence

    def test_delta_lowers_it(self):
        plain, loose = (
            epsilon_of_rates(90, 100, 10, 100, delta=d) for d in (0.0, 0.3)
        )
        assert 0 < loose < plain

    def test_negatives_count_as_well(self):
        """It is sure of absence, and of nothing else."""
        assert epsilon_of_rates(100, 100, 50, 100, delta=0.0) > 2.0

    def test_guessing_gives_nothing(self):
        assert epsilon_of_rates(50, 100, 50, 100, delta=1e-5) == 0.0


class TestOneRun:
    def test_is_tight_for_randomized_response(self):
        generator = np.random.default_rng(0)
        truth, said = randomized_response(2.0, 100_000, generator)
        bound = epsilon_of_one_run(
            int((truth == said).sum()), 100_000, 100_000, delta=0.0
        )
        assert 1.95 < bound < 2.0

    def test_exceeds_the_truth_as_seldom_as_said(self):
        generator = np.random.default_rng(0)
        wrong = 0
        for _ in range(500):
            truth, said = randomized_response(1.0, 100, generator)
            right = int((truth == said).sum())
            bound = epsilon_of_one_run(right, 100, 100, delta=0.0)
            wrong += bound > 1.0
        # Five of a hundred, give or take three standard deviations.
        assert wrong / 500 < 0.05 + 3 * math.sqrt(0.05 / 500)

    def test_example_of_the_paper(self):
        """All of 1,000 right, at delta = 1e-5: between pure and delta."""
        pure = epsilon_of_one_run(1000, 1000, 1000, delta=0.0)
        # (e^eps / (1 + e^eps))^1000 = 0.05
        expected = -math.log(0.05 ** (-1 / 1000) - 1)
        assert pure == pytest.approx(expected, abs=1e-6)
        assert 0 < epsilon_of_one_run(1000, 1000, 1000, delta=1e-5) < pure

    def test_delta_allows_what_it_can(self):
        """Each of 1,000 bits is told with probability delta, or not at all."""
        generator = np.random.default_rng(0)
        told = generator.binomial(1000, 0.02, 500)
        pure, loose = (
            [epsilon_of_one_run(int(t), int(t), 1000, delta=d) for t in told]
            for d in (0.0, 0.02)
        )
        assert min(pure) > 0.5
        assert np.mean(np.array(loose) > 0) <= 0.05

    def test_guessing_gives_nothing(self):
        assert epsilon_of_one_run(500, 1000, 1000, delta=1e-5) == 0.0

    @pytest.mark.parametrize(
        "arguments, delta",
        [((3, 2, 5), 0.0), ((1, 6, 5), 0.0), ((1, 2, 3), 1.0)],
    )
    def test_wrong_arguments(self, arguments, delta):
        with pytest.raises(ValueError, match="Expected"):
            epsilon_of_one_run(*arguments, delta=delta)
