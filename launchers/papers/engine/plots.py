"""Figures of the results of an experiment.

Not seaborn: a method keeps its colour and marker in all figures, and most of
the code is what seaborn leaves to matplotlib, such as the paper's points.
"""

import functools
import itertools
import math
import statistics

import numpy as np
from matplotlib import colormaps

from tf_dpsub.launchers.reports import figures
from tf_dpsub.launchers.reports.method_styles import COLOURS, MARKERS

_MAX_COLUMNS = 3
_PAPER = ", paper"
_BESIDE = 1.025


def _noise_of(row):
    """What a row's trials have in common: ε, or the noise multiplier."""
    return row.labels["ε" if "ε" in row.labels else "σ"]


def accuracy_against_epsilon(results, best=False, panel="units"):
    """Draws test accuracy against ε for each method, and the paper's points.

    Args:
        results: `results.Results`.
        best: bool, whether to show only the best setting of each method and ε,
            or σ. Defaults to `False`.
        panel: string, the label whose values have panels of their own. Defaults
            to `"units"`.

    Returns:
        A `matplotlib.figure.Figure`; None if no row is there yet.
    """
    if not results.rows:
        return None
    rows = results.rows
    if best:
        rows = list({
            (row.labels.get(panel), row.method, _noise_of(row)): row
            for row in sorted(rows, key=lambda row: row.mean)
        }.values())  # fmt: skip
        rows.sort(key=results.rows.index)
    panels = _panels(results, panel, rows)
    canvas, grid = _canvas(results, len(panels), height=4.2)
    for axes, (name, rows) in zip(grid, panels.items()):
        figures.subtitle(axes, name)
        methods = list(dict.fromkeys(row.method for row in rows))
        for i, method in enumerate(methods):
            method_rows = [row for row in rows if row.method == method]
            # Methods are shifted apart: most of them share their ε.
            shift = _BESIDE ** (i - (len(methods) - 1) / 2)
            _points(
                axes,
                method_rows,
                method,
                lambda row, shift=shift: shift * _epsilon(row),
            )
            _paper_points(axes, method_rows, method)
        _epsilon_axis(axes, rows)
        _accuracy_axis(axes)
    _legend(canvas, grid)
    return canvas


def accuracy_against_setting(results, setting, panel="units"):
    """Draws test accuracy by the value of a setting, with a baseline.

    Args:
        results: `results.Results`.
        setting: string, the label that the trials differ in. Trials of the
            baseline have an empty one.
        panel: string, the label by whose value the panels differ. Defaults to
            `"units"`.

    Returns:
        A `matplotlib.figure.Figure`.
    """
    panels = _panels(results, panel)
    canvas, grid = _canvas(results, len(panels), height=4.2)
    for axes, (name, rows) in zip(grid, panels.items()):
        figures.subtitle(axes, name)
        for row in rows:
            if row.labels[setting] == "":
                _band(axes, row)
        varied_rows = [row for row in rows if row.labels[setting] != ""]
        values = list(dict.fromkeys(row.labels[setting] for row in varied_rows))
        if all(isinstance(value, (int, float)) for value in values):
            # In whatever order they were tried.
            values = sorted(values)
            varied_rows = sorted(varied_rows, key=lambda r: r.labels[setting])
        for method in dict.fromkeys(row.method for row in varied_rows):
            _points(
                axes,
                [row for row in varied_rows if row.method == method],
                method,
                position=lambda row: values.index(row.labels[setting]),
            )
        axes.set_xticks(range(len(values)), [str(v) for v in values])
        axes.set_xlim(-0.5, len(values) - 0.5)
        axes.set_xlabel(setting)
        _accuracy_axis(axes)
    _legend(canvas, grid)
    return canvas


def accuracy_by_method(results):
    """Draws bars of test accuracy by method and ε, and the paper's points.

    Each task has its own panel.

    Args:
        results: `results.Results`.

    Returns:
        A `matplotlib.figure.Figure`; None if no row is there yet.
    """
    if not results.rows:
        return None
    panels = _panels(results, "task")
    largest_panel = max(map(len, panels.values()))
    canvas, grid = _canvas(
        results, len(panels), height=1.0 + 0.38 * largest_panel, sharey=False
    )
    for axes, (name, rows) in zip(grid, panels.items()):
        figures.subtitle(axes, name)
        _bars(axes, rows)
    if any(row.paper is not None for row in results.rows):
        _legend(canvas, grid)
    return canvas


