"""Metrics of a server's requests and its process, in the text format of Prometheus, and the code that writes that format.

Written by hand: the format is simple, most numbers are read from a server's status on request, and prometheus_client
would add series of its own (`_created`), which only a process-wide switch disables. Each server adds its own metric families.
"""

from __future__ import annotations

import bisect
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LATENCIES = (
    0.002,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
)
"""Upper bounds of the buckets in seconds: a stored response takes milliseconds, a wait for a step takes minutes."""
PREFIX = "groupwise_"

Sample = tuple[Mapping[str, object], float]


@dataclass(slots=True)
class Histogram:
    """Durations of the requests of one route."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(LATENCIES) + 1))
    total: float = 0.0
    """Seconds."""

    def observe(self, seconds: float) -> None:
        """Count one more observation."""
        self.counts[bisect.bisect_left(LATENCIES, seconds)] += 1
        self.total += seconds


@dataclass(slots=True)
class RequestMetrics:
    """Requests that this process has answered since it started, and the process itself."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter[tuple[str, int]])
    """Requests, by route and status."""
    seconds: dict[str, Histogram] = field(default_factory=dict[str, Histogram])
    """Durations, by route."""
    refusals: Counter[str] = field(default_factory=Counter[str])
    """Refusals, by code."""
    event_streams: int = 0
    """Event streams that are open now."""
    began: float = field(default_factory=time.time)
    """Start time in seconds since 1970."""

    def observe(self, route: str, status: int, seconds: float) -> None:
        """Count a request that was answered, or whose client disconnected."""
        self.requests[route, status] += 1
        self.seconds.setdefault(route, Histogram()).observe(seconds)

    def lines(self) -> Iterator[str]:
        """All metrics in the text format."""
        request_samples = [
            ({"route": route, "status": status}, count)
            for (route, status), count in sorted(self.requests.items())
        ]
        yield from family("http_requests_total", "counter", "By route and status.", request_samples)
        refusal_samples = [({"code": code}, count) for code, count in sorted(self.refusals.items())]
        yield from family(
            "refusals_total", "counter", "By the code of the problem.", refusal_samples
        )
        name = f"{PREFIX}http_request_seconds"
        yield from _family_header(name, "histogram", "Until the last byte of the answer.")
        for route, histogram in sorted(self.seconds.items()):
            cumulative = 0
            for bound, count in zip((*LATENCIES, float("inf")), histogram.counts, strict=True):
                cumulative += count
                yield f"{name}_bucket{_format_labels({'route': route, 'le': _format_value(bound)})} {cumulative}"
            yield f"{name}_sum{_format_labels({'route': route})} {_format_value(histogram.total)}"
            yield f"{name}_count{_format_labels({'route': route})} {cumulative}"
        yield from one("event_streams", "gauge", "Open now.", self.event_streams)
        cpu = os.times().user + os.times().system
        yield from plain("process_cpu_seconds_total", "counter", "Of the HTTP process.", cpu)
        memory = resident_bytes()
        yield from plain("process_resident_memory_bytes", "gauge", "Of the HTTP process.", memory)
        yield from plain("process_start_time_seconds", "gauge", "Since 1970.", self.began)


def resident_bytes() -> int:
    """Resident memory of this process now; its peak if the system does not provide the current value."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def one(name: str, kind: str, meaning: str, value: float | None) -> Iterator[str]:
    """A family with one sample, or nothing if the value is unknown."""
    if value is not None:
        yield from family(name, kind, meaning, [({}, value)])


def plain(name: str, kind: str, meaning: str, value: float) -> Iterator[str]:
    """A family with a standard Prometheus name, without our prefix."""
    yield from _family_header(name, kind, meaning)
    yield f"{name} {_format_value(value)}"


def family(name: str, kind: str, meaning: str, samples: Iterable[Sample]) -> Iterator[str]:
    """A family with its samples (labels and a value)."""
    full = PREFIX + name
    yield from _family_header(full, kind, meaning)
    for labels, value in samples:
        yield f"{full}{_format_labels(labels)} {_format_value(value)}"


def _family_header(name: str, kind: str, meaning: str) -> Iterator[str]:
    yield f"# HELP {name} {meaning}"
    yield f"# TYPE {name} {kind}"


def _format_labels(labels: Mapping[str, object]) -> str:
    if not labels:
        return ""
    escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    pairs = (f'{name}="{str(value).translate(escapes)}"' for name, value in labels.items())
    return "{" + ",".join(pairs) + "}"


def _format_value(value: float) -> str:
    if value == float("inf"):
        return "+Inf"
    return str(int(value)) if float(value).is_integer() else repr(float(value))
