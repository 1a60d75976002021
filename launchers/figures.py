"""How figures look: one style for all of them."""

import contextlib

import matplotlib
from matplotlib import figure

INK, GREY, FAINT = "#222222", "#6b7280", "#e5e7eb"

# Okabe and Ito's colours, which people with any colour vision tell apart.
BLUE, ORANGE, GREEN = "#0072b2", "#e69f00", "#009e73"
RED, PURPLE, SKY = "#d55e00", "#cc79a7", "#56b4e9"


@contextlib.contextmanager
def style():
    """The context in which figures are made and saved."""
    with matplotlib.rc_context({"font.family": "DejaVu Sans", "font.size": 10}):
        yield


def new(width, height, title):
    """Makes a figure of a size in inches, titled at its left.

    Returns:
        A `matplotlib.figure.Figure`.
    """
    canvas = figure.Figure(
        figsize=(width, height), dpi=150, layout="constrained"
    )
    canvas.suptitle(title, x=0.02, ha="left", color=INK, weight="bold")
    return canvas


def subtitle(axes, text):
    """Writes a text in grey above axes, at the left."""
    axes.set_title(text, loc="left", fontsize=10, color=GREY)


def tidy(axes):
    """Leaves of axes what is read: two spines, ticks, and lines across."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(colors=GREY, which="both")
    axes.yaxis.label.set_color(INK)
    axes.xaxis.label.set_color(INK)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