def by_setting(setting, panel):
    """Figures of an experiment whose trials differ in a setting.

    Args:
        setting: string, the label of the setting.
        panel: string, the label by whose value the panels of the training
            curves differ; None for one panel.

    Returns:
        dict, the `figures` of a `trials.Experiment`.
    """
    return {
        "accuracy": functools.partial(
            accuracy_against_setting, setting=setting
        ),
        "training": functools.partial(
            training_curves, panel=panel, line=setting
        ),
    }


def _bars(axes, rows):
    names = [
        f"{row.method}, ε = {row.labels['ε']}"
        if row.labels["ε"] != "∞"
        else row.method
        for row in rows
    ]
    axes.barh(
        names,
        [row.mean for row in rows],
        xerr=[row.deviation or 0.0 for row in rows],
        color=[COLOURS.get(row.method, figures.GREY) for row in rows],
        height=0.6,
        capsize=3,
    )
    for name, row in zip(names, rows):
        axes.annotate(
            f"{100 * row.mean:.1f}",
            (0.01, name),
            color="white",
            va="center",
            fontsize=9,
        )
    paper_points = [
        (r.paper, n) for r, n in zip(rows, names) if r.paper is not None
    ]
    if paper_points:
        axes.plot(
            *zip(*paper_points),
            marker="D",
            linestyle="",
            markerfacecolor="none",
            markeredgecolor="black",
            label="the paper's, with its model and data",
        )
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(_percent)
    axes.set_xlabel("test accuracy")


def training_curves(results, panel, line="method", labels=None):
    """Draws test accuracy by epoch: the mean and the range over seeds.

    Args:
        results: `results.Results`.
        panel: string, the label by whose value the panels differ; None for
            one panel.
        line: string, the label by whose value the lines differ. Defaults to
            `"method"`.
        labels: dict, the labels of the rows to draw. Defaults to `None`: all.

    Returns:
        A `matplotlib.figure.Figure`; None if no such row is there yet.
    """
    chosen = results.where(**(labels or {}))
    if not chosen:
        return None
    panels = _panels(results, panel, chosen)
    canvas, grid = _canvas(results, len(panels), height=3.2)
    for axes, (name, rows) in zip(grid, panels.items()):
        fixed = [_labelled(*label) for label in (labels or {}).items()]
        figures.subtitle(axes, ", ".join([name, *fixed]))
        colours = _line_colours(rows, line)
        for row in rows:
            name = _line_name(row, line)
            curves = [
                {point["epoch"]: point["val_accuracy"] for point in o.curve}
                for o in row.outcomes
            ]
            _mean_and_range(axes, curves, name, colours[name])
        _mark_start(axes, rows)
        figures.epoch_ticks(axes)
        _accuracy_axis(axes)
    _legend(canvas, grid)
    return canvas


def grid_of_settings(results, panel="learning rate", setting="clip", line="k"):
    """Draws test accuracy by a setting, one panel for each value of another.

    Args:
        results: `results.Results`.
        panel: string, the label by whose value the panels differ. Defaults to
            `"learning rate"`.
        setting: string, the label on the axis. Defaults to `"clip"`.
        line: string, the label by whose value the lines of a method differ; a
            method without it has an empty one. Defaults to `"k"`.

    Returns:
        A `matplotlib.figure.Figure`.
    """
    rows = sorted(results.rows, key=lambda row: row.labels[panel])
    settings = sorted({row.labels[setting] for row in rows})
    values = sorted({row.labels[line] for row in rows} - {""})
    panels = _panels(results, panel, rows)
    canvas, grid = _canvas(results, len(panels), height=4.2)
    for axes, (name, panel_rows) in zip(grid, panels.items()):
        figures.subtitle(axes, name)
        for method, value in dict.fromkeys(
            (row.method, row.labels[line]) for row in panel_rows
        ):
            line_rows = [
                row
                for row in panel_rows
                if (row.method, row.labels[line]) == (method, value)
            ]
            line_rows.sort(key=lambda row: row.labels[setting])
            _points(
                axes,
                line_rows,
                method,
                position=lambda row: settings.index(row.labels[setting]),
                name=method if value == "" else f"{method}, {line} = {value}",
                linestyle="--" if value in values[:1] else "-",
            )
        axes.set_xticks(range(len(settings)), [f"{v:g}" for v in settings])
        axes.set_xlim(-0.3, len(settings) - 0.7)
        axes.set_xlabel(setting)
        _accuracy_axis(axes)
    _legend(canvas, grid)
    return canvas


