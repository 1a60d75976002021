"""Steps of one call of `fit`: charged before they run, limited, observed."""

import contextlib
import dataclasses
import math
import threading
import warnings
import weakref
from collections.abc import Callable

from tf_dpsub import accounting, interruptions
from tf_dpsub.training import calibration, public_updates, requirements
from tf_dpsub.training.claims import Claims, claims_of

# Runs in progress.
_TRAINING: weakref.WeakSet = weakref.WeakSet()
_ONE_AT_A_TIME = threading.Lock()


class Run:
    """A call of `fit` in progress, as the ledger and callbacks see it.

    It is the model's `current_run` within its context, and closed at its end.

    Args:
        model: compiled `PrivateModel`, whose step is built.
        entry: `accounting.LedgerEntry` of its steps.
        steps_per_epoch: int, or None where it is not known.
        last_epoch: int, the epoch at which it ends. Defaults to `1`.
        first_epoch: int, the epoch at which it begins. Defaults to `0`.
        inputs: structure of arrays, all private inputs. Defaults to `None`,
            not known.
        beside: sequence of `accounting.LedgerEntry` with counts, what callbacks
            will release. Defaults to nothing.
        releasing: sequence of `released_metrics.ReleasedMetrics`, these
            callbacks. Defaults to none.
        require_unchanged: function that is called before each block of steps is
            charged, and raises where the data are not those that the entry
            describes. Defaults to `None`.

    Attributes:
        entry: as given, and what was stated since by `leave_uncovered`.
        steps_per_epoch: as given.
        last_epoch: as given.
        first_epoch: int. Known for certain once an epoch has begun: Keras may
            restore a later one from a backup.
        steps_left: int, steps left in the epoch; None if not known.
        inputs: as given.
        optimizer: the private optimizer that the entry describes.
        observer: function that `observe_sums` was given, or None.
        budgets: list of `calibration.Budget`, which the run must keep,
            whatever is added to the ledger meanwhile: that of the optimizer,
            and those of callbacks.
    """

    def __init__(
        self,
        model,
        entry: accounting.LedgerEntry,
        *,
        steps_per_epoch: int | None,
        last_epoch: int = 1,
        first_epoch: int = 0,
        inputs=None,
        beside=(),
        releasing=(),
        require_unchanged: Callable | None = None,
    ):
        self.entry = entry
        self._require_unchanged = require_unchanged
        self.steps_per_epoch = steps_per_epoch
        self.last_epoch = last_epoch
        self.first_epoch = first_epoch
        self.steps_left: int | None = None
        self.inputs = inputs
        self.optimizer = model.optimizer
        self.observer: Callable | None = None
        self.budgets = calibration.budgets_of(model.optimizer)
        # What callbacks will release, by description: number of releases.
        self._planned_releases = {_plan_of(e): e.steps for e in beside}
        self._releasing = tuple(releasing)
        self._model = model
        self._iterator: object = None
        self._limit: int | None = None
        self._epoch_limit: float = math.inf
        self._epochs_begun = 0
        # What the ledger holds if none but the run charges it; None where its
        # budgets are to be looked at before the next step.
        self._ledger_counts: tuple[int, int] | None = None
        self._epochs_to_charge = 0
        self._has_begun = False
        self._is_step_due = False
        self._last_batch = -1
        # Whether this thread may make a step.
        self._permits = threading.local()
        self._claims = claims_of(self.optimizer)

    def __enter__(self):
        with _ONE_AT_A_TIME:
            require_none(self._model)
            for other in _TRAINING:
                self._require_apart(other)
            _TRAINING.add(self)
            self._model.current_run = self
        return self

    def _require_apart(self, other):
        """Refuses a run beside another one that it shares a state with."""
        if self.optimizer is other.optimizer:
            raise RuntimeError(
                "Expected an optimizer that trains no other model at the "
                "moment, got one that does: its steps would share noise. "
                "Give each model an optimizer of its own."
            )
        weights = {id(v) for v in other._model.trainable_variables}
        if any(id(v) in weights for v in self._model.trainable_variables):
            raise RuntimeError(
                "Expected weights that no other model trains at the moment, "
                "got some that one does: the ledger of neither would hold all "
                "steps that these weights take. Train one after the other, or "
                "freeze the layers that they share in one of them."
            )

    def __exit__(self, *error):
        self.close()

    @property
    def epochs(self) -> int:
        """Number of epochs of the whole run."""
        return max(0, self.last_epoch - self.first_epoch)

    @property
    def steps(self) -> int | None:
        """Number of steps of the whole run, None if not known."""
        if self.steps_per_epoch is None:
            return None
        return self.steps_per_epoch * self.epochs

    def begin_epoch(self, epoch: int):
        """Begins an epoch, before its first step.

        Raises:
            ValueError: if the target of the optimizer is spent.
        """
        if not self._has_begun:
            self.first_epoch, self._has_begun = epoch, True
            calibration.keep_target(self, self._model.ledger)
            self._ledger_counts = self._model.ledger.counts
        self._epochs_begun += 1
        self._last_batch = -1
        if self._epochs_begun > self._epoch_limit:
            self.limit(0)
        self.steps_left = self.steps_per_epoch
        self._epochs_to_charge += 1

    def end_epoch(self, epoch: int):
        """Ends an epoch, after its last step, and before callbacks see it."""
        self._model._carried_ledger.end_epoch()
        for callback in self._releasing:
            callback.charge_due(self, epoch)

    def steps_at_once(self, steps_per_execution: int) -> int:
        """Number of steps that may be charged and run together.

        Args:
            steps_per_execution: int, the most that Keras would run.

        Returns:
            int, 0 where no further step may run.
        """
        for what in self._model._carried_ledger.uncovered():
            self.leave_uncovered(what)
        if self._ledger_counts != self._model.ledger.counts:
            if self.entry.each_example_once_per_epoch:
                # What follows in the epoch is an entry of its own.
                self._epochs_to_charge = max(1, self._epochs_to_charge)
            calibration.keep_budgets(self, self._epochs_to_charge)
            self._ledger_counts = self._model.ledger.counts
        if self.steps_left is None:
            # Where an epoch ends is not known: nothing may be charged for
            # that does not run.
            bounds = [1]
        else:
            bounds = [steps_per_execution, self.steps_left]
        if self._limit is not None:
            bounds.append(self._limit)
        return min(bounds)

    def expect_step(self, batch: int):
        """Called when the next step, or block of steps, is to run.

        Args:
            batch: int, its number in the epoch.

        Raises:
            RuntimeError: if that step was due before.
        """
        if batch <= self._last_batch:
            raise RuntimeError(
                f"Expected the step after number {self._last_batch}, got "
                f"{batch}: `on_train_batch_begin` was called more than once "
                "for a step. Leave that to `fit`."
            )
        self._last_batch = batch
        self._is_step_due = True

    def take_from(self, iterator):
        """Called with the iterator of batches, before any is taken.

        With bands, batches of an iterator come from one group after the other,
        and share noise: a new one begins an entry, and the noise anew.

        Formal guarantees: batches come from what the run was made for. Only
        one block of steps runs each time that Keras begins one: a callback
        cannot make others, of a batch that it has chosen.

        Raises:
            RuntimeError: if no step is due.
            ValueError: if the data have changed: nothing more is charged.
        """
        if not self._is_step_due:
            raise RuntimeError(
                "Expected a step that `fit` itself begins, got one between "
                "its steps, of a callback, say: it would be charged as if its "
                "batch was drawn like the others. Call `train_on_batch` when "
                "`fit` has ended."
            )
        self._is_step_due = False
        if self._require_unchanged is not None:
            self._require_unchanged()
        if self.entry.bands > 1 and iterator is not self._iterator:
            if self._iterator is not None:
                # Budgets were looked at for the cycles of the first.
                self._ledger_counts = None
            self._iterator = iterator
            self._model.ledger.end_entry()
            self.optimizer.banded_noise.forget()

    @contextlib.contextmanager
    def one_step(self):
        """A context in which this thread may make one step, that is charged."""
        self._permits.left = 1
        try:
            yield
        finally:
            self._permits.left = 0

    def take_step(self):
        """Called where a step begins.

        Raises:
            RuntimeError: if it is none of those that were charged.
        """
        if not getattr(self._permits, "left", 0):
            raise _uncharged()
        self._permits.left = 0

    def charge(self, steps: int):
        """Records steps in the ledger, before they run."""
        interruptions.check()
        model = self._model
        model.optimizer._noise_key.require_own_process()
        model.ledger.charge(
            self.entry, steps, self._epochs_to_charge, planned=self.steps_left
        )
        self._ledger_counts = model.ledger.counts
        model._carried_ledger.begin_step()
        self._epochs_to_charge = 0
        if self.steps_left is not None:
            self.steps_left -= steps
        if self._limit is not None:
            self._limit -= steps
            if self._limit <= 0:
                model.stop_training = True

    @property
    def planned_releases(self) -> list:
        """Entries with counts of what callbacks will release, and have not."""
        return [
            dataclasses.replace(entry, steps=count)
            for entry, count in self._planned_releases.items()
            if count
        ]

    def charge_release(self, entry: accounting.LedgerEntry):
        """Records a release beside the steps, before it is made.

        Args:
            entry: `accounting.LedgerEntry` without counts. One of those that
                were planned is no longer planned then.

        Raises:
            ValueError: if it was not planned, and a budget does not suffice.
        """
        ledger = self._model.ledger
        is_known = self._ledger_counts == ledger.counts
        planned = self._planned_releases.get(_plan_of(entry), 0)
        if planned == 0:
            calibration.require_release(self, ledger, entry)
        ledger.charge(entry, 1, planned=1)
        if planned:
            self._planned_releases[_plan_of(entry)] = planned - 1
            # Then the steps that are left keep the budgets as before.
            if is_known:
                self._ledger_counts = ledger.counts

    @property
    def steps_to_come(self) -> int | None:
        """Number of steps that are left, None if not known.

        Where an epoch gives each example once, that of epochs to be charged.
        """
        epochs = self.epochs - self._epochs_begun
        if self.entry.each_example_once_per_epoch:
            return epochs + self._epochs_to_charge
        if self.steps_per_epoch is None or self.steps_left is None:
            return None
        return self.steps_per_epoch * epochs + self.steps_left

    def keeps(
        self,
        epsilon: float,
        delta: float,
        accountant: str,
        rows_per_person: int | None = None,
    ) -> bool:
        """Tells whether all planned steps of the run keep a budget.

        Args:
            epsilon: float, the budget, all earlier steps included.
            delta: float.
            accountant: string, `"rdp"` or `"pld"`.
            rows_per_person: int, as for `PrivateModel.epsilon`. Defaults to
                `None`.

        Returns:
            bool; False where it is not known how many steps there are.
        """
        bounds = [n for n in (self.steps, self._limit) if n is not None]
        if not bounds:
            return False
        after = self._model.ledger.epsilon_after(
            self.entry,
            min(bounds),
            delta,
            epochs=int(min(self.epochs, self._epoch_limit)),
            accountant=accountant,
            beside=self.planned_releases,
            rows_per_person=rows_per_person,
        )
        return after <= epsilon

    def steps_within(
        self,
        epsilon: float,
        delta: float,
        accountant: str = "pld",
        rows_per_person: int | None = None,
    ) -> int:
        """Number of further steps of the run that keep a budget.

        Args:
            epsilon: float, the budget, all earlier steps included.
            delta: float.
            accountant: string, `"rdp"` or `"pld"`. Defaults to `"pld"`.
            rows_per_person: int, as for `PrivateModel.epsilon`. Defaults to
                `None`.

        Returns:
            int: epochs, where an epoch gives each example once.
        """
        return self._model.ledger.steps_within(
            self.entry,
            epsilon=epsilon,
            delta=delta,
            accountant=accountant,
            beside=self.planned_releases,
            rows_per_person=rows_per_person,
        )

    def limit(self, steps: int):
        """Stops the run after so many further steps, or earlier."""
        self._limit = steps if self._limit is None else min(self._limit, steps)

    def limit_epochs(self, epochs: int):
        """Stops the run after so many further epochs have begun, or earlier."""
        self._epoch_limit = min(self._epoch_limit, self._epochs_begun + epochs)

    def require_claims(self, *traced: Claims | None):
        """Refuses a step of which something else is claimed than of the run.

        Args:
            *traced: `Claims` that the step was made under, if it was before.

        Raises:
            RuntimeError: if these, or those of the optimizer now, are others
                than those that the run began with.
            ValueError: as `require_optimizer`.
        """
        self.require_optimizer()
        for claims in (claims_of(self.optimizer), *traced):
            if claims is None or not (
                claims == self._claims
                and claims.effective_noise_multiplier
                == self.entry.noise_multiplier
            ):
                raise RuntimeError(
                    f"Expected what the run began with, {self._claims}, got "
                    f"{claims}: something has changed it since. Give each "
                    "model an optimizer of its own, and change none while it "
                    "trains."
                )

    def require_optimizer(self):
        """Refuses a step that is not the one which is in the ledger.

        Raises:
            ValueError: if the optimizer is not that of the run.
        """
        step = self._model.training_step
        if step is None or not (
            self.optimizer is self._model.optimizer is step.optimizer
        ):
            raise ValueError(
                "Expected the optimizer that the run began with, got another "
                "one, or a model compiled again: the ledger counts the steps "
                "of the first. Call `compile` before `fit`, not in a callback."
            )

    def leave_uncovered(self, what: str):
        """States that the guarantee does not cover something.

        Args:
            what: string, a noun.
        """
        if what not in self.entry.uncovered:
            uncovered = (*self.entry.uncovered, what)
            self.entry = dataclasses.replace(self.entry, uncovered=uncovered)
            if self._has_begun and self.entry.each_example_once_per_epoch:
                self._ledger_counts = None

    def observe_sums(self, observer: Callable, what: str):
        """Shows the clipped sums of each step of the run to an observer.

        Formal guarantees: they are private results without noise. The statement
        says that no epsilon covers what the observer makes of them.

        Args:
            observer: function of the list of tensors, float32 or float64, that
                the step releases with noise, traced with the step.
            what: string, a noun: what the observer makes of them.
        """
        self.leave_uncovered(what)
        self.observer = observer
        self._model.make_train_function(force=True)

    def close(self):
        """Ends the run: no further step is taken in it."""
        model = self._model
        model.current_run = None
        _TRAINING.discard(self)
        if self.observer is not None:
            # The next one traces a step that shows its sums to nobody.
            model.make_train_function(force=True)
        model._carried_ledger.end_run()
        model.ledger.settle()
        if self.entry.bands > 1:
            model.ledger.end_entry()


