"""Reward functions that are called without a run: completions may come flat, or nested as prompts × members.

    scores = correctness(prompts=["2+2?"], completions=[["4", "5"]], answer=["4"])     # [[1.0, 0.0]]

Arguments with an entry for each prompt (prompts and columns) are repeated for each of its completions; the result has the shape of
the completions. A call that is already flat is passed on unchanged; a run calls it in this way.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, cast

from groupwise.core.reward_call.call import RewardCallable

WRAPPED_ATTRIBUTE = "_stands_for"
"""The attribute that holds the wrapped function."""


def accept_nested(function: RewardCallable, name: str) -> RewardCallable:
    """A wrapper named `name`, with the function's signature, that accepts completions in either shape."""
    signature = inspect.signature(function)

    def reward(*arguments: Any, **keywords: Any) -> Any:
        bound = signature.bind_partial(*arguments).arguments
        named_arguments = {**bound, **keywords}
        shape = _shape_of(named_arguments.get("prompts"), named_arguments.get("completions"))
        if shape is None:
            return function(*arguments, **keywords)
        answer = function(
            **{name: shape.flat(name, value) for name, value in named_arguments.items()}
        )
        return _nest_awaited(answer, shape) if inspect.isawaitable(answer) else shape.nested(answer)

    return update_reward_wrapper(function, reward, name)


def update_reward_wrapper(
    function: RewardCallable, wrapper: RewardCallable, name: str
) -> RewardCallable:
    """`wrapper`, given the function's signature, the attributes that a rubric reads, and the name `name`."""
    functools.update_wrapper(wrapper, function, updated=())
    wrapper.__name__ = wrapper.__qualname__ = name
    setattr(wrapper, WRAPPED_ATTRIBUTE, function)
    for attribute in ("stateful", "check_row"):
        if hasattr(function, attribute):
            setattr(wrapper, attribute, getattr(function, attribute))
    return wrapper


def unwrap_reward(function: Any) -> Any:
    """The function that the user gave, without the wrappers that `update_reward_wrapper` put around it."""
    while hasattr(function, WRAPPED_ATTRIBUTE):
        within = getattr(function, WRAPPED_ATTRIBUTE)
        if getattr(function, "__wrapped__", None) is not within:
            break  # the user's own wrapper around such a function, with attributes copied by `functools.wraps`
        function = within
    return function


@dataclass(frozen=True, slots=True)
class _Shape:
    """The number of completions of each prompt, and whether they were nested."""

    sizes: tuple[int, ...]
    is_nested: bool

    def flat(self, name: str, value: Any) -> Any:
        """An argument with an entry for each completion; non-lists are unchanged."""
        if not isinstance(value, list | tuple):
            return value
        entries = cast("Sequence[Any]", value)
        if self.is_nested and name in ("completions", "completion_ids"):
            return [entry for members in entries for entry in members]
        if len(entries) != len(self.sizes):
            return list(entries)
        return [entry for entry, size in zip(entries, self.sizes, strict=True) for _ in range(size)]

    def nested(self, answer: Any) -> Any:
        """The result in the shape of the completions."""
        if not self.is_nested:
            return answer
        values = list(answer)
        ends = accumulate(self.sizes, initial=0)
        return [values[start:end] for start, end in pairwise(ends)]


async def _nest_awaited(answer: Awaitable[Any], shape: _Shape) -> Any:
    return shape.nested(await answer)


def _shape_of(prompts: Any, completions: Any) -> _Shape | None:
    """The shape of nested completions; None if there is already an entry for each completion."""
    if not isinstance(completions, list | tuple):
        return None
    entries = cast("Sequence[Any]", completions)
    if any(_is_group(entry) for entry in entries):
        if any(isinstance(entry, str) for entry in entries):
            raise ValueError("some completions are in a list for their prompt, and some are not")
        return _Shape(tuple(len(members) for members in entries), is_nested=True)
    count = len(cast("Sequence[Any]", prompts)) if isinstance(prompts, list | tuple) else 0
    if count in (0, len(entries)) or len(entries) % count:
        return None
    return _Shape((len(entries) // count,) * count, is_nested=False)


def _is_group(entry: Any) -> bool:
    """True if it is several completions, not the messages of one."""
    if not isinstance(entry, list | tuple):
        return False
    members = cast("Sequence[Any]", entry)
    return len(members) > 0 and not isinstance(members[0], Mapping)
