"""The table of an experiment, in Markdown.

Not `pandas.DataFrame.to_markdown`, which takes two further packages to save the
ten lines of `_grid`.
"""

import math

from tf_dpsub.accounting.statement import round_up
from tf_dpsub.launchers.reports import folder_page


def markdown(results, command):
    """Formats the results beside the paper's accuracies.

    Args:
        results: `results.Results`.
        command: string, the command line that made them.

    Returns:
        A string of several lines.
    """
    experiment = results.experiment
    lines = folder_page.heading(experiment.title, command)
    lines += [_sentence(results), ""]
    lines += [
        "Test accuracy in percent after the last epoch, mean ± standard "
        "deviation over seeds. ε is of the steps that ran, recomputed from "
        "their ledgers.",
        "",
    ]
    lines += [f"- {note}" for note in _notes(results)]
    columns = _columns(results)
    if experiment.best_of and results.rows:
        lines += ["", f"## Best by {' and '.join(experiment.best_of)}", ""]
        lines += _grid(columns, results.best(*experiment.best_of))
        lines += ["", "## All"]
    lines += ["", *_grid(columns, results.rows)]
    return "\n".join(lines) + "\n"


def _sentence(results):
    if not results.rows:
        return "No trial has finished."
    best = max(results.rows, key=lambda row: row.mean)
    labels = ", ".join(
        str(value) if name == "method" else f"{name} = {value}"
        for name, value in sorted(
            best.labels.items(), key=lambda label: label[0] != "method"
        )
        if value != ""
    )
    return (
        f"The most accurate of {len(results.rows)} settings is {labels}: "
        f"{_accuracy(best)} % of test examples."
    )


def _notes(results):
    experiment = results.experiment
    notes = list(experiment.notes)
    if experiment.fraction != 1:
        notes.insert(
            0,
            f"Shortened: {experiment.fraction:g} of the paper's epochs were "
            "run (at least one). Schedules that depend on the epoch were "
            "shortened with it.",
        )
    missing = len(experiment.trials) - len(results.outcomes)
    if missing:
        notes.insert(
            0,
            f"Not complete: {missing} of {len(experiment.trials)} trials have "
            "not finished.",
        )
    return notes


def _columns(results):
    """Columns of the table: dict from names to functions of a row."""
    labels = {}
    for row in results.rows:
        labels |= dict.fromkeys(row.labels)
    columns = {
        label: lambda row, label=label: str(row.labels.get(label, ""))
        for label in labels
    }
    columns["test accuracy"] = _accuracy
    if any(row.paper is not None for row in results.rows):
        columns["paper"] = lambda row: _percent(row.paper)
    if any(row.projection_error is not None for row in results.rows):
        columns["projection error"] = lambda row: _percent(row.projection_error)
    columns["seeds"] = lambda row: str(len(row.outcomes))
    columns["epochs"] = lambda row: str(row.epochs)
    columns["ε (RDP)"] = lambda row: _epsilon(row.epsilon("rdp"))
    columns["ε (PLD)"] = lambda row: _epsilon(row.epsilon("pld"))
    if any(row.paper_epsilon is not None for row in results.rows):
        columns["paper's ε"] = lambda row: (
            "" if row.paper_epsilon is None else f"{row.paper_epsilon:g}"
        )
    return columns


def _grid(columns, rows):
    cells = [list(columns)]
    cells += [[text(row) for text in columns.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    cells.insert(1, ["-" * width for width in widths])
    return [
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths)) + " |"
        for line in cells
    ]


def _accuracy(row):
    if row.deviation is None:
        return _percent(row.mean)
    return f"{_percent(row.mean)} ± {_percent(row.deviation)}"


def _percent(share):
    return "" if share is None else f"{100 * share:.1f}"


def _epsilon(value):
    # Rounded up: a printed ε must not be below the spent one.
    return round_up(value, digits=3) if math.isfinite(value) else "∞"
