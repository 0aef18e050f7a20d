"""Stop strings: where they cut a text, and which part of an unfinished text may already be streamed.

A client that names a stop string never sees any part of it. So the end of the text is held back as long as it may be the start of one.
The streamed part is always a prefix of the final text.
"""

from __future__ import annotations

from collections.abc import Sequence


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the stop string that was completed first; the sampler ended there."""
    ends_and_starts = [
        (start + len(stop), start) for stop in stops if (start := text.find(stop)) >= 0
    ]
    return text[: min(ends_and_starts)[1]] if ends_and_starts else text


def streamable_prefix(text: str, stops: Sequence[str]) -> str:
    """The part of an unfinished text that can already be streamed."""
    before_stop = cut_at_stop(text, stops)
    if len(before_stop) < len(text):
        return before_stop
    return text[: len(text) - max((_partial_stop_length(text, stop) for stop in stops), default=0)]


def _partial_stop_length(text: str, stop: str) -> int:
    """Number of characters at the end of the text that may be the start of a stop string."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
