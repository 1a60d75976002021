"""A figure of a metric and of the privacy spent, epoch by epoch."""

import math
import textwrap

from matplotlib import ticker

from tf_dpsub.launchers.reports import figures

_TEST, _TRAINING, _EPSILON = figures.BLUE, figures.ORANGE, figures.PURPLE


def save_progress(
    path, rows, *, title, subtitle, metric, is_share, delta, budget=None
):
    """Saves a figure of a metric and, below it, epsilon by epoch.

    Args:
        path: `pathlib.Path`, the PNG file.
        rows: list of dicts with `epoch`, `epsilon`, and the metric of training
            and, with `val_` before its name, of the test split.
        title: string, names data, optimizer and model.
        subtitle: string, the result.
        metric: string, its name, such as `"accuracy"`.
        is_share: bool, whether the metric lies between 0 and 1.
        delta: float, the delta of the epsilon shown.
        budget: float, the epsilon to keep, drawn as a line. Defaults to `None`.
    """
    epochs = [row["epoch"] for row in rows]
    with figures.style():
        # Narrow enough to be legible on a phone.
        canvas = figures.new(4.6, 5, title, dpi=200)
        upper, lower = canvas.subplots(2, 1, sharex=True, height_ratios=[3, 2])
        result_text = figures.subtitle(upper, textwrap.fill(subtitle, 48))
        for name, label, colour in (
            (metric, "training (private, not covered by ε)", _TRAINING),
            (f"val_{metric}", "test", _TEST),
        ):
            # A perplexity may be infinite.
            values = [
                v if math.isfinite(v := row[name]) else math.nan for row in rows
            ]
            _line(upper, epochs, values, label, colour)
        upper.set_ylabel(metric)
        if is_share:
            upper.yaxis.set_major_formatter(ticker.PercentFormatter(1.0))
        else:
            upper.set_yscale("log")
        # The legend is below both axes, where it hides no line.
        canvas.legend(
            frameon=False, loc="outside lower left", labelcolor=figures.INK
        )
        epsilons = [row["epsilon"] for row in rows]
        if all(map(math.isfinite, epsilons)):
            _line(lower, epochs, epsilons, None, _EPSILON)
        else:
            lower.text(
                0.5,
                0.4,
                "not private: ε is infinite",
                transform=lower.transAxes,
                ha="center",
                color=_EPSILON,
            )
            lower.set_yticks([])
        if budget is not None:
            lower.axhline(
                budget, color=figures.GREY, linewidth=1, linestyle="--"
            )
            lower.annotate(
                f"budget ε = {budget:g}",
                (0, budget),
                xycoords=("axes fraction", "data"),
                xytext=(4, -3),
                textcoords="offset points",
                va="top",
                color=figures.GREY,
            )
        # Set last: it also ends automatic scaling of the upper limit.
        lower.set_ylim(bottom=0)
        lower.set_ylabel(f"ε at δ = {delta:g}")
        lower.set_xlim(epochs[0] - 0.5, epochs[-1] + 0.5)
        figures.epoch_ticks(lower)
        for axes in (upper, lower):
            figures.tidy(axes)
        canvas.align_ylabels()
        figures.write(canvas, path, png_only=[result_text])


def _line(axes, epochs, values, label, colour):
    axes.plot(
        epochs,
        values,
        color=colour,
        label=label,
        linewidth=2,
        marker="o" if len(epochs) <= 60 else None,
        markersize=3,
    )
