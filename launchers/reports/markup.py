"""HTML of pages that need no other file and no network.

Not Jinja2: most of this file is the style sheet. The few functions that escape
their texts need no templates, which would be data files of the wheel and one
more dependency.
"""

import base64
import dataclasses
import hashlib
import html
import re

from tf_dpsub.launchers.reports import safe_html

_STYLE = """
:root {
  color-scheme: light dark;
  --ink: #222222; --grey: #5b6370; --faint: #e1e4e8; --bad: #b3261e;
  --page: #ffffff; --panel: #f5f6f8; --link: #0072b2; --shade: #0003;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e8eaed; --grey: #a0a7b3; --faint: #3a3f47; --bad: #ff9d94;
    --page: #16181c; --panel: #22252b; --link: #56b4e9; --shade: #fff4;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 2rem 1.5rem 4rem; max-width: 67rem;
  background: var(--page); color: var(--ink);
  font: 1rem/1.55 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
  overflow-wrap: anywhere; -webkit-text-size-adjust: 100%;
}
h1 { font-size: 1.4rem; line-height: 1.25; margin: 0 0 1rem; }
h2 {
  font-size: 1.15rem; margin: 2.75rem 0 0.75rem; padding-top: 0.75rem;
  border-top: 1px solid var(--faint);
}
h3 { font-size: 1rem; margin: 1.5rem 0 0.5rem; }
.headline {
  display: flex; flex-wrap: wrap; gap: 1px; margin: 0 0 1rem;
  background: var(--faint); overflow: hidden;
  border: 1px solid var(--faint); border-radius: 0.5rem;
}
.headline > div {
  flex: 1 1 6.25rem; padding: 0.9rem 1.1rem; background: var(--panel);
}
.headline dd { margin: 0; }
.headline dt, .headline .note {
  color: var(--grey); font-size: 0.85rem; line-height: 1.35;
}
.headline .value {
  font-size: clamp(1.3rem, 4.5vw, 2.6rem); font-weight: 650;
  line-height: 1.3; white-space: nowrap; font-variant-numeric: tabular-nums;
}
.headline .bad .value, .warning { color: var(--bad); }
.result { color: var(--grey); margin: 0 0 1.25rem; }
a { color: var(--link); }
.command {
  display: flex; gap: 0.5rem; align-items: flex-start; padding: 0.5rem;
  background: var(--panel); border-radius: 0.5rem;
}
pre {
  font-size: 0.85rem; margin: 0; padding: 0.9rem; overflow-x: auto;
  background: var(--panel); border-radius: 0.5rem;
}
.command pre { flex: 1; padding: 0.55rem 0.3rem; white-space: pre-wrap; }
.command span { display: inline-block; }
button {
  font: inherit; font-size: 0.85rem; min-height: 2.5rem; padding: 0 0.9rem;
  color: var(--ink); background: var(--page); cursor: pointer;
  border: 1px solid var(--grey); border-radius: 0.4rem;
}
.beside { display: grid; gap: 0 2.5rem; align-items: start; }
.beside > div { min-width: 0; }
.wide { margin: 0.75rem 0; }
/* A shadow shows where content goes on sideways. */
.wide, figure {
  overflow-x: auto; background:
    linear-gradient(90deg, var(--page) 50%, transparent) 0 / 2.5rem 100%,
    linear-gradient(270deg, var(--page) 50%, transparent) 100% / 2.5rem 100%,
    linear-gradient(90deg, var(--shade), transparent) 0 / 0.75rem 100%,
    linear-gradient(270deg, var(--shade), transparent) 100% / 0.75rem 100%;
  background-attachment: local, local, scroll, scroll;
  background-repeat: no-repeat;
}
.panel .wide { background: none; }
table {
  border-collapse: collapse; width: 100%; font-size: 0.925rem;
  overflow-wrap: normal; font-variant-numeric: tabular-nums;
}
th, td {
  padding: 0.45rem 1rem 0.45rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--faint);
}
th:last-child, td:last-child { padding-right: 0; }
th { color: var(--grey); font-weight: 600; }
.pairs th { width: 48%; font-weight: 400; }
.pairs td { overflow-wrap: anywhere; }
.numbers :is(th, td):not(:first-child) { text-align: right; width: 22%; }
figure { margin: 1.25rem 0; overflow-x: auto; }
figcaption { font-weight: 600; margin-bottom: 0.5rem; }
figure svg { display: block; width: 100%; height: auto; }
details { margin-top: 0.75rem; }
summary { cursor: pointer; padding: 0.4rem 0; }
.panel > :first-child { margin-top: 0; }
.panel > :last-child { margin-bottom: 0; }
.panel {
  background: var(--panel); border-radius: 0.5rem; padding: 1rem 1.1rem;
}
.terms { margin: 0.75rem 0; }
.terms dt { font-weight: 600; margin-top: 0.75rem; }
.terms dd { margin: 0; }
@media (min-width: 44rem) {
  .beside { grid-template-columns: 1.1fr 1fr; }
  .terms {
    display: grid; grid-template-columns: 10rem minmax(0, 48rem); gap: 0 1rem;
  }
  .terms :is(dt, dd) { margin: 0; padding: 0.45rem 0; }
}
@media (max-width: 43.99rem) {
  body { padding: 1.25rem 1rem 3rem; }
  .headline > div { padding: 0.7rem 0.6rem; }
  .command { flex-direction: column; align-items: stretch; }
  .command button { align-self: flex-end; }
  .wide:not([class*=" "]) table { min-width: 34rem; }
  .stacked :is(table, tbody, tr, td) { display: block; width: auto; }
  .stacked thead { display: none; }
  .stacked tr { padding: 0.5rem 0; border-bottom: 1px solid var(--faint); }
  .stacked td { display: flex; border: 0; padding: 0.1rem 0; }
  .stacked td::before {
    content: attr(data-column); flex: 0 0 38%; color: var(--grey);
  }
}
"""

