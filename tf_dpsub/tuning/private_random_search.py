"""A random search of hyper-parameters as one private release."""

import dataclasses
import math
import os

import keras
import keras_tuner
import numpy as np
from absl import logging
from keras_tuner.src.distribute import utils as distribution
from keras_tuner.src.engine import tuner_utils

from tf_dpsub import accounting, files
from tf_dpsub.accounting import accountants, selection
from tf_dpsub.training import requirements
from tf_dpsub.training.private_model import PrivateModel
from tf_dpsub.tuning import random_oracle
from tf_dpsub.tuning.random_oracle import RandomOracle
from tf_dpsub.tuning.trial_ledger import BreaksGuaranteeError, TrialLedger

_MECHANISM = "PrivateRandomSearch"
# That of the steps of a trial: which one it was may be searched.
_OF_TRIALS = "Private training"
# What KerasTuner's other searches take: each would break the theorem.
_REFUSED = {
    "max_trials": "the number of trials is random and secret: pass mean_trials",
    "executions_per_trial": "a trial trains one model",
    "max_retries_per_trial": "a trial is never drawn again",
    "max_consecutive_failed_trials": "a trial that fails has the worst score",
    "seed": "a known one tells which trial was the best, and so how many ran",
    "oracle": "proposals must not depend on earlier results",
    "tune_new_entries": "the space must not grow: declare it in `build`",
    "allow_new_entries": "the space must not grow: declare it in `build`",
}


