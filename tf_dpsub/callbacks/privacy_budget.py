"""Callback that keeps training within a privacy budget, and shows it."""

import math
import warnings

import keras

from tf_dpsub.accounting.accountants import check_accountant
from tf_dpsub.checks import check_count, check_delta
from tf_dpsub.training.calibration import Budget
from tf_dpsub.training.private_model import PrivateModel


class PrivacyBudget(keras.callbacks.Callback):
    """Keeps `fit` within a budget, and shows at each epoch what is spent.

    A run that would cross the budget is refused before its first step, with
    the releases of a `PrivateValidation` beside its steps. Where it cannot be
    known how many steps an epoch has, training stops after the last step that
    fits, also within `steps_per_execution`; and so it does where something is
    added to the ledger of the model during the run.

    Epsilon is written into the logs of each epoch, hence into the progress bar,
    `History`, and every logger that comes after this callback in the list.

    Formal guarantees: nothing is released, and no decision rests on private
    data. After each step, all steps and releases in the ledger of the model,
    those of earlier calls of `fit` and of a ledger that was merged included,
    compose to at most (`epsilon`, `delta`) by the accountant, unless what was
    merged or released by others crosses it alone: no step follows then. Steps
    that were written ahead and lost in a crash count as spent.

    Args:
        epsilon: float, > 0, the budget; `inf` to show what is spent without
            any limit.
        delta: float, in (0, 1), well below 1 / (number of examples).
        accountant: string, `"pld"`, the smaller bound, or `"rdp"`, the cheaper
            one. Defaults to `"pld"`.
        rows_per_person: int, the most rows of one person, for a budget of all
            of them together; see `data.limit_rows`. Defaults to `None`, a
            budget of one row, or of one id of `person_ids`.

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

    def __init__(
        self,
        epsilon: float,
        delta: float,
        accountant: str = "pld",
        rows_per_person: int | None = None,
    ):
        super().__init__()
        if not epsilon > 0:
            raise ValueError(
                f"Expected epsilon > 0, got {epsilon}. It is the whole budget; "
                "`inf` stands for no limit."
            )
        check_delta(delta)
        check_accountant(accountant)
        check_count("rows_per_person", rows_per_person, optional=True)
        self.epsilon = float(epsilon)
        self.delta = float(delta)
        self.accountant = accountant
        self.rows_per_person = rows_per_person
        self._budget = Budget(
            self.epsilon, self.delta, accountant, rows_per_person
        )

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
            # From now on, the run looks at it whenever its ledger changes.
            self.model.current_run.budgets.append(self._budget)

    def _check(self):
        run = self.model.current_run
        if run.keeps(*self._budget):
            return
        fitting = run.steps_within(*self._budget)
        # Where an epoch gives each example once, it counts as one release.
        by_epoch = run.entry.each_example_once_per_epoch
        planned = run.epochs if by_epoch else run.steps
        if planned is None and fitting > 0:
            run.limit(fitting)
        else:
            self._refuse(planned, fitting, by_epoch)

    def on_epoch_end(self, epoch, logs=None):
        if logs is not None:
            logs["epsilon"] = self._spent()

    def _spent(self):
        return self.model.epsilon(
            self.delta, self.accountant, self.rows_per_person
        )

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
        spent = self._spent()
        beside = [
            f"{entry.steps} releases of {entry.mechanism}"
            for entry in run.planned_releases
        ]
        if planned is None:
            beside = f" beside {' and '.join(beside)}" if beside else ""
            raise ValueError(
                f"Expected a run that keeps the budget {self._budget}, of "
                f"which ε = {spent:.4g} is spent already: not even one step "
                f"fits{beside}. Train with more noise, or with a larger budget."
            )
        cost = model.ledger.epsilon_after(
            run.entry,
            planned,
            self.delta,
            epochs=run.epochs,
            accountant=self.accountant,
            beside=run.planned_releases,
            rows_per_person=self.rows_per_person,
        )
        if by_epoch:
            got, fits = f"{planned} epochs", f"{fitting} epochs"
        else:
            epochs = fitting * run.epochs // planned
            got = f"{planned} steps ({run.epochs} epochs)"
            fits = f"{fitting} steps ({epochs} whole epochs)"
        fit, fewer = "fit", "Train for fewer epochs"
        if beside:
            fit = "fit beside these releases"
            fewer += ", release less often"
        raise ValueError(
            f"Expected a run that keeps the budget {self._budget}, got "
            f"{' and '.join([got, *beside])}, which would raise ε from "
            f"{spent:.4g} to {cost:.4g}: {fits} {fit}. {fewer}, with more "
            "noise, or with a larger budget."
        )
