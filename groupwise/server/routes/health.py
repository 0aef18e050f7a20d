"""Is it alive, does it answer, what does it count. The first two are for machines that look after the server, which have no key."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import Response

from groupwise.api.http.declared import Route, sent_model
from groupwise.api.http.prometheus import MEDIA_TYPE
from groupwise.api.schemas.keys import Role
from groupwise.api.schemas.training import HealthAnswer
from groupwise.server.routes.declared import AskedHere, Serving
from groupwise.server.routes.prometheus import render

TAG = "health"


async def healthz() -> Response:
    """Answer while the process lives."""
    return sent_model(HealthAnswer(status="ok"))


async def readyz(request: Request) -> Response:
    """Answer 200 while requests are served, else 503 with the reason."""
    serving: Serving = request.app.state.shared
    ending = "the server is shutting down" if serving.ending.is_set() else None
    why = ending or serving.service.ready()
    if why is None:
        return sent_model(HealthAnswer(status="ok"))
    return sent_model(HealthAnswer(status="not_ready", detail=why), 503)


async def metrics(asked: AskedHere) -> Response:
    """Numbers of server and run, in the text format of Prometheus."""
    text = render(asked.serving.metrics, await asked.service.status())
    return Response(text, media_type=MEDIA_TYPE)


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
