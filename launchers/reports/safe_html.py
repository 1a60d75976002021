"""Parts of a page that come from files, without what could run."""

import html
import html.parser
import re

# What our figures and Markdown's tables and texts are made of.
_TAGS = frozenset(
    "svg g defs path use text tspan rect circle ellipse line polyline polygon "
    "clippath lineargradient stop image title desc style "
    "h1 h2 h3 h4 h5 h6 p br hr ul ol li em strong del code pre blockquote a "
    "div span table thead tbody tr th td dl dt dd".split()
)
_SCHEMES = ("http", "https", "mailto")
_PICTURE = "data:image/png;base64,"
# A style that refers to nothing outside, and is no markup to any reader.
_STYLE = re.compile(r"(?!.*(?:url\((?!\s*[\"']?#)|@|\\))[^<>&]*", re.DOTALL)


def cleaned(text: str) -> str:
    """Leaves of HTML or SVG what is shown, and nothing that runs or loads.

    Elements, attributes and addresses of other kinds than figures and tables
    have are left out; scripts with what is in them.

    Args:
        text: string, what is shown inside of a page.

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
    # Browsers ignore white space in an address.
    address = re.sub(r"[\s\x00-\x20]", "", value).lower()
    if tag != "a":
        return address.startswith(("#", _PICTURE))
    scheme = re.match(r"([^/?#]*?):", address)
    return scheme is None or scheme[1] in _SCHEMES
