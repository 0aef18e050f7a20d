"""Finds the part of an unfinished text that may be shown, given the texts that stop it.

A client that names a stop text never sees any part of it. So the end of the text is held back as long as it may be the start of a stop
text. The shown part is always a prefix of the final text.
"""

from __future__ import annotations

from collections.abc import Sequence


def cut(text: str, stops: Sequence[str]) -> str:
    """The text before the stop text that was completed first; the sampler ended there."""
    found = [(place + len(stop), place) for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(found)[1]] if found else text


def showable(text: str, stops: Sequence[str]) -> str:
    """The part of an unfinished text that can already be shown."""
    whole = cut(text, stops)
    if len(whole) < len(text):
        return whole
    return text[: len(text) - max((_length_of_begun_stop(text, stop) for stop in stops), default=0)]


def _length_of_begun_stop(text: str, stop: str) -> int:
    """Number of characters at the end of the text that may be the start of a stop text."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