def projection_errors(results):
    """Draws the projection error by epoch for each method that records it.

    Args:
        results: `results.Results`.

    Returns:
        A `matplotlib.figure.Figure`; None if none is there yet.
    """
    rows = [row for row in results.rows if row.projection_error is not None]
    if not rows:
        return None
    canvas, (axes,) = _canvas(results, 1, height=4.2)
    figures.subtitle(
        axes, "energy of gradients of test examples outside of the subspace"
    )
    for row in rows:
        curves = [o.projection_errors for o in row.outcomes]
        _mean_and_range(axes, curves, row.method, COLOURS[row.method])
    figures.epoch_ticks(axes)
    axes.set_ylim(0, 1)
    axes.set_ylabel("projection error")
    axes.yaxis.set_major_formatter(_percent)
    _legend(canvas, [axes])
    return canvas


def projection_residuals(results):
    """Draws the share of gradients outside carriers, and stable ranks.

    Args:
        results: `results.Results`.

    Returns:
        A `matplotlib.figure.Figure`; None if no row is there yet.
    """
    rows = [row for row in results.rows if row.outcomes[0].residuals]
    if not rows:
        return None
    canvas, grid = _canvas(results, 2, height=3.8, sharey=False)
    styles = {
        "historical": ("-", "o", "carriers of the history"),
        "self": (":", "D", "carriers of the gradient itself"),
    }
    for row in rows:
        colour = COLOURS.get(row.method, figures.GREY)
        residuals = row.outcomes[0].residuals
        # A line of one point would be invisible.
        is_point = len(residuals) == 1
        for name, (style, marker, text) in styles.items():
            grid[0].plot(
                list(residuals),
                [v[name] for v in residuals.values()],
                color=colour,
                linestyle=style,
                marker=marker if is_point else None,
                label=f"{row.method}: {text}",
            )
        grid[1].plot(
            list(residuals),
            [v["stable_rank"] for v in residuals.values()],
            color=colour,
            marker="o" if is_point else None,
        )
    figures.subtitle(grid[0], "share of the gradient that carriers miss")
    figures.subtitle(grid[1], "stable rank of gradients")
    grid[0].set_ylim(0, 1)
    grid[0].yaxis.set_major_formatter(_percent)
    for axes in grid:
        figures.epoch_ticks(axes)
    _legend(canvas, grid)
    return canvas


def spectra(results):
    """Draws the eigenvalues of gradients by rank, on logarithmic axes.

    Args:
        results: `results.Results`.

    Returns:
        A `matplotlib.figure.Figure`.
    """
    panels = _panels(results, "method")
    canvas, grid = _canvas(results, len(panels), height=3.8)
    epochs = {e for o in results.outcomes for e in o.spectra}
    shades = colormaps["viridis"](np.linspace(0.85, 0.1, len(epochs)))
    colours = dict(zip(sorted(epochs), shades))
    for axes, (name, rows) in zip(grid, panels.items()):
        figures.subtitle(axes, name)
        for epoch, eigenvalues in rows[0].outcomes[0].spectra.items():
            axes.loglog(
                range(1, len(eigenvalues) + 1),
                eigenvalues,
                color=colours[epoch],
                label=f"epoch {epoch}",
                linewidth=1.8,
            )
        axes.set_xlabel("order of the eigenvalue")
    grid[0].set_ylabel("eigenvalue of the second moment\nof private gradients")
    canvas.supxlabel(
        "An analysis of private data: no ε covers it.",
        x=0.02,
        ha="left",
        fontsize=9,
        color=figures.GREY,
    )
    _legend(canvas, grid)
    return canvas


def _panels(results, label, rows=None):
    """Groups rows by the value of a label; one group without the label."""
    rows = results.rows if rows is None else rows
    panels = {}
    for row in rows:
        value = row.labels.get(label)
        name = "" if value is None else _labelled(label, value)
        panels.setdefault(name, []).append(row)
    return panels


def _labelled(label, value):
    if label in ("method", "data"):
        return str(value)
    return f"{value} units" if label == "units" else f"{label} = {value}"


def _canvas(results, panels, height, sharey=True):
    columns = min(panels, _MAX_COLUMNS)
    lines = math.ceil(panels / columns)
    title = results.experiment.title
    if results.experiment.fraction != 1:
        title += f"\nshortened: {results.experiment.fraction:g} of the epochs"
    canvas = figures.new(
        2.2 + max(4.8, 3.8 * columns), height * lines + 0.5, title
    )
    grid = canvas.subplots(lines, columns, squeeze=False, sharey=sharey).ravel()
    for axes in grid:
        figures.tidy(axes)
    for axes in grid[panels:]:
        axes.set_visible(False)
    return canvas, grid[:panels]


