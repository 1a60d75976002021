"""Runs an experiment of a paper, and compares the results with the paper's.

    tf-dpsub reproduce --list
    tf-dpsub reproduce --experiment=pdp_mnist --workdir=out/papers
    tf-dpsub reproduce --experiment=pdp_mnist --only=tanh_sigma18 --dry_run

The folder WORKDIR/EXPERIMENT receives `report.html`, `table.md`,
`results.json`, figures, and one folder for each trial. The same command goes on
where it was stopped: finished trials stay, unfinished ones are resumed.
`--fraction=0.1` runs a tenth of the epochs. `--dry_run` names the trials; of
one alone, it says σ, ε, the number of steps, their time and their memory.
"""

import difflib
import functools
import pathlib
import re
import sys

from absl import flags

from tf_dpsub import files
from tf_dpsub.launchers import papers
from tf_dpsub.launchers.papers.engine import progress, results, runner, table
from tf_dpsub.launchers.reports import folder_page
from tf_dpsub.launchers.terminal import program, quiet
from tf_dpsub.launchers.terminal.program import DRY_RUN, WORKDIR
from tf_dpsub.launchers.training import run_directory

_EXPERIMENT = flags.DEFINE_string(
    "experiment", None, "Name of the experiment; --list shows all."
)
_FRACTION = flags.DEFINE_float(
    "fraction", 1.0, "Share of the epochs of each trial to run, at least one."
)
_JOBS = flags.DEFINE_integer(
    "jobs", 2, "Number of trials that run at a time and share the cores."
)
_ONLY = flags.DEFINE_string(
    "only", None, "Regular expression: run the trials with a match in the name."
)
_PUBLIC_IMAGES = flags.DEFINE_string(
    "public_images",
    None,
    "An .npz file with public images [images, height, width, channels], uint8, "
    "for gep_... experiments and accuracy_by_epsilon.",
)
_PUBLIC_TEXTS = flags.DEFINE_string(
    "public_texts",
    None,
    "A file with a public text in each line, for SST-2 in accuracy_by_epsilon.",
)
_FEATURES = flags.DEFINE_string(
    "features",
    None,
    "An .npz file with x_train, y_train, x_test and y_test, for "
    "gep_linear_probe. gep_cifar10_features... writes it, if it is not there.",
)
_LANGUAGE_MODEL = flags.DEFINE_string(
    "language_model",
    None,
    "A preset of keras_hub, or a folder with a checkpoint, of BERT, for "
    "rgp_glue, or such a folder for accuracy_by_epsilon.",
)
_LIST = flags.DEFINE_bool("list", False, "List all experiments.")


def main():
    """Runs the experiment that the flags name; returns the exit code."""
    if _LIST.value:
        print(overview())
        return 0
    if _EXPERIMENT.value in papers.STUDIES:
        return _run_study(papers.STUDIES[_EXPERIMENT.value])
    experiment = chosen(_EXPERIMENT.value, _inputs(), _FRACTION.value)
    trials = selected(experiment.name, experiment.trials, _ONLY.value)
    if DRY_RUN.value:
        announce(trials, WORKDIR.value)
        return 0
    _check_flags()
    return reproduce(
        experiment,
        trials,
        WORKDIR.value,
        jobs=_JOBS.value,
        command=program.command("reproduce"),
    )


def _inputs():
    return papers.Inputs(
        public_images=_PUBLIC_IMAGES.value,
        public_texts=_PUBLIC_TEXTS.value,
        features=_FEATURES.value,
        language_model=_LANGUAGE_MODEL.value,
    )


def _check_flags():
    if WORKDIR.value is None:
        raise ValueError("Expected --workdir, got none.")
    if _JOBS.value < 1:
        raise ValueError(f"Expected --jobs >= 1, got {_JOBS.value}.")
    _check_fraction(_FRACTION.value)


def _check_fraction(fraction):
    if not 0 < fraction <= 1:
        raise ValueError(f"Expected 0 < --fraction <= 1, got {fraction}.")


def _run_study(study):
    points = selected(study.name, study.points(), _ONLY.value)
    if DRY_RUN.value:
        print("\n".join(point.name for point in points))
        return 0
    _check_flags()
    return study.run(
        pathlib.Path(WORKDIR.value) / study.name,
        points,
        fraction=_FRACTION.value,
        jobs=_JOBS.value,
        command=program.command("reproduce"),
        inputs=_inputs(),
    )


def overview():
    """Lists all experiments, each with a one-line description."""
    experiments = papers.EXPERIMENTS | papers.STUDIES
    width = max(map(len, experiments))
    return "\n".join(
        f"{name:<{width}}  {experiment.__doc__.splitlines()[0]}"
        for name, experiment in experiments.items()
    )


def chosen(name, inputs, fraction=1.0):
    """Builds an experiment by its name.

    Args:
        name: string, one of `papers.EXPERIMENTS`.
        inputs: `papers.Inputs`.
        fraction: float in (0, 1], share of the epochs. Defaults to `1`.

    Returns:
        A `trials.Experiment`.

    Raises:
        ValueError: if there is no such experiment, it lacks an input, or the
            fraction is not in (0, 1].
    """
    experiments = papers.EXPERIMENTS
    if name not in experiments:
        close = difflib.get_close_matches(str(name), experiments, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            "Expected --experiment, one of "
            f"{', '.join(experiments | papers.STUDIES)}, got {name!r}."
            f"{hint}"
        )
    _check_fraction(fraction)
    experiment = experiments[name](inputs)
    return experiment if fraction == 1 else experiment.shortened(fraction)


