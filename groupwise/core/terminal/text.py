"""Shows untrusted text. A model's text may contain terminal commands, markup, or characters that reorder a line.

`clean` makes such text harmless and still shows what it contained: a control character becomes its symbol (`␛`), an
invisible one its code. The result is plain text: pass it to rich as `Text`, never as markup.
"""

from __future__ import annotations

import shlex
import unicodedata
from collections.abc import Iterable

_KEPT_INVISIBLE = "\u200c\u200d"
"""Zero-width joiners: several scripts and many emoji need them."""


def clean(text: str) -> str:
    """The text without characters that a terminal would interpret; line breaks stay, tabs become spaces."""
    text = text.replace("\r\n", "\n").replace("\t", "    ")
    return text if text.isprintable() else text.translate(_SHOWN)


def one_line(text: str) -> str:
    """The text cleaned, on one line; line breaks are shown as `⏎`."""
    return clean(text).replace("\n", "⏎")


def command_line(words: Iterable[str]) -> str:
    """The command as a shell takes it: `python -c "print('hello')"`. A word with single quotes gets double quotes, if it then means the
    same."""
    return " ".join(
        f'"{word}"' if "'" in word and not set(word) & set('"$`\\!') else shlex.quote(word)
        for word in words
    )


def shorten(text: str, limit: int) -> str:
    """Cut a text to `limit` characters, the last of them `…` if something was cut off."""
    return text if len(text) <= limit else text[: max(limit - 1, 0)] + "…"


def ending(text: str, limit: int) -> str:
    """Cut a text to its last `limit` characters, the first of them `…` if it was cut. For prompts: the question is at the end."""
    return text if len(text) <= limit else "…" + text[len(text) - max(limit - 1, 0) :]


class _VisibleText(dict[int, str]):
    """The text shown for each character, by its code. Filled on first use: `str.translate` then rarely calls Python."""

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


_SHOWN = _VisibleText()
