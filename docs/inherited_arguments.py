"""Lists inherited arguments in the reference, where a docstring names them.

A docstring says whose arguments it takes, and those of its own:

    Args: as `PrivateOptimizer`.
        rank: int, the rank of gradients.

The page of that class lists the arguments of `PrivateOptimizer`, then `rank`;
its signature has them in place of `**kwargs`. Those that it does not take are
left out. MkDocs runs this (see mkdocs.yml); docstrings stay as they are.
"""

import re

import griffe

# A name without a dot: other packages tell of their own arguments.
_AS = re.compile(r"^Args: as `(\w+)`\.$", re.MULTILINE)
_ITEMS = re.compile(
    r"^Args:.*(?:\n|\Z)((?:    .*\n?|\n(?=    ))*)", re.MULTILINE
)
_ITEM = re.compile(r"^    (\*{0,2}\w+):(?:.*\n?)(?:     .*\n?)*", re.MULTILINE)


class InheritedArguments(griffe.Extension):
    """Writes out "Args: as `...`." of a package's classes and functions."""

    def on_package(self, *, pkg, loader, **kwargs):
        """Called by griffe with what it has read of a package.

        Args:
            pkg: `griffe.Module`.
            loader: `griffe.GriffeLoader`.
            **kwargs: not used.

        Raises:
            ValueError: if a docstring names what is not found, or has no
                arguments.
        """
        found = [o for o in _objects(pkg) if o.docstring is not None]
        written = set()
        for member in found:
            _write_out(member, found, written)


def _objects(parent):
    """The classes and functions of a module, at any depth."""
    for member in parent.members.values():
        if member.is_alias:
            continue
        if member.is_class or member.is_function:
            yield member
        if member.is_class or member.is_module:
            yield from _objects(member)


def _write_out(member, found, written):
    if member.path in written:
        return
    written.add(member.path)
    text = member.docstring.value
    named = _AS.search(text)
    if named is None:
        return
    source = _source(member, named[1], found)
    _write_out(source, found, written)
    own, taken = _arguments(text), _arguments(source.docstring.value)
    if not taken:
        raise ValueError(f"{member.path}: {named[1]} lists no arguments.")
    function = _function(member)
    if function is not None:
        _expand_signature(function, _function(source), taken)
        names = {p.name for p in function.parameters}
        taken = {k: v for k, v in taken.items() if k.lstrip("*") in names}
    lines = "".join({**taken, **own}.values())
    replaced = _ITEMS.sub(
        lambda _: f"Args:\n{lines}\n", text[named.start() :], count=1
    )
    member.docstring.value = (text[: named.start()] + replaced).rstrip()


def _source(member, name, found):
    """What a docstring names: beside it, in its module, or in the package."""
    same = [o for o in found if o.name == name and o is not member]
    for near in (member.parent, member.module):
        inside = [o for o in same if o.parent is near]
        if inside:
            return inside[0]
    if len(same) != 1:
        raise ValueError(
            f"Expected one {name} for the arguments of {member.path}, got "
            f"{len(same)}."
        )
    return same[0]


def _arguments(text):
    """What a docstring says of its arguments: name to lines."""
    items = _ITEMS.search(text)
    return {
        item[1]: item[0].rstrip("\n") + "\n"
        for item in _ITEM.finditer(items[1] if items else "")
    }


def _function(member):
    """The function with the signature of a class or function of its own."""
    return member.members.get("__init__") if member.is_class else member


def _expand_signature(function, source, taken):
    """Puts the parameters of another function in place of `**kwargs`."""
    rest = [
        p
        for p in function.parameters
        if p.kind is griffe.ParameterKind.var_keyword
    ]
    if not rest or f"**{rest[0].name}" in taken:
        return
    del function.parameters[rest[0].name]
    names = {p.name for p in function.parameters}
    for parameter in source.parameters:
        if parameter.name in taken and parameter.name not in names:
            function.parameters.add(parameter)
