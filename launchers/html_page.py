"""A page for the browser that needs no other file, and no network."""

import dataclasses
import html

_STYLE = """
:root {
  color-scheme: light dark;
  --ink: #222222; --grey: #6b7280; --faint: #e5e7eb;
  --page: #ffffff; --panel: #f6f7f9; --link: #0072b2;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e8eaed; --grey: #a0a7b3; --faint: #3a3f47;
    --page: #16181c; --panel: #22252b; --link: #56b4e9;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 56rem;
  background: var(--page); color: var(--ink);
  font: 1rem/1.55 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
  overflow-wrap: anywhere;
}
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 0.75rem; }
h2 { font-size: 1.15rem; margin: 2.25rem 0 0.75rem; }
h3 { font-size: 1rem; margin: 1.5rem 0 0.5rem; }
.result { font-size: 1.15rem; margin: 0 0 1.25rem; }
a { color: var(--link); }
.command {
  display: flex; gap: 0.5rem; align-items: flex-start; padding: 0.5rem;
  background: var(--panel); border-radius: 0.4rem;
}
pre { font-size: 0.85rem; margin: 0; overflow-x: auto; }
.command pre { flex: 1; padding: 0.55rem 0.3rem; }
button {
  font: inherit; font-size: 0.85rem; min-height: 2.25rem; padding: 0 0.8rem;
  color: var(--ink); background: var(--page); cursor: pointer;
  border: 1px solid var(--grey); border-radius: 0.4rem;
}
.wide { overflow-x: auto; }
table {
  border-collapse: collapse; font-size: 0.9rem; overflow-wrap: normal;
  font-variant-numeric: tabular-nums;
}
th, td {
  padding: 0.35rem 0.9rem 0.35rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--faint);
}
th { color: var(--grey); font-weight: 600; }
figure { margin: 1rem 0; overflow-x: auto; }
figure svg { display: block; width: 100%; height: auto; }
details { margin-top: 0.75rem; }
summary { cursor: pointer; }
.panel > :first-child { margin-top: 0; }
.panel > :last-child { margin-bottom: 0; }
.panel { background: var(--panel); border-radius: 0.4rem; padding: 0.75rem; }
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


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of a page.

    Attributes:
        heading: string; empty for none.
        body: string, HTML.
    """

    heading: str
    body: str


def page(title, sentence, sections, command=None):
    """A whole page.

    Args:
        title: string.
        sentence: string, the result.
        sections: iterable of `Section`.
        command: string, what made it, with a button that copies it. Defaults to
            `None`.

    Returns:
        string, an HTML document.
    """
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="result">{html.escape(sentence)}</p>',
    ]
    if command is not None:
        parts.append(
            f'<div class="command"><pre id="command">{html.escape(command)}'
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


def table(columns, rows):
    """A table of texts, HTML.

    Args:
        columns: sequence of strings, their names; empty for none.
        rows: iterable of sequences of strings.
    """
    lines = ['<div class="wide"><table>']
    if columns:
        cells = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
        lines.append(f"<thead><tr>{cells}</tr></thead>")
    for row in rows:
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
        lines.append(f"<tr>{cells}</tr>")
    return "\n".join([*lines, "</table></div>"])


def figure(svg):
    """A figure, HTML, of what `figures.svg` returned."""
    return f"<figure>{svg}</figure>"


def prose(text):
    """Paragraphs of a plain text, HTML; indented lines stay as they are."""
    parts = []
    for paragraph in text.strip().split("\n\n"):
        escaped = html.escape(paragraph)
        kept = paragraph.startswith(" ")
        parts.append(f"<pre>{escaped}</pre>" if kept else f"<p>{escaped}</p>")
    return f'<div class="panel">{"".join(parts)}</div>'


def folded(summary, body):
    """HTML that is shown when it is asked for."""
    return f"<details><summary>{html.escape(summary)}</summary>{body}</details>"
