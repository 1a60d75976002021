"""Removes scripts and external references from HTML and SVG.

Not by bleach, which is no longer maintained, nor by nh3, where cleaning of SVG
is an open question (messense/nh3, issue 91).
"""

import html
import html.parser
import re

# Elements of our figures and of Markdown's tables and texts.
_TAGS = frozenset(
    "svg g defs path use text tspan rect circle ellipse line polyline polygon "
    "clippath lineargradient stop image title desc style "
    "h1 h2 h3 h4 h5 h6 p br hr ul ol li em strong del code pre blockquote a "
    "div span table thead tbody tr th td dl dt dd".split()
)
_SCHEMES = ("http", "https", "mailto")
_PICTURE = "data:image/png;base64,"
# A style without external references and without characters of markup.
_STYLE = re.compile(r"(?!.*(?:url\((?!\s*[\"']?#)|@|\\))[^<>&]*", re.DOTALL)


def cleaned(text: str) -> str:
    """Removes everything from HTML or SVG that could run or load.

    Elements, attributes and addresses that figures and tables do not need are
    removed; scripts together with their content.

    Args:
        text: string, a part of a page.

    Returns:
        string.
    """
    cleaner = _Cleaner()
    cleaner.feed(text)
    cleaner.close()
    return "".join(cleaner.parts)


class _Cleaner(html.parser.HTMLParser):
    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.parts = []
        self._in = None

    def handle_starttag(self, tag, attrs):
        if tag in ("script", "style"):
            self._in = tag
        if tag in _TAGS:
            self.parts.append(f"<{tag}{_attributes(tag, attrs)}>")

    def handle_startendtag(self, tag, attrs):
        if tag in _TAGS:
            self.parts.append(f"<{tag}{_attributes(tag, attrs)}/>")

    def handle_endtag(self, tag):
        if tag == self._in:
            self._in = None
        if tag in _TAGS:
            self.parts.append(f"</{tag}>")

    def handle_data(self, data):
        if self._in is None:
            self.parts.append(html.escape(data, quote=False))
        elif self._in == "style" and _STYLE.fullmatch(data):
            self.parts.append(data)


def _attributes(tag, attributes):
    return "".join(
        f' {name}="{html.escape(value or "")}"'
        for name, value in attributes
        if _is_harmless(tag, name, value or "")
    )


def _is_harmless(tag, name, value):
    if name.startswith("on") or not re.fullmatch(r"[a-z][\w:.-]*", name):
        return False
    if name not in ("href", "xlink:href", "src"):
        return _STYLE.fullmatch(value) or "url(" not in value.lower()
    # Browsers ignore white space in an address; so does this check.
    address = re.sub(r"[\s\x00-\x20]", "", value).lower()
    if tag != "a":
        return address.startswith(("#", _PICTURE))
    scheme = re.match(r"([^/?#]*?):", address)
    return scheme is None or scheme[1] in _SCHEMES
