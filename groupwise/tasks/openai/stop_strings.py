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
    starts_of_stops = (stop[:n] for stop in stops for n in range(1, len(stop)))
    return text[: len(text) - max((len(s) for s in starts_of_stops if text.endswith(s)), default=0)]
