"""Files in a folder of results cannot run code in its page."""

import html
import html.parser
import json
import re

import numpy as np
import pytest

from tf_dpsub.launchers.reports import figures, folder_page, markup, safe_html

HOSTILE_SVG = (
    "<svg onload=alert(1)><script>alert(2)</script><g>kept</g></svg>",
    '<svg><a xlink:href="javascript:alert(1)"><text>kept</text></a></svg>',
    '<svg><a href="&#106;ava\tscript:alert(1)"><text>kept</text></a></svg>',
    '<svg><use href="data:image/svg+xml;base64,PHN2Zz4=#x"/>kept</svg>',
    "<svg><foreignObject><iframe srcdoc='<script>1'/></foreignObject>kept",
    "<svg><style><img src=x onerror=alert(1)></style><g>kept</g></svg>",
    "<svg><style>*{background:url(//evil/x)}</style><g>kept</g></svg>",
    "<svg><set attributeName=onload to=alert(1) /><g>kept</g></svg>",
    '<svg><text style="fill: url(http://evil/x)">kept</text></svg>',
    "</figure></main><script>alert(1)</script><p>kept",
)


class _Active(html.parser.HTMLParser):
    """Finds what runs or is loaded, the page's own script excepted."""

    def __init__(self, text):
        super().__init__()
        self.found, self.tags = [], []
        self.feed(text.replace(f"<script>{markup._SCRIPT}</script>", ""))

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag in ("script", "iframe", "img", "object", "set", "base", "link"):
            self.found.append(tag)
        for name, value in attrs:
            value = re.sub(r"\s", "", value or "")
            if name.startswith("on") or re.search(
                r"^(java|vb)script:|^data:|^//|url\((?!#)", value
            ):
                self.found.append((name, value))


@pytest.mark.parametrize("svg", HOSTILE_SVG)
def test_nothing_of_a_figure_runs(svg):
    page = markup.page("", "", [], None) + markup.figure(svg)
    assert "kept" in page
    assert not _Active(page).found


def test_our_own_figures_stay_as_they_are():
    with figures.style():
        canvas = figures.new(4, 3, "A <title> & more")
        axes = canvas.subplots()
        axes.loglog([1, 10, 100], [3, 2, 1], label="points", marker="o")
        axes.legend()
        svg = figures.svg(canvas, "name")
    cleaned = html.unescape(safe_html.cleaned(svg))
    svg = html.unescape(svg)
    assert _Active(cleaned).tags == _Active(svg).tags
    numbers = r'[\d.]+(?=[ "])'
    assert re.findall(numbers, cleaned) == re.findall(numbers, svg)
    assert re.findall(r'(?:id|href|style)="[^"]*"', cleaned) == re.findall(
        r'(?:id|href|style)="[^"]*"', svg
    )


def test_the_page_runs_its_own_script_alone():
    page = markup.page("", "", [])
    (policy,) = re.findall(r'Security-Policy" content="([^"]*)"', page)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert page.index("Security-Policy") < page.index("<style>")


def _hostile_result():
    text = "</td></pre><script>alert(1)</script>"
    config = {"dataset": text, "optimizer": text, "model": text, text: text}
    return {
        "summary": text,
        "config": config,
        "command": text,
        "versions": {text: text},
        "devices": [text],
        "noise_multiplier": 1.0,
        "l2_norm_clip": text,
        "sampling": text,
        "accountant": text,
        "test_accuracy": 0.5,
        "test_examples": 5,
        "delta": 1e-5,
        "private_examples": 10,
        "batch_size": 5,
        "sampling_rate": 0.5,
        "epochs": 1,
        "steps": 2,
        "parameters": 3,
        "epsilon": "inf",
        "epsilon_rdp": "inf",
        "epsilon_pld": "inf",
        "test_loss": "nan",
        "peak_memory_mib": {"host": 1.0},
        "step_milliseconds": None,
    }


def test_nothing_of_a_run_runs(tmp_path):
    folder = tmp_path / "<script>alert(1)<"
    folder.mkdir()
    (folder / "result.json").write_text(json.dumps(_hostile_result()))
    (folder / "privacy_statement.txt").write_text("<b onclick=x>\n\n  <i>")
    (folder / "evil.svg").write_text(HOSTILE_SVG[0])
    # Never complete, so not a figure of the run.
    (folder / ".incomplete-1-evil.svg").write_text("<svg>half")
    (folder / "test_projection_error.csv").write_text(
        'epoch,group,error\n1,"</text><script>alert(1)</script>",0.1\n'
        "2,$\\frac$,0.2\n"
    )
    np.savez(
        folder / 'a"><script>\\1<_spectrum.npz',
        epochs=[1],
        eigenvalues=np.ones([1, 3]),
    )
    page = folder_page.write(folder).read_text("utf-8")
    assert not _Active(page).found
    assert "half" not in page
    assert r"$\frac$" in page


def test_nothing_of_a_table_runs(tmp_path):
    (tmp_path / "table.md").write_text(
        "# <script>a</script>\n\n```sh\nx</pre><script>1</script>\n```\n\n"
        "**<img onerror=x src=y>**\n\n[a](javascript:alert(1)) [b](//evil) "
        "<script>x</script>\n\n![i](http://evil/x.png)\n\n| a | b |\n"
        "|---|---|\n| <b onclick=1> | [c](JavaScript:x) [d](docs/x.md) |\n"
    )
    page = folder_page.write(tmp_path).read_text("utf-8")
    assert {found for found in _Active(page).found} <= {("href", "//evil")}
    assert 'href="docs/x.md"' in page
