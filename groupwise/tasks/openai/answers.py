"""Completions in OpenAI's formats: as one response, or as the chunks of a stream.

Some data is sent only with the chunk that ends its choice: tokens and log-probabilities, which are known when the choice is complete, the
response's metadata, and tool calls, each in a chunk of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, Literal

from groupwise.api.schemas.openai import (
    AlternativeToken,
    CalledFunction,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    Reply,
    TextChoice,
    TextCompletion,
    TextLogprobs,
    TokenLogprob,
    ToolCallData,
    Usage,
)
from groupwise.api.schemas.problems import Refusal
from groupwise.tasks.openai.completed import Completed, CompletionChoice
from groupwise.tasks.openai.errors import error_of_refusal

Kind = Literal["chat", "text"]
PREFIX: dict[Kind, str] = {"chat": "chatcmpl-", "text": "cmpl-"}
"""Prefixes of response ids."""
DONE = b"data: [DONE]\n\n"
INCOMPLETE = "\ufffd"
"""Contained in the text of a token that holds only part of a character."""


def full_response(kind: Kind, completed: Completed) -> ChatCompletion | TextCompletion:
    """The complete response, without streaming."""
    metadata: dict[str, Any] = {
        **_response_metadata(kind, completed),
        "usage": _token_usage(completed),
    }
    if kind == "text":
        texts = [
            TextChoice(
                index=index,
                text=choice.text,
                finish_reason=choice.finish_reason,
                token_ids=list(choice.token_ids),
                logprobs=_text_logprobs(choice),
                prompt_token_ids=_prompt_token_ids(choice),
            )
            for index, choice in enumerate(completed.choices)
        ]
        return TextCompletion(**metadata, choices=texts)
    chats: list[ChatChoice] = []
    for index, choice in enumerate(completed.choices):
        calls = tool_calls(completed.id, index, choice)
        content = None if calls and not choice.text else choice.text
        chats.append(
            ChatChoice(
                index=index,
                message=Reply(content=content, tool_calls=calls or None),
                finish_reason=choice.finish_reason,
                token_ids=list(choice.token_ids),
                logprobs=_chat_logprobs(choice),
            )
        )
    prompt_token_ids = _prompt_token_ids(completed.choices[0])
    return ChatCompletion(**metadata, choices=chats, prompt_token_ids=prompt_token_ids)


def _response_metadata(kind: Kind, completed: Completed) -> dict[str, Any]:
    return {
        "id": PREFIX[kind] + completed.id,
        "created": int(completed.created),
        "model": completed.model,
        "system_fingerprint": completed.fingerprint,
        "policy_version": (completed.run, completed.step),
        "group_id": completed.group,
    }


def _token_usage(completed: Completed) -> Usage:
    prompt, completion = completed.prompt_tokens, completed.completion_tokens
    return Usage(
        prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion
    )


def tool_calls(id: str, choice_index: int, choice: CompletionChoice) -> list[ToolCallData]:
    """The calls of a choice, with their ids. `id`: of the completion, without its prefix."""
    return [
        ToolCallData(
            id=f"call_{id}-{choice_index}-{number}",
            function=CalledFunction(
                name=call.name, arguments=json.dumps(call.arguments, ensure_ascii=False)
            ),
        )
        for number, call in enumerate(choice.calls)
    ]


def _chat_logprobs(choice: CompletionChoice) -> ChatLogprobs | None:
    if choice.details is None:
        return None
    alternatives = choice.details.alternatives or ((),) * len(choice.details.texts)
    return ChatLogprobs(
        content=[
            TokenLogprob(
                token=text,
                logprob=logprob,
                bytes=bytes_of(text),
                top_logprobs=[
                    AlternativeToken(token=other, logprob=value, bytes=bytes_of(other))
                    for other, value in best or ()
                ],
            )
            for text, logprob, best in zip(
                choice.details.texts, choice.logprobs, alternatives, strict=True
            )
        ]
    )


def bytes_of(text: str) -> list[int] | None:
    """The bytes of a token's text; None if it is not a whole character."""
    return None if INCOMPLETE in text else list(text.encode())