def _plan_of(entry):
    """Description by which a release is one of those that were planned."""
    return dataclasses.replace(entry.description, uncovered=())


def take_step(run: Run | None):
    """Refuses a step that is not in the ledger.

    Args:
        run: the one in progress, or None.

    Raises:
        RuntimeError: where `Run.one_step` permits none.
    """
    if run is None:
        raise _uncharged()
    run.take_step()


def _uncharged():
    return RuntimeError(
        "train_step was called outside of fit and train_on_batch, between "
        "their steps, or twice in one: it would not be accounted for. Call "
        "one of these instead; a train_step of your own calls "
        "`super().train_step` once."
    )


def require_none(model):
    """Refuses to train within a call of `fit` of the same model.

    Args:
        model: `PrivateModel`.

    Raises:
        RuntimeError: if one is in progress.
    """
    if model.current_run is not None:
        raise RuntimeError(
            "Expected no call of `fit` in progress, got one: its steps and "
            "those of another call cannot be told apart in the ledger. "
            "Train in a callback by another private model, with weights of "
            "its own, or afterwards."
        )


def moved(name: str, new: str) -> Callable:
    """A method of the model that its run has now, with a warning."""

    def method(model, *args, **kwargs):
        warnings.warn(
            f"PrivateModel.{name} is now PrivateModel.current_run.{new}; the "
            "old name goes in version 0.2.",
            FutureWarning,
            stacklevel=2,
        )
        if model.current_run is None:
            raise RuntimeError(
                "Expected a call of `fit` in progress, got none."
            )
        return getattr(model.current_run, new)(*args, **kwargs)

    return method


