"""Every call of the training server, as data: what is sent, and how the answer is read. Both clients make theirs from these.

What a caller gives is checked with the models of the wire before it is sent, so that a mistake is reported at once, in the same words as
by the server: `InvalidRequest`, with each field.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar
from urllib.parse import quote

import httpx2
from pydantic import BaseModel, TypeAdapter, ValidationError

from groupwise.api.client.errors import InvalidRequest
from groupwise.api.client.exchange import Call
from groupwise.api.schemas.activity import ActivityAnswer
from groupwise.api.schemas.problems import FieldError, Refusal
from groupwise.api.schemas.training import (
    DEFAULT_WAIT,
    REWARDS_REQUEST,
    CheckpointAnswer,
    CheckpointRequest,
    CheckpointsAnswer,
    CompletionsBatch,
    CompletionsRequest,
    GivenUpAnswer,
    GroupAnswer,
    GroupRewards,
    Include,
    RewardAnswer,
    RewardsBatchAnswer,
    RewardsRequest,
    StartAnswer,
    StartRequest,
    StatusAnswer,
    StepAnswer,
    StepRequest,
    StopAnswer,
    TokenizerAnswer,
)
from groupwise.core.types import Prompt

A = TypeVar("A", bound=BaseModel)

Rewards = Sequence[float | None]
"""A number for each completion, or None for one that failed and does not teach."""

RewardsEntry = GroupRewards | Mapping[str, Any]
"""The rewards of one group among several: made by `rewards_for`, or its fields."""


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


def start(
    settings: StartRequest | Mapping[str, Any] | None, more: Mapping[str, Any]
) -> Call[StartAnswer]:
    """`more` goes over `settings`."""
    if isinstance(settings, StartRequest):
        settings = settings.model_dump(exclude_unset=True)
    return _post("/start", _checked(StartRequest, {**(settings or {}), **more}), StartAnswer)


def stop() -> Call[StopAnswer]:
    """End the run cleanly."""
    return _call("POST", "/stop", StopAnswer)


def completions(
    prompt: Prompt,
    draw: int | None,
    prompt_tokens: Sequence[int] | None,
    sampling: Sampling,
) -> Call[GroupAnswer]:
    """Ask for completions of one prompt."""
    given = {"prompt": prompt, "draw": draw, "prompt_tokens": prompt_tokens, **sampling}
    return _post("/completions", _checked(CompletionsRequest, _given(given)), GroupAnswer)


def completions_batch(
    prompts: Sequence[Prompt], draws: Sequence[int] | None, sampling: Sampling
) -> Call[CompletionsBatch]:
    """Ask for completions of several prompts."""
    given = {"prompts": list(prompts), "draws": draws, **sampling}
    return _post("/completions", _checked(CompletionsRequest, _given(given)), CompletionsBatch)


def rewards_for(
    answer: GroupAnswer, rewards: Rewards, *, include: Include = "next"
) -> GroupRewards:
    """The rewards of the completions of `answer`, ready to be posted. Raises InvalidRequest where they are not one for each."""
    if len(rewards) != len(answer.completions):
        raise _invalid(
            "rewards", f"has {len(rewards)} entries for {len(answer.completions)} completions"
        )
    given = {"group_id": answer.group_id, "rewards": rewards, "include": include}
    return GroupRewards.model_validate_json(_checked(GroupRewards, given))


def rewards(
    group: GroupAnswer | str,
    values: Rewards,
    *,
    include: Include = "next",
    wait: bool = False,
    timeout: float = DEFAULT_WAIT,
) -> Call[RewardAnswer]:
    """Post rewards for one group, named by its id or by the answer that it came in."""
    if isinstance(group, GroupAnswer):
        entry = _entry(rewards_for(group, values, include=include))
    else:
        entry = {"group_id": group, "rewards": values, "include": include}
    body = _checked(REWARDS_REQUEST, {**entry, **_waiting(wait, timeout)})
    return _post("/rewards", body, RewardAnswer, waits=timeout if wait else 0.0)


def rewards_batch(
    groups: Sequence[RewardsEntry], *, wait: bool = False, timeout: float = DEFAULT_WAIT
) -> Call[RewardsBatchAnswer]:
    """Post rewards for several groups, all or none."""
    given = {"groups": [_entry(group) for group in groups], **_waiting(wait, timeout)}
    body = _checked(REWARDS_REQUEST, given)
    return _post("/rewards", body, RewardsBatchAnswer, waits=timeout if wait else 0.0)


def give_up(group: GroupAnswer | str) -> Call[GivenUpAnswer]:
    """No rewards will come for this group."""
    name = group.group_id if isinstance(group, GroupAnswer) else group
    return _call("DELETE", f"/completions/{quote(name, safe='')}", GivenUpAnswer)


def step(
    group_ids: Sequence[str] | None,
    learning_rate: float | None,
    *,
    wait: bool = True,
    timeout: float = DEFAULT_WAIT,
) -> Call[StepAnswer]:
    """Take a step now."""
    given = _given({"group_ids": group_ids, "learning_rate": learning_rate})
    body = _checked(StepRequest, {**given, **_waiting(wait, timeout)})
    return _post("/step", body, StepAnswer, waits=timeout if wait else 0.0)


def status() -> Call[StatusAnswer]:
    """Ask for the status of server and run."""
    return _call("GET", "/status", StatusAnswer)


def activity() -> Call[ActivityAnswer]:
    """Ask for the current activity."""
    return _call("GET", "/activity", ActivityAnswer)


def checkpoints() -> Call[CheckpointsAnswer]:
    """Ask for the list of checkpoints."""
    return _call("GET", "/checkpoints", CheckpointsAnswer)


def save_checkpoint(name: str) -> Call[CheckpointAnswer]:
    """Write one now."""
    body = _checked(CheckpointRequest, {"name": name})
    return _post("/checkpoints", body, CheckpointAnswer)


def tokenizer() -> Call[TokenizerAnswer]:
    """Tokenizer and template of the model."""
    return _call("GET", "/tokenizer", TokenizerAnswer)


def model(version: str | None) -> Call[httpx2.Response]:
    """The weights of a version, as a stream."""
    query = {} if version is None else {"version": version}
    return Call("GET", "/model", _as_it_comes, query=query)


def events(after: int | None) -> Call[httpx2.Response]:
    """Ask for the stream of events after the event `after`."""
    headers = {"Accept": "text/event-stream"}
    if after is not None:
        headers["Last-Event-ID"] = str(after)
    return Call("GET", "/events", _as_it_comes, headers=headers)


def _call(method: str, path: str, answer: type[A]) -> Call[A]:
    return Call(method, path, _reader(answer))


def _post(path: str, body: bytes, answer: type[A], waits: float = 0.0) -> Call[A]:
    return Call("POST", path, _reader(answer), body, waits=waits)


def _reader(answer: type[A]) -> Callable[[httpx2.Response], A]:
    return lambda response: answer.model_validate_json(response.content)


def _as_it_comes(response: httpx2.Response) -> httpx2.Response:
    return response


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _entry(group: RewardsEntry) -> dict[str, Any]:
    if isinstance(group, GroupRewards):
        return group.model_dump(exclude_unset=True)
    return dict(group)


def _waiting(wait: bool, timeout: float) -> dict[str, Any]:
    """A time is given with `wait`, and refused without it."""
    given: dict[str, Any] = {"wait": wait}
    return given | ({"timeout": timeout} if wait or timeout != DEFAULT_WAIT else {})


def _checked(model: type[BaseModel] | TypeAdapter[Any], given: Mapping[str, Any]) -> bytes:
    """The body, once the model has nothing against it. Raises InvalidRequest."""
    try:
        body = json.dumps(given, default=_plain)
    except (TypeError, ValueError) as error:
        raise _invalid("", f"cannot be written as JSON: {error}") from None
    try:
        if isinstance(model, TypeAdapter):
            model.validate_json(body)
        else:
            model.model_validate_json(body)
    except ValidationError as error:
        kind = RewardsRequest if isinstance(model, TypeAdapter) else model
        raise InvalidRequest.about(Refusal.of_fields(error, kind).problem()) from None
    return body.encode()


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy and torch as Python's own, without importing either."""
    for conversion in ("tolist", "item"):
        if callable(convert := getattr(value, conversion, None)):
            return convert()
    if isinstance(value, Sequence):
        return list(value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    raise TypeError(f"{type(value).__name__} is no number, text, list or mapping")


def _invalid(field: str, message: str) -> InvalidRequest:
    errors = (FieldError(field=field, message=message),)
    detail = f"{field}: {message}" if field else message
    return InvalidRequest.about(Refusal("invalid_request", detail, errors=errors).problem())
