"""Converts between /v1/responses and chats: its requests become chat requests, and completions become responses or their events.

The items of a request become messages: calls of tools belong to the message of the assistant before them. A response of the policy is one
message, if there is text, followed by its calls. A kept response is stored with all messages up to it
(`groupwise.server.ledger.idempotency`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from groupwise.api.schemas.openai import ChatRequest, ToolCallData
from groupwise.api.schemas.problems import FieldError, Refusal, summary_of
from groupwise.api.schemas.responses import (
    FunctionCallItem,
    FunctionOutputItem,
    IncompleteDetails,
    MessageItem,
    OutputAlternative,
    OutputCall,
    OutputLogprob,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ResponseData,
    ResponsesRequest,
    ResponseUsage,
    Status,
    text_of,
)
from groupwise.core.settings.field_errors import field_errors
from groupwise.tasks.openai.answers import bytes_of, tool_calls
from groupwise.tasks.openai.completed import Completed, CompletionChoice
from groupwise.tasks.openai.errors import error_of_refusal

Messages = list[dict[str, Any]]

PREFIX = "resp_"
"""Prefix of response ids."""
SHARED = (
    *("model", "temperature", "top_p", "top_k", "min_p", "stop", "seed", "stream", "metadata"),
    *("parallel_tool_calls", "chat_template_kwargs", "user"),
)
"""Fields that have the same name and meaning in chats."""
NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
"""Fields of chats under the names that they have here; for refusals."""


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A response as it was sent, and the conversation that it ends."""

    response: dict[str, Any]
    messages: list[dict[str, Any]]
    """Messages as /v1/chat/completions takes them, without instructions; the last one is the response's."""


