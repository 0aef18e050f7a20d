"""Health and readiness of the server, for monitors without a key, and its metrics, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import Request
from fastapi.responses import Response

from groupwise.api.http.prometheus import MEDIA_TYPE, RequestMetrics, family, one
from groupwise.api.http.route import Route, json_response
from groupwise.api.schemas.keys import Role
from groupwise.api.schemas.training import HealthAnswer, StatusAnswer
from groupwise.server.routes.context import Context, Serving

TAG = "health"


async def healthz() -> Response:
    """Answer while the process lives."""
    return json_response(HealthAnswer(status="ok"))


async def readyz(request: Request) -> Response:
    """Answer 200 while requests are served, else 503 with the reason."""
    serving: Serving = request.app.state.shared
    ending = "the server is shutting down" if serving.ending.is_set() else None
    reason = ending or serving.service.ready()
    if reason is None:
        return json_response(HealthAnswer(status="ok"))
    return json_response(HealthAnswer(status="not_ready", detail=reason), 503)


async def metrics(context: Context) -> Response:
    """Numbers of server and run, in the text format of Prometheus."""
    text = render(context.serving.metrics, await context.service.status())
    return Response(text, media_type=MEDIA_TYPE)


GROUP_STATES = "open rewarded held planned trained expired given_up stale quarantined".split()
"""States of groups, which are fields of `Counters`."""


def render(requests: RequestMetrics, status: StatusAnswer) -> str:
    """The metrics text: the state of the run, and the counters of requests."""
    return "\n".join([*_run_lines(status), *requests.lines()]) + "\n"


def _run_lines(status: StatusAnswer) -> Iterator[str]:
    counters = status.counters.model_dump()
    groups = [({"state": state}, counters[state]) for state in GROUP_STATES]
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


ROUTES = (
    Route(method="GET", path="/healthz", handler=healthz, role=None, tag=TAG, answer=HealthAnswer),
    Route(method="GET", path="/readyz", handler=readyz, role=None, tag=TAG, answer=HealthAnswer),
    Route(
        method="GET",
        path="/metrics",
        handler=metrics,
        role=Role.READ,
        tag=TAG,
        media_type="text/plain",
    ),
)
