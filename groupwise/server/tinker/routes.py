"""The Tinker API over HTTP, at the addresses and in the formats of the Tinker client 0.38; mounted in the server's own application.

Calls that take time return an id at once; `retrieve_future` waits for the answer, slightly shorter than the client's own timeout. `ROUTES`
describes every route completely; the OpenAPI document is made from it. Every refusal is JSON with `code` and `message`: see `refusals.py`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import reprlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from groupwise.api.http.bodies import Bodies, ClientGone, read_body
from groupwise.api.http.route import SMALL_BODY
from groupwise.api.http.shared_state import SCOPE, Facts
from groupwise.api.http.strict_json import NotStrict, parse
from groupwise.api.schemas.problems import Refusal
from groupwise.core.errors import UsageError
from groupwise.core.settings.field_errors import field_errors
from groupwise.server.engine.tinker_protocol import Stored
from groupwise.server.tinker import requests, responses, translate
from groupwise.server.tinker.compatibility import refused_route
from groupwise.server.tinker.refusals import CODES, code_of
from groupwise.server.tinker.service import TinkerService
from groupwise.server.tinker.sessions import MODEL, SCHEME, NotFound, stored_at

logger = logging.getLogger(__name__)

PREFIX = "/api/v1"
POLL = 40.0
"""Seconds that `retrieve_future` waits; the client times out after 45."""
MAX_BYTES = 64 * 2**20
"""Limit of a body in bytes, unless the application sets another. The client splits its requests at the size that it receives in
`ClientConfig`.
"""
OF_ALL = ("unauthorised", "forbidden", "rate_limited", "shutting_down", "internal")
OF_BODIES = ("usage", "too_large", "unsupported_media_type", "timed_out")
OF_RECORDS = ("not_kept", "disk_full")
OF_CALLS = ("usage", "not_there", "answer_gone", "too_many_calls", *OF_RECORDS)
OF_ENGINES = ("usage", "not_there", "engine_failed")

Authorise = Callable[[Request], None]
"""Raises a `Refusal` if the request is not allowed."""
Handler = Callable[[Request], Awaitable[Response]]
RouteHandler = Callable[..., Awaitable[BaseModel | Response]]
"""A method of `_Handlers`: it is given the request, and the parsed body and query if the route declares them."""


@dataclass(frozen=True, slots=True)
class TinkerRoute:
    """One route: address, handler, and everything that the OpenAPI document shows."""

    method: str
    path: str
    """Relative to `PREFIX`."""
    handler: RouteHandler
    answer: type[BaseModel] | None
    """None: the outcome of a call, or 408; or the file that `gives` describes."""
    gives: str = ""
    """Description of the answer if it is a zip file."""
    reads: type[requests.Body] | None = None
    is_large: bool = False
    """Whether the body may be as large as the server reads."""
    query: type[requests.Body] | None = None
    bytes: str = ""
    """Description of the body if it is not JSON."""
    codes: tuple[str, ...] = ()
    """Codes that it may be refused with, in addition to those of all routes."""

    @property
    def all_codes(self) -> tuple[str, ...]:
        """Every code that it can be refused with."""
        of_body = OF_BODIES if self.reads is not None or self.bytes else ()
        of_query = ("usage",) if self.query is not None else ()
        return tuple(dict.fromkeys((*OF_ALL, *of_body, *of_query, *self.codes)))


ROUTES: list[TinkerRoute] = []
"""All routes that need a key: a reading key for GET, a training key for the others."""


def _route(
    method: str, path: str, answer: type[BaseModel] | None, **facts: Any
) -> Callable[[RouteHandler], RouteHandler]:
    """Declares a handler as a route; `facts` are further fields of `TinkerRoute`."""

    def declare(handler: RouteHandler) -> RouteHandler:
        ROUTES.append(TinkerRoute(method, path, handler, answer, **facts))
        return handler

    return declare


def tinker_routes(
    service: TinkerService,
    authorise: Authorise,
    *,
    bodies: Bodies | None = None,
    poll: float = POLL,
) -> list[Route]:
    """Every route, and one that refuses all others below `PREFIX`. `service` must be open before the first request."""
    handlers = _Handlers(service, bodies or Bodies(MAX_BYTES), poll)

    async def healthz(request: Request) -> Response:
        return _json_response(responses.HealthResponse())

    return [
        *(
            Route(
                f"{PREFIX}{route.path}",
                _guard(partial(handlers.answer, route), service, authorise),
                methods=[route.method],
            )
            for route in ROUTES
        ),
        Route(f"{PREFIX}/healthz", healthz, methods=["GET"]),
        Route(
            f"{PREFIX}/{{path:path}}",
            _guard(handlers.refuse, service, authorise),
            methods=["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"],
        ),
    ]


class _Handlers:
    def __init__(self, service: TinkerService, bodies: Bodies, poll: float) -> None:
        self._service = service
        self._bodies = bodies
        self._poll = poll

    async def answer(self, route: TinkerRoute, request: Request) -> Response:
        """Parse what the route declares, and call its handler."""
        given: list[requests.Body] = []
        if route.reads is not None:
            given.append(await self._parse_body(request, route.reads, is_large=route.is_large))
        if route.query is not None:
            given.append(_parse_query(request, route.query))
        answer = await route.handler(self, request, *given)
        return answer if isinstance(answer, Response) else _json_response(answer)

    @_route("POST", "/client/config", responses.ClientConfigResponse)
    async def client_config(self, request: Request) -> BaseModel:
        """Settings for the client. A body is not read."""
        return responses.ClientConfigResponse()

    @_route("POST", "/client/dynamic_config", responses.ClientDynamicConfigResponse)
    async def dynamic_config(self, request: Request) -> BaseModel:
        """Settings that may change while the client runs. A body is not read."""
        return responses.ClientDynamicConfigResponse()

    @_route("GET", "/get_server_capabilities", responses.GetServerCapabilitiesResponse)
    async def capabilities(self, request: Request) -> BaseModel:
        """The base models of the server."""
        answer = {"supported_models": self._service.capabilities()}
        return responses.GetServerCapabilitiesResponse.model_validate(answer)

    @_route(
        "GET",
        "/tokenizer",
        None,
        query=requests.TokenizerOf,
        gives="A zip file with what AutoTokenizer.from_pretrained reads.",
        codes=OF_ENGINES,
    )
    async def tokenizer(self, request: Request, query: requests.TokenizerOf) -> Response:
        """The tokenizer's files of a base, to be unpacked into a folder of its name, from which clients load it."""
        content = await self._service.zipped_tokenizer(query.base_model)
        return Response(content, media_type="application/zip")

    @_route(
        "POST",
        "/create_session",
        responses.CreateSessionResponse,
        reads=requests.CreateSession,
        codes=(*OF_RECORDS, "engine_failed"),
    )
    async def create_session(self, request: Request, body: requests.CreateSession) -> BaseModel:
        """Open a session; the same one for the same X-Idempotency-Key, caller and body."""
        name = request.headers.get("x-idempotency-key") or request.headers.get("idempotency-key")
        facts: Facts | None = request.scope.get(SCOPE)
        caller = "" if facts is None or facts.caller is None else facts.caller.key_id
        identity = [name, caller, body.model_dump_json()]
        key = hashlib.sha256(json.dumps(identity).encode()).hexdigest() if name else None
        session = await self._service.registry.create_session(
            key, caller, body.display_name, body.user_metadata
        )
        return responses.CreateSessionResponse(session_id=session)

    @_route(
        "POST",
        "/session_heartbeat",
        responses.SessionHeartbeatResponse,
        reads=requests.Heartbeat,
        codes=("not_there",),
    )
    async def heartbeat(self, request: Request, body: requests.Heartbeat) -> BaseModel:
        """Report that the client is alive."""
        self._service.registry.heartbeat(body.session_id)
        return responses.SessionHeartbeatResponse()

    @_route(
        "POST",
        "/sessions/{session}/finish",
        responses.CloseSessionResponse,
        codes=("engine_failed",),
    )
    async def finish(self, request: Request) -> BaseModel:
        """End the session and release its models. A body is not read. Safe to repeat."""
        await self._service.registry.finish(request.path_params["session"])
        return responses.CloseSessionResponse()

    @_route("POST", "/telemetry", responses.TelemetryResponse, bytes="Anything; it is ignored.")
    async def telemetry(self, request: Request) -> BaseModel:
        """Accepted and discarded: the client always sends it to its server."""
        await self._read_body(request)
        return responses.TelemetryResponse()

    @_route(
        "POST",
        "/create_model",
        responses.UntypedAPIFuture,
        reads=requests.CreateModel,
        codes=OF_CALLS,
    )
    async def create_model(self, request: Request, body: requests.CreateModel) -> BaseModel:
        """Make a model with a new adapter."""
        await self._service.training.admit(body)
        return await self._promise(*self._service.training.create_model(body))

    @_route(
        "POST", "/get_info", responses.GetInfoResponse, reads=requests.GetInfo, codes=OF_ENGINES
    )
    async def get_info(self, request: Request, body: requests.GetInfo) -> BaseModel:
        """A model's base and adapter."""
        return responses.GetInfoResponse.model_validate(
            await self._service.training.info(body.model_id)
        )

    @_route(
        "POST",
        "/forward_backward",
        responses.UntypedAPIFuture,
        bytes="The protobuf message `ForwardBackwardRequest` of the client.",
        codes=OF_CALLS,
    )
    async def forward_backward(self, request: Request) -> BaseModel:
        """Log-probabilities and loss of some data, with or without gradient."""
        forward = await read_body(await self._read_body(request), translate.read)
        return await self._promise(*self._service.training.forward_backward(forward))

    @_route(
        "POST", "/optim_step", responses.UntypedAPIFuture, reads=requests.OptimStep, codes=OF_CALLS
    )
    async def optim_step(self, request: Request, body: requests.OptimStep) -> BaseModel:
        """Update a model with the accumulated gradient."""
        return await self._promise(*self._service.training.optim_step(body))

    @_route(
        "POST",
        "/save_weights",
        responses.UntypedAPIFuture,
        reads=requests.SaveWeights,
        codes=OF_CALLS,
    )
    async def save_weights(self, request: Request, body: requests.SaveWeights) -> BaseModel:
        """Save a model's weights and optimiser under a name."""
        return await self._promise(*self._service.training.save_weights(body))

    @_route(
        "POST",
        "/load_weights",
        responses.UntypedAPIFuture,
        reads=requests.LoadWeights,
        codes=OF_CALLS,
    )
    async def load_weights(self, request: Request, body: requests.LoadWeights) -> BaseModel:
        """Load saved weights into a model, or into a new one."""
        return await self._promise(*self._service.training.load_weights(body))

    @_route(
        "POST",
        "/save_weights_for_sampler",
        responses.UntypedAPIFuture,
        reads=requests.SaveForSampler,
        codes=OF_CALLS,
    )
    async def save_for_sampler(self, request: Request, body: requests.SaveForSampler) -> BaseModel:
        """Save a model's weights for sampling."""
        return await self._promise(*self._service.training.save_for_sampler(body))

    @_route(
        "POST",
        "/create_sampling_session",
        responses.CreateSamplingSessionResponse,
        reads=requests.CreateSampler,
        codes=(*OF_RECORDS, *OF_ENGINES),
    )
    async def create_sampler(self, request: Request, body: requests.CreateSampler) -> BaseModel:
        """Make a sampler from saved weights, or from a base model."""
        sampler = await self._service.sampling.create_sampler(body)
        return responses.CreateSamplingSessionResponse(sampling_session_id=sampler)

    @_route("GET", "/samplers/{sampler}", responses.GetSamplerResponse, codes=("not_there",))
    async def sampler(self, request: Request) -> BaseModel:
        """The model of a sampler."""
        description = self._service.sampling.sampler(request.path_params["sampler"])
        return responses.GetSamplerResponse.model_validate(description)

    @_route(
        "POST",
        "/weights_info",
        responses.WeightsInfoResponse,
        reads=requests.WeightsInfo,
        codes=OF_ENGINES,
    )
    async def weights_info(self, request: Request, body: requests.WeightsInfo) -> BaseModel:
        """The kind of model that saved the weights at a path."""
        description = await self._service.training.weights_info(body.tinker_path)
        return responses.WeightsInfoResponse.model_validate(description)

    @_route(
        "GET",
        "/training_runs/{run}",
        responses.TrainingRun,
        query=requests.Scope,
        codes=("not_there", *OF_RECORDS),
    )
    async def training_run(self, request: Request, query: requests.Scope) -> BaseModel:
        """One model that a client has trained; also after its session has ended."""
        return await self._service.rest.training_run(request.path_params["run"])

    @_route(
        "GET",
        "/training_runs",
        responses.TrainingRunsResponse,
        query=requests.ScopedPage,
        codes=OF_RECORDS,
    )
    async def list_training_runs(self, request: Request, page: requests.ScopedPage) -> BaseModel:
        """Every model that clients have trained, the newest first."""
        return await self._service.rest.training_runs(page)

    @_route(
        "GET",
        "/sessions/{session}",
        responses.GetSessionResponse,
        query=requests.Scope,
        codes=("not_there", *OF_RECORDS),
    )
    async def session(self, request: Request, query: requests.Scope) -> BaseModel:
        """One session; also after it has ended."""
        return await self._service.rest.session(request.path_params["session"])

    @_route(
        "GET",
        "/sessions",
        responses.ListSessionsResponse,
        query=requests.ScopedPage,
        codes=OF_RECORDS,
    )
    async def list_sessions(self, request: Request, page: requests.ScopedPage) -> BaseModel:
        """The ids of all sessions, the newest first."""
        return await self._service.rest.sessions(page)

    @_route(
        "GET",
        "/training_runs/{run}/checkpoints",
        responses.CheckpointsListResponse,
        codes=("usage",),
    )
    async def list_checkpoints(self, request: Request) -> BaseModel:
        """The named checkpoints of a model, the oldest first; also after its session has ended."""
        run = request.path_params["run"]
        if not MODEL.fullmatch(run):
            raise UsageError(f"{run!r} is not an id of a training run; they look like s-…:train:0.")
        return await self._service.rest.checkpoints_of(run)

    @_route("GET", "/checkpoints", responses.CheckpointsListResponse, query=requests.Page)
    async def list_all_checkpoints(self, request: Request, page: requests.Page) -> BaseModel:
        """The named checkpoints of all models, the newest first."""
        return await self._service.rest.all_checkpoints(page)

    @_route(
        "DELETE",
        "/training_runs/{run}/checkpoints/{kind}/{name}",
        responses.EmptyResponse,
        codes=("usage", "not_there", *OF_RECORDS),
    )
    async def delete_checkpoint(self, request: Request) -> BaseModel:
        """Delete a checkpoint. Its files stay on the disk while a sampler of an open session uses them."""
        await self._service.checkpoints.delete(_checkpoint_of(request))
        return responses.EmptyResponse()

    @_route(
        "PUT",
        "/training_runs/{run}/checkpoints/{kind}/{name}/ttl",
        responses.EmptyResponse,
        reads=requests.SetTtl,
        codes=("not_there", *OF_RECORDS),
    )
    async def set_checkpoint_ttl(self, request: Request, body: requests.SetTtl) -> BaseModel:
        """Let a checkpoint expire after this many seconds; null: never."""
        await self._service.checkpoints.set_ttl(_checkpoint_of(request), body.ttl_seconds)
        return responses.EmptyResponse()

    @_route(
        "GET",
        "/billing/usage/checkpoints/current",
        responses.CheckpointStorageUsageResponse,
        query=requests.NoQuery,
    )
    async def storage_usage(self, request: Request, query: requests.NoQuery) -> BaseModel:
        """The disk space that checkpoints use on the server."""
        return await self._service.rest.storage_usage()

    @_route(
        "POST",
        "/asample",
        responses.SampleFuture,
        reads=requests.Sample,
        is_large=True,
        codes=(*OF_CALLS, "engine_failed"),
    )
    async def sample(self, request: Request, body: requests.Sample) -> BaseModel:
        """Complete a prompt, or compute its log-probabilities."""
        id, sequences = await self._service.sampling.sample(body)
        await self._service.wait_until_persisted(id)
        return responses.SampleFuture(request_id=id, sample_sequence_ids=sequences)

    @_route(
        "POST",
        "/retrieve_future",
        None,
        reads=requests.Retrieve,
        codes=("unknown_answer", "answer_gone"),
    )
    async def retrieve(self, request: Request, body: requests.Retrieve) -> BaseModel | Response:
        """The result of a call; 408 if it has none after a while."""
        answer = await self._service.answer(body.request_id, self._poll)
        if answer is None:
            return _json_response(responses.TryAgainResponse(request_id=body.request_id), 408)
        if answer.state == "failed":
            category = "user" if answer.media_type == "user" else "server"
            return responses.RequestFailedResponse(error=answer.body.decode(), category=category)
        return Response(answer.body, media_type=answer.media_type)

    async def refuse(self, request: Request) -> Response:
        """Refuse all other routes."""
        await self._read_body(request)
        path = request.url.path.removeprefix(PREFIX)
        raise refused_route(request.method, path) or NotFound(
            f"There is no route {request.method} {request.url.path[:200]}."
        )

    async def _promise(self, model: str, id: str) -> BaseModel:
        """The answer to a call that was started and is stored: its result is retrieved later."""
        await self._service.wait_until_persisted(id)
        return responses.UntypedAPIFuture(request_id=id, model_id=model)

    async def _parse_body(
        self, request: Request, kind: type[requests.Body], *, is_large: bool
    ) -> requests.Body:
        try:
            body = await self._read_body(request, None if is_large else SMALL_BODY)
            return await read_body(body, lambda text: kind.model_validate(parse(text)))
        except NotStrict as error:
            raise UsageError(
                f"The body is not JSON as it is taken here: {error.msg} (at {error.pos})."
            ) from None
        except ValidationError as error:
            raise _usage_error(error, kind) from error

    async def _read_body(self, request: Request, max_bytes: int | None = None) -> bytes:
        """Read the body, unpacked if need be. It is kept in the request's state, because `TinkerService.use_up_number` needs it."""
        request.state.body = await self._bodies.read(request.headers, request.receive, max_bytes)
        return request.state.body


