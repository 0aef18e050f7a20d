"""The verbs over HTTP, at the addresses and in the forms of the Tinker client 0.38: a mount of the server's own application.

Calls that take time answer with an id at once; `retrieve_future` waits for the answer, a little less long than the client does. The client
sends a request again after 408, 409, 429 and 5xx, for minutes, so what will never work is refused with 400, also what the protocol has
and this server has not. Every refusal is JSON with `code` and `message`.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from groupwise.errors import GroupwiseError, RunError, UsageError
from groupwise.server.verbs import requests
from groupwise.server.verbs.compatibility import refused_route
from groupwise.server.verbs.futures import (
    AnswerGone,
    Failure,
    NotKept,
    TooManyCalls,
    UnknownAnswer,
)
from groupwise.server.verbs.opened import NotThere
from groupwise.server.verbs.service import VerbService

PREFIX = "/api/v1"
POLL = 40.0
"""Seconds that `retrieve_future` waits; the client gives up after 45."""
MOST_BYTES = 64 * 2**20
"""Of a body, unless the application says otherwise. The client cuts its requests at the size that it is told (`CLIENT_CONFIG`)."""
CLIENT_CONFIG: Mapping[str, Any] = {
    "pjwt_auth_enabled": False,
    "use_pyqwest_transport": False,
    "proto_compress_fwdbwd": False,
    "parallel_fwdbwd_chunks": True,
    "sample_use_retrieve_futures": False,
    "sample_join_sampling_session": False,
    "custom_loss_server_side": False,
    "fwdbwd_max_chunk_len": 1024,
    "fwdbwd_max_chunk_bytes_count": 5_000_000,
}
DYNAMIC_CONFIG: Mapping[str, Any] = {"sample_cancel_enabled": False}

Authorise = Callable[[Request], None]
"""Raises `Unauthorised` where a request has no valid key."""
Handler = Callable[[Request], Awaitable[Response]]
BodyT = TypeVar("BodyT", bound=requests.Body)


class Unauthorised(UsageError):
    """The request has no key, or one that the server does not know."""

    code = "unauthorised"


class Forbidden(UsageError):
    """The key may not ask for this."""

    code = "forbidden"


class Ending(GroupwiseError):
    """The server takes nothing new; the next one will."""

    code = "shutting_down"


class TooLarge(UsageError):
    """The body has more bytes than are read."""

    code = "too_large"


STATUS: Mapping[type[Exception], int] = {
    Unauthorised: 401,
    Forbidden: 403,
    NotThere: 404,
    UnknownAnswer: 404,
    AnswerGone: 410,
    TooLarge: 413,
    TooManyCalls: 429,
    NotKept: 503,
    Ending: 503,
    RunError: 503,
    UsageError: 400,
}
"""The first that fits counts."""


def verb_routes(service: VerbService, authorise: Authorise, *, poll: float = POLL) -> list[Route]:
    """Every route, and one that refuses all others of the protocol. `service` must be open before the first request."""
    return [
        Route(f"{PREFIX}{path}", _guarded(handler, service, authorise), methods=[method])
        for method, path, handler in _Handlers(service, poll).table()
    ] + [
        Route(f"{PREFIX}/healthz", _healthz, methods=["GET"]),
        Route(
            f"{PREFIX}/{{path:path}}",
            _guarded(_refuse, service, authorise),
            methods=["GET", "POST", "PUT", "PATCH", "DELETE"],
        ),
    ]


class _Handlers:
    def __init__(self, service: VerbService, poll: float) -> None:
        self._service = service
        self._poll = poll

    def table(self) -> list[tuple[str, str, Handler]]:
        return [
            ("POST", "/client/config", self._client_config),
            ("POST", "/client/dynamic_config", self._dynamic_config),
            ("GET", "/get_server_capabilities", self._capabilities),
            ("POST", "/create_session", self._create_session),
            ("POST", "/session_heartbeat", self._heartbeat),
            ("POST", "/sessions/{session}/finish", self._finish),
            ("POST", "/telemetry", self._telemetry),
            ("POST", "/create_model", self._create_model),
            ("POST", "/get_info", self._get_info),
            ("POST", "/forward_backward", self._forward_backward),
            ("POST", "/optim_step", self._optim_step),
            ("POST", "/save_weights", self._save_weights),
            ("POST", "/load_weights", self._load_weights),
            ("POST", "/save_weights_for_sampler", self._save_for_sampler),
            ("POST", "/create_sampling_session", self._create_sampler),
            ("GET", "/samplers/{sampler}", self._sampler),
            ("POST", "/weights_info", self._weights_info),
            ("POST", "/asample", self._sample),
            ("POST", "/retrieve_future", self._retrieve),
        ]

    async def _client_config(self, request: Request) -> Response:
        return JSONResponse(CLIENT_CONFIG)

    async def _dynamic_config(self, request: Request) -> Response:
        return JSONResponse(DYNAMIC_CONFIG)

    async def _capabilities(self, request: Request) -> Response:
        return JSONResponse({"supported_models": self._service.capabilities()})

    async def _create_session(self, request: Request) -> Response:
        await _read(request, requests.CreateSession)
        key = request.headers.get("x-idempotency-key") or request.headers.get("idempotency-key")
        session = await self._service.opened.create_session(key)
        return JSONResponse({"type": "create_session", "session_id": session})

    async def _heartbeat(self, request: Request) -> Response:
        self._service.opened.heartbeat((await _read(request, requests.Heartbeat)).session_id)
        return JSONResponse({"type": "session_heartbeat"})

    async def _finish(self, request: Request) -> Response:
        await self._service.opened.finish(request.path_params["session"])
        return JSONResponse({})

    async def _telemetry(self, request: Request) -> Response:
        """Taken and thrown away: the client sends it wherever it is pointed to."""
        await _body(request)
        return JSONResponse({"status": "accepted"})

    async def _create_model(self, request: Request) -> Response:
        return await self._promise(
            *self._service.training.create_model(await _read(request, requests.CreateModel))
        )

    async def _get_info(self, request: Request) -> Response:
        model = (await _read(request, requests.GetInfo)).model_id
        return JSONResponse(await self._service.training.info(model))

    async def _forward_backward(self, request: Request) -> Response:
        return await self._promise(*self._service.training.forward_backward(await _body(request)))

    async def _optim_step(self, request: Request) -> Response:
        return await self._promise(
            *self._service.training.optim_step(await _read(request, requests.OptimStep))
        )

    async def _save_weights(self, request: Request) -> Response:
        return await self._promise(
            *self._service.training.save_weights(await _read(request, requests.SaveWeights))
        )

    async def _load_weights(self, request: Request) -> Response:
        return await self._promise(
            *self._service.training.load_weights(await _read(request, requests.LoadWeights))
        )

    async def _save_for_sampler(self, request: Request) -> Response:
        body = await _read(request, requests.SaveForSampler)
        return await self._promise(*self._service.training.save_for_sampler(body))

    async def _create_sampler(self, request: Request) -> Response:
        sampler = await self._service.sampling.create_sampler(
            await _read(request, requests.CreateSampler)
        )
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampler})

    async def _sampler(self, request: Request) -> Response:
        return JSONResponse(self._service.sampling.sampler(request.path_params["sampler"]))

    async def _weights_info(self, request: Request) -> Response:
        path = (await _read(request, requests.WeightsInfo)).tinker_path
        return JSONResponse(await self._service.training.weights_info(path))

    async def _sample(self, request: Request) -> Response:
        id, sequences = await self._service.sampling.sample(await _read(request, requests.Sample))
        await self._service.kept(id)
        return JSONResponse({"request_id": id, "sample_sequence_ids": sequences})

    async def _retrieve(self, request: Request) -> Response:
        id = (await _read(request, requests.Retrieve)).request_id
        answer = await self._service.answer(id, self._poll)
        if answer is None:
            waiting = {"type": "try_again", "request_id": id, "queue_state": "active"}
            return JSONResponse(waiting, status_code=408)
        if isinstance(answer, Failure):
            return JSONResponse({"error": answer.message, "category": answer.category})
        return Response(answer.body, media_type=answer.media_type)

    async def _promise(self, model: str, id: str) -> Response:
        await self._service.kept(id)
        return JSONResponse({"request_id": id, "model_id": model})


def _guarded(handler: Handler, service: VerbService, authorise: Authorise) -> Handler:
    async def guarded(request: Request) -> Response:
        try:
            authorise(request)
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody reads it
        except tuple(STATUS) as error:
            if isinstance(error, UsageError):
                service.refused(getattr(request.state, "body", b""), error)
            return _problem(error)

    return guarded


async def _healthz(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _refuse(request: Request) -> Response:
    await _body(request)
    path = request.url.path.removeprefix(PREFIX)
    raise refused_route(request.method, path) or NotThere(
        f"There is no route {request.method} {request.url.path}."
    )


def _problem(error: Exception) -> Response:
    status = next(status for kind, status in STATUS.items() if isinstance(error, kind))
    code = getattr(error, "code", "usage")
    headers = {"Retry-After": "1"} if status in (429, 503) else {}
    return JSONResponse({"code": code, "message": str(error)}, status, headers)


async def _read(request: Request, kind: type[BodyT]) -> BodyT:
    try:
        return kind.model_validate_json(await _body(request))
    except ValidationError as error:
        raise UsageError(_told(kind, error)) from error


def _told(kind: type[requests.Body], error: ValidationError) -> str:
    lines = [
        f"{'.'.join(map(str, each['loc'])) or 'the body'}: {each['msg']} (given: {_short(each['input'])})"
        for each in error.errors()[:10]
    ]
    return f"{kind.__name__} is not what this server takes. " + "; ".join(lines)


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 100 else f"{text[:100]}…"


async def _body(request: Request) -> bytes:
    """The body, also for whoever notes why it was refused; no more than `MOST_BYTES` of it, and not packed."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise UsageError(f"The content encoding {encoding!r} is not taken; send the body as it is.")
    most: int = getattr(request.app.state, "most_bytes", MOST_BYTES)
    pieces: list[bytes] = []
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > most:
            raise TooLarge(f"The body has more than {most} bytes; send less at once.")
        pieces.append(piece)
    request.state.body = b"".join(pieces)
    return request.state.body
