"""Callback that validates on private rows with noise, which may steer a run."""

import dataclasses
from collections.abc import Mapping

from keras import tree

from tf_dpsub.accounting import LedgerEntry
from tf_dpsub.checks import check_count, check_fraction, check_seed
from tf_dpsub.training.private_evaluation import (
    PrivateEvaluation,
    check_metrics,
    check_noise,
)
from tf_dpsub.training.private_model import PrivateModel
from tf_dpsub.training.released_metrics import ReleasedMetrics


class PrivateValidation(ReleasedMetrics):
    """Puts metrics of private rows into the logs, with noise.

    With `metrics={"accuracy": 1.0}` the logs of an epoch get
    `val_private_accuracy`. Callbacks that come later in the list, such as
    `EarlyStopping`, `ModelCheckpoint` and those of KerasTuner, may monitor it:
    `fit` accepts them without `allow_private_selection`. Between two releases
    the logs repeat the last one.

    Formal guarantees: each release is that of
    `PrivateModel.evaluate_privately`: one Gaussian event without sampling, in
    the ledger before it is made, and before any callback sees the end of its
    epoch: a model that one of them saves has it, wherever it is in the list.
    Decisions by these metrics are post-processing. A run with a target ε, or a
    `PrivacyBudget`, counts all releases that it plans before its first step.

    Args:
        x: array, or structure of arrays, `[rows, ...]`, private inputs. They
            may be rows of the training: all releases are composed.
        y: the same for targets.
        noise_multiplier: float, > 0, of each release.
        every: int, number of epochs from one release to the next. Defaults to
            `1`.
        metrics: dict of name and bound, as for `evaluate_privately`. Defaults
            to `None`, `{"accuracy": 1.0}`.
        person_ids: int or string array `[rows]`, as for `evaluate_privately`.
            Defaults to `None`.
        confidence: float in (0, 1), of the intervals in `history`. Defaults to
            `0.95`.
        seed: int, makes the noise reproducible, for experiments. Defaults to
            `None`, fresh entropy.
        secure_noise: bool, as for `tf_dpsub.optimizers.DPSGD`. Defaults to
            `False`.

    Attributes:
        history: dict of the epochs, counted from 1, and what
            `evaluate_privately` returns at their end.

    Raises:
        ValueError: if an argument is out of range; in `fit`, if the model is
            not private, if the data do not fit, if no release falls into the
            run, or if a metric of the model has a name of ours.

    Example:

    ```python
    validation = tf_dpsub.callbacks.PrivateValidation(
        x_val, y_val, noise_multiplier=20.0, every=5
    )
    best = keras.callbacks.ModelCheckpoint(
        "best.keras", "val_private_accuracy", save_best_only=True, mode="max"
    )
    model.fit(x, y, epochs=20, callbacks=[validation, best])
    ```
    """

    def __init__(
        self,
        x,
        y,
        *,
        noise_multiplier: float,
        every: int = 1,
        metrics: Mapping[str, float] | None = None,
        person_ids=None,
        confidence: float = 0.95,
        seed: int | None = None,
        secure_noise: bool = False,
    ):
        super().__init__()
        metrics = {"accuracy": 1.0} if metrics is None else dict(metrics)
        check_metrics(metrics)
        check_noise(noise_multiplier)
        check_count("every", every)
        check_fraction("confidence", confidence)
        check_seed(seed)
        self.every = int(every)
        self.confidence = float(confidence)
        self.history: dict = {}
        self._metrics = metrics
        self._data = x, y
        self._settings = {
            "metrics": metrics,
            "noise_multiplier": noise_multiplier,
            "person_ids": person_ids,
            "seed": seed,
            "secure_noise": secure_noise,
        }
        self._evaluation: PrivateEvaluation | None = None
        # What the ledger has of the release to come.
        self._charged: LedgerEntry | None = None
        self._last: dict = {}

    def __deepcopy__(self, memo):
        # As KerasTuner copies it for each trial: the rows stay where they are.
        copied = type(self)(
            *self._data,
            every=self.every,
            confidence=self.confidence,
            **self._settings,
        )
        memo[id(self)] = copied
        return copied

    @property
    def released_names(self):
        return tuple(f"val_private_{name}" for name in self._metrics)

    def planned_entry(self, model, first_epoch, last_epoch):
        count = last_epoch // self.every - first_epoch // self.every
        if count < 1:
            raise ValueError(
                f"Expected a release in the run, got every={self.every} and "
                f"epochs {first_epoch} to {last_epoch}: none is due. Lower "
                "`every`, or leave the callback out."
            )
        self._require_own_names(model)
        evaluation = PrivateEvaluation(model, *self._data, **self._settings)
        evaluation.require_rows_alone()
        self._evaluation = evaluation
        return dataclasses.replace(evaluation.entry(), steps=count)

    def on_train_begin(self, logs=None):
        if not isinstance(self.model, PrivateModel):
            raise ValueError(
                "Expected a private model for PrivateValidation, got "
                f"{type(self.model).__name__} '{self.model.name}'. Wrap it: "
                "`tf_dpsub.make_private(model)`."
            )
        self.history, self._last, self._charged = {}, {}, None

    def charge_due(self, run, epoch):
        if (epoch + 1) % self.every == 0:
            self._charged = self._evaluation.entry()
            run.charge_release(self._charged)

    def on_epoch_end(self, epoch, logs=None):
        given = sorted(set(self.released_names) & set(logs or {}))
        if given:
            raise ValueError(
                f"Expected no metric called {', '.join(given)} but that of "
                "PrivateValidation, got another one: it has no noise. Rename "
                "it."
            )
        if (epoch + 1) % self.every == 0:
            self._release(epoch)
        if logs is not None:
            logs.update(self._last)

    def _release(self, epoch):
        values = self._evaluation.checked()
        entry, charged = self._evaluation.entry(), self._charged
        if charged is None or set(entry.uncovered) - set(charged.uncovered):
            # A callback has changed the weights, which the statement must say.
            self.model.current_run.charge_release(entry)
        self._charged = None
        estimates = self._evaluation.released(values, self.confidence)
        self.history[epoch + 1] = estimates
        self._last = {
            f"val_private_{name}": estimate.value
            for name, estimate in estimates.items()
        }

    def _require_own_names(self, model):
        """Refuses metrics without noise whose names would pass for ours."""
        metrics = getattr(model, "_compile_metrics", None)
        given = tree.flatten(getattr(metrics, "_user_metrics", None))
        given += tree.flatten(getattr(metrics, "_user_weighted_metrics", None))
        for metric in given:
            name = getattr(metric, "name", getattr(metric, "__name__", metric))
            if str(name).startswith("private_"):
                raise ValueError(
                    "Expected metrics of `compile` whose names do not begin "
                    f"with 'private_', got '{name}': `val_{name}` would pass "
                    "for a metric with noise. Rename it."
                )
