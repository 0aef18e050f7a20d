"""Times, sizes and counts as people say them, and sizes as they type them."""

from __future__ import annotations

import re

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?(b?)", re.IGNORECASE)
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}


def counted(number: int, noun: str) -> str:
    """The number and the noun that it counts: `1 file`, `2,000 files`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def parse_size(text: str, bare_number: int = 1) -> float | None:
    """The bytes of a size: `40GB` by thousands, `64GiB` or `64Gi` by 1024; None for other text. `bare_number`: bytes of a number that has
    no unit."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return None
    number, unit, byte = float(match[1]), (match[2] or "").lower(), match[3]
    if not unit:
        return number * (1 if byte else bare_number)
    return number * (1024 if unit.endswith("i") else 1000) ** _POWERS[unit[0]]


def duration(seconds: float) -> str:
    """A time span in its two largest units: `3 min 20 s`."""
    total = max(0, round(seconds))
    parts = [
        (total // 86400, "d"),
        (total // 3600 % 24, "h"),
        (total // 60 % 60, "min"),
        (total % 60, "s"),
    ]
    words = [f"{count} {unit}" for count, unit in parts if count][:2]
    return " ".join(words) or "0 s"


def byte_size(count: float) -> str:
    """Bytes, by thousands: `12 bytes`, `3.4 kB`, `24 GB`."""
    if count < 1000:
        return counted(round(count), "byte")
    for unit in ("kB", "MB", "GB", "TB"):
        count /= 1000
        if count < 999.5 or unit == "TB":
            return f"{count:.0f} {unit}" if count >= 100 else f"{count:.3g} {unit}"
    raise AssertionError("the last unit holds any number")
