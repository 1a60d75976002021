"""Folders of finished trials, written without any training."""

import csv
import json

import numpy as np

from tf_dpsub import accounting
from tf_dpsub.configs import default
from tf_dpsub.launchers.papers.engine import trials
from tf_dpsub.launchers.training import run_directory

EXAMPLES, STEPS = 1000, 20


def trial(name, method, *, seed=0, sigma=4.0, paper=None, **labels):
    config = default.get_config()
    config.seed = seed
    config.noise_multiplier = sigma
    config.batch_size = 100
    config.epochs = 2
    return trials.Trial(
        name=name,
        labels={"method": method} | labels,
        config=config,
        paper=paper,
        paper_epsilon=0.5 if paper else None,
    )


def write(
    folder,
    trial,
    accuracy,
    *,
    steps=STEPS,
    errors=(),
    spectra=(),
    residuals=(),
):
    """Writes what `experiment.train` leaves of a trial."""
    folder = folder / trial.name
    folder.mkdir(parents=True)
    ledger = accounting.PrivacyLedger(folder / "ledger.json")
    entry = accounting.LedgerEntry(
        mechanism="DPSGD",
        noise_multiplier=trial.config.noise_multiplier,
        l2_norm_clip=1.0,
        batch_size=100,
        examples=EXAMPLES,
        sampler="poisson",
    )
    ledger.charge(entry, steps)
    ledger.settle()
    result = {
        "test_accuracy": accuracy,
        "epsilon": 123.0,
        "epochs": 2,
        "steps": steps,
        "noise_multiplier": trial.config.noise_multiplier,
        "step_milliseconds": 1.5,
        "private_examples": EXAMPLES,
        "test_examples": 100,
    }
    config = run_directory.json_fields(trial.config)
    for name, content in (("config", config), ("result", result)):
        (folder / f"{name}.json").write_text(json.dumps(content), "utf-8")
    _write_table(
        folder / "metrics.csv",
        ["epoch", "val_accuracy", "epsilon"],
        [[1, accuracy / 2, 1.0], [2, accuracy, 2.0]],
    )
    if errors:
        _write_table(
            folder / "test_projection_error.csv",
            ["epoch", "group", "error"],
            [
                [epoch, group, error / (2 if group == "layer" else 1)]
                for epoch, error in enumerate(errors, 1)
                for group in ("layer", "all")
            ],
        )
    if spectra:
        np.savez(
            folder / "private_spectrum.npz",
            epochs=list(range(1, len(spectra) + 1)),
            eigenvalues=spectra,
        )
    if residuals:
        names = ["historical", "self", "stable_rank", "stable_rank_of_history"]
        _write_table(
            folder / "test_projection_residual.csv",
            ["epoch", "kernel", *names],
            [
                [epoch, kernel, share, share / 2, 10 * share, 3.0]
                for epoch, shares in enumerate(residuals, 1)
                for kernel, share in zip("ab", shares)
            ],
        )


def _write_table(file, header, rows):
    with open(file, "w", encoding="utf-8", newline="") as stream:
        csv.writer(stream).writerows([header, *rows])
