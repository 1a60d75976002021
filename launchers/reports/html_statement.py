"""Layout of the privacy statement in a page of HTML."""

import html
import re

from tf_dpsub.launchers.reports import markup

# A paragraph's term and its text. The term is a word before a full stop, a few
# words before a colon, or a mechanism before a longer description.
_TERMS = (
    re.compile(r"(\w+)\.\s(.*)", re.DOTALL),
    re.compile(r"((?:[\w-]+\s){0,3}[\w-]+):\s(.*)", re.DOTALL),
    re.compile(r"([\w-]+),?\s(?=[^:]*:\s\d+\ssteps)(.*)", re.DOTALL),
)
_WARNINGS = ("WARNING", "NOT PRIVATE")


def section(text):
    """Lays a privacy statement out as a section of a page.

    Values of ε form a table that fits a phone. Each paragraph stands beside its
    term, or below it on a narrow screen. The section has all words of the
    statement.

    Args:
        text: string, as `tf_dpsub.accounting.statement` returns it.

    Returns:
        A `markup.Section`.
    """
    heading, *paragraphs = text.strip("\n").split("\n\n")
    parts, terms = [], []
    for paragraph in paragraphs:
        term = _term(paragraph)
        if term is not None:
            terms.append(term)
            continue
        parts += _list(terms)
        terms = []
        parts.append(_table(paragraph) or f"<p>{html.escape(paragraph)}</p>")
    parts += _list(terms)
    body = f'<div class="panel statement">{"".join(parts)}</div>'
    return markup.Section(heading, body)


def _term(paragraph):
    for form in _TERMS:
        match = form.fullmatch(paragraph)
        if match is not None:
            return match[1], match[2]
    return None


def _list(terms):
    if not terms:
        return
    yield '<dl class="terms">'
    for name, text in terms:
        mark = ' class="warning"' if name in _WARNINGS else ""
        yield (
            f"<dt{mark}>{html.escape(name)}</dt>"
            f"<dd{mark}>{html.escape(text)}</dd>"
        )
    yield "</dl>"


def _table(paragraph):
    """HTML table of indented lines, whose columns are two spaces apart."""
    lines = paragraph.splitlines()
    if not all(line.startswith("  ") for line in lines):
        return None
    columns, *rows = (re.split(r" {2,}", line.strip()) for line in lines)
    return markup.table(columns, rows, kind="numbers")
