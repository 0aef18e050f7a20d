"""Chooses which turns of a rollout are trained on, for environments that run the rollout themselves: `rollout.trained_turns`.

    all              every turn
    last             the last one
    with_tool_calls  those that call a tool
    FILE.py:NAME     those for which a function returns True: it gets all turns, as messages of the assistant with `content` and
                     `tool_calls`, and returns one truth value for each

If the environment itself names the completions to train on, only those are considered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from groupwise.core.errors import TaskError
from groupwise.core.plugins import explain, load
from groupwise.core.types import Message

TrainedTurns = Callable[[Sequence[Message]], Sequence[bool]]
"""A function that gets the turns of a rollout (at least one), and returns for each turn whether it is trained on."""


def every_turn(turns: Sequence[Message]) -> list[bool]:
    """Train on all turns."""
    return [True] * len(turns)


def last_turn(turns: Sequence[Message]) -> list[bool]:
    """Train on the last turn."""
    return [turn is turns[-1] for turn in turns]


def turns_with_tool_calls(turns: Sequence[Message]) -> list[bool]:
    """Train on the turns that call a tool."""
    return [bool(turn.get("tool_calls")) for turn in turns]


CHOICES: dict[str, TrainedTurns] = {
    "all": every_turn,
    "last": last_turn,
    "with_tool_calls": turns_with_tool_calls,
}


class UnusableChoice(Exception):
    """The function raised, or its answer does not fit the turns; the message says how."""


def trained_turns(name: str) -> TrainedTurns:
    """The function of a name. Raises TaskError if there is none."""
    if name in CHOICES:
        return CHOICES[name]
    if ":" not in name:
        raise TaskError(
            f"rollout.trained_turns is {name}. Expected {', '.join(CHOICES)}, or a function: FILE.py:NAME or package.module:NAME."
        )
    function = load(name, kind="function", instantiate=False).object
    if not callable(function):
        raise TaskError(f"rollout.trained_turns: {name} is not a function.")

    def choose(turns: Sequence[Message]) -> list[bool]:
        try:
            answer: Any = function([dict(turn) for turn in turns])
            chosen = [bool(value) for value in answer]
        except Exception as error:  # code of the user, which fails its attempt only
            raise UnusableChoice(f"{name} raised {explain(error).strip()}") from error
        if len(chosen) != len(turns):
            raise UnusableChoice(f"{name} returned {len(chosen)} values for {len(turns)} turns")
        return chosen

    return cast("TrainedTurns", choose)