_SCRIPT = """
for (const button of document.querySelectorAll("button[data-copies]")) {
  button.addEventListener("click", async () => {
    const source = document.getElementById(button.dataset.copies);
    try {
      await navigator.clipboard.writeText(source.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(source);
      button.textContent = "Selected";
    }
  });
}
"""


# Only the page's own script may run, and nothing may be loaded.
_DIGEST = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
_POLICY = (
    f"default-src 'none'; script-src 'sha256-{_DIGEST}'; "
    "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of a page.

    Attributes:
        heading: string; empty for none.
        body: string, HTML.
    """

    heading: str
    body: str


@dataclasses.dataclass(frozen=True)
class Figure:
    """A main number at the top of a page.

    Attributes:
        name: string.
        value: string.
        note: string, a remark below it. Defaults to none.
        bad: bool, whether it is marked as a warning. Defaults to `False`.
    """

    name: str
    value: str
    note: str = ""
    bad: bool = False


def page(title, sentence, sections, command=None, headline=()):
    """Builds a whole page.

    Args:
        title: string.
        sentence: string, the result.
        sections: iterable of `Section`.
        command: string, the command line that made it, shown with a button
            that copies it. Defaults to `None`.
        headline: sequence of `Figure`, at most four. Defaults to none.

    Returns:
        string, an HTML document.
    """
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        *_headline(headline),
        f'<p class="result">{html.escape(sentence)}</p>',
    ]
    if command is not None:
        # Lines break between words, not after the dashes of a flag.
        words = re.sub(r"\S+", r"<span>\g<0></span>", html.escape(command))
        parts.append(
            f'<div class="command"><pre id="command">{words}'
            '</pre><button data-copies="command">Copy</button></div>'
        )
    for section in sections:
        if section.heading:
            parts.append(f"<h2>{html.escape(section.heading)}</h2>")
        parts.append(section.body)
    return "\n".join([
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{html.escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        "</head>",
        "<body>",
        "<main>",
        *parts,
        "</main>",
        f"<script>{_SCRIPT}</script>",
        "</body>",
        "</html>",
        "",
    ])  # fmt: skip


def _headline(figures):
    if not figures:
        return
    yield '<dl class="headline">'
    for figure in figures:
        mark = ' class="bad"' if figure.bad else ""
        note = f'<dd class="note">{html.escape(figure.note)}</dd>'
        yield (
            f"<div{mark}><dt>{html.escape(figure.name)}</dt>"
            f'<dd class="value">{html.escape(figure.value)}</dd>'
            f"{note * bool(figure.note)}</div>"
        )
    yield "</dl>"


def pairs(rows):
    """HTML table of names and their values."""
    lines = ['<div class="wide pairs"><table>']
    for name, value in rows:
        lines.append(
            f'<tr><th scope="row">{html.escape(name)}</th>'
            f"<td>{html.escape(value)}</td></tr>"
        )
    return "\n".join([*lines, "</table></div>"])


def table(columns, rows, kind="stacked"):
    """HTML table of texts.

    Args:
        columns: sequence of strings, their names.
        rows: iterable of sequences of strings.
        kind: string. Rows of `"stacked"` become blocks on a narrow screen;
            `"numbers"` has few columns, all but the first aligned right.
            Defaults to `"stacked"`.
    """
    names = [html.escape(name) for name in columns]
    heads = "".join(f'<th scope="col">{name}</th>' for name in names)
    lines = [
        f'<div class="wide {kind}"><table>',
        f"<thead><tr>{heads}</tr></thead>",
        "<tbody>",
    ]
    for row in rows:
        cells = "".join(
            f'<td data-column="{name}">{html.escape(cell)}</td>'
            for name, cell in zip(names, row, strict=True)
        )
        lines.append(f"<tr>{cells}</tr>")
    return "\n".join([*lines, "</tbody></table></div>"])


def figure(svg, caption=""):
    """HTML figure with a caption.

    Args:
        svg: string, as `figures.svg` returns it.
        caption: string. Defaults to none.
    """
    if caption:
        caption = f"<figcaption>{html.escape(caption)}</figcaption>"
    return f"<figure>{caption}{safe_html.cleaned(svg)}</figure>"


def beside(*parts):
    """HTML with parts side by side, or stacked on a narrow screen."""
    columns = "".join(f"<div>{part}</div>" for part in parts)
    return f'<div class="beside">{columns}</div>'


def folded(summary, body):
    """HTML that is hidden until its summary is clicked."""
    return f"<details><summary>{html.escape(summary)}</summary>{body}</details>"
