"""Figures as pictures of web pages, which can be read by those who see none."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib import ticker

from tf_dpsub.launchers.reports import figures


@pytest.fixture(name="canvas")
def _canvas():
    canvas = figures.new(6, 3, "Two & three")
    left, right = canvas.subplots(1, 2)
    left.plot([1, 2, 3], [0.5, 0.25, 0.75], label="<test>", color=figures.BLUE)
    left.plot([1, 2, 3, 4], [np.nan, 1.0, 1.0, 1.0], color=figures.GREY)
    left.axhline(0.5)
    left.set_xlabel("epoch")
    left.set_ylabel("accuracy")
    left.yaxis.set_major_formatter(ticker.PercentFormatter(1.0))
    figures.subtitle(left, "by epoch")
    right.barh(["a", "b"], [1.5, 20.0], label="bars")
    for axes in (left, right):
        figures.tidy(axes)
    return canvas


def test_description(canvas):
    assert figures.description(canvas) == (
        "Two & three. by epoch, accuracy by epoch: <test> from 50.0 % at 1 to "
        "75.0 % at 3; from 100.0 % at 2 to 100.0 % at 4. bars: a 1.5, b 20."
    )


def test_description_of_points_and_of_named_places():
    canvas = figures.new(6, 3, "Points")
    axes = canvas.subplots()
    axes.errorbar([0.03, 0.97], [0.5, 0.75], yerr=[0.1, 0.1], label="GEP")
    axes.plot([0, 1], [1, 2], label="line")
    axes.axvline(0.5, label="claimed")
    axes.set_xticks([0, 1], ["few", "many"])
    assert figures.description(canvas) == (
        "Points. line from 1 at few to 2 at many; claimed 0.5; GEP from 0.5 at "
        "few to 0.75 at many."
    )


def test_svg_texts_have_the_ink_of_the_page():
    """Legends included, which have no colour of their own."""
    with figures.style():
        canvas = figures.new(6, 3, "Title")
        axes = canvas.subplots()
        axes.plot([1, 2], label="line")
        axes.legend()
        canvas.legend(loc="outside right upper")
        figures.tidy(axes)
        text = figures.svg(canvas, "some")
    texts = re.findall(r"<text [^>]*>", text)
    assert len(texts) > 4
    assert all("fill: var(--" in element for element in texts)


def test_svg_takes_the_colours_of_the_page(canvas):
    text = figures.svg(canvas, "some")
    assert figures.BLUE in text
    for colour in (figures.INK, figures.GREY, figures.FAINT):
        assert f", {colour})" in text
        assert not re.search(f"(?<!, ){colour}", text)


def test_svg_is_an_element_with_a_description(canvas):
    root = ElementTree.fromstring(figures.svg(canvas, "some"))
    assert root.tag.endswith("svg")
    assert root.get("role") == "img"
    assert root.get("aria-label") == figures.description(canvas)


def test_the_title_of_an_svg_is_for_the_page(canvas):
    """And so is what the page says beside it; a PNG file has both."""
    subtitle = figures.subtitle(canvas.axes[0], "said elsewhere")
    assert "said elsewhere" in figures.svg(canvas, "some")
    text = figures.svg(canvas, "some", hidden=[subtitle])
    assert "<title>Two &amp; three</title>" in text
    root = ElementTree.fromstring(text)
    texts = {e.text for e in root.iter("{http://www.w3.org/2000/svg}text")}
    assert "epoch" in texts
    assert not {"said elsewhere", "Two & three"} & texts
    assert subtitle.get_text() == "said elsewhere"
    assert canvas.get_suptitle() == "Two & three"


def test_two_figures_share_no_identifier(canvas):
    owned = []
    for name in ("first", "second"):
        text = figures.svg(canvas, name)
        owned.append(set(re.findall(r'\bid="([^"]+)"', text)))
        used = re.findall(r'(?:href="#|url\(#)([^")]+)', text)
        assert used and set(used) <= owned[-1]
    assert not owned[0] & owned[1]


def test_files(canvas, tmp_path):
    figures.write(canvas, tmp_path / "some.png")
    assert {p.name for p in tmp_path.iterdir()} == {"some.png", "some.svg"}
    assert (tmp_path / "some.png").stat().st_size > 5000
    text = (tmp_path / "some.svg").read_text("utf-8")
    assert figures.description(canvas).startswith("Two & three.")
    assert 'aria-label="Two &amp; three.' in text


@pytest.mark.parametrize("name", [r"$\frac$", "$^$", r"\$x$ $\undefined{y}$"])
def test_a_dollar_sign_is_no_mathematics(tmp_path, name):
    drawn = figures.new(4, 3, name)
    axes = drawn.subplots()
    figures.subtitle(axes, name)
    axes.semilogy([1, 2, 3], label=name)
    axes.set_xticks([0, 1, 2], [name, "b", "c"])
    axes.legend()
    figures.write(drawn, tmp_path / "some.png")
    text = (tmp_path / "some.svg").read_text("utf-8")
    # In its description, too.
    assert text.count(f">{name}<") >= 3
    # Powers of ten are set as such.
    assert not re.search(r">[^<]*10\^", text)
