"""Request bodies for the training server, validated with the server's own models before they are sent.

A mistake is therefore reported at once, in the server's words: `InvalidRequest`, with each wrong field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from pydantic import BaseModel, TypeAdapter, ValidationError

from groupwise.api.client.errors import InvalidRequest
from groupwise.api.schemas.problems import FieldError, Refusal
from groupwise.api.schemas.training import (
    DEFAULT_WAIT,
    GroupAnswer,
    GroupRewards,
    Include,
    RewardsRequest,
)

Rewards = Sequence[float | None]
"""A number for each completion, or None for one that failed and must not be trained on."""

RewardsEntry = GroupRewards | Mapping[str, Any]
"""The rewards of one group among several: the result of `rewards_for`, or its fields."""


class Sampling(TypedDict, total=False):
    """Sampling settings that differ from the run's; see `CompletionsRequest`."""

    num_completions: int | None
    temperature: float | None
    max_completion_length: int | None
    min_completion_length: int | None
    stop: Sequence[str] | None
    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None
    tokenizer_hash: str | None


def rewards_for(
    answer: GroupAnswer, rewards: Rewards, *, include: Include = "next"
) -> GroupRewards:
    """The rewards of the completions of `answer`, ready to be posted. Raises InvalidRequest unless there is one for each completion."""
    if len(rewards) != len(answer.completions):
        raise _invalid_request(
            "rewards", f"has {len(rewards)} entries for {len(answer.completions)} completions"
        )
    fields = {"group_id": answer.group_id, "rewards": rewards, "include": include}
    return GroupRewards.model_validate_json(checked_body(GroupRewards, fields))


def rewards_entry(group: RewardsEntry) -> dict[str, Any]:
    """The fields of one group's rewards."""
    if isinstance(group, GroupRewards):
        return group.model_dump(exclude_unset=True)
    return dict(group)


def without_none(**fields: Any) -> dict[str, Any]:
    """The fields that have a value; the server has defaults for the others."""
    return {name: value for name, value in fields.items() if value is not None}


def waiting(wait: bool, timeout: float) -> dict[str, Any]:
    """The fields that say whether the response waits for the step. The server refuses a time limit without `wait`."""
    limit = {"timeout": timeout} if wait or timeout != DEFAULT_WAIT else {}
    return {"wait": wait, **limit}


def checked_body(model: type[BaseModel] | TypeAdapter[Any], fields: Mapping[str, Any]) -> bytes:
    """The fields as JSON, after the model accepted them. Raises InvalidRequest."""
    try:
        body = json.dumps(fields, default=_to_json_value)
    except (TypeError, ValueError) as error:
        raise _invalid_request("", f"cannot be written as JSON: {error}") from None
    try:
        if isinstance(model, TypeAdapter):
            model.validate_json(body)
        else:
            model.model_validate_json(body)
    except ValidationError as error:
        kind = RewardsRequest if isinstance(model, TypeAdapter) else model
        raise InvalidRequest.about(Refusal.of_fields(error, kind).problem()) from None
    return body.encode()


def _to_json_value(value: Any) -> Any:
    """Numbers and arrays of numpy and torch as Python values, without importing either."""
    for conversion in ("tolist", "item"):
        if callable(convert := getattr(value, conversion, None)):
            return convert()
    if isinstance(value, Sequence):
        return list(value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    raise TypeError(f"{type(value).__name__} is not a number, text, list or mapping")


def _invalid_request(field: str, message: str) -> InvalidRequest:
    errors = (FieldError(field=field, message=message),)
    detail = f"{field}: {message}" if field else message
    return InvalidRequest.about(Refusal("invalid_request", detail, errors=errors).problem())
