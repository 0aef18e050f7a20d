"""The training server's metrics in the text format of Prometheus: its run, its requests and its process."""

from __future__ import annotations

from collections.abc import Iterator

from groupwise.api.http.prometheus import Requests, family, one
from groupwise.api.schemas.training import StatusAnswer

STATES = (
    "open rewarded held planned trained expired given_up stale quarantined".split()
)  # as `Counters` has them


def render(requests: Requests, status: StatusAnswer) -> str:
    """Everything: what the service says of its run, and what was counted."""
    return "\n".join([*_of_run(status), *requests.lines()]) + "\n"


def _of_run(status: StatusAnswer) -> Iterator[str]:
    counters = status.counters.model_dump()
    groups = [({"state": state}, counters[state]) for state in STATES]
    yield from family("groups", "gauge", "Groups of the run, by their state.", groups)
    yield from one("groups_served_total", "counter", "Groups answered.", counters["served"])
    yield from one("run_step", "gauge", "Steps done.", status.step)
    yield from one("run_max_steps", "gauge", "Steps of the whole run.", status.max_steps)
    phase = [({"phase": status.phase}, 1)]
    yield from family("run_phase", "gauge", "1 for the phase that the server is in.", phase)
    if status.model_version is not None:
        run, step = status.model_version
        labels = {"run": run, "step": step, "fingerprint": status.fingerprint or ""}
        yield from family("model_version", "gauge", "What serves.", [(labels, 1)])
    yield from one("versions_kept", "gauge", "Versions that can be read.", len(status.versions))
    yield from one("queue_depth", "gauge", "Requests that wait for room.", status.queue_depth)
    yield from one("engine_restarts_total", "counter", "Of the engine.", status.engine_restarts)
    speed = status.throughput
    yield from one("sampled_tokens_total", "counter", "Tokens sampled.", speed.sampled_tokens)
    yield from one("step_seconds", "gauge", "From step to step.", speed.seconds_per_step)
    yield from one(
        "engine_memory_bytes", "gauge", "Most, of the engine.", status.memory.engine_bytes
    )