class PrivateRandomSearch(keras_tuner.RandomSearch):
    """Searches hyper-parameters at random; the search is one private release.

    It is a tuner of KerasTuner. A random and secret number of trials each draw
    hyper-parameters, train a private model of their own, and have a score. The
    best model, its hyper-parameters and its score may be released, once all
    trials have run. That costs less than all trials together: of 30 expected
    trials of ε = 0.89 each, 1.75 instead of 5.88.

    All trials have to spend alike, as the same entry of a ledger. Learning
    rates, clips, architectures and mechanisms may be searched where nothing
    else of the entry follows from them; noise multipliers, batch sizes and
    numbers of epochs may not.

    Formal guarantees: what is released is what `get_best_models`,
    `get_best_hyperparameters` and `results_summary` give: the best trial, its
    score included. Trials are independent and alike; their number is of the
    truncated negative binomial distribution, and no other trial leaves the
    search. Its event is `accounting.selection.selection_event` of one trial: of
    all steps and releases that its call of `fit` plans, also where it stops
    early. The ledger has it before the first step of the first trial, and each
    later trial is refused before its first step if it plans another event, or
    differs from what the entry says. The entry follows from no setting that was
    searched: neither mechanism nor clip of a trial are in it, and what is taken
    as public is said of the best trial alone. A score has to be computed from
    public data, or be released with noise in the trial. A trial that fails, is
    interrupted or has no finite score counts as the worst, and is not drawn
    again. Not covered, and to be kept secret: all other trials, their number,
    the time that the search took, and its folder.

    Args:
        hypermodel: `keras_tuner.HyperModel`, or function of
            `keras_tuner.HyperParameters`, which gives a compiled
            `tf_dpsub.PrivateModel` without a `ledger_path`.
        objective: string or `keras_tuner.Objective`, the score: a metric of
            `callbacks.PrivateValidation`, such as `"val_private_accuracy"`, or
            one of public validation data.
        mean_trials: float, > 1, the expected number of trials.
        distribution: string, `"logarithmic"`, with which most searches are
            short and some very long, or `"geometric"`. Defaults to
            `"logarithmic"`.
        ledger_path: string, file of the ledger of the search, which may hold
            more. Defaults to `None`: in memory, and in the folder.
        hyperparameters: as for `keras_tuner.RandomSearch`. Defaults to `None`.
        directory: string, as for `keras_tuner.RandomSearch`. Defaults to
            `None`.
        project_name: string, likewise; the folder in it is called `private`,
            and is readable by its owner alone. Defaults to `None`.
        overwrite: bool, whether to begin a new search where the folder has one.
            That is another release. Defaults to `False`, it goes on.
        **refused: arguments of other tuners, which raise.

    Attributes:
        ledger: `accounting.PrivacyLedger` of the search.

    Raises:
        ValueError: if an argument is out of range, or would break the
            guarantee; in `search`, if a trial would.

    Example:

    ```python
    tuner = tf_dpsub.tuning.PrivateRandomSearch(
        build, "val_private_accuracy", mean_trials=30, directory="search",
        ledger_path="search.json",
    )
    validation = tf_dpsub.callbacks.PrivateValidation(
        x_val, y_val, noise_multiplier=20.0, every=10
    )
    tuner.search(x, y, epochs=10, callbacks=[validation])
    (model,) = tuner.get_best_models()
    model.epsilon(delta=1e-5)
    ```

    Reference:
        - [Papernot, Steinke, 2022](https://arxiv.org/abs/2110.03620)
    """

    def __init__(
        self,
        hypermodel,
        objective,
        *,
        mean_trials: float,
        distribution: str = "logarithmic",
        ledger_path: str | None = None,
        hyperparameters=None,
        directory: str | None = None,
        project_name: str | None = None,
        overwrite: bool = False,
        **refused,
    ):
        for name in refused:
            reason = _REFUSED.get(name, "it is not known")
            raise ValueError(
                f"Expected no argument {name} of PrivateRandomSearch, got it: "
                f"{reason}. Leave it out."
            )
        if hypermodel is None:
            raise ValueError(
                "Expected a hypermodel, got None. Pass a function of "
                "hyper-parameters that gives a compiled private model."
            )
        if distribution_of_work():
            raise ValueError(
                "Expected a search in one process, got KerasTuner's "
                "environment variables of several. Unset them."
            )
        self.seed = None
        self.ledger = accounting.PrivacyLedger(ledger_path)
        oracle = RandomOracle(
            _objective(objective),
            mean_trials,
            selection.shape_of(distribution),
            hyperparameters=hyperparameters,
        )
        folder = os.path.join(project_name or "untitled_project", "private")
        path = os.path.join(directory or ".", folder)
        if overwrite and ledger_path is None and os.path.exists(path):
            raise ValueError(
                "Expected a ledger_path with overwrite=True, got None: the "
                f"search in {path} is another release, which would be "
                "forgotten. Give one from the first search on, or take another "
                "folder."
            )
        files.make_folder(path)
        # The constructor of RandomSearch would make an oracle of its own.
        keras_tuner.Tuner.__init__(
            self,
            oracle,
            hypermodel,
            directory=directory,
            project_name=folder,
            overwrite=overwrite,
        )
        # `overwrite` has made it anew.
        os.chmod(self.project_dir, 0o700)
        # What trials add later has its default, in all of them.
        self.oracle.tune_new_entries = False
        self.oracle.verbose = 0
        if self.oracle.entry is not None:
            self.ledger.add(self.oracle.name, self.oracle.entry)

    def search(self, *fit_args, **fit_kwargs):
        """Runs all trials, or those that an interrupted search has left.

        Args:
            *fit_args: as for `PrivateModel.fit`.
            **fit_kwargs: likewise. `verbose` defaults to 0: what is printed is
                private.

        Raises:
            ValueError: if a trial would break the guarantee, before it begins.
        """
        for name in ("allow_private_selection", "initial_epoch"):
            if fit_kwargs.get(name):
                raise ValueError(
                    f"Expected no {name} in a search, got it: the guarantee "
                    "covers trials that are chosen by scores with noise, or of "
                    "public data, and that begin anew. Leave it out."
                )
        self._end_interrupted()
        fit_kwargs = {"verbose": 0, **fit_kwargs}
        verbose = fit_kwargs["verbose"]
        # KerasTuner would print all trials.
        fit_kwargs["verbose"] = 0
        super().search(*fit_args, **{**fit_kwargs, "fit_verbose": verbose})

    def run_trial(self, trial, *args, fit_verbose=0, **kwargs):
        kwargs["verbose"] = fit_verbose
        # Initial weights must not tell how many trials have run before.
        keras.utils.set_random_seed(random_oracle.secret_seed() % 2**32)
        model = self._try_build(trial.hyperparameters)
        self._require_new(model)
        model.ledger = TrialLedger()
        given = kwargs.pop("callbacks", None) or []
        if any(
            isinstance(callback, keras.callbacks.BackupAndRestore)
            for callback in requirements.all_callbacks(given)
        ):
            raise ValueError(
                "Expected trials that begin anew, got BackupAndRestore: a "
                "trial would go on from another one. Leave it out: an "
                "interrupted search goes on with its next trial."
            )
        kwargs["callbacks"] = [
            *self._deepcopy_callbacks(given),
            _Begin(self, trial),
            tuner_utils.TunerCallback(self, trial),
            tuner_utils.SaveBestEpoch(
                self.oracle.objective,
                self._get_checkpoint_fname(trial.trial_id),
            ),
        ]
        history = self.hypermodel.fit(
            trial.hyperparameters, model, *args, **kwargs
        )
        if history is None or history is not model.history:
            raise BreaksGuaranteeError(
                "Expected HyperModel.fit to return the History of the call of "
                f"`model.fit`, got {type(history).__name__}: another score "
                "might be computed from private data without noise."
            )
        return history

    def begin(self, trial, model):
        """Records what a trial will release, before its first step.

        Args:
            trial: `keras_tuner.Trial`.
            model: `PrivateModel` that is about to be trained.

        Raises:
            ValueError: if it plans something else than the search.
        """
        run = model.current_run
        if run.steps is None:
            raise ValueError(
                "Expected trials of a known number of steps, from which their "
                "cost follows, got a dataset of unknown length. Pass arrays, "
                "or steps_per_epoch."
            )
        plan = [
            dataclasses.replace(run.entry, steps=run.steps, epochs=run.epochs),
            *run.planned_releases,
        ]
        entry = _entry(plan, self.oracle.mean_trials, self.oracle.shape)
        self._require_alike(entry, self.oracle.entry or entry)
        model.ledger.plan(plan)
        if self.oracle.entry is None:
            self.oracle.entry = entry
        # Durably, and before it begins.
        self.ledger.require_unit(self.oracle.entry.unit)
        self.ledger.add(self.oracle.name, self.oracle.entry)
        self.oracle.begun.append(trial.trial_id)
        self.oracle.notes[trial.trial_id] = _joined(plan, "notes")
        self.save()

    def _require_alike(self, entry, first):
        """Refuses a trial whose event is not that of the first one."""
        changes = [
            f"{name} {getattr(entry, name)!r} instead of "
            f"{getattr(first, name)!r}"
            for name in ("noise_multiplier", "batch_size", "examples")
            if getattr(entry, name) != getattr(first, name)
        ]
        if entry.private_selection:
            raise ValueError(
                "Expected trials that do not steer by private results, got one "
                "that does. Leave `allow_private_selection` out."
            )
        differing = sorted(set(entry.uncovered) ^ set(first.uncovered))
        if differing:
            raise ValueError(
                "Expected trials of which the guarantee leaves out the same, "
                f"got some that differ in this: {', '.join(differing)}. Leave "
                "it out of the search."
            )
        if entry != first:
            raise ValueError(
                "Expected trials that all spend alike, got one with "
                f"{', '.join(changes) or 'other steps, releases or seeds'}. "
                "Take noise multiplier, batch size, epochs and releases out "
                "of the search: choose them beforehand."
            )

    def _run_and_update_trial(self, trial, *fit_args, **fit_kwargs):
        history = self.run_trial(trial, *fit_args, **fit_kwargs)
        objective = self.oracle.objective
        if objective.name not in history.history:
            raise BreaksGuaranteeError(
                f"Expected the objective {objective.name!r} in the logs, got "
                f"{', '.join(sorted(history.history))}. Pass one of these."
            )
        values = np.array(history.history[objective.name], float)
        values = values[np.isfinite(values)]
        score = self.oracle.worst_score
        if len(values):
            best = np.max if objective.direction == "max" else np.min
            score = float(best(values))
        self.oracle.update_trial(trial.trial_id, {objective.name: score})

    def _try_run_and_update_trial(self, trial, *fit_args, **fit_kwargs):
        try:
            self._run_and_update_trial(trial, *fit_args, **fit_kwargs)
        except BreaksGuaranteeError:
            raise
        except Exception as error:
            if trial.trial_id not in self.oracle.begun:
                # A mistake of the caller's: nothing was spent.
                raise
            # Its message may quote private examples.
            logging.warning(
                "A trial failed and counts as the worst: %s.",
                type(error).__name__,
            )
            self._update_as_worst(trial)
        trial.status = "COMPLETED"

    def _update_as_worst(self, trial):
        self.oracle.update_trial(
            trial.trial_id,
            {self.oracle.objective.name: self.oracle.worst_score},
        )

    def _end_interrupted(self):
        """Ends trials that had begun when the search stopped, as the worst."""
        oracle = self.oracle
        ongoing = [t.trial_id for t in oracle.ongoing_trials.values()]
        for trial_id in [*oracle._retry_queue, *ongoing]:
            if trial_id in oracle.begun:
                if trial_id in oracle._retry_queue:
                    oracle._retry_queue.remove(trial_id)
                trial = oracle.trials[trial_id]
                self._update_as_worst(trial)
                trial.status = "COMPLETED"
                self.oracle.end_trial(trial)

    def _require_new(self, model):
        if not isinstance(model, PrivateModel):
            raise ValueError(
                "Expected trials of private models, got "
                f"{type(model).__name__}. Return "
                "`tf_dpsub.make_private(model)`, compiled, from the hypermodel."
            )
        if model.ledger.path is not None or model.ledger.steps:
            raise ValueError(
                "Expected trials of models without a ledger, got one with "
                f"{model.ledger.steps} steps and the path "
                f"{model.ledger.path!r}. The search has a ledger of its own: "
                "pass ledger_path to PrivateRandomSearch, and none to "
                "make_private."
            )

    # What leaves the search.

    def get_best_models(self, num_models=1):
        """The best model, with the ledger of the search.

        Args:
            num_models: int, 1. Defaults to `1`.

        Returns:
            List of one `PrivateModel`, as at the end of its best epoch.

        Raises:
            ValueError: if more than one is asked for, if the search is not
                finished, or if no trial has a score.
        """
        (trial,) = self._best("num_models", num_models)
        model = self._try_build(trial.hyperparameters)
        with model.distribute_strategy.scope():
            # The checkpoint has its state.
            model.optimizer.build_for(model)
        model.load_weights(self._get_checkpoint_fname(trial.trial_id))
        model.ledger = self.ledger
        return [model]

    def get_best_hyperparameters(self, num_trials=1):
        """The hyper-parameters of the best trial.

        To train with them once more is another release, which the ledger has to
        count too: pass the same `ledger_path` to `make_private`, once nothing
        more is asked of the search.

        Args:
            num_trials: int, 1. Defaults to `1`.

        Returns:
            List of one `keras_tuner.HyperParameters`.

        Raises:
            ValueError: as `get_best_models`.
        """
        (trial,) = self._best("num_trials", num_trials)
        return [trial.hyperparameters]

    def results_summary(self, num_trials=1):
        """Prints hyper-parameters and score of the best trial, alone.

        Raises:
            ValueError: as `get_best_models`.
        """
        (trial,) = self._best("num_trials", num_trials)
        trial.display_hyperparameters()
        print(f"{self.oracle.objective.name}: {trial.score}")

    def epsilon(self, delta: float) -> float:
        """Epsilon of the search, and of all else in its ledger.

        Args:
            delta: float in (0, 1).

        Returns:
            float, by RDP.
        """
        return self.ledger.epsilon(delta)

    def epsilon_of_all_trials(self, delta: float) -> float:
        """Epsilon if all trials were published, instead of the best alone.

        It tells the number of trials: it is as secret as they are, unless they
        are published.

        Args:
            delta: float in (0, 1).

        Returns:
            float.
        """
        if self.oracle.entry is None:
            return 0.0
        trial = [entry.event() for entry in self.oracle.entry.trial]
        return accountants.composed_epsilon(
            trial * len(self.oracle.begun), delta=delta
        )

    def _best(self, name, number):
        if number != 1:
            raise ValueError(
                f"Expected {name}=1, got {number}. The guarantee covers the "
                "best trial alone; all others have to stay secret."
            )
        best = self.oracle.get_best_trials()
        if not math.isfinite(best[0].score):
            raise ValueError(
                "Expected a trial with a score, got none: all of them failed. "
                "Search again, in another folder; this search counts too."
            )
        notes = self.oracle.notes[best[0].trial_id]
        self.ledger.add(
            self.oracle.name,
            dataclasses.replace(self.oracle.entry, notes=tuple(notes)),
        )
        return best


