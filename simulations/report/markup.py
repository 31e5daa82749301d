"""HTML and SVG out of plain values: every text is escaped unless it was made here."""

from __future__ import annotations

from html import escape

_VOID = {"meta", "input", "br", "link"}
_BREAKS = {"main", "section", "figure", "table", "tr", "ul", "li", "fieldset"}


class Markup(str):
    """Text that is markup already; only :func:`element` and :func:`join` make it."""

    __slots__ = ()


def element(
    tag: str, /, *children: str, **attributes: str | int | bool | None
) -> Markup:
    """Return an element."""
    words = [tag]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key if key in _AS_WRITTEN else key.rstrip("_").replace("_", "-")
        words.append(key if value is True else f'{key}="{escape(str(value))}"')
    start = f"<{' '.join(words)}>"
    if tag in _VOID:
        return Markup(start)
    end = f"</{tag}>" + ("\n" if tag in _BREAKS else "")
    return Markup(f"{start}{join(*children)}{end}")


_AS_WRITTEN = {"viewBox"}


def join(*children: str) -> Markup:
    """Return several pieces as one; a text that is not :class:`Markup` is escaped."""
    return Markup(
        "".join(c if isinstance(c, Markup) else escape(str(c)) for c in children)
    )
