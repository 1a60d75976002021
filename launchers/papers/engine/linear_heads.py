"""Linear heads on features, trained privately or simulated."""

import dataclasses
import functools
import time

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """The settings of a head and of its features.

    Attributes:
        rate: float, a multiple of the rate of `heads.FullBatch`.
        clip: float.
        steps: int.
        rank: int, number of public directions; None for all features.
        whiten: float; None for all features.
    """

    rate: float
    clip: float
    steps: int
    rank: int | None = None
    whiten: float | None = None

    @property
    def name(self):
        features = "all"
        if self.rank is not None:
            features = f"rank{self.rank}_whiten{self.whiten:g}"
        return (
            f"{features}_rate{self.rate:g}_clip{self.clip:g}_steps{self.steps}"
        )


@functools.cache
def full_batch(examples, setting, epsilon, delta):
    """The `heads.FullBatch` of a `Setting` and a budget."""
    from tf_dpsub import heads

    rule = heads.FullBatch(examples, epsilon, delta)
    return heads.FullBatch(
        examples,
        epsilon,
        delta,
        steps=setting.steps,
        learning_rate=setting.rate * rule.learning_rate,
        l2_norm_clip=setting.clip,
    )


def simulate(split, settings, epsilon, delta, seeds):
    """Trains linear heads as `train` does, by a simulation.

    The noise has the same distribution, but is neither secure nor exact:
    nothing is released by it.

    Args:
        split: `feature_cache.Split`, the features of all settings.
        settings: list of `Setting`, which differ in neither rank nor whitening.
        epsilon, delta: as `train`.
        seeds: list of ints, of the noise of each setting.

    Returns:
        List of dicts as those of `train`, but without an epsilon: of how long
        it took, each has its share.
    """
    from tf_dpsub.planning import simulated_heads

    began = time.monotonic()
    examples, size = split.x_train.shape
    num_classes = int(split.y_train.max()) + 1
    heads = [
        full_batch(examples, setting, epsilon, delta) for setting in settings
    ]
    kernels = simulated_heads.full_batches(
        split.x_train,
        split.y_train,
        np.zeros((size, num_classes)),
        heads,
        [np.random.default_rng(seed) for seed in seeds],
    )
    x_test = split.x_test.astype(np.float32)
    accuracies = [
        float(simulated_heads.is_right(kernel, x_test, split.y_test).mean())
        for kernel in kernels
    ]
    seconds = (time.monotonic() - began) / len(settings)
    return [
        {
            "accuracy": accuracy,
            "noise_multiplier": head.noise_multiplier,
            "learning_rate": head.learning_rate,
            "examples": examples,
            "features": size,
            "seconds": seconds,
        }
        for accuracy, head in zip(accuracies, heads)
    ]


def train(split, setting, epsilon, delta, seed):
    """Trains a linear head privately, and measures it.

    Formal guarantees: what is released is the head, by `steps` Gaussians of the
    clipped sums over all training examples. The noise follows from the seed:
    whoever knows it can take the noise off. Accuracy is measured without noise.

    Args:
        split: `feature_cache.Split`.
        setting: `Setting`.
        epsilon: float, the budget.
        delta: float in (0, 1).
        seed: int, of the noise.

    Returns:
        dict of the accuracy, of what was spent, and of how long it took.
    """
    import keras
    import tensorflow as tf

    from tf_dpsub import make_private
    from tf_dpsub.models.feature_classifier import linear_head

    began = time.monotonic()
    keras.utils.clear_session()
    examples, size = split.x_train.shape
    head = full_batch(examples, setting, epsilon, delta)
    num_classes = int(split.y_train.max()) + 1
    model = make_private(
        keras.Sequential(
            [
                keras.Input((size,), dtype=split.x_train.dtype),
                linear_head(num_classes),
            ]
        )
    )
    model.compile(
        head.optimizer(seed=seed),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    # One batch, which is drawn from nothing: it is in memory once.
    batch = tf.data.Dataset.from_tensors((split.x_train, split.y_train))
    model.fit(batch, epochs=head.steps, verbose=0)
    logits = np.asarray(model(split.x_test))
    return {
        "accuracy": float((logits.argmax(1) == split.y_test).mean()),
        "epsilon": model.epsilon(delta, "pld"),
        "noise_multiplier": head.noise_multiplier,
        "learning_rate": head.learning_rate,
        "examples": examples,
        "features": size,
        "seconds": time.monotonic() - began,
    }
