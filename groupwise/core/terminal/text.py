"""Showing untrusted text. What a model says may hold terminal commands, markup, or characters that reorder a line.

`clean` makes such text harmless and still shows what was there: a control character becomes its picture (`␛`), an
invisible one its code. The result is plain text: give it to rich as `Text`, never as markup.
"""

from __future__ import annotations

import unicodedata

_KEPT_INVISIBLE = "\u200c\u200d"
"""Joiners: words of several scripts and many emoji need them."""


def clean(text: str) -> str:
    """The text without anything that a terminal would obey; line breaks stay, tabs become spaces."""
    text = text.replace("\r\n", "\n").replace("\t", "    ")
    return text if text.isprintable() else text.translate(_SHOWN)


def one_line(text: str) -> str:
    """The text cleaned, on one line; line breaks are shown as `⏎`."""
    return clean(text).replace("\n", "⏎")


def shorten(text: str, limit: int) -> str:
    """Cut a text to `limit` characters, the last of them `…` if something was cut off."""
    return text if len(text) <= limit else text[: max(limit - 1, 0)] + "…"


def ending(text: str, limit: int) -> str:
    """Cut a text to its last `limit` characters, the first of them `…` if something was cut off: questions end a prompt."""
    return text if len(text) <= limit else "…" + text[len(text) - max(limit - 1, 0) :]


class _Shown(dict[int, str]):
    """How each letter is shown, by its code; found when it first occurs, so that long texts are not gone through in Python."""

    def __missing__(self, code: int) -> str:
        letter = chr(code)
        if letter == "\n" or letter.isprintable() or letter in _KEPT_INVISIBLE:
            visible = letter
        elif code < 0x20:
            visible = chr(0x2400 + code)
        elif code == 0x7F:
            visible = "␡"
        elif unicodedata.category(letter) == "Zs":
            visible = " "
        else:
            visible = f"<U+{code:04X}>"
        self[code] = visible
        return visible


_SHOWN = _Shown()
