"""Parses responses of an OpenAI-compatible service strictly: an unexpected one is an EndpointError that shows the response."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from groupwise.core.errors import EndpointError
from groupwise.core.plugins import printable

MAX_CHARACTERS_IN_MESSAGE = 300
"""Maximum number of characters of an unexpected body in a message."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Billed tokens; None if the service does not report them."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            _add_counts(self.prompt_tokens, other.prompt_tokens),
            _add_counts(self.completion_tokens, other.completion_tokens),
        )


@dataclass(frozen=True, slots=True)
class Choices:
    """The choices for one prompt; every tuple has one entry per choice."""

    texts: tuple[str, ...]
    finish_reasons: tuple[str | None, ...]
    """The service's own words: `stop`, `length`, `content_filter` …; None if it does not say."""
    usage: Usage
    model: str
    """The model named in the response."""
    reasoning: tuple[str | None, ...]
    """A reasoning model's reasoning before its text, if the service separates them."""

    def __add__(self, other: Choices) -> Choices:
        return Choices(
            self.texts + other.texts,
            self.finish_reasons + other.finish_reasons,
            self.usage + other.usage,
            other.model,
            self.reasoning + other.reasoning,
        )

    def first(self, count: int) -> Choices:
        """Only the first `count` choices; the usage is still that of all, because all are billed."""
        return Choices(
            self.texts[:count],
            self.finish_reasons[:count],
            self.usage,
            self.model,
            self.reasoning[:count],
        )


def read_json(body: bytes) -> Mapping[str, Any]:
    """The JSON object of a body. Raises EndpointError."""
    try:
        value: object = json.loads(body)
    except ValueError:
        raise EndpointError(f"answered no JSON, but {excerpt(body)}") from None
    if not isinstance(value, Mapping):
        raise EndpointError(f"answered no JSON object, but {excerpt(body)}")
    return cast("Mapping[str, Any]", value)


def read_answer(body: bytes, requested_model: str) -> Choices:
    """The choices in a body of /chat/completions or /completions, in order. Raises EndpointError."""
    value = read_json(body)
    choice_list: object = value.get("choices")
    if not isinstance(choice_list, list) or not choice_list:
        raise EndpointError(f"answered without choices: {excerpt(body)}")
    choices = [_as_mapping(choice) for choice in cast("list[Any]", choice_list)]
    # Sort by `index`: services may list choices in the order in which they finish.
    indices = [choice.get("index") for choice in choices]
    if sorted(index for index in indices if isinstance(index, int)) == list(range(len(choices))):
        choices = [choices[indices.index(index)] for index in range(len(choices))]
    texts: list[str] = []
    reasons: list[str | None] = []
    for choice in choices:
        message, text = _as_mapping(choice.get("message")), choice.get("text")
        if not message and not isinstance(text, str):
            raise EndpointError(f"answered a choice without message or text: {excerpt(body)}")
        texts.append(
            printable(_message_content(message.get("content"), body) if message else str(text))
        )
        reason = choice.get("finish_reason")
        reasons.append(reason if isinstance(reason, str) else None)
    model, usage = value.get("model"), _as_mapping(value.get("usage"))
    return Choices(
        texts=tuple(texts),
        finish_reasons=tuple(reasons),
        usage=Usage(
            _token_count(usage.get("prompt_tokens")), _token_count(usage.get("completion_tokens"))
        ),
        model=printable(model) if isinstance(model, str) and model else requested_model,
        reasoning=tuple(
            _message_reasoning(_as_mapping(choice.get("message"))) for choice in choices
        ),
    )


def read_models(body: bytes) -> tuple[str, ...]:
    """The ids in a body of /models. Raises EndpointError."""
    entries: object = read_json(body).get("data")
    if not isinstance(entries, list):
        raise EndpointError(f"answered no list of models, but {excerpt(body)}")
    listed = [_as_mapping(entry).get("id") for entry in cast("list[Any]", entries)]
    return tuple(printable(name) for name in listed if isinstance(name, str))


def holds_error(body: bytes) -> bool:
    """True if a body with status 200 contains an error: some gateways pass on others' errors this way."""
    if b'"error"' not in body:
        return False
    try:
        value = _as_mapping(json.loads(body))
    except ValueError:
        return False
    return bool(value.get("error")) and "choices" not in value and "data" not in value


def error_in(body: bytes) -> tuple[str, str | None, int | None]:
    """The error's message, the service's own code for it, and the HTTP status that a gateway passes on in the body."""
    try:
        value = _as_mapping(json.loads(body))
    except ValueError:
        return excerpt(body), None, None
    error: object = value.get("error") or value.get("message") or value.get("detail")
    fields = _as_mapping(error)
    code: object = fields.get("code")
    message: object = fields.get("message") if fields else error
    text = (
        printable(message)[:MAX_CHARACTERS_IN_MESSAGE]
        if isinstance(message, str) and message
        else excerpt(body)
    )
    number = isinstance(code, int) and not isinstance(code, bool)
    return text, code if isinstance(code, str) else None, cast("int", code) if number else None


def excerpt(body: bytes) -> str:
    """A body for a message: its beginning on one line, and its size if it was cut."""
    if not body:
        return "an empty body"
    text = " ".join(printable(body.decode("utf-8", "replace")).split())
    return (
        text
        if len(text) <= MAX_CHARACTERS_IN_MESSAGE
        else f"{text[:MAX_CHARACTERS_IN_MESSAGE]}… ({len(body)} bytes)"
    )


def _message_content(content: Any, body: bytes) -> str:
    """The text of a message. A reasoning model that was cut off has only reasoning and no text."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):  # a list of parts; other kinds, such as thoughts, are not text
        parts = [_as_mapping(part) for part in cast("list[Any]", content)]
        return "".join(str(part.get("text", "")) for part in parts if part.get("type") == "text")
    raise EndpointError(f"answered content that is not text: {excerpt(body)}")


def _message_reasoning(message: Mapping[str, Any]) -> str | None:
    for name in ("reasoning_content", "reasoning"):
        thought = message.get(name)
        if isinstance(thought, str) and thought:
            return printable(thought)
    return None


def _token_count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _as_mapping(value: Any) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def _add_counts(first: int | None, second: int | None) -> int | None:
    return None if first is None or second is None else first + second