def chat_request(request: ResponsesRequest, messages: Sequence[Mapping[str, Any]]) -> ChatRequest:
    """The chat that a request asks for; `messages` is the conversation without instructions. Refuses what a chat refuses, by the names
    of this protocol.
    """
    system = [{"role": "system", "content": request.instructions}] if request.instructions else []
    chat: dict[str, Any] = {name: getattr(request, name) for name in SHARED}
    chat["messages"] = [*system, *messages]
    chat["store"] = request.store is True  # None keeps a response for later turns, not for a reward
    chat["max_completion_tokens"] = request.max_output_tokens
    chat["logprobs"] = request.wants_logprobs
    chat["top_logprobs"] = request.top_logprobs
    chat["reasoning_effort"] = request.reasoning.effort if request.reasoning else None
    chat["tools"] = [
        {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
        for tool in request.tools or ()
    ]
    chat["tool_choice"] = _chat_tool_choice(request.tool_choice)
    text_format = (request.text.format if request.text else None) or {"type": "text"}
    if text_format.get("type") == "json_schema":
        schema = {key: value for key, value in text_format.items() if key != "type"}
        text_format = {"type": "json_schema", "json_schema": schema}
    chat["response_format"] = text_format
    try:
        return ChatRequest.model_validate(chat)
    except ValidationError as error:
        errors = [
            FieldError(field=own_name(each.field), message=each.message)
            for each in field_errors(error, ChatRequest)
        ]
        raise Refusal("invalid_request", summary_of(errors), errors=errors) from None


def in_own_names(refusal: Refusal) -> Refusal:
    """A refusal of the chat, with the names of this protocol."""
    errors = [
        FieldError(field=own_name(each.field), message=each.message) for each in refusal.errors
    ]
    return Refusal(refusal.code, refusal.detail, errors=errors, retry_after=refusal.retry_after)


def own_name(field: str) -> str:
    """The name of a chat's field in this protocol."""
    first, _, rest = field.partition(".")
    if first == "tools":  # here a tool's function has no level of its own
        rest = rest.replace(".function", "", 1)
    if first == "response_format":  # nor has a schema
        rest = rest.removeprefix("json_schema").removeprefix(".")
    return ".".join(filter(None, (NAMES.get(first, first), rest)))


def _chat_tool_choice(choice: Any) -> Any:
    """`{"type": "function", "name": …}` and `allowed_tools` as chats have them; others as they are."""
    if not isinstance(choice, dict):
        return choice
    fields = cast("dict[str, Any]", choice)
    if fields.keys() == {"type", "mode", "tools"} and isinstance(fields["tools"], list):
        tools = [_chat_tool_choice(tool) for tool in cast("list[Any]", fields["tools"])]
        return {"type": fields["type"], fields["type"]: {"mode": fields["mode"], "tools": tools}}
    if fields.keys() != {"type", "name"}:
        return fields
    return {"type": fields["type"], "function": {"name": fields["name"]}}


def messages_of_input(request: ResponsesRequest) -> Messages:
    """The messages that a request adds to the conversation."""
    if isinstance(request.input, str):
        return [{"role": "user", "content": request.input}]
    messages: Messages = []
    for item in request.input:
        match item:
            case MessageItem():
                messages.append({"role": item.role, "content": text_of(item.content)})
            case FunctionCallItem():
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": None})
                messages[-1].setdefault("tool_calls", []).append(call)
            case FunctionOutputItem():
                output = {"role": "tool", "tool_call_id": item.call_id}
                messages.append({**output, "content": text_of(item.output)})
            case ReasoningItem():
                pass
    return messages


def response_of(
    request: ResponsesRequest, id: str, model: str, created: float, completed: Completed | None
) -> ResponseData:
    """The response; before it is complete, without output."""
    echoed: dict[str, Any] = {
        "instructions": request.instructions,
        "previous_response_id": request.previous_response_id,
        "store": request.is_kept,
        "tools": [
            {"strict": False, "parameters": None, **tool.model_dump(exclude_none=True)}
            for tool in request.tools or ()
        ],
        "tool_choice": request.tool_choice or "auto",
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "reasoning": request.reasoning.model_dump(exclude_none=True) if request.reasoning else {},
    }
    if request.text is not None and request.text.format is not None:
        echoed["text"] = {"format": request.text.format}
    if completed is None:
        return ResponseData(
            id=PREFIX + id,
            created_at=int(created),
            status="in_progress",
            model=model,
            output=[],
            **echoed,
        )
    (choice,) = completed.choices
    prompt, completion = completed.prompt_tokens, completed.completion_tokens
    is_cut = choice.finish_reason == "length"
    return ResponseData(
        id=PREFIX + completed.id,
        created_at=int(completed.created),
        status="incomplete" if is_cut else "completed",
        incomplete_details=IncompleteDetails(reason="max_output_tokens") if is_cut else None,
        model=completed.model,
        output=[*_output_message(completed.id, choice), *_output_calls(completed.id, choice)],
        usage=ResponseUsage(
            input_tokens=prompt, output_tokens=completion, total_tokens=prompt + completion
        ),
        system_fingerprint=completed.fingerprint,
        policy_version=(completed.run, completed.step),
        group_id=completed.group,
        token_ids=list(choice.token_ids),
        **echoed,
    )


def _output_message(id: str, choice: CompletionChoice) -> list[OutputMessage]:
    """The policy's words; none if it only calls tools."""
    if choice.calls and not choice.text:
        return []
    logprobs: list[OutputLogprob] = []
    if choice.details is not None:
        texts = choice.details.texts
        alternatives = choice.details.alternatives or ((),) * len(texts)
        for text, logprob, best in zip(texts, choice.logprobs, alternatives, strict=True):
            tops = [
                OutputAlternative(token=other, bytes=bytes_of(other) or [], logprob=value)
                for other, value in best or ()
            ]
            logprobs.append(
                OutputLogprob(
                    token=text, bytes=bytes_of(text) or [], logprob=logprob, top_logprobs=tops
                )
            )
    status: Status = "incomplete" if choice.finish_reason == "length" else "completed"
    text = OutputText(text=choice.text, logprobs=logprobs)
    return [OutputMessage(id=f"msg_{id}", status=status, content=[text])]


def _output_calls(id: str, choice: CompletionChoice) -> list[OutputCall]:
    calls: list[ToolCallData] = tool_calls(id, 0, choice)
    return [
        OutputCall(
            id=f"fc_{id}-{number}",
            status="completed",
            call_id=call.id,
            name=call.function.name,
            arguments=call.function.arguments,
        )
        for number, call in enumerate(calls)
    ]


def kept_response(
    request: ResponsesRequest, messages: Sequence[Mapping[str, Any]], completed: Completed
) -> KeptResponse:
    """The response as it is stored; `messages` is the conversation before it."""
    response = response_of(request, "", "", 0.0, completed)
    (choice,) = completed.choices
    calls = tool_calls(completed.id, 0, choice)
    message: dict[str, Any] = {"role": "assistant", "content": choice.text or None}
    if calls:
        message["tool_calls"] = [call.model_dump() for call in calls]
    elif not choice.text:
        message["content"] = ""
    conversation = [*map(dict, messages), message]
    return KeptResponse(response.model_dump(mode="json"), conversation)


class ResponseEncoder:
    """The events of one streamed response, in OpenAI's order."""

    def __init__(self, request: ResponsesRequest, created: float) -> None:
        """`created`: seconds since 1970."""
        self._request = request
        self._created = created
        self._number = 0
        """Events sent so far."""
        self._item_id = ""
        self._text: str | None = None
        """The text sent so far; None before the first."""

    def first_chunks(self, id: str, choices: int) -> Iterator[bytes]:
        """The events that precede all text."""
        assert choices == 1, "a response is one completion"
        self._item_id = f"msg_{id}"
        response = response_of(self._request, id, self._request.model, self._created, None)
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def text_chunk(self, index: int, text: str) -> bytes:
        """An event with more text; the first is preceded by those that begin a message."""
        opening = b"" if self._text is not None else b"".join(self._message_begins())
        self._text = (self._text or "") + text
        place = {"item_id": self._item_id, "output_index": 0, "content_index": index}
        return opening + self._event("response.output_text.delta", **place, delta=text, logprobs=[])

    def last_chunks(self, completed: Completed) -> Iterator[bytes]:
        """The events that end each item, then the complete response."""
        response = response_of(self._request, "", "", 0.0, completed)
        for index, item in enumerate(response.output):
            if isinstance(item, OutputMessage):
                yield from self._message_ends(item)
                continue
            unfinished = item.model_copy(update={"status": "in_progress", "arguments": ""})
            place = {"item_id": item.id, "output_index": index}
            yield self._event("response.output_item.added", output_index=index, item=unfinished)
            yield self._event(
                "response.function_call_arguments.delta", **place, delta=item.arguments
            )
            yield self._event(
                "response.function_call_arguments.done",
                **place,
                name=item.name,
                arguments=item.arguments,
            )
            yield self._event("response.output_item.done", output_index=index, item=item)
        yield self._event(f"response.{response.status}", response=response)

    def error_chunk(self, refusal: Refusal) -> bytes:
        """The event of a failure within the stream, after which it ends."""
        error = error_of_refusal(refusal).error
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def _message_begins(self) -> Iterator[bytes]:
        message = OutputMessage(id=self._item_id, status="in_progress", content=[])
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        yield self._event("response.output_item.added", output_index=0, item=message)
        yield self._event("response.content_part.added", **place, part=OutputText(text=""))

    def _message_ends(self, message: OutputMessage) -> Iterator[bytes]:
        if self._text is None:
            yield from self._message_begins()
        (part,) = message.content
        place = {"item_id": message.id, "output_index": 0, "content_index": 0}
        yield self._event(
            "response.output_text.done", **place, text=part.text, logprobs=part.logprobs
        )
        yield self._event("response.content_part.done", **place, part=part)
        yield self._event("response.output_item.done", output_index=0, item=message)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._number, **_plain(fields)}
        self._number += 1
        return f"event: {kind}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


def _plain(value: Any) -> Any:
    """Models within an event as JSON has them."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_plain(item) for item in cast("list[Any]", value)]
    return value