class _Begin(keras.callbacks.Callback):
    """Tells the search that a trial begins."""

    def __init__(self, tuner, trial):
        super().__init__()
        self._tuner = tuner
        self._trial = trial

    def on_train_begin(self, logs=None):
        self._tuner.begin(self._trial, self.model)


def distribution_of_work() -> bool:
    """True where KerasTuner is told to search in several processes."""
    return distribution.has_chief_oracle()


def _objective(objective):
    """A `keras_tuner.Objective`, with its direction."""
    if isinstance(objective, keras_tuner.Objective) and hasattr(
        objective, "direction"
    ):
        if objective.direction in ("min", "max"):
            return objective
    if not isinstance(objective, str):
        raise ValueError(
            "Expected a string or a keras_tuner.Objective as the objective, "
            f"got {objective!r}. A search has one score."
        )
    name = objective.removeprefix("val_").removeprefix("private_")
    if name == "loss":
        return keras_tuner.Objective(objective, "min")
    try:
        metric = keras.metrics.get(name)
        direction = {"up": "max", "down": "min"}.get(
            getattr(metric, "_direction", None)
        )
    except ValueError:
        direction = None
    if name in ("accuracy", "acc"):
        direction = "max"
    if direction is None:
        raise ValueError(
            f"Expected an objective whose direction is known, got "
            f"{objective!r}. Pass keras_tuner.Objective({objective!r}, "
            "direction='max') or 'min'."
        )
    return keras_tuner.Objective(objective, direction)


