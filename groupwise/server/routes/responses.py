"""The routes of /v1/responses: one turn of a conversation, and the responses that are kept.

A request is converted to a chat and served as one; see `groupwise.tasks.openai.responses`.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Annotated

from fastapi import Path
from fastapi.responses import Response

from groupwise.api.http.route import Route, json_response
from groupwise.api.schemas.keys import Role
from groupwise.api.schemas.problems import Refusal
from groupwise.api.schemas.responses import DeletedResponse, ResponseData, ResponsesRequest
from groupwise.api.schemas.training import MAX_NAME
from groupwise.server.ledger.idempotency import StoredResponse, keep_response
from groupwise.server.ledger.transaction import Transaction
from groupwise.server.openai.service import OpenAIService
from groupwise.server.routes.context import Context, RequestContext
from groupwise.server.routes.openai import (
    TAG,
    Storage,
    StreamedResponse,
    completion_route,
    with_retry_key,
)
from groupwise.tasks.openai.completed import Completed
from groupwise.tasks.openai.generation_request import (
    GenerationRequest,
    StorageHeaders,
    parse_request,
)
from groupwise.tasks.openai.responses import (
    Messages,
    ResponseEncoder,
    chat_request,
    in_own_names,
    kept_response,
    messages_of_input,
    own_name,
    response_of,
)

PREVIOUS = "previous_response_id"
ResponseId = Annotated[str, Path(description="Id of a response.", max_length=MAX_NAME)]


async def _create(
    service: OpenAIService, body: ResponsesRequest, storage: StorageHeaders, context: RequestContext
) -> Response:
    caller, messages = context.caller, messages_of_input(body)
    if body.previous_response_id is not None:
        previous = await service.kept_response(caller, body.previous_response_id, PREVIOUS)
        messages = [*previous.messages, *messages]
    request = await _generation_request(service, body, messages, storage)
    context = await with_retry_key(service, request, body, storage, context)

    def keep(transaction: Transaction, completed: Completed) -> None:
        keep_response(transaction, caller, kept_response(body, messages, completed))

    def render(completed: Completed) -> StoredResponse:
        response = response_of(body, "", "", 0.0, completed)
        return StoredResponse(200, response.model_dump_json().encode())

    also = keep if body.is_kept else None
    if body.stream:
        stream = partial(service.stream, request, context.caller, also=also)
        encoder = partial(ResponseEncoder, body, time.time())
        return StreamedResponse(context, stream, encoder, 1)
    return await context.run_idempotent(
        lambda: service.answer(request, context.caller, render, also)
    )


async def _generation_request(
    service: OpenAIService, body: ResponsesRequest, messages: Messages, storage: StorageHeaders
) -> GenerationRequest:
    try:
        request = await service.with_template(parse_request(chat_request(body, messages), storage))
    except Refusal as refusal:
        raise in_own_names(refusal) from None
    field_names = {name: own_name(field) for name, field in request.field_names.items()}
    return replace(request, field_names=field_names)


def response_routes(service: OpenAIService) -> tuple[Route, ...]:
    """The routes of /v1/responses."""

    async def create_response(
        body: ResponsesRequest, context: Context, storage: Storage
    ) -> Response:
        """One turn of the policy in a conversation."""
        return await _create(service, body, storage, context)

    async def retrieve_response(context: Context, response_id: ResponseId) -> Response:
        """A response that is kept."""
        stored = await service.kept_response(context.caller, response_id)
        return json_response(ResponseData.model_validate(stored.response))

    async def delete_response(context: Context, response_id: ResponseId) -> Response:
        """Keep a response no longer. Those that went on from it stay."""
        await service.delete_response(context.caller, response_id)
        return json_response(DeletedResponse(id=response_id))

    return (
        completion_route(
            "/v1/responses",
            create_response,
            ResponseData,
            {"model": "latest", "input": "Sort: pear, apple"},
            "unknown_response",
        ),
        Route(
            method="GET",
            path="/v1/responses/{response_id}",
            handler=retrieve_response,
            role=Role.TRAIN,
            tag=TAG,
            answer=ResponseData,
            codes=("unknown_response",),
        ),
        Route(
            method="DELETE",
            path="/v1/responses/{response_id}",
            handler=delete_response,
            role=Role.TRAIN,
            tag=TAG,
            answer=DeletedResponse,
            works=True,
            codes=("unknown_response", "disk_full"),
        ),
    )
