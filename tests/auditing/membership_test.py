"""Membership inference, where it is known how well it must do."""

import numpy as np
import pytest
from scipy import special, stats

from tf_dpsub.auditing import (
    attack_features,
    classifier_attack,
    likelihood_ratio_attack,
    loss_threshold_attack,
)

GENERATOR = np.random.default_rng()


@pytest.fixture(autouse=True)
def _same_draws():
    """Whatever tests ran before."""
    start = np.random.default_rng(0).bit_generator.state
    GENERATOR.bit_generator.state = start


def shifted(difference, count=4000):
    """Losses of members and of others, whose means differ."""
    losses = GENERATOR.normal(size=(2, count))
    return losses[0], losses[1] + difference


class TestLossThreshold:
    def test_same_losses_tell_nothing(self):
        found = loss_threshold_attack(*shifted(0.0))
        assert found.interval[0] < 0.5 < found.interval[1]
        assert found.auc == pytest.approx(0.5, abs=0.03)
        assert found.true_positive_rates[0.01] < 0.03
        assert found.examples == 4000

    def test_success_is_that_of_the_best_threshold(self):
        """Of two normal distributions: Phi(difference / 2)."""
        found = loss_threshold_attack(*shifted(2.0))
        assert found.success == pytest.approx(stats.norm.cdf(1), abs=0.02)
        low, high = found.interval
        assert low < stats.norm.cdf(1) < high
        assert found.auc == pytest.approx(
            stats.norm.cdf(2 / np.sqrt(2)), abs=0.02
        )
        expected = stats.norm.sf(stats.norm.isf(0.1) - 2)
        assert found.true_positive_rates[0.1] == pytest.approx(
            expected, abs=0.05
        )

    def test_separate_losses_tell_all(self):
        found = loss_threshold_attack([0.1] * 50, [2.0] * 80)
        assert found.success == found.auc == 1
        assert found.true_positive_rates[0.001] == 1
        # As many others as members.
        assert found.examples == 50

    def test_higher_losses_of_members_do_not_help(self):
        """The threshold attack knows of one direction."""
        found = loss_threshold_attack(*shifted(-2.0))
        assert found.success == pytest.approx(0.5, abs=0.03)
        assert found.auc < 0.2

    def test_the_threshold_is_not_chosen_on_what_is_attacked(self):
        """Over many tries, success does not exceed a half."""
        tries = [
            loss_threshold_attack(*shifted(0.0, 10), seed=k).success
            for k in range(400)
        ]
        assert np.mean(tries) == pytest.approx(0.5, abs=0.03)

    @pytest.mark.parametrize(
        "losses, message",
        [
            (([1.0] * 3, [1.0] * 9), "four members"),
            (([np.nan] * 9, [1.0] * 9), "finite"),
            ((np.ones((9, 2)), np.ones((9, 3))), "one row of numbers"),
        ],
    )
    def test_wrong_arguments(self, losses, message):
        with pytest.raises(ValueError, match=message):
            loss_threshold_attack(*losses)


class TestClassifier:
    @pytest.mark.parametrize("classifier", ["logistic", "forest"])
    def test_finds_what_a_threshold_does_not(self, classifier):
        """Members are told by a second feature."""
        members, others = GENERATOR.normal(size=(2, 1000, 2))
        others[:, 1] += 2
        found = classifier_attack(members, others, classifier=classifier)
        assert found.success == pytest.approx(stats.norm.cdf(1), abs=0.05)

    def test_no_difference_tells_nothing(self):
        found = classifier_attack(*GENERATOR.normal(size=(2, 1000, 5)))
        assert found.interval[0] < 0.5 < found.interval[1]

    def test_unknown(self):
        with pytest.raises(ValueError, match="Expected classifier in"):
            classifier_attack(np.ones(9), np.ones(9), classifier="oracle")


class TestLikelihoodRatio:
    def scores(self, effect, models=16, examples=2000):
        """Examples differ more from each other than by membership."""
        # Half of the shadow models see each example.
        order = GENERATOR.random((models, examples)).argsort(0)
        inside = np.concatenate(
            [GENERATOR.random((1, examples)) < 0.5, order < models // 2]
        )
        hardness = GENERATOR.normal(0, 5, examples)
        scores = hardness + GENERATOR.normal(size=inside.shape)
        scores += effect * inside
        return scores[0], inside[0], scores[1:], inside[1:]

    def test_is_not_misled_by_hard_examples(self):
        scores, is_member, *shadows = self.scores(2.0)
        found = likelihood_ratio_attack(scores, is_member, *shadows)
        assert found.success == pytest.approx(stats.norm.cdf(1), abs=0.05)
        plain = loss_threshold_attack(-scores[is_member], -scores[~is_member])
        assert plain.success < 0.65

    def test_no_effect_tells_nothing(self):
        found = likelihood_ratio_attack(*self.scores(0.0))
        assert found.interval[0] < 0.51
        assert found.auc == pytest.approx(0.5, abs=0.04)

    def test_too_few_shadow_models(self):
        scores, is_member, shadows, inside = self.scores(1.0, 4, 5)
        inside[:] = True
        with pytest.raises(ValueError, match="two shadow models at least"):
            likelihood_ratio_attack(scores, is_member, shadows, inside)

    def test_wrong_shapes(self):
        with pytest.raises(ValueError, match="Expected scores"):
            likelihood_ratio_attack(
                np.ones(3), np.ones(3), np.ones((2, 4)), np.ones((2, 4))
            )


class TestFeatures:
    def test_are_what_they_say(self):
        logits = GENERATOR.normal(size=(6, 4))
        labels = np.array([0, 1, 2, 3, 0, 1])
        found = attack_features(logits, labels)
        p = special.softmax(logits, 1)
        right = p[np.arange(6), labels]
        np.testing.assert_allclose(found[:, 0], -np.log(right))
        for row, scores, label in zip(found, logits, labels):
            others = np.delete(scores, label)
            assert row[1] == pytest.approx(scores[label] - others.max())
        np.testing.assert_allclose(found[:, 2], np.log(right / (1 - right)))
        np.testing.assert_allclose(found[:, 3:], np.sort(np.log(p), 1)[:, ::-1])

    def test_are_finite_where_a_model_is_sure(self):
        found = attack_features([[1000.0, -1000.0]], [0])
        assert np.isfinite(found).all()
        assert found[0, 2] == pytest.approx(2000)

    def test_wrong_shapes(self):
        with pytest.raises(ValueError, match="Expected logits"):
            attack_features(np.ones((3, 1)), np.zeros(3, int))