def _entry(plan, mean_trials, shape) -> accounting.LedgerEntry:
    """The entry of a search, from the entries of one trial.

    Mechanism and clip may be searched, and what is taken as public may follow
    from what is: those of a trial are not said, which would tell whether it was
    the best one.
    """
    uncovered = _joined(plan, "uncovered")
    plan = [
        dataclasses.replace(entry, notes=())
        if entry.is_validation
        else dataclasses.replace(
            entry, mechanism=_OF_TRIALS, l2_norm_clip=1.0, notes=()
        )
        for entry in plan
    ]
    first = plan[0]
    return accounting.LedgerEntry(
        mechanism=_MECHANISM,
        noise_multiplier=first.noise_multiplier,
        l2_norm_clip=first.l2_norm_clip,
        batch_size=first.batch_size,
        examples=first.examples,
        sampler=first.sampler,
        each_example_once_per_epoch=first.each_example_once_per_epoch,
        epoch_steps=first.epoch_steps,
        unit=first.unit,
        fixed_seed=any(entry.fixed_seed for entry in plan),
        private_selection=any(entry.private_selection for entry in plan),
        private_state=any(entry.private_state for entry in plan),
        uncovered=uncovered,
        steps=1,
        trial=tuple(plan),
        mean_trials=mean_trials,
        trials_shape=shape,
    )


def _joined(plan, name):
    """What the entries of a plan say under a name, each once."""
    parts = [part for entry in plan for part in getattr(entry, name)]
    return tuple(dict.fromkeys(parts))
