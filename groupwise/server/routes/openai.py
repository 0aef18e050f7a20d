"""The OpenAI-compatible routes: models, chats and plain completions, complete or as streams.

`openai_routes` returns the routes of a service, for `make_app(…, also=…)`; `attach_openai_errors` then converts the errors of everything
under /v1 to OpenAI's format. A stream starts with the first text: earlier refusals are ordinary errors; a later failure, of whatever kind,
is an error within the stream, which then has no final `[DONE]`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Annotated, Any, Protocol, cast

from fastapi import Depends, FastAPI, Header, Path
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from groupwise.api.http.route import Route, json_response
from groupwise.api.http.shared_state import Shared, facts_of
from groupwise.api.schemas.idempotency import HEADER as IDEMPOTENCY_KEY
from groupwise.api.schemas.keys import Caller, Role
from groupwise.api.schemas.openai import (
    MAX_VALUE,
    ChatCompletion,
    ChatRequest,
    ModelData,
    ModelList,
    TextCompletion,
    TextRequest,
)
from groupwise.api.schemas.problems import Refusal
from groupwise.api.schemas.training import MAX_ADDRESS, MAX_COMPLETIONS
from groupwise.server.ledger.idempotency import StoredResponse
from groupwise.server.openai.answers import Kind, StreamEncoder, full_response
from groupwise.server.openai.asking import StorageHeaders, field_refusal, parse_request
from groupwise.server.openai.completed import Completed
from groupwise.server.openai.errors import OpenAIErrors, document_errors
from groupwise.server.openai.service import OpenAIService, StreamStarted, TextDelta
from groupwise.server.routes.context import Context, RequestContext
from groupwise.server.routes.training import OF_ENGINE, OF_RUN

logger = logging.getLogger(__name__)

TAG = "openai"


def storage_headers(
    x_groupwise_store: Annotated[
        bool, Header(description="As `store: true` of the body, for clients that cannot add to it.")
    ] = False,
    x_groupwise_group: Annotated[
        str | None,
        Header(description="As `metadata.group` of the body.", min_length=1, max_length=MAX_VALUE),
    ] = None,
    x_groupwise_size: Annotated[
        int | None,
        Header(description="As `metadata.size` of the body.", ge=1, le=MAX_COMPLETIONS),
    ] = None,
    x_groupwise_trajectory: Annotated[
        str | None,
        Header(
            description="As `metadata.trajectory` of the body.",
            min_length=1,
            max_length=MAX_VALUE,
        ),
    ] = None,
    x_stainless_retry_count: Annotated[
        int,
        Header(
            description="Sent by the client of OpenAI. A call of a trajectory that is sent again gets its stored answer.",
            ge=0,
        ),
    ] = 0,
) -> StorageHeaders:
    """Read the headers of a request."""
    return StorageHeaders(
        x_groupwise_store,
        x_groupwise_group,
        x_groupwise_size,
        x_groupwise_trajectory,
        x_stainless_retry_count,
    )


Storage = Annotated[StorageHeaders, Depends(storage_headers)]
ModelName = Annotated[
    str, Path(description="`run@step`, or `latest`.", min_length=1, max_length=MAX_ADDRESS)
]


def refuse_named_stream(caller: Caller) -> None:
    """Refuse an Idempotency-Key of a request for a stream."""
    if caller.answer_key is not None:
        raise field_refusal(
            IDEMPOTENCY_KEY,
            "names an answer that can be sent again, which a stream cannot; leave it out, or ask without `stream`",
        )


async def _completion_response(
    service: OpenAIService,
    kind: Kind,
    body: ChatRequest | TextRequest,
    storage: StorageHeaders,
    context: RequestContext,
) -> Response:
    ask = service.with_template(parse_request(body, storage))
    if body.stream:
        refuse_named_stream(context.caller)
        encoder = StreamEncoder(kind, body.model, int(time.time()), usage=body.includes_usage)
        choices = len(ask.prompts) * ask.n
        return StreamedResponse(service.stream(ask, context.caller), encoder, choices)

    def stored(done: Completed) -> StoredResponse:
        return StoredResponse(200, full_response(kind, done).model_dump_json().encode())

    return await context.run_idempotent(lambda: service.answer(ask, context.caller, stored))


class Encoder(Protocol):
    """Encodes a stream as the events of a protocol."""

    def first_chunks(self, id: str, choices: int) -> Iterator[bytes]:
        """The first event, before any text; `id` of the completion, without a prefix."""
        ...

    def text_chunk(self, index: int, text: str) -> bytes:
        """More text of a choice."""
        ...

    def last_chunks(self, completed: Completed) -> Iterator[bytes]:
        """The last events of the stream."""
        ...

    def error_chunk(self, refusal: Refusal) -> bytes:
        """A failure, after which the stream ends."""
        ...


class StreamedResponse(Response):
    """A streamed response. The stream is closed in every case (sent, refused, or the client disconnected), which ends the sampling."""

    media_type = "text/event-stream"

    def __init__(
        self,
        stream: AsyncGenerator[StreamStarted | TextDelta | Completed],
        encoder: Encoder,
        choices: int,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]  # unknown before the end
        self._stream = stream
        self._encoder = encoder
        self._choices = choices

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._stream) as stream:
            first = await anext(stream)  # a refusal here is an ordinary error response
            head = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start", **head})
            await self._send_output(send, first)
            while True:
                try:
                    output = await anext(stream, None)
                except Exception as error:  # noqa: BLE001 — no status can be sent now, and a stream that only stops looks complete to some clients
                    refusal = _refusal_within_stream(scope, error)
                    await _send_body(send, self._encoder.error_chunk(refusal))
                    break
                if output is None:
                    break
                await self._send_output(send, output)
        await send({"type": "http.response.body", "body": b""})

    async def _send_output(self, send: Send, output: StreamStarted | TextDelta | Completed) -> None:
        match output:
            case StreamStarted(id):
                for chunk in self._encoder.first_chunks(id, self._choices):
                    await _send_body(send, chunk)
            case TextDelta(choice, text):
                await _send_body(send, self._encoder.text_chunk(choice, text))
            case Completed():
                for chunk in self._encoder.last_chunks(output):
                    await _send_body(send, chunk)


def _refusal_within_stream(scope: Scope, error: Exception) -> Refusal:
    """The error as the client receives it; it is counted and logged like the error of an ordinary answer."""
    facts, shared = facts_of(scope), cast("Shared", scope["app"].state.shared)
    refusal = error if isinstance(error, Refusal) else shared.refusal_of(error)
    if refusal is None:
        logger.error("request %s failed", facts.request_id, exc_info=error)
        refusal = Refusal("internal")
    facts.code = refusal.code
    return refusal


async def _send_body(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


def openai_routes(service: OpenAIService) -> tuple[Route, ...]:
    """The routes under /v1."""

    async def list_models(context: Context) -> Response:
        """The policies that serve: the newest one, under its address and as `latest`."""
        return json_response(ModelList(data=await service.models()))

    async def retrieve_model(context: Context, model: ModelName) -> Response:
        """One policy that serves."""
        return json_response(await service.model(model))

    async def chat_completions(body: ChatRequest, context: Context, storage: Storage) -> Response:
        """Continue a chat."""
        return await _completion_response(service, "chat", body, storage, context)

    async def text_completions(body: TextRequest, context: Context, storage: Storage) -> Response:
        """Continue a text."""
        return await _completion_response(service, "text", body, storage, context)

    chat = {"model": "latest", "messages": [{"role": "user", "content": "Sort: pear, apple"}]}
    text = {"model": "latest", "prompt": "Sort these words: pear, apple"}
    return (
        Route(
            method="GET",
            path="/v1/models",
            handler=list_models,
            role=Role.READ,
            tag=TAG,
            answer=ModelList,
            codes=("shutting_down", *OF_ENGINE),
        ),
        Route(
            method="GET",
            path="/v1/models/{model}",
            handler=retrieve_model,
            role=Role.READ,
            tag=TAG,
            answer=ModelData,
            codes=("unknown_model", "invalid_request", "shutting_down", *OF_ENGINE),
        ),
        completion_route("/v1/chat/completions", chat_completions, ChatCompletion, chat),
        completion_route("/v1/completions", text_completions, TextCompletion, text),
    )


def completion_route(path: str, handler: Any, answer: Any, example: Any, *more_codes: str) -> Route:
    """A route that samples; `more_codes`: problems that it alone answers with."""
    return Route(
        method="POST",
        path=path,
        handler=handler,
        role=Role.TRAIN,
        tag=TAG,
        answer=answer,
        takes_body=True,
        works=True,
        named=True,
        codes=(
            *more_codes,
            "unknown_model",
            "too_busy",
            "draw_taken",
            "settings_conflict",
            "prompt_too_long",
            "already_rewarded",
            "lease_expired",
            "group_given_up",
            "disk_full",
            *OF_RUN,
            *OF_ENGINE,
        ),
        example=example,
    )


def attach_openai_errors(app: FastAPI) -> None:
    """Answer refusals under /v1 in OpenAI's format. Call it before the first request."""
    app.add_middleware(cast("Any", OpenAIErrors))
    document_errors(app.openapi())
