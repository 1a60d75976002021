"""Results of the finished trials of an experiment.

Not pandas: a row keeps the trials behind it, whose ledgers and curves tables
and figures read, and its mean and deviation are one line each.
"""

import csv
import dataclasses
import functools
import statistics

import numpy as np

from tf_dpsub import accounting, files
from tf_dpsub.accounting import accountants
from tf_dpsub.launchers.papers.engine import trials
from tf_dpsub.launchers.training.run_directory import (
    json_number,
    require_counted,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a finished trial.

    Attributes:
        trial: `trials.Trial`.
        accuracy: float, on the test split, after the last epoch.
        epsilon: dict from the name of an accountant to the spent epsilon.
        curve: list of dicts with `epoch`, `val_accuracy` and `epsilon`.
        result: dict, the content of `result.json`.
        projection_errors: dict from epochs to the projection error of all
            groups together; empty if not recorded.
        spectra: dict from epochs to arrays of eigenvalues; empty if not
            recorded.
        residuals: dict from epochs to dicts from recorded quantities to their
            means over kernels; empty if not recorded.
    """

    trial: trials.Trial
    accuracy: float
    epsilon: dict
    curve: list
    result: dict
    projection_errors: dict
    spectra: dict
    residuals: dict


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table: the finished seeds of one setting.

    Attributes:
        labels: dict, the labels of its trials.
        outcomes: list of `Outcome`, at least one.
    """

    labels: dict
    outcomes: list

    @property
    def method(self):
        return self.labels["method"]

    @property
    def paper(self):
        return self.outcomes[0].trial.paper

    @property
    def paper_epsilon(self):
        return self.outcomes[0].trial.paper_epsilon

    @property
    def mean(self):
        """Mean test accuracy."""
        return statistics.fmean(o.accuracy for o in self.outcomes)

    @property
    def deviation(self):
        """Standard deviation of the accuracy over seeds; None for one seed."""
        if len(self.outcomes) == 1:
            return None
        return statistics.stdev(o.accuracy for o in self.outcomes)

    @property
    def projection_error(self):
        """Mean projection error after the last epoch; None if not recorded."""
        if not all(o.projection_errors for o in self.outcomes):
            return None
        return statistics.fmean(
            o.projection_errors[max(o.projection_errors)] for o in self.outcomes
        )

    @property
    def seeds(self):
        return sorted(o.trial.config.seed for o in self.outcomes)

    @property
    def epochs(self):
        """Number of epochs that ran: the smallest among the seeds."""
        return min(o.result["epochs"] for o in self.outcomes)

    def epsilon(self, accountant):
        """Largest epsilon among the seeds."""
        return max(o.epsilon[accountant] for o in self.outcomes)


class Results:
    """The finished trials of an experiment.

    Args:
        experiment: `trials.Experiment`.
        folder: `pathlib.Path`, with one folder for each trial.

    Attributes:
        experiment: `trials.Experiment`.
        outcomes: list of `Outcome`, in the order of the trials.
        rows: list of `Row`, in the order of their first trials.
    """

    def __init__(self, experiment, folder):
        self.experiment = experiment
        outcomes = (_outcome(t, folder / t.name) for t in experiment.trials)
        self.outcomes = [outcome for outcome in outcomes if outcome]
        settings = {}
        for outcome in self.outcomes:
            settings.setdefault(outcome.trial.setting, []).append(outcome)
        order = [t.setting for t in experiment.trials]
        self.rows = [
            Row(labels=dict(setting), outcomes=settings[setting])
            for setting in sorted(settings, key=order.index)
        ]

    def where(self, **labels):
        """Rows with these labels."""
        return [
            row
            for row in self.rows
            if all(row.labels.get(n) == v for n, v in labels.items())
        ]

    def best(self, *labels):
        """The row of highest mean accuracy for each value of the labels."""
        best = {}
        for row in self.rows:
            value = tuple(row.labels[label] for label in labels)
            if value not in best or row.mean > best[value].mean:
                best[value] = row
        return list(best.values())


def is_finished(folder):
    """Returns whether a trial's folder holds its result."""
    return (folder / "result.json").exists()


def epochs_done(folder):
    """Number of epochs that a trial has recorded so far."""
    file = folder / "metrics.csv"
    if not file.exists():
        return 0
    return len(file.read_text("utf-8").splitlines()) - 1


def _outcome(trial, folder):
    if not is_finished(folder):
        return None
    result = files.read_json(folder / "result.json")
    ledger = accounting.PrivacyLedger(folder / "ledger.json")
    require_counted(ledger, result["steps"], folder / "result.json")
    return Outcome(
        trial=trial,
        accuracy=result["test_accuracy"],
        epsilon={
            accountant: _epsilon(ledger.entries, trial.config.delta, accountant)
            for accountant in accountants.ACCOUNTANTS
        },
        curve=_read_curve(folder / "metrics.csv"),
        result=result,
        projection_errors=_read_projection_errors(
            folder / "test_projection_error.csv"
        ),
        spectra=_read_spectra(folder / "private_spectrum.npz"),
        residuals=_read_residuals(folder / "test_projection_residual.csv"),
    )


def _read_curve(file):
    with open(file, encoding="utf-8", newline="") as lines:
        return [
            {
                "epoch": int(row["epoch"]),
                "val_accuracy": float(row["val_accuracy"]),
                "epsilon": float(row["epsilon"]),
            }
            for row in csv.DictReader(lines)
        ]


def _read_projection_errors(file):
    if not file.exists():
        return {}
    with open(file, encoding="utf-8", newline="") as lines:
        return {
            int(row["epoch"]): float(row["error"])
            for row in csv.DictReader(lines)
            if row["group"] == "all"
        }


def _read_residuals(file):
    if not file.exists():
        return {}
    epochs = {}
    with open(file, encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            quantities = epochs.setdefault(int(row.pop("epoch")), {})
            del row["kernel"]
            for name, value in row.items():
                quantities.setdefault(name, []).append(float(value))
    return {
        epoch: {name: statistics.fmean(v) for name, v in quantities.items()}
        for epoch, quantities in epochs.items()
    }


def _read_spectra(file):
    if not file.exists():
        return {}
    with np.load(file) as arrays:
        return dict(zip(arrays["epochs"].tolist(), arrays["eigenvalues"]))


@functools.lru_cache(maxsize=None)
def _epsilon(entries, delta, accountant):
    """Epsilon of a ledger's entries, cached: all seeds share it."""
    return accountants.composed_epsilon(
        [entry.event() for entry in entries], delta=delta, accountant=accountant
    )


def as_json(results):
    """All rows and trials as a dict that JSON can hold."""
    return {
        "experiment": results.experiment.name,
        "title": results.experiment.title,
        "fraction": results.experiment.fraction,
        "notes": list(results.experiment.notes),
        "rows": [_row_as_json(row) for row in results.rows],
    }


def _row_as_json(row):
    return {
        "labels": row.labels,
        "paper_accuracy": row.paper,
        "paper_epsilon": row.paper_epsilon,
        "accuracy_mean": row.mean,
        "accuracy_deviation": row.deviation,
        "projection_error": row.projection_error,
        "epsilon": {
            a: json_number(row.epsilon(a)) for a in accountants.ACCOUNTANTS
        },
        "trials": [
            {
                "name": outcome.trial.name,
                "seed": outcome.trial.config.seed,
                "accuracy": outcome.accuracy,
                "epsilon": {
                    a: json_number(e) for a, e in outcome.epsilon.items()
                },
                "noise_multiplier": outcome.result["noise_multiplier"],
                "epochs": outcome.result["epochs"],
                "steps": outcome.result["steps"],
                "step_milliseconds": outcome.result["step_milliseconds"],
            }
            for outcome in row.outcomes
        ],
    }
