"""The common style of all figures, and their files."""

import contextlib
import html
import io
import re

import matplotlib
from matplotlib import container, figure, ticker
from matplotlib.text import Text

from tf_dpsub import files

INK, GREY, FAINT = "#222222", "#6b7280", "#e5e7eb"

# Okabe and Ito's colours, which people with any colour vision tell apart.
BLUE, ORANGE, GREEN = "#0072b2", "#e69f00", "#009e73"
RED, PURPLE, SKY = "#d55e00", "#cc79a7", "#56b4e9"


@contextlib.contextmanager
def style():
    """Context with the style; figures are made and saved in it."""
    settings = {
        "font.family": "DejaVu Sans",
        "font.size": 10,
        "text.color": INK,
        "axes.labelcolor": INK,
        "legend.labelcolor": INK,
    }
    with matplotlib.rc_context(settings):
        yield


def new(width, height, title, dpi=150):
    """Makes an empty figure with its title at the left.

    Args:
        width: float, inches.
        height: float, inches.
        title: string.
        dpi: int, pixels per inch of its PNG file. Defaults to `150`.

    Returns:
        A `matplotlib.figure.Figure`.
    """
    canvas = figure.Figure(
        figsize=(width, height), dpi=dpi, layout="constrained"
    )
    canvas.suptitle(title, x=0.02, ha="left", color=INK, weight="bold")
    return canvas


def subtitle(axes, text):
    """Writes a text in grey above axes, at the left, and returns it."""
    return axes.set_title(text, loc="left", fontsize=10, color=GREY)


