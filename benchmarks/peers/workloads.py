"""Workloads of all frameworks: sizes, and data drawn from a fixed seed.

This module, like `timing`, needs NumPy alone: each framework's program runs in
an environment of its own, and imports both.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and its batch.

    Attributes:
        title: string, for tables.
        batch: int, examples.
        parameters: int, all numbers of the model.
        trained: int, those that are trained.
        image: tuple of ints, height, width and channels; None for text.
        tokens: int, of each example; None for images.
        vocabulary: int, for text.
        classes: int; of a language model the vocabulary, at each token.
        one_logit: bool, whether two classes have one logit, the loss being
            binary cross-entropy.
        steps_of_epoch: int, of an epoch that is timed as a whole: of so many
            times the batch. It takes half a second at least, beside which what
            a library does once an epoch counts little, and half a minute at
            most.
    """

    title: str
    batch: int
    parameters: int
    trained: int
    image: tuple[int, int, int] | None = None
    tokens: int | None = None
    vocabulary: int | None = None
    classes: int = 10
    one_logit: bool = False
    steps_of_epoch: int

    @property
    def is_language_model(self):
        """True if the next token is predicted at each token."""
        return self.classes == self.vocabulary

    @property
    def outputs(self):
        """Number of logits of an example, or of a token."""
        return 1 if self.one_logit else self.classes


def _bert(batch, tokens, trained, what):
    return Workload(
        steps_of_epoch=8,
        title=f"BERT 6 × 384, {batch} × {tokens}, embeddings {what}",
        batch=batch,
        tokens=tokens,
        vocabulary=30_522,
        classes=2,
        parameters=_BERT_EMBEDDINGS[tokens] + _BERT_REST,
        trained=trained,
    )


# Tokens, positions, segments and their normalization; layers, pooling, head.
_BERT_EMBEDDINGS = {n: (30_522 + n + 2 + 2) * 384 for n in (64, 256)}
_BERT_REST = 6 * (12 * 384**2 + 13 * 384) + (384 + 1) * 384 + 385 * 2


def _lstm(title):
    # Embeddings of width 64; one bias for each gate.
    parameters = 640_000 + 4 * (64 + 128 + 1) * 128 + 129 * 2
    return Workload(
        title=title,
        batch=64,
        tokens=100,
        vocabulary=10_000,
        classes=2,
        parameters=parameters,
        trained=parameters,
        steps_of_epoch=100,
    )


WORKLOADS = {
    "cnn": Workload(
        title="CNN of the PDP-SGD paper, batch 250",
        batch=250,
        image=(28, 28, 1),
        parameters=26_010,
        trained=26_010,
        steps_of_epoch=200,
    ),
    "mlp": Workload(
        title="MLP 784-128-128-10, batch 250",
        batch=250,
        image=(28, 28, 1),
        parameters=118_282,
        trained=118_282,
        steps_of_epoch=200,
    ),
    "binary": Workload(
        title="MLP 784-128-128-1, a binary head, batch 250",
        batch=250,
        image=(28, 28, 1),
        classes=2,
        one_logit=True,
        parameters=117_121,
        trained=117_121,
        steps_of_epoch=200,
    ),
    "resnet20": Workload(
        title="ResNet-20 with GroupNorm, batch 256",
        batch=256,
        image=(32, 32, 3),
        parameters=272_474,
        trained=272_474,
        steps_of_epoch=8,
    ),
    "wrn28_4": Workload(
        title="WRN-28-4 with GroupNorm, batch 64",
        batch=64,
        image=(32, 32, 3),
        parameters=5_849_050,
        trained=5_849_050,
        steps_of_epoch=8,
    ),
    "bert_frozen": _bert(32, 64, _BERT_REST, "frozen"),
    "bert": _bert(32, 64, _BERT_EMBEDDINGS[64] + _BERT_REST, "trained"),
    "bert_long_frozen": _bert(16, 256, _BERT_REST, "frozen"),
    "bert_long": _bert(16, 256, _BERT_EMBEDDINGS[256] + _BERT_REST, "trained"),
    # The output is the product with the embeddings of tokens.
    "gpt2": Workload(
        title="GPT-2 small, tied embeddings, 8 × 128",
        batch=8,
        tokens=128,
        vocabulary=50_257,
        classes=50_257,
        parameters=(50_257 + 128 + 2) * 768 + 12 * (12 * 768**2 + 13 * 768),
        trained=(50_257 + 128 + 2) * 768 + 12 * (12 * 768**2 + 13 * 768),
        steps_of_epoch=4,
    ),
    "lstm": _lstm("LSTM of 128 units, 64 × 100"),
    # In TensorFlow, with the loop that Keras makes by default.
    "lstm_loop": _lstm("LSTM of 128 units as it comes, 64 × 100"),
}


def data(name, examples=None, seed=0):
    """Batch of a workload, or another number of such examples.

    Args:
        name: string.
        examples: int. Defaults to `None`, the batch.
        seed: int. Defaults to 0.

    Returns:
        Inputs, float32 `[batch, height, width, channels]` or int32 tokens
        `[batch, tokens]`, and int32 labels `[batch]`, of a language model
        `[batch, tokens]`.
    """
    workload = WORKLOADS[name]
    rng = np.random.default_rng(seed)
    count = workload.batch if examples is None else examples
    labels = (count,)
    if workload.image is not None:
        x = rng.normal(size=(count, *workload.image))
        x = x.astype("float32")
    else:
        shape = (count, workload.tokens)
        x = rng.integers(0, workload.vocabulary, shape).astype("int32")
        if workload.is_language_model:
            labels = shape
    return x, rng.integers(0, workload.classes, labels).astype("int32")
