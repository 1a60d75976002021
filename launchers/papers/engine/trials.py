"""Experiments and the trials that they consist of."""

import copy
import dataclasses
from collections.abc import Callable

import ml_collections


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """One training run of an experiment.

    Attributes:
        name: string, also the name of its folder.
        labels: dict from the columns of the table to strings or numbers. The
            trials with the same labels are seeds of one setting, a row.
        config: `ml_collections.ConfigDict`, as `training_run.train` takes it.
            Its accountant becomes that of the trial.
        paper: float, the paper's test accuracy of this setting. Defaults to
            `None`: the paper gives none.
        paper_epsilon: float, the paper's epsilon. Defaults to `None`.
        accountant: string, by which noise is found for an epsilon. Defaults to
            `"rdp"`, as in the papers and in all trials that were recorded.
    """

    name: str
    labels: dict
    config: ml_collections.ConfigDict
    paper: float | None = None
    paper_epsilon: float | None = None
    accountant: str = "rdp"

    def __post_init__(self):
        config = copy.deepcopy(self.config)
        config.accountant = self.accountant
        object.__setattr__(self, "config", config)

    @property
    def method(self):
        """Name of the method."""
        return self.labels["method"]

    @property
    def setting(self):
        """The labels as a hashable key."""
        return tuple(self.labels.items())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """A set of trials, with the figures to draw of them.

    Attributes:
        name: string, also the name of its folder.
        title: string, for tables and figures.
        trials: tuple of `Trial`, in the order in which they run: whole
            comparisons first.
        figures: dict from the name of a file without its ending to a function
            of `results.Results` that returns a `matplotlib.figure.Figure`.
        notes: tuple of strings, one for each point in which the experiment
            differs from the paper, or in which the paper leaves a choice.
        best_of: tuple of strings, labels: the table shows the best row for
            each of their values first. Defaults to `()`: no row is shown first.
        fraction: float, the share of the epochs that is run. Defaults to `1`.
        prepare: function that writes a file which all trials read. Defaults to
            `None`: there is none.
    """

    name: str
    title: str
    trials: tuple
    figures: dict[str, Callable]
    notes: tuple = ()
    best_of: tuple[str, ...] = ()
    fraction: float = 1.0
    prepare: Callable[[], None] | None = None

    def __post_init__(self):
        names = [trial.name for trial in self.trials]
        repeated = {name for name in names if names.count(name) > 1}
        if repeated:
            raise ValueError(
                "Expected trials of distinct names, got "
                f"{sorted(repeated)} twice."
            )

    def shortened(self, fraction):
        """Returns the same experiment with a fraction of the epochs.

        At least one epoch runs. Start epochs and warm-up steps are shortened by
        the same fraction.

        Args:
            fraction: float in (0, 1].
        """
        trials = []
        for trial in self.trials:
            config = copy.deepcopy(trial.config)
            config.epochs = max(1, round(fraction * config.epochs))
            epochs_before = round(fraction * (config.start_epoch - 1))
            config.start_epoch = min(1 + epochs_before, config.epochs)
            if "warmup_steps" in config.optimizer_kwargs:
                steps = config.optimizer_kwargs["warmup_steps"]
                config.optimizer_kwargs["warmup_steps"] = round(
                    fraction * steps
                )
            trials.append(dataclasses.replace(trial, config=config))
        return dataclasses.replace(
            self, trials=tuple(trials), fraction=fraction
        )


def change_subspace(config, **changes):
    """Changes arguments of the subspace that a config names."""
    config.subspace_kwargs = config.subspace_kwargs.to_dict() | changes
