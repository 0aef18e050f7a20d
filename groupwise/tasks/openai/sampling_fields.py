"""Reads the fields of a request that change how tokens are drawn or what an answer says about them; says which are refused with `store`.

A stored completion is trained on, so it must be drawn from the policy's own distribution. The ledger keeps its text, its tokens and their
log-probabilities, so a later call that receives a stored completion can get nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from groupwise.api.schemas.openai import ChatRequest, ResponseFormat, TextRequest
from groupwise.core.types import CallGrammar, LogitsProcessing


def processing_of(request: ChatRequest | TextRequest) -> LogitsProcessing | None:
    """The changes of the logits that the request asks for; None if there are none."""
    changes = _changes(request)
    return LogitsProcessing(**changes) if changes else None


def _changes(request: ChatRequest | TextRequest) -> dict[str, Any]:
    bias = request.logit_bias or {}
    values: dict[str, Any] = {
        "presence_penalty": request.presence_penalty or None,
        "frequency_penalty": request.frequency_penalty or None,
        "repetition_penalty": None
        if request.repetition_penalty == 1
        else request.repetition_penalty,
        "logit_bias": tuple((int(token), value) for token, value in bias.items() if value) or None,
    }
    if isinstance(request, ChatRequest):
        is_forced = request.tool_selection.mode == "required"
        schema = None if is_forced else schema_of(request.response_format)
        values["json_schema"] = schema
        if is_forced or (schema is not None and request.offered_tools):
            # The notation of the calls is the model's, see `OpenAIService.with_template`.
            functions = [tool["function"] for tool in request.callable_tools]
            values["tool_calls"] = CallGrammar(
                tuple(
                    (function["name"], json.dumps(function.get("parameters") or {}))
                    for function in functions
                ),
                is_single=request.tool_selection.is_single or request.parallel_tool_calls is False,
            )
    return {name: value for name, value in values.items() if value is not None}


def schema_of(response_format: ResponseFormat | None) -> str | None:
    """The JSON schema that an answer must follow, as JSON text; None: any text. Properties stay in the order in which they are written."""
    if response_format is None or response_format.type == "text":
        return None
    schema = (
        response_format.json_schema.schema_ if response_format.json_schema is not None else None
    )
    return json.dumps({"type": "object"} if schema is None else schema)


def _field_name(request: ChatRequest | TextRequest, change: str) -> str:
    """Name of the request's field that asks for such a change."""
    if change == "tool_calls" and isinstance(request, ChatRequest):
        return "tool_choice" if request.tool_selection.mode == "required" else "response_format"
    return "response_format" if change == "json_schema" else change


def unlearnable_fields(request: ChatRequest | TextRequest) -> Iterator[tuple[str, str]]:
    """Each field with which the completions cannot be stored, and why."""
    for name in (*request.restrictions, *_changes(request)):
        yield (
            _field_name(request, name),
            "draws from another distribution than the one that is learnt; leave it out, or ask without `store`",
        )
    if request.alternatives:
        name = "top_logprobs" if isinstance(request, ChatRequest) else "logprobs"
        yield (
            name,
            "asks for tokens that were not drawn, which are not kept with `store`; give 0, or ask without `store`",
        )
    if isinstance(request, TextRequest) and request.echo:
        yield (
            "echo",
            "has no place with `store`: what is kept is the completion. Leave it out, or ask without `store`",
        )