def _guard(handler: Handler, service: TinkerService, authorise: Authorise) -> Handler:
    async def guarded(request: Request) -> Response:
        try:
            authorise(request)
            return await handler(request)
        except ClientGone:
            raise
        except (
            Exception
        ) as error:  # an error in one request must not affect others; its details are only logged
            code = code_of(error)
            facts: Facts | None = request.scope.get(SCOPE)
            if facts is not None:
                facts.code = code
            if code == "internal":
                logger.error("request %s failed", facts.request_id if facts else "", exc_info=error)
                message = CODES[code].meaning
            else:
                message = str(error)
            if isinstance(error, UsageError):
                service.use_up_number(getattr(request.state, "body", b""), error)
            headers = {"Retry-After": "1"} if CODES[code].retry else {}
            if isinstance(error, Refusal):
                headers |= error.headers
            return _json_response(
                responses.RefusedResponse(code=code, message=message), CODES[code].status, headers
            )

    return guarded


def _parse_query(request: Request, kind: type[requests.Body]) -> requests.Body:
    """The parameters behind `?`. UsageError names the wrong ones."""
    try:
        return kind.model_validate(dict(request.query_params))
    except ValidationError as error:
        raise _usage_error(error, kind) from error


def _usage_error(error: ValidationError, kind: type[requests.Body]) -> UsageError:
    problems = [
        f"{field_error} (given: {reprlib.repr(field_error.given)})"
        for field_error in field_errors(error, kind)[:10]
    ]
    return UsageError(f"{kind.__name__} is not what this server takes. " + "; ".join(problems))


def _checkpoint_of(request: Request) -> Stored:
    """The checkpoint that the address names. UsageError if it is malformed."""
    named = request.path_params
    return stored_at(f"{SCHEME}{named['run']}/{named['kind']}/{named['name']}")


def _json_response(
    answer: BaseModel, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    content = answer.model_dump_json(exclude_none=True)
    return Response(content, status, headers, "application/json")