def _points(axes, rows, method, position, name=None, linestyle="-"):
    axes.errorbar(
        [position(row) for row in rows],
        [row.mean for row in rows],
        yerr=[row.deviation or 0.0 for row in rows],
        label=name or method,
        color=COLOURS[method],
        marker=MARKERS[method],
        markersize=6,
        linewidth=1.5,
        linestyle=linestyle,
        capsize=3,
    )


def _paper_points(axes, rows, method):
    paper_rows = [row for row in rows if row.paper is not None]
    if not paper_rows:
        return
    axes.plot(
        [row.paper_epsilon for row in paper_rows],
        [row.paper for row in paper_rows],
        label=f"{method}{_PAPER}",
        color=COLOURS[method],
        marker=MARKERS[method],
        markersize=8,
        markerfacecolor="none",
        linestyle="none",
    )


def _band(axes, row):
    colour = COLOURS[row.method]
    axes.axhline(row.mean, color=colour, linewidth=1.5, label=row.method)
    if row.deviation is not None:
        axes.axhspan(
            row.mean - row.deviation,
            row.mean + row.deviation,
            color=colour,
            alpha=0.15,
            linewidth=0,
        )


def _mean_and_range(axes, curves, name, colour):
    """Draws the mean and the range of curves, dicts from epochs to values."""
    epochs = sorted(set().union(*curves))
    values = [[c[epoch] for c in curves if epoch in c] for epoch in epochs]
    axes.plot(
        epochs,
        [statistics.fmean(v) for v in values],
        color=colour,
        label=name,
        linewidth=1.8,
        marker="o" if len(epochs) == 1 else None,
    )
    axes.fill_between(
        epochs,
        [min(v) for v in values],
        [max(v) for v in values],
        color=colour,
        alpha=0.15,
        linewidth=0,
    )


def _mark_start(axes, rows):
    """Marks the first epoch with projection, after a start as DP-SGD."""
    starts = {row.outcomes[0].trial.config.start_epoch for row in rows}
    for start in sorted(starts - {1}):
        axes.axvline(start - 0.5, color=figures.GREY, linewidth=1, ls=":")
        axes.annotate(
            f"projected from epoch {start}",
            (start - 0.5, 0.02),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            fontsize=8,
            color=figures.GREY,
        )


def _line_name(row, line):
    value = row.labels.get(line, "")
    if line == "method" or value == "":
        return row.method
    return f"{line} = {value}"


def _line_colours(rows, line):
    """Colours of lines: those of methods, else shades in order."""
    names = list(dict.fromkeys(_line_name(row, line) for row in rows))
    shaded = [name for name in names if name not in COLOURS]
    shades = colormaps["viridis"](np.linspace(0.1, 0.85, len(shaded)))
    return COLOURS | dict(zip(shaded, shades))


def _epsilon_axis(axes, rows):
    """Makes the horizontal axis logarithmic, with a tick at each ε."""
    epsilons = sorted(set(map(_epsilon, rows)))
    # Ticks closer than a few percent would overlap.
    ticks = [
        value
        for before, value in itertools.pairwise([0, *epsilons])
        if value > 1.08 * before
    ]
    figures.log_ticks(axes, {value: f"{value:.2g}" for value in ticks})
    # A single ε does not fill the whole axis.
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, epsilons[0] / 1.5), max(high, 1.5 * epsilons[-1]))
    trial = rows[0].outcomes[0].trial
    axes.set_xlabel(
        f"ε ({trial.accountant.upper()}) at δ = {trial.config.delta:g}"
    )


def _epsilon(row):
    """The ε of a row, by the accountant that its noise was found by."""
    return row.epsilon(row.outcomes[0].trial.accountant)


def _accuracy_axis(axes):
    axes.yaxis.set_major_formatter(_percent)
    if axes.get_subplotspec().is_first_col():
        axes.set_ylabel("test accuracy")


def _percent(share, _):
    return f"{round(100 * share, 6):g} %"


def _legend(canvas, grid):
    """Adds the legend: measured results first, then the paper's points."""
    figures.shared_legend(
        canvas, grid, key=lambda label: label.endswith(_PAPER)
    )
