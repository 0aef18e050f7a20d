"""Renders pages: Jinja's templates with everything escaped, and the few filters that they share.

Text by a model or a user is always shown literally: characters that would control a terminal or change the writing direction are
shown as visible symbols (`display.text`), and each text is in an element with its own direction.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache, partial
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined

from groupwise.core.terminal.quantities import byte_size, duration
from groupwise.core.terminal.text import clean, one_line, shorten
from groupwise.runs.tables import prompt_text

STATIC = Path(__file__).parent / "static"
OUTCOMES = {
    "scored": "scored",
    "failed": "failed",
    "timed_out": "timed out",
    "unscored": "failed or timed out",
    "pending": "not scored yet",
}
MARKS = re.compile(r"<\|[^|<>]{1,40}\|>|</?(?:start_of_turn|end_of_turn|bos|eos|s)>")
"""Special tokens of chat templates."""
SPEAKER = re.compile(r"(?:<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>)(\w{1,20})\b")
"""The role of a message, after its start mark."""
LONGEST_LINE = 4_000
LONGEST = 200_000
"""Most characters of one text in a page; the whole text is in the file that the page links to."""


@cache
def environment(at: str = "") -> Environment:
    """All templates. `at` is the prefix of all our paths: `/dashboard` if another server mounts us there."""
    environment = Environment(
        loader=PackageLoader("groupwise.dashboard"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = cast("dict[str, Any]", environment.filters)  # pyright: ignore[reportUnknownMemberType]
    filters.update(FILTERS)
    shared = cast("dict[str, Any]", environment.globals)  # pyright: ignore[reportUnknownMemberType]
    shared["at"] = at
    shared["static"] = partial(static, at)
    shared["now"] = time.time
    shared["parts"] = environment.get_template("parts.html").module
    return environment


def render(template: str, data: Mapping[str, Any], at: str = "") -> str:
    """A whole page; see `environment`."""
    return environment(at).get_template(template).render(data)


@cache
def static(at: str, name: str) -> str:
    """The address of a static file, which changes with its content, so browsers may cache it."""
    digest = hashlib.sha256((STATIC / name).read_bytes()).hexdigest()[:12]
    return f"{at}/static/{name}?v={digest}"


def text(value: Any, most: int = LONGEST) -> str:
    """Untrusted text with control characters made visible, otherwise unchanged; very long text is cut."""
    whole_text = _as_text(value)
    more = f"\n… {len(whole_text) - most:,} more characters" if len(whole_text) > most else ""
    return clean(whole_text[:most]) + more


def line(value: Any) -> str:
    """The start of untrusted text, on one line."""
    return short(value, LONGEST_LINE)


def number(value: float | None, digits: int = 4) -> str:
    """A number for readers, with `digits` significant digits."""
    if value is None:
        return "–"
    if isinstance(value, int) or not math.isfinite(value):
        return str(value)
    if value.is_integer() and abs(value) < 1e6:
        return str(int(value))
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.{digits - 1}g}"
    if abs(value) >= 10**digits:
        return f"{value:,.0f}"
    if abs(value) >= 1:
        return f"{value:.{digits}g}"
    return f"{value:.3f}" if abs(value) >= 0.1 or not value else f"{value:.3g}"


def moment(seconds: float | None) -> str:
    """A point in time, in the time zone of the dashboard's machine, which is shown."""
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(seconds))


def ago(seconds: float | None) -> str:
    """The time elapsed since then."""
    if seconds is None:
        return ""
    elapsed = duration(max(0.0, time.time() - seconds)).split()
    return f"{elapsed[0]} {elapsed[1]} ago"


def spark(values: Sequence[float], width: int = 120, height: int = 28) -> str:
    """The points of a small line, for the `points` of an SVG polyline."""
    finite = [(i, value) for i, value in enumerate(values) if math.isfinite(value)]
    if not finite:
        return ""
    low, high = min(v for _, v in finite), max(v for _, v in finite)
    across, extent = max(1, len(values) - 1), (high - low) or 1.0
    return " ".join(
        f"{1 + i / across * (width - 2):.1f},{height - 2 - (v - low) / extent * (height - 4):.1f}"
        for i, v in finite
    )


def short(value: Any, most: int = 60) -> str:
    """The start of untrusted text, on one line; the rest is not processed. A line break may be two characters."""
    return shorten(one_line(_as_text(value)[: 2 * most + 2]), most)


def gist(value: Any, most: int = 160) -> str:
    """The end of a prompt on one line, because its question is usually there, without the marks of a chat template."""
    text = SPEAKER.sub(r" \1: ", _as_text(value)[-20 * most :])
    plain = (
        " ".join(clean(MARKS.sub(" ", text)).split())
        .removesuffix(" assistant:")
        .removesuffix(" model:")
    )
    return plain if len(plain) <= most else f"…{plain[-most:]}"


def prompt_for_people(prompt: Any) -> str:
    """A prompt for readers: text unchanged, messages one after the other, anything else as data."""
    try:
        return prompt_text(prompt)
    except (AttributeError, TypeError):
        return pretty(prompt)


def time_for_people(iso: str | None) -> str:
    """A timestamp of an API for readers, in local time of the dashboard's machine."""
    return "" if not iso else moment(datetime.fromisoformat(iso).timestamp())


def since(iso: str | None) -> str:
    """The time elapsed since then."""
    return "" if not iso else ago(datetime.fromisoformat(iso).timestamp())


def signed_number(value: float | None) -> str:
    """A difference, with its sign."""
    return "–" if value is None else f"{value:+.3f}".replace("-", "−")


def percent(value: float | None) -> str:
    """A share, as a percentage."""
    return "–" if value is None else f"{value:.0%}"


def segment(value: Any) -> str:
    """A value quoted for use in an address's path."""
    return quote(str(value), safe="")


def pretty(value: Any) -> str:
    """Plain data, formatted for readers."""
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)


def outcome(value: str) -> str:
    """The outcome of a rollout, in words."""
    return OUTCOMES.get(value, value)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else str(value)


FILTERS: Mapping[str, Any] = {
    "text": text,
    "line": line,
    "short": short,
    "gist": gist,
    "said": prompt_for_people,
    "written": time_for_people,
    "since": since,
    "number": number,
    "signed": signed_number,
    "percent": percent,
    "duration": duration,
    "size": byte_size,
    "moment": moment,
    "ago": ago,
    "path": segment,
    "spark": spark,
    "pretty": pretty,
    "outcome": outcome,
}
"""Filters of the templates."""
