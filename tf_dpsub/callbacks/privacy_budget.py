"""Callback that keeps training within a privacy budget, and shows it."""

import math
import warnings

import keras

from tf_dpsub.accounting.accountants import check_accountant
from tf_dpsub.checks import check_delta
from tf_dpsub.training.private_model import PrivateModel


class PrivacyBudget(keras.callbacks.Callback):
    """Keeps `fit` within a budget, and shows at each epoch what is spent.

    A run that would cross the budget is refused before its first step. Where
    it cannot be known how many steps an epoch has, training stops after the
    last step that fits, also within `steps_per_execution`.

    Epsilon is written into the logs of each epoch, hence into the progress bar,
    `History`, and every logger that comes after this callback in the list.

    Formal guarantees: nothing is released, and no decision rests on private
    data. After the last step, all steps in the ledger of the model, those of
    earlier calls of `fit` included, compose to at most (`epsilon`, `delta`)
    by the accountant. Steps that were written ahead and lost in a crash count
    as spent.

    Args:
        epsilon: float, > 0, the budget; `inf` to show what is spent without
            any limit.
        delta: float, in (0, 1), well below 1 / (number of examples).
        accountant: string, `"pld"`, the smaller bound, or `"rdp"`, the cheaper
            one. Defaults to `"pld"`.

    Raises:
        ValueError: if an argument is out of range; in `fit`, if the run cannot
            keep the budget, or if the model is not private.

    Example:

    ```python
    budget = tf_dpsub.callbacks.PrivacyBudget(epsilon=2.0, delta=1e-5)
    history = model.fit(x, y, epochs=30, callbacks=[budget])
    history.history["epsilon"]
    ```
    """

    def __init__(self, epsilon: float, delta: float, accountant: str = "pld"):
        super().__init__()
        if not epsilon > 0:
            raise ValueError(
                f"Expected epsilon > 0, got {epsilon}. It is the whole budget; "
                "`inf` stands for no limit."
            )
        check_delta(delta)
        check_accountant(accountant)
        self.epsilon = float(epsilon)
        self.delta = float(delta)
        self.accountant = accountant

    def on_train_begin(self, logs=None):
        model = self.model
        if not isinstance(model, PrivateModel):
            raise ValueError(
                f"Expected a private model, got {type(model).__name__} "
                f"'{model.name}', which spends no privacy budget but gives "
                "none either. Wrap it: `tf_dpsub.make_private(model)`."
            )
        self._warn_of_large_delta(model.current_run.entry.examples)
        self._is_checked = math.isinf(self.epsilon)

    def on_epoch_begin(self, epoch, logs=None):
        # By then Keras has restored a backup, and the model knows from where
        # the run goes on.
        if not self._is_checked:
            self._check()
            self._is_checked = True

    def _check(self):
        run = self.model.current_run
        if run.keeps(self.epsilon, self.delta, self.accountant):
            return
        fitting = run.steps_within(self.epsilon, self.delta, self.accountant)
        # Where an epoch gives each example once, it counts as one release.
        by_epoch = run.entry.each_example_once_per_epoch
        planned = run.epochs if by_epoch else run.steps
        if planned is None and fitting > 0:
            run.limit(fitting)
        else:
            self._refuse(planned, fitting, by_epoch)

    def on_epoch_end(self, epoch, logs=None):
        if logs is not None:
            logs["epsilon"] = self.model.epsilon(self.delta, self.accountant)

    def _warn_of_large_delta(self, examples):
        if examples is not None and self.delta >= 1 / examples:
            warnings.warn(
                f"Expected delta well below 1 / {examples}, the number of "
                f"examples, got {self.delta:g}. A mechanism that publishes a "
                "random example would keep such a budget.",
                stacklevel=2,
            )

    def _refuse(self, planned, fitting, by_epoch):
        model, run = self.model, self.model.current_run
        spent = model.epsilon(self.delta, self.accountant)
        budget = f"(ε = {self.epsilon:g}, δ = {self.delta:g})"
        if planned is None:
            raise ValueError(
                f"Expected a run that keeps the budget {budget}, of which "
                f"ε = {spent:.4g} is spent already: not even one step fits. "
                "Train with more noise, or with a larger budget."
            )
        cost = model.ledger.epsilon_after(
            run.entry,
            planned,
            self.delta,
            epochs=run.epochs,
            accountant=self.accountant,
            beside=run.planned_releases,
        )
        if by_epoch:
            got, fits = f"{planned} epochs", f"{fitting} epochs"
        else:
            epochs = fitting * run.epochs // planned
            got = f"{planned} steps ({run.epochs} epochs)"
            fits = f"{fitting} steps ({epochs} whole epochs)"
        raise ValueError(
            f"Expected a run that keeps the budget {budget}, got {got}, which "
            f"would raise ε from {spent:.4g} to {cost:.4g}: {fits} fit. Train "
            "for fewer epochs, with more noise, or with a larger budget."
        )
