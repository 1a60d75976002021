"""Tasks: classification, and generation of responses to prompts."""

import abc
import csv
import io
import itertools

import keras
import numpy as np

from tf_dpsub import extras

# Target of tokens that losses and metrics ignore.
_IGNORED = -1


def of(loaded):
    """The task of a `tf_dpsub.data.Dataset`."""
    return Classification() if loaded.num_classes else Generation()


class Task(abc.ABC):
    """Loss and metrics of a task.

    Attributes:
        evaluation_batch: int, examples at a time, without effect on results.
        metric: string, the name of the main metric.
        is_share: bool, whether it lies between 0 and 1.
    """

    @abc.abstractmethod
    def loss(self):
        """The loss for `compile`."""

    @abc.abstractmethod
    def metrics(self):
        """The metrics for `compile`."""

    def last_result(self, model, loaded, directory):
        """Measures the trained model once, at the end of the run.

        Args:
            model: plain `keras.Model`, with its preprocessor if it has one.
            loaded: `tf_dpsub.data.Dataset`, as it was loaded.
            directory: `run_directory.RunDirectory`, for files.

        Returns:
            dict, a part of `result.json`.
        """
        return {}


class Classification(Task):
    """Predicts the class of an input."""

    # Features of an image can take megabytes.
    evaluation_batch = 128
    metric = "accuracy"
    is_share = True

    def loss(self):
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def metrics(self):
        return ["accuracy"]


class Generation(Task):
    """Generates the response to a prompt, token by token.

    The loss of an example is the mean over the tokens of its response;
    perplexity is over all tokens of all examples alike.
    """

    # Small, since each token has logits for the whole vocabulary.
    evaluation_batch = 32
    metric = "perplexity"
    is_share = False

    def __init__(self):
        # BLEU is computed after training, but a missing package raises before.
        self._sacrebleu = extras.require("sacrebleu", "nlp")

    def loss(self):
        return keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, ignore_class=_IGNORED
        )

    def metrics(self):
        return [Perplexity(name=self.metric)]

    def last_result(self, model, loaded, directory):
        """Writes `responses.csv`, and measures BLEU against all references.

        Decoding is greedy.

        Reference:
            - [Post, 2018](https://arxiv.org/abs/1804.08771)
        """
        references = {}
        for prompt, response in zip(loaded.x_test, loaded.y_test):
            references.setdefault(prompt, []).append(response)
        responses = self._responses(model, list(references))
        table = io.StringIO(newline="")
        writer = csv.writer(table, lineterminator="\n")
        writer.writerow(["prompt", "response"])
        writer.writerows(zip(references, responses))
        directory.write_text("responses.csv", table.getvalue())
        columns = itertools.zip_longest(*references.values())
        bleu = self._sacrebleu.corpus_bleu(responses, list(map(list, columns)))
        return {"test_bleu": bleu.score}

    def _responses(self, model, prompts):
        model.compile(sampler="greedy")
        responses = []
        for k in range(0, len(prompts), self.evaluation_batch):
            part = prompts[k : k + self.evaluation_batch]
            # Padded to a full batch: `generate` is compiled for one shape.
            full = part + part[-1:] * (self.evaluation_batch - len(part))
            written = model.generate(full, strip_prompt=True)
            responses += written[: len(part)]
        return responses


class Perplexity(keras.metrics.Mean):
    """The exponential of the mean cross-entropy of tokens.

    Unlike keras_hub's, it takes weights of examples, as a private step gives
    them.
    """

    def update_state(self, y_true, y_pred, sample_weight=None):
        counted = keras.ops.not_equal(y_true, _IGNORED)
        losses = keras.ops.sparse_categorical_crossentropy(
            keras.ops.where(counted, y_true, 0), y_pred, from_logits=True
        )
        weights = keras.ops.cast(counted, losses.dtype)
        if sample_weight is not None:
            weights *= keras.ops.cast(sample_weight, losses.dtype)[:, None]
        super().update_state(losses, weights)

    def result(self):
        return keras.ops.exp(super().result())


def summary(result):
    """Accuracy, or perplexity and BLEU, of a `result.json` in words."""
    if "test_accuracy" in result:
        return f"test accuracy {result['test_accuracy']:.2f}"
    return (
        f"test perplexity {float(result['test_perplexity']):.2f}, BLEU "
        f"{result['test_bleu']:.1f}"
    )


def masked_targets(targets, weights):
    """Targets of tokens, with those of weight 0 marked as ignored.

    Args:
        targets: array of ints, `[examples, tokens]`.
        weights: array, likewise.
    """
    return np.where(weights, targets, _IGNORED).astype(np.int32)
