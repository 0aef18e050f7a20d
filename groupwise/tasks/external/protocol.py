"""The calls between a run and an environment that plays attempts in a process of its own; decision 0075 describes them.

`Program` says how to start such a process. `AttemptResult` is the checked answer to a call of `rollout`; an environment is code of others,
which may send anything.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

from groupwise.core.plugins import printable
from groupwise.core.types import RewardPart

PROTOCOL = 1
"""Version of the calls, sent with `open`."""
MAX_PARTS = 256
"""Reward parts and metrics of one attempt."""
MAX_NAME = 200
"""Characters of the name of a reward or a metric."""
MAX_WORDS = 2000
"""Characters kept of what an environment says to people: errors, and why an attempt stopped."""
MAX_NOTES = 1 << 20
"""Bytes of an attempt's notes as JSON."""
MAX_DEPTH = 64
"""Lists and objects in each other in an attempt's notes."""


@dataclass(frozen=True, slots=True)
class Program:
    """An environment's process: how to start it, and what it is to load."""

    described: str
    """For messages: `verifiers:wordle`."""
    command: tuple[str, ...]
    """Words of its command line, without the socket."""
    name: str
    """`name` of the call `open`."""
    args: dict[str, Any] = field(default_factory=dict[str, Any])
    """`args` of the call `open`."""
    eval_args: dict[str, Any] | None = None
    """`eval_args` of the call `open`: arguments of evaluation; None: the environment itself says which examples are held out."""
    variables: dict[str, str] = field(default_factory=dict[str, str])
    """Variables of its environment, added to those of the run."""


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """How an attempt ended."""

    parts: tuple[RewardPart, ...] = ()
    """Rewards and, with weight 0, metrics."""
    completions: tuple[str, ...] | None = None
    """Ids of the completions that teach; None: all."""
    truncated: bool = False
    error: str | None = None
    notes: dict[str, Any] = field(default_factory=dict[str, Any])


class InvalidAnswer(ValueError):
    """An environment's answer that cannot be used; the message says why."""


def parse_attempt_result(result: object, given: Mapping[str, str | None]) -> AttemptResult:
    """The answer to a call of `rollout`. `given`: the ids of the completions that the attempt was given, in order, with their sessions.

    Raises InvalidAnswer.
    """
    turns = {id: turn for turn, id in enumerate(given)}
    if not isinstance(result, dict):
        raise InvalidAnswer(f"it is {_short(result)}; expected an object")
    answer = cast("dict[str, Any]", result)
    error = answer.get("error")
    if error is not None:
        return AttemptResult(error=readable(error), notes=_notes(answer))
    rewards = answer.get("rewards", [])
    metrics = answer.get("metrics", {})
    if not isinstance(rewards, list) or not isinstance(metrics, dict):
        raise InvalidAnswer("`rewards` is a list and `metrics` an object")
    reward_list, numbers = cast("list[Any]", rewards), cast("dict[str, Any]", metrics)
    if len(reward_list) + len(numbers) > MAX_PARTS:
        raise InvalidAnswer(f"it has more than {MAX_PARTS} rewards and metrics")
    parts = [_reward(entry, turns) for entry in reward_list]
    names = {part.name for part in parts}
    for name, value in numbers.items():
        own_name = f"metric/{name}" if name in names else name
        parts.append(RewardPart(_name(own_name), _number(name, value), 0.0))
    if not math.isfinite(sum((part.value or 0.0) * part.weight for part in parts)):
        raise InvalidAnswer("the sum of its rewards is not a finite number")
    completions = answer.get("completions")
    if completions is not None:
        completions = tuple(_known(id, turns) for id in _list(completions, "completions"))
    elif (sessions := answer.get("sessions")) is not None:
        taken = set(map(str, _list(sessions, "sessions")))
        completions = tuple(id for id, session in given.items() if session in taken)
    truncated = answer.get("truncated") is True
    return AttemptResult(tuple(parts), completions, truncated, None, _notes(answer))


def _reward(entry: Any, turns: Mapping[str, int]) -> RewardPart:
    shown = _short(entry)
    fields = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {}
    name = fields.get("name")
    if not isinstance(name, str):
        raise InvalidAnswer(f"a reward is {shown}; expected an object with `name` and `value`")
    completion = fields.get("completion")
    return RewardPart(
        _name(name),
        _number(name, fields.get("value")),
        _number(f"{name} (weight)", fields.get("weight", 1.0)),
        None if completion is None else turns[_known(completion, turns)],
    )


def readable(message: object) -> str:
    """What an environment says to people, bounded and printable."""
    return printable(str(message)[:MAX_WORDS])


def _name(name: str) -> str:
    if len(name) > MAX_NAME:
        raise InvalidAnswer(f"the name {_short(name)}… has more than {MAX_NAME} characters")
    return printable(name)


def _number(name: str, value: object) -> float:
    with suppress(OverflowError):  # an integer of any length is JSON
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    raise InvalidAnswer(f"`{name}` is {_short(value)}; expected a finite number")


def _known(id: object, turns: Collection[str]) -> str:
    """The id of a completion, without the prefix of its route."""
    bare = id.rpartition("-")[2].removeprefix("resp_") if isinstance(id, str) else None
    if bare in turns:
        return cast("str", bare)
    raise InvalidAnswer(f"{_short(id)} is not an id of a completion that this attempt was given")


def _list(value: object, name: str) -> list[Any]:
    if isinstance(value, list):
        return cast("list[Any]", value)
    raise InvalidAnswer(f"`{name}` is {_short(value)}; expected a list")


def _notes(answer: Mapping[str, Any]) -> dict[str, Any]:
    notes = answer.get("notes")
    own = dict(cast("dict[str, Any]", notes)) if isinstance(notes, dict) else {}
    if isinstance(stopped := answer.get("stopped"), str):
        own["stopped"] = readable(stopped)
    level, depth = [cast("Any", own)], 0
    while level and depth <= MAX_DEPTH:
        level = [inner for value in level for inner in _inside(value)]
        depth += 1
    try:
        if level:
            raise RecursionError(f"more than {MAX_DEPTH} lists and objects in each other")
        text = json.dumps(own, allow_nan=False, ensure_ascii=False)
        length = len(text.encode())  # raises for half of a character, which no file can hold
    except (ValueError, RecursionError) as error:
        raise InvalidAnswer(f"its notes cannot be recorded: {readable(error)}") from None
    if length > MAX_NOTES:
        raise InvalidAnswer(f"its notes have {length} bytes as JSON; at most {MAX_NOTES} are kept")
    return own


def _inside(value: Any) -> Collection[Any]:
    if isinstance(value, dict):
        return cast("dict[str, Any]", value).values()
    return cast("list[Any]", value) if isinstance(value, list) else ()


def _short(value: object) -> str:
    return printable(f"{value!r:.80}")