def selected(experiment, trials, only=None):
    """Selects the trials of an experiment by a regular expression of names.

    Args:
        experiment: string, its name.
        trials: sequence of `trials.Trial`, or of points of a study.
        only: string. Defaults to `None`: all trials.

    Returns:
        List of the matching trials, in their order.

    Raises:
        ValueError: if none matches, or `only` is no regular expression.
    """
    try:
        pattern = re.compile(only or "")
    except re.error as error:
        raise ValueError(
            f"Expected --only to be a regular expression, got {only!r}: "
            f"{error}."
        ) from error
    matching = [t for t in trials if pattern.search(t.name)]
    if not matching:
        names = [trial.name for trial in trials]
        close = difflib.get_close_matches(only, names, n=1, cutoff=0)
        raise ValueError(
            f"Expected --only to name trials of {experiment}, got "
            f"{only!r}, which none of {len(names)} holds. The closest is "
            f"{close[0]!r}; --dry_run shows all."
        )
    return matching


def announce(trials, workdir):
    """Prints the names of trials; for a single one, its settings and cost.

    Args:
        trials: list of `trials.Trial`.
        workdir: string or path-like; None without one.
    """
    if len(trials) > 1:
        print("\n".join(trial.name for trial in trials))
        return
    quiet.load_tensorflow()
    from tf_dpsub.launchers.training import training_run

    (trial,) = trials
    print(trial.name)
    training_run.announce(
        trial.config, pathlib.Path(workdir or "") / trial.name
    )


def reproduce(experiment, trials, workdir, *, jobs, command):
    """Runs the unfinished trials, and writes tables and figures.

    Args:
        experiment: `trials.Experiment`.
        trials: list of `trials.Trial`, those of the experiment to run. The
            table shows all that are finished.
        workdir: string or path-like.
        jobs: int, how many trials run at a time.
        command: string, the command line, for the table.

    Returns:
        int, the exit code: 1 if a trial failed, 130 if interrupted.

    Raises:
        ValueError: if the folder holds other trials.
    """
    folder = pathlib.Path(workdir) / experiment.name
    for trial in experiment.trials:
        run_directory.RunDirectory(
            folder / "trials" / trial.name,
            run_directory.json_fields(trial.config),
            resume=True,
        )
    unfinished = [
        trial
        for trial in trials
        if not results.is_finished(folder / "trials" / trial.name)
    ]
    finished_count = len(trials) - len(unfinished)
    print(
        f"{experiment.title}: {len(trials)} trials, {finished_count} "
        f"finished, {len(unfinished)} to run in {folder}/",
        flush=True,
    )
    failed = []
    try:
        if unfinished:
            if experiment.prepare is not None:
                experiment.prepare()
            failed = _run(
                experiment, unfinished, len(trials), folder, jobs, command
            )
    except KeyboardInterrupt:
        print("\nInterrupted; the same command goes on from here.")
        return program.INTERRUPTED
    finally:
        write(experiment, folder, command)
    for trial, error in failed:
        print(f"failed: {trial.name}: {error}", file=sys.stderr)
        print(f"        {folder}/logs/{trial.name}.log", file=sys.stderr)
    print(f"{folder}/table.md")
    return 1 if failed else 0


def _run(experiment, unfinished, total, folder, jobs, command):
    """Runs trials; returns pairs of a failed trial and its error."""
    failed = []
    with runner.Runner(unfinished, folder, jobs) as running:
        display = progress.Progress(running, folder / "trials", total)
        for outcome in running:
            if outcome is None:
                display.look()
                continue
            if outcome.error is not None:
                failed.append((outcome.trial, outcome.error))
            display.finished(
                outcome, _summary(folder / "trials" / outcome.trial.name)
            )
            write_table(experiment, folder, command)
    return failed


def _summary(folder):
    if not results.is_finished(folder):
        return None
    result = files.read_json(folder / "result.json")
    return (
        f"{100 * result['test_accuracy']:.1f} % at ε = "
        f"{float(result['epsilon']):.3g}"
    )


def write(experiment, folder, command):
    """Writes table, results and figures of the trials that are finished."""
    finished = write_table(experiment, folder, command)
    if not finished.rows:
        return
    folder_page.write_with_figures(
        folder,
        {
            name: functools.partial(draw, finished)
            for name, draw in experiment.figures.items()
        },
    )


def write_table(experiment, folder, command):
    """Writes `table.md` and `results.json`; returns the `results.Results`."""
    finished = results.Results(experiment, folder / "trials")
    files.make_folder(folder)
    commands = "\n".join(_commands(folder, command))
    files.write_text(folder / "table.md", table.markdown(finished, commands))
    files.write_json(
        folder / "results.json", results.as_json(finished), allow_nan=False
    )
    return finished


def _commands(folder, command):
    """All commands that wrote to a folder, including this one."""
    file = folder / "commands.json"
    commands = files.read_json(file, list) if file.exists() else []
    if command not in commands:
        commands.append(command)
        files.write_json(file, commands)
    return commands


def run():
    """Runs `tf-dpsub reproduce`."""
    program.run(main)


if __name__ == "__main__":
    run()