def entry_of(
    model, batches=None, notes=(), uncovered=(), **stated
) -> accounting.LedgerEntry:
    """Builds the ledger's entry of a run.

    Args:
        model: compiled `PrivateModel`, whose step is built.
        batches: `PrivateBatches` of the run. Defaults to `None`, one that the
            user gives.
        notes: strings, what else is taken as public. Defaults to none.
        uncovered: strings, what the guarantee does not cover. Defaults to none.
        **stated: further fields of the entry.

    Returns:
        An `accounting.LedgerEntry`.
    """
    optimizer = model.optimizer
    poisson = None if batches is None else batches.poisson
    return accounting.LedgerEntry(
        mechanism=optimizer.mechanism,
        noise_multiplier=float(optimizer.effective_noise_multiplier),
        l2_norm_clip=float(optimizer.l2_norm_clip),
        batch_size=optimizer.batch_size,
        **sampling_of(model, batches),
        fixed_seed=optimizer.seed is not None
        or (poisson is not None and poisson.seed is not None),
        notes=(
            *requirements.public_assumptions(model.model),
            *model.training_step.assumptions,
            *public_updates.assumptions(model),
            *(
                ()
                if model.kept_features is None
                else model.kept_features.assumptions
            ),
            *optimizer.public_state.notes,
            *(() if poisson is None else poisson.assumptions),
            *notes,
        ),
        uncovered=tuple(uncovered),
        **stated,
    )


def sampling_of(model, batches=None) -> dict:
    """The fields of a ledger's entry from which its events follow, but noise.

    Args:
        model: compiled `PrivateModel`.
        batches: as for `entry_of`. Defaults to `None`.

    Raises:
        ValueError: if earlier steps protect something else than these.
    """
    poisson = None if batches is None else batches.poisson
    model.ledger.require_unit("example" if poisson is None else poisson.unit)
    given = {
        "unit": "example",
        "examples": None,
        "sampler": "batches",
        "each_example_once_per_epoch": batches is not None
        and batches.each_example_once_per_epoch,
    }
    return {
        **(given if poisson is None else poisson.ledger_fields),
        "bands": model.optimizer.bands,
        "private_state": not model.optimizer.public_state.is_public,
    }
