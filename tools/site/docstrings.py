"""Docstrings of the package as the site's parser of Google style wants them."""

import re

import griffe

_ROLE = re.compile(r":(?:func|meth|attr|class):`~?([\w.]+)`")
# Several names described at once, maybe on more than one line: "x, w,\n        bias: as in ...".
_WRAPPED = re.compile(r"^( +)((?:\w+, )*\w+,)\n +((?:\w+, )*\w+:)", re.MULTILINE)
_NAMES = re.compile(r"^( +)(\w+(?:, \w+)+): (.*(?:\n\1 +.*)*)$", re.MULTILINE)
_EXAMPLE = re.compile(r"^( *)(>>> .*(?:\n\1\S.*)*)", re.MULTILINE)
_RETURNS = re.compile(r"^Returns:\n( +)([^\n:]*): ", re.MULTILINE)


def tidied(text: str) -> str:
    """The docstring in Markdown, with an item for each name of a section.

    >>> tidied("Of :func:`pallas_loss.fused_ce`, with::")
    'Of [`fused_ce`][pallas_loss.fused_ce], with:'
    >>> print(tidied("Args:\\n    x, w,\\n        b: as there."))
    Args:
        x: as there.
        w: as there.
        b: as there.
    """
    while _WRAPPED.search(text):
        text = _WRAPPED.sub(r"\1\2 \3", text)
    text = _NAMES.sub(_items, text)
    text = _RETURNS.sub(r"Returns:\n\1\2 – ", text)
    text = _EXAMPLE.sub(_fenced, text)
    text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
    return _ROLE.sub(_link, text)


def _items(found: re.Match) -> str:
    indent, names, description = found.groups()
    return "\n".join(f"{indent}{name}: {description}" for name in names.split(", "))


def _fenced(found: re.Match) -> str:
    indent, lines = found.groups()
    return f"{indent}```pycon\n{indent}{lines}\n{indent}```"


def _link(role: re.Match) -> str:
    name = role[1].rpartition(".")[2]
    return f"[`{name}`][{role[1]}]" if role[1].startswith("pallas_loss.") else f"`{name}`"


class Tidy(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_) -> None:
        if obj.docstring is not None:
            obj.docstring.value = tidied(obj.docstring.value)