def tidy(axes):
    """Reduces axes to two spines, ticks and horizontal grid lines."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(colors=GREY, which="both")
    axes.yaxis.label.set_color(INK)
    axes.xaxis.label.set_color(INK)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)


def log_ticks(axes, labels):
    """Makes the horizontal axis logarithmic, with these ticks alone.

    Args:
        axes: matplotlib axes.
        labels: dict from the places of ticks to their texts.
    """
    axes.set_xscale("log")
    axes.set_xticks(list(labels), list(labels.values()))
    axes.xaxis.set_minor_locator(ticker.NullLocator())


def epoch_ticks(axes):
    """Makes the horizontal axis one of epochs, with ticks at whole numbers."""
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(
        ticker.MaxNLocator(integer=True, min_n_ticks=1)
    )


def shared_legend(canvas, grid, key=None):
    """Adds one legend for all panels, beside them.

    Args:
        canvas: `matplotlib.figure.Figure`.
        grid: sequence of its axes. A label occurs once in the legend.
        key: function by whose value labels are sorted. Defaults to `None`: by
            their first panel.
    """
    handles = {}
    for axes in grid:
        for handle, label in zip(*axes.get_legend_handles_labels()):
            handles.setdefault(label, handle)
    labels = list(handles) if key is None else sorted(handles, key=key)
    canvas.legend(
        [handles[label] for label in labels],
        labels,
        loc="outside right center",
        frameon=False,
        labelcolor=INK,
    )


def write(canvas, path, png_only=()):
    """Writes a figure as a PNG file, and as an SVG file beside it.

    Args:
        canvas: `matplotlib.figure.Figure`.
        path: `pathlib.Path`, of the PNG file.
        png_only: sequence of matplotlib texts to leave out of the SVG: the web
            page has them beside the figure. Defaults to none.
    """
    _take_literally(canvas)
    with style():
        files.replace(path, lambda p: canvas.savefig(p, format="png"))
        text = svg(canvas, path.stem, png_only)
    files.write_text(path.with_suffix(".svg"), text)


# CSS pixels per point: at the smallest scale, texts of 10 points are legible;
# at the largest, they are no larger than the text around them.
_LEAST_SCALE, _LARGEST_SCALE = 0.95, 1.6

# Colours that follow the page's colour scheme; those of data do not.
_FOLLOWS = {"#000000": "ink", INK: "ink", GREY: "grey", FAINT: "faint"}


def svg(canvas, name, hidden=()):
    """The figure as an SVG element that takes the colours of its web page.

    The title is not drawn. The page takes it as a caption from the SVG's
    `<title>`: a caption does not shrink with the figure.

    Args:
        canvas: `matplotlib.figure.Figure`.
        name: string, unique on the page.
        hidden: sequence of matplotlib texts to leave out. Defaults to none.

    Returns:
        string, with a description for screen readers.
    """
    name = re.sub(r"[^\w-]", "-", name)
    _take_literally(canvas)
    file = io.StringIO()
    settings = {"svg.fonttype": "none", "svg.hashsalt": name}
    title = canvas.get_suptitle()
    metadata = {"Date": None, "Title": title or None}
    titles = [text for text in canvas.texts if text.get_text() == title]
    with matplotlib.rc_context(settings), _without([*titles, *hidden]):
        canvas.savefig(file, format="svg", transparent=True, metadata=metadata)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # Identifiers must be unique on the page.
    text = re.sub(r'(\bid="|"#|\(#)', rf"\g<1>{name}-", text)
    for colour, variable in _FOLLOWS.items():
        text = text.replace(colour, f"var(--{variable}, {colour})")
    text = text.replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")
    label = html.escape(description(canvas), quote=True)
    # On a small screen, the figure scrolls rather than becoming illegible.
    least, largest = (
        f"{scale * 72 * canvas.get_figwidth():.0f}px"
        for scale in (_LEAST_SCALE, _LARGEST_SCALE)
    )
    return text.replace(
        "<svg",
        f'<svg role="img" aria-label="{label}" '
        f'style="min-width: {least}; max-width: {largest}"',
        1,
    )


@contextlib.contextmanager
def _without(texts):
    """Context in which some texts of a figure are empty."""
    contents = [text.get_text() for text in texts]
    for text in texts:
        text.set_text("")
    try:
        yield
    finally:
        for text, content in zip(texts, contents):
            text.set_text(content)


def _take_literally(canvas):
    """Makes dollar signs in texts literal, not marks of mathematics."""
    scales = {
        label
        for axes in canvas.axes
        for axis in (axes.xaxis, axes.yaxis)
        # Powers of ten need mathematical typesetting.
        if isinstance(axis.get_major_formatter(), ticker.LogFormatter)
        for label in axis.get_ticklabels(which="both")
    }
    for text in canvas.findobj(Text):
        if text not in scales:
            text.set_parse_math(False)


def description(canvas):
    """Describes a figure in words: each line from its start to its end."""
    parts = []
    if canvas.get_suptitle():
        parts.append(canvas.get_suptitle())
    for axes in canvas.axes:
        series = [*_lines(axes), *_points(axes), *_bars(axes)]
        if not series:
            continue
        title = axes.get_title(loc="left") or axes.get_title()
        names = " by ".join(
            filter(None, (axes.get_ylabel(), axes.get_xlabel()))
        )
        heading = ", ".join(filter(None, (title, names)))
        parts.append(": ".join(filter(None, (heading, "; ".join(series)))))
    return ". ".join(parts) + "."


def _lines(axes):
    for line in axes.get_lines():
        points = [(x, y) for x, y in zip(*line.get_data()) if _is_number(y)]
        label = line.get_label()
        named = not label.startswith("_")
        if not points or (not named and len(points) < 3):
            continue
        text = f"{label} " if named else ""
        if line.get_transform() == axes.get_xaxis_transform():
            # A vertical line over the full height.
            yield f"{text}{_number(axes.xaxis, points[0][0])}"
        else:
            yield text + _course(axes, points)


def _points(axes):
    """Yields a description of each series of points with error bars."""
    for bars in axes.containers:
        if isinstance(bars, container.ErrorbarContainer):
            points = [*zip(*bars.lines[0].get_data())]
            label = bars.get_label()
            text = "" if label.startswith("_") else f"{label} "
            yield text + _course(axes, points)


def _course(axes, points):
    """Describes the first and last point, or the constant of a short line."""
    (x0, y0), (x1, y1) = points[0], points[-1]
    y0, y1 = (_number(axes.yaxis, y) for y in (y0, y1))
    if len(points) < 3 and y0 == y1:
        return y0
    x0, x1 = (_number(axes.xaxis, x) for x in (x0, x1))
    return f"from {y0} at {x0} to {y1} at {x1}"


def _bars(axes):
    names = [t.get_text() for t in axes.get_yticklabels()]
    for bars in axes.containers:
        if not isinstance(bars, container.BarContainer):
            continue
        if bars.orientation != "horizontal" or len(bars) != len(names):
            continue
        values = [_number(axes.xaxis, bar.get_width()) for bar in bars]
        label = bars.get_label()
        text = "" if label.startswith("_") else f"{label}: "
        yield text + ", ".join(f"{n} {v}" for n, v in zip(names, values))


def _is_number(value):
    try:
        return value == value and abs(value) != float("inf")
    except TypeError:
        return False


def _number(axis, value):
    form = axis.get_major_formatter()
    if isinstance(form, ticker.PercentFormatter):
        return f"{100 * value:.1f} %"
    if isinstance(axis.get_major_locator(), ticker.FixedLocator):
        # Points are shifted a little from their tick.
        for tick in axis.get_major_ticks():
            if abs(value - tick.get_loc()) <= 0.1 * max(abs(value), 1):
                return tick.label1.get_text()
    return f"{value:.3g}"
