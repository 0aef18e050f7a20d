"""Times and sizes as people say them."""

from __future__ import annotations


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
        return f"{count:.0f} byte{'' if count == 1 else 's'}"
    for unit in ("kB", "MB", "GB", "TB"):
        count /= 1000
        if count < 999.5 or unit == "TB":
            return f"{count:.0f} {unit}" if count >= 100 else f"{count:.3g} {unit}"
    raise AssertionError("the last unit holds any number")
