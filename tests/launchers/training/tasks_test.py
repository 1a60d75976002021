"""Metrics of models that generate text."""

import keras
import numpy as np
import pytest
from scipy import special

from tf_dpsub.launchers.training import tasks
from tf_dpsub.training import proved_features

_random = np.random.default_rng(0)
TARGETS = np.array([[-1, 2, 0, -1], [1, -1, -1, -1]])
LOGITS = _random.normal(size=(2, 4, 3)).astype("float32")


def cross_entropies():
    log_shares = special.log_softmax(LOGITS, -1)
    return -np.array(
        [log_shares[0, 1, 2], log_shares[0, 2, 0], log_shares[1, 0, 1]]
    )


class TestPerplexity:
    def test_of_all_tokens_alike(self):
        metric = tasks.Perplexity()
        metric.update_state(TARGETS[:1], LOGITS[:1])
        metric.update_state(TARGETS[1:], LOGITS[1:])
        expected = np.exp(cross_entropies().mean())
        assert float(metric.result()) == pytest.approx(expected, rel=1e-6)

    def test_an_example_that_does_not_count(self):
        metric = tasks.Perplexity()
        metric.update_state(TARGETS, LOGITS, np.array([0.0, 1.0]))
        expected = np.exp(cross_entropies()[2])
        assert float(metric.result()) == pytest.approx(expected, rel=1e-6)

    def test_targets_that_are_ignored_are_no_word(self):
        """Index -1 would select the last word."""
        metric = tasks.Perplexity()
        metric.update_state(np.full((1, 4), -1), LOGITS[:1])
        assert float(metric.result()) == 1


def test_the_loss_is_the_mean_over_the_tokens_of_a_response():
    loss = tasks.Generation().loss()
    expected = cross_entropies()[:2].mean()
    assert float(loss(TARGETS[:1], LOGITS[:1])) == pytest.approx(expected)


def test_targets_of_weight_zero_are_ignored():
    targets = tasks.masked_targets(
        np.array([[3, 4]]), np.array([[False, True]])
    )
    assert targets.tolist() == [[-1, 4]]
    assert targets.dtype == np.int32


class Writer:
    """A fake model with given responses; records the sizes of batches."""

    def __init__(self, responses):
        self.responses, self.sizes = responses, []

    def compile(self, sampler):
        assert sampler == "greedy"

    def generate(self, prompts, strip_prompt):
        assert strip_prompt
        self.sizes.append(len(prompts))
        return [self.responses[prompt] for prompt in prompts]


class Directory(dict):
    write_text = dict.__setitem__


class Loaded:
    x_test = np.array(["a", "b", "a", "c"], dtype=object)
    y_test = np.array(
        ["one two three four five", "x y z v w", "five four", "k l m n o"],
        dtype=object,
    )


class TestResponses:
    def result(self, **responses):
        writer, directory = Writer(responses), Directory()
        last_result = tasks.Generation().last_result(writer, Loaded, directory)
        return last_result["test_bleu"], writer, directory

    def test_any_reference_will_do(self):
        bleu, *_ = self.result(
            a="one two three four five", b="x y z v w", c="k l m n o"
        )
        assert bleu == pytest.approx(100)
        worse, *_ = self.result(
            a="one two three four five", b="x y z v", c="k l m n o"
        )
        assert 50 < worse < 100

    def test_each_prompt_is_asked_once(self):
        _, writer, directory = self.result(a="é", b="", c='"')
        assert writer.sizes == [tasks.Generation.evaluation_batch]
        assert directory["responses.csv"].splitlines() == [
            "prompt,response", "a,é", "b,", 'c,""""'
        ]  # fmt: skip


def test_a_summary_for_each_task():
    assert tasks.summary({"test_accuracy": 0.5}) == "test accuracy 0.50"
    written = {"test_perplexity": 3.14159, "test_bleu": 41.26}
    assert tasks.summary(written) == "test perplexity 3.14, BLEU 41.3"
    assert isinstance(tasks.Classification().loss(), keras.losses.Loss)


def test_an_infinite_perplexity_is_a_result():
    result = {"test_perplexity": "inf", "test_bleu": 0.0}
    assert tasks.summary(result) == "test perplexity inf, BLEU 0.0"


def test_no_more_images_at_a_time_than_frozen_features_are_kept_of():
    """Those of an image of CIFAR-10 take 19 MB while they are computed."""
    assert tasks.Classification.evaluation_batch <= proved_features._CHUNK
