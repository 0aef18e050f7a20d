"""The OpenAI-compatible routes: models, chats and plain completions, complete or as streams.

`openai_routes` returns the routes of a service, for `make_app(…, also=…)`; `attach_openai_errors` then converts the errors of everything
under /v1 to OpenAI's format. A stream starts with the first text: earlier refusals are ordinary errors; a later failure, of whatever kind,
is an error within the stream, which then has no final `[DONE]`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Protocol, cast

from fastapi import Depends, FastAPI, Header, Path
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from groupwise.api.http.route import Route, json_response
from groupwise.api.http.shared_state import Shared, facts_of
from groupwise.api.schemas.idempotency import AnswerKey, new_idempotency_key
from groupwise.api.schemas.keys import Role
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
from groupwise.server.openai.service import OpenAIService, StreamStarted, TextDelta
from groupwise.server.openai.storing import Render, StoredCompletion
from groupwise.server.routes.context import REPLAYED, Context, RequestContext
from groupwise.server.routes.training import OF_ENGINE, OF_RUN, OF_SAMPLING
from groupwise.tasks.openai.answers import Kind, StreamEncoder, full_response
from groupwise.tasks.openai.completed import Completed
from groupwise.tasks.openai.errors import OpenAIErrors, document_errors
from groupwise.tasks.openai.generation_request import (
    GenerationRequest,
    StorageHeaders,
    parse_request,
)

logger = logging.getLogger(__name__)

TAG = "openai"
BY_BODY = "POST /v1 without a key"
"""Route of the keys that the server makes: these requests are told apart by their bodies."""


def storage_headers(
    x_groupwise_store: Annotated[
        bool, Header(description="As `store: true` of the body, for clients that cannot add to it.")
    ] = False,
    x_groupwise_group: Annotated[
        str | None,
        Header(description="As `metadata.group` of the body.", min_length=1, max_length=MAX_VALUE),
    ] = None,
    x_groupwise_size: Annotated[
        int | None, Header(description="As `metadata.size` of the body.", ge=1, le=MAX_COMPLETIONS)
    ] = None,
    x_groupwise_trajectory: Annotated[
        str | None,
        Header(
            description="As `metadata.trajectory` of the body.", min_length=1, max_length=MAX_VALUE
        ),
    ] = None,
    x_stainless_retry_count: Annotated[
        int,
        Header(
            description="Sent by the client of OpenAI. A stored call that is sent again gets the answer that was lost.",
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


async def with_retry_key(
    service: OpenAIService,
    request: GenerationRequest,
    body: BaseModel,
    storage: StorageHeaders,
    context: RequestContext,
) -> RequestContext:
    """The request with a key of the server's, by which a retry gets the answer of its first attempt, if it stores completions and has no
    Idempotency-Key.
    """
    caller, in_flight = context.caller, context.serving.in_flight
    if not request.store or caller.answer_key is not None:
        return context
    key = AnswerKey(BY_BODY, new_idempotency_key(), storage.hash_with(body), storage.retries)
    if storage.retries:
        claim = partial(service.claim_answer, caller)
        shared = not request.names_trajectory
        repeated = await in_flight.key_for(caller, key, claim, lost_only=shared)
        key = replace(key, key=repeated or key.key)
    context.facts.note_delivery = partial(in_flight.note_delivery, caller, key)
    return replace(context, caller=replace(caller, answer_key=key))


async def _completion_response(
    service: OpenAIService,
    kind: Kind,
    body: ChatRequest | TextRequest,
    storage: StorageHeaders,
    context: RequestContext,
) -> Response:
    request = await service.with_template(parse_request(body, storage))
    context = await with_retry_key(service, request, body, storage, context)
    if body.stream:
        encoder = partial(
            StreamEncoder, kind, body.model, int(time.time()), usage=body.includes_usage
        )
        stream = partial(service.stream, request, context.caller)
        return StreamedResponse(context, stream, encoder, len(request.prompts) * request.n)

    def render(completed: Completed) -> StoredResponse:
        return StoredResponse(200, full_response(kind, completed).model_dump_json().encode())

    return await context.run_idempotent(lambda: service.answer(request, context.caller, render))


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


Stream = AsyncGenerator[StreamStarted | TextDelta | StoredCompletion]


class StreamedResponse(Response):
    """A streamed response. The stream is closed in every case (sent, refused, or the client disconnected), which ends the sampling.

    A request whose key was answered before gets the same completion as the events of one stream, all at once.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        context: RequestContext,
        stream: Callable[[Render], Stream],
        encoder: Callable[[], Encoder],
        choices: int,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]  # unknown before the end
        self._context = context
        self._stream = stream
        self._make_encoder = encoder
        self._choices = choices

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(FailureSent):
            response = await self._context.run_idempotent(
                lambda: self._send_stream(scope, send), media_type=self.media_type
            )
            if REPLAYED in response.headers:
                await response(scope, receive, send)

    async def _send_stream(self, scope: Scope, send: Send) -> StoredResponse:
        """Send the events as they come; returns the answer that was stored. Raises FailureSent after the event of a failure."""
        encoder = self._make_encoder()

        async def send_body(*chunks: bytes) -> None:
            for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})

        async with aclosing(self._stream(self._render)) as stream:
            item = await anext(stream)  # a refusal here is an ordinary error response
            head = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start", **head})
            while not isinstance(item, StoredCompletion):
                if isinstance(item, StreamStarted):
                    await send_body(*encoder.first_chunks(item.id, self._choices))
                else:
                    await send_body(encoder.text_chunk(item.choice, item.text))
                try:
                    item = await anext(stream)
                except Exception as error:
                    # The error as the client receives it; it is counted and logged like the error of an ordinary answer.
                    facts, shared = facts_of(scope), cast("Shared", scope["app"].state.shared)
                    refusal = error if isinstance(error, Refusal) else shared.refusal_of(error)
                    if refusal is None:
                        logger.error("request %s failed", facts.request_id, exc_info=error)
                        refusal = Refusal("internal")
                    facts.code = refusal.code
                    await send_body(encoder.error_chunk(refusal))
                    await send({"type": "http.response.body", "body": b""})
                    raise FailureSent from error
            assert item.completed is not None, "a stream ends with what it sampled"
            await send_body(*encoder.last_chunks(item.completed))
        await send({"type": "http.response.body", "body": b""})
        return item.answer

    def _render(self, completed: Completed) -> StoredResponse:
        encoder = self._make_encoder()
        texts = [encoder.text_chunk(i, each.text) for i, each in enumerate(completed.choices)]
        first = encoder.first_chunks(completed.id, self._choices)
        return StoredResponse(200, b"".join((*first, *texts, *encoder.last_chunks(completed))))


class FailureSent(Exception):
    """A stream has ended with the event of a failure."""


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

    get_route = partial(Route, method="GET", role=Role.READ, tag=TAG)
    chat = {"model": "latest", "messages": [{"role": "user", "content": "Sort: pear, apple"}]}
    text = {"model": "latest", "prompt": "Sort these words: pear, apple"}
    return (
        get_route(
            path="/v1/models",
            handler=list_models,
            answer=ModelList,
            codes=("shutting_down", *OF_ENGINE),
        ),
        get_route(
            path="/v1/models/{model}",
            handler=retrieve_model,
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
            *(*more_codes, "unknown_model", *OF_SAMPLING),
            *("already_rewarded", "lease_expired", "group_given_up", *OF_RUN, *OF_ENGINE),
        ),
        example=example,
    )


def attach_openai_errors(app: FastAPI) -> None:
    """Answer refusals under /v1 in OpenAI's format. Call it before the first request."""
    app.add_middleware(cast("Any", OpenAIErrors))
    document_errors(app.openapi())
