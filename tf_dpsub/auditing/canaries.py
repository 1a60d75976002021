"""Many canaries in one run: what training itself tells about who was there."""

import dataclasses
from collections.abc import Callable

import keras
import numpy as np

from tf_dpsub import layers
from tf_dpsub.auditing.lower_bounds import epsilon_of_one_run
from tf_dpsub.data.poisson_batches import PoissonBatches
from tf_dpsub.training.private_model import make_private

# Of gradients of canaries, relative to the clip.
_HUGE = 1e3


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneRun:
    """What an attacker on one run proves.

    Attributes:
        bound: float, lower bound on epsilon.
        claimed: float, the epsilon of the run's ledger.
        delta: float, of both.
        confidence: float, of the bound.
        correct: int, right guesses.
        guesses: int, guesses that were made.
        canaries: int.
    """

    bound: float
    claimed: float
    delta: float
    confidence: float
    correct: int
    guesses: int
    canaries: int

    @property
    def passed(self):
        """Whether no more was proved than is claimed."""
        return bool(self.bound <= self.claimed)


def audit_one_run(
    train: Callable,
    canaries: int,
    *,
    delta: float,
    guesses: int | None = None,
    confidence: float = 0.95,
    seed: int = 0,
):
    """Audits one training run by many canaries.

    A fair coin decides of each canary whether it is trained on. The attacker
    says of those with the highest scores that they were, and of those with the
    lowest that they were not.

    Args:
        train: function of a bool array `[canaries]`, which of them to train on.
            It returns a score for each canary, higher where it looks as if it
            was trained on, and the epsilon that the run claims at `delta`.
        canaries: int.
        delta: float.
        guesses: int, how many guesses are made, half of each kind; it has to be
            chosen before the scores are seen. Defaults to `None`, all.
        confidence: float, of the bound. Defaults to `0.95`.
        seed: int, of the coins. Defaults to `0`.

    Returns:
        A `OneRun`.

    Raises:
        ValueError: if there are more guesses than canaries, or not a score for
            each.

    Reference:
        - [Steinke, Nasr, Jagielski, 2023](https://arxiv.org/abs/2305.08846),
          Algorithm 1
    """
    guesses = canaries if guesses is None else guesses
    half = guesses // 2
    if not 1 <= half <= guesses <= canaries:
        raise ValueError(
            f"Expected 2 <= guesses <= canaries, got {guesses} of {canaries}."
        )
    is_in = np.random.default_rng(seed).random(canaries) < 0.5
    scores, claimed = train(is_in)
    scores = np.asarray(scores, float)
    if scores.shape != (canaries,) or np.isnan(scores).any():
        raise ValueError(
            f"Expected a score for each of {canaries} canaries, got shape "
            f"{list(scores.shape)} with {int(np.isnan(scores).sum())} NaN."
        )
    order = np.argsort(-scores, kind="stable")
    correct = int(is_in[order[:half]].sum() + (~is_in[order[-half:]]).sum())
    return OneRun(
        bound=epsilon_of_one_run(
            correct, 2 * half, canaries, delta=delta, confidence=confidence
        ),
        claimed=float(claimed),
        delta=delta,
        confidence=confidence,
        correct=correct,
        guesses=2 * half,
        canaries=canaries,
    )


def audit_by_gradients(
    make_optimizer: Callable,
    *,
    canaries: int = 1000,
    epochs: int = 1,
    delta: float = 1e-5,
    guesses=None,
    carrier_rank: int | None = None,
    confidence: float = 0.95,
    seed: int = 0,
    rows_per_person: int = 1,
    draws_persons: bool = False,
    sampling_rates=None,
):
    """Audits whole runs of a mechanism by canaries with the worst gradients.

    The loss is linear in the weights, one for each canary, and the gradient of
    a canary is huge along its own: what is left of it in the weights after the
    run, through sampling, clipping, noise and optimizer, is its score. The
    claim is that of the ledger. A canary may be a person of several rows, which
    all have that gradient.

    Args:
        make_optimizer: function of an inner optimizer and of the number of
            weights, which returns a `tf_dpsub.optimizers.PrivateOptimizer`
            without a seed, whose `batch_size` is at most `canaries`.
        canaries: int. Defaults to `1000`.
        epochs: int, of the run. Defaults to `1`.
        delta: float. Defaults to `1e-5`.
        guesses: as for `audit_one_run`.
        carrier_rank: int, for `RGP`, the rank of carriers. Defaults to `None`.
        confidence: float. Defaults to `0.95`.
        seed: int, of the coins. Defaults to `0`.
        rows_per_person: int, rows of each canary. Defaults to `1`.
        draws_persons: bool, whether steps draw persons, instead of rows whose
            epsilon for so many is claimed. Defaults to `False`.
        sampling_rates: array of floats, `[canaries]`, of the rows of each.
            Defaults to `None`, all alike.

    Returns:
        A `OneRun`.
    """

    def train(is_in):
        plain = keras.Sequential(
            [
                keras.Input([canaries]),
                keras.layers.Dense(
                    1, use_bias=False, kernel_initializer="zeros"
                ),
            ]
        )
        if carrier_rank is not None:
            layers.reparametrize(plain, carrier_rank)
        optimizer = make_optimizer(keras.optimizers.SGD(1.0), canaries)
        model = make_private(plain)
        model.compile(optimizer, loss=_linear)
        gradients = np.diag(is_in) * optimizer.l2_norm_clip * _HUGE
        persons = np.repeat(np.arange(canaries), rows_per_person)
        x = gradients.astype(np.float32)[persons]
        y = np.ones((len(x), 1), np.float32)
        settings = {"epochs": epochs, "verbose": 0}
        if draws_persons:
            # All rows of a person enter each of its steps.
            model.fit(
                x,
                y,
                person_ids=persons,
                rows_per_person_per_step=rows_per_person,
                **settings,
            )
        elif sampling_rates is not None:
            batches = PoissonBatches(
                x,
                y,
                batch_size=optimizer.batch_size,
                sampling_rates=np.asarray(sampling_rates)[persons],
            )
            model.fit(batches, **settings)
        else:
            model.fit(x, y, **settings)
        (weights,) = plain.get_weights()
        # Descent goes against the gradient.
        claimed = model.epsilon(delta, "pld", rows_per_person)
        return -weights[:, 0], claimed

    return audit_one_run(
        train,
        canaries,
        delta=delta,
        guesses=guesses,
        confidence=confidence,
        seed=seed,
    )


def _linear(y_true, y_pred):
    return keras.ops.sum(y_true * y_pred, -1)
