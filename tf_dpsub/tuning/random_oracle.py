"""The oracle of a private search: independent proposals, a secret number."""

import math
import secrets
import uuid

import keras_tuner
from keras_tuner.src.engine import hyperparameters as hp_module
from keras_tuner.src.engine import trial as trial_module

from tf_dpsub import accounting
from tf_dpsub.accounting import selection


def secret_seed() -> int:
    """A seed that nobody can predict, or tell from another one's."""
    return secrets.randbits(128)


class RandomOracle(keras_tuner.oracles.RandomSearchOracle):
    """Proposes hyper-parameters at random, a random number of times.

    Formal guarantees: the number of trials is drawn from the distribution that
    is accounted for, by the system's cryptographic generator, and kept in the
    folder of the search alone. Proposals are drawn with replacement, from a
    space that does not grow, each by a secret seed of its own: they depend
    neither on the data nor on other trials, and do not tell which of the trials
    was the best. Of those with the same score, it is chosen by chance.

    Args:
        objective: `keras_tuner.Objective`.
        mean_trials: float, > 1.
        shape: float, >= 0, of the distribution of the number of trials.
        **kwargs: as `keras_tuner.oracles.RandomSearchOracle`.

    Attributes:
        name: str, random, of the search in its ledger.
        entry: `accounting.LedgerEntry` of the search, None before the first
            trial has begun.
        begun: list of the trials whose training has begun.
        notes: dict of these trials, and what each takes as public.
    """

    def __init__(self, objective, mean_trials, shape, **kwargs):
        super().__init__(
            objective,
            max_trials=selection.draw_trials(mean_trials, shape),
            **kwargs,
        )
        self.mean_trials, self.shape = float(mean_trials), float(shape)
        self.name = uuid.uuid4().hex
        self.entry: accounting.LedgerEntry | None = None
        self.begun: list = []
        self.notes: dict = {}
        self._ties: dict = {}

    @property
    def worst_score(self) -> float:
        """Score of a trial that has none."""
        return -math.inf if self.objective.direction == "max" else math.inf

    @property
    def is_finished(self) -> bool:
        """True once all trials have run."""
        return len(self.end_order) >= self.max_trials

    def populate_space(self, trial_id):
        # Keras's own never proposes the same twice, and may end a search
        # early: trials would neither be independent nor of that number.
        space = hp_module.HyperParameters()
        for parameter in self.hyperparameters.space:
            space.merge([parameter])
            if space.is_active(parameter):
                space.values[parameter.name] = parameter.random_sample(
                    secret_seed()
                )
        self._ties[trial_id] = secrets.randbits(62)
        return {
            "status": trial_module.TrialStatus.RUNNING,
            "values": space.values,
        }

    def get_best_trials(self, num_trials=1):
        """The best trial, alone, and of a finished search alone.

        Raises:
            ValueError: if more than one is asked for, or if trials are left.
        """
        if num_trials != 1:
            raise ValueError(
                f"Expected one best trial, got num_trials={num_trials}. The "
                "guarantee covers the best one alone."
            )
        if not self.is_finished:
            raise ValueError(
                "Expected a finished search, got one with trials that have not "
                "run. Call `search`, again if it was interrupted: to look "
                "earlier is a choice that the guarantee does not cover."
            )
        sign = 1 if self.objective.direction == "max" else -1
        best = max(
            self.trials.values(),
            key=lambda t: (sign * t.score, self._ties[t.trial_id]),
        )
        return [best]

    def get_state(self):
        state = super().get_state()
        entry = None
        if self.entry is not None:
            ledger = accounting.PrivacyLedger()
            ledger.add(self.name, self.entry)
            entry = ledger.to_json()
        return {
            **state,
            "private_search": {
                "name": self.name,
                "entry": entry,
                "trials": self.max_trials,
                "mean_trials": self.mean_trials,
                "shape": self.shape,
                "begun": self.begun,
                "notes": self.notes,
                "ties": self._ties,
            },
        }

    def set_state(self, state):
        search = state["private_search"]
        for name in ("mean_trials", "shape"):
            if search[name] != getattr(self, name):
                raise ValueError(
                    f"Expected the {name} with which the search in this folder "
                    f"was begun, {search[name]}, got {getattr(self, name)}. "
                    "Pass it, or use another folder."
                )
        super().set_state(state)
        self.name, self.max_trials = search["name"], search["trials"]
        self.begun, self._ties = search["begun"], search["ties"]
        self.notes = search["notes"]
        if search["entry"] is not None:
            ledger = accounting.PrivacyLedger.from_json(search["entry"])
            (self.entry,) = ledger.entries