def _prompt_token_ids(choice: CompletionChoice) -> list[int] | None:
    return None if choice.prompt_ids is None else list(choice.prompt_ids)


def _text_logprobs(choice: CompletionChoice) -> TextLogprobs | None:
    details = choice.details
    if details is None:
        return None
    lengths = accumulate(map(len, details.texts), initial=0)
    offsets = [offset for offset, _ in zip(lengths, details.texts, strict=False)]
    best: list[dict[str, float] | None] | None = None
    if details.alternatives is not None:
        best = [
            None if logprob is None else {**dict(reversed(alternatives or ())), text: logprob}
            for text, logprob, alternatives in zip(
                details.texts, details.logprobs, details.alternatives, strict=True
            )
        ]
    return TextLogprobs(
        tokens=list(details.texts),
        token_logprobs=list(details.logprobs),
        text_offset=offsets,
        top_logprobs=best,
    )


class StreamEncoder:
    """The encoded chunks of one stream."""

    def __init__(self, kind: Kind, model: str, created: int, *, usage: bool) -> None:
        """`model` is the requested model name; `usage`: whether the last chunk contains token counts."""
        self._kind: Kind = kind
        self._token_usage = usage
        self._id = ""
        self._model = model
        self._created = created

    def first_chunks(self, id: str, choices: int) -> Iterator[bytes]:
        """The chunks that precede all text."""
        self._id = PREFIX[self._kind] + id
        if self._kind == "chat":
            for index in range(choices):
                yield self._encode_chunk([self._choice_delta(index, "", role="assistant")])

    def text_chunk(self, index: int, text: str) -> bytes:
        """A chunk with more text of a choice."""
        return self._encode_chunk([self._choice_delta(index, text)])

    def last_chunks(self, completed: Completed) -> Iterator[bytes]:
        """The final chunk of each choice, then the end of the stream."""
        metadata = _response_metadata(self._kind, completed)
        if self._kind == "chat" and completed.choices[0].prompt_ids is not None:
            metadata["prompt_token_ids"] = completed.choices[0].prompt_ids
        for index, choice in enumerate(completed.choices):
            logprobs = _chat_logprobs(choice) if self._kind == "chat" else _text_logprobs(choice)
            final_choice = {
                **self._choice_delta(index, ""),
                "finish_reason": choice.finish_reason,
                "token_ids": choice.token_ids,
                "logprobs": None if logprobs is None else logprobs.model_dump(),
            }
            if self._kind == "text" and choice.prompt_ids is not None:
                final_choice["prompt_token_ids"] = choice.prompt_ids
            if self._kind == "chat":
                final_choice["delta"] = {}
                for number, call in enumerate(tool_calls(completed.id, index, choice)):
                    delta = {"tool_calls": [{"index": number, **call.model_dump()}]}
                    yield self._encode_chunk([{**self._choice_delta(index, ""), "delta": delta}])
            yield self._encode_chunk([final_choice], metadata)
        if self._token_usage:
            yield self._encode_chunk(
                [], {**metadata, "usage": _token_usage(completed).model_dump()}
            )
        yield DONE

    def error_chunk(self, refusal: Refusal) -> bytes:
        """The event of a failure within the stream, after which it ends without `[DONE]`."""
        return encode_event(error_of_refusal(refusal).model_dump())

    def _choice_delta(self, index: int, text: str, **delta: str) -> dict[str, Any]:
        if self._kind == "text":
            return {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        delta = {**delta, "content": text}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _encode_chunk(
        self, choices: list[dict[str, Any]], metadata: dict[str, Any] | None = None
    ) -> bytes:
        chunk: dict[str, Any] = {
            "id": self._id,
            "object": "chat.completion.chunk" if self._kind == "chat" else "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }
        if self._token_usage:
            chunk["usage"] = None
        return encode_event(chunk | (metadata or {}))


def encode_event(data: Any) -> bytes:
    """Encode a server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"
