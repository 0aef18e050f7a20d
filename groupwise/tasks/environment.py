"""Defines an environment: an object for one rollout, which answers the policy turn by turn.

    class Guess:
        def reset(self, secret):                 # optional: columns of the row by name, `prompt`, `seed`, `member`
            self.secret = secret

        def step(self, completion):              # each turn: what the policy wrote, as text
            if completion.strip() == self.secret:
                return Step(done=True, reward=1.0)
            return Step("No. Guess again.")

    def get_environment(config):                 # a class, or any function that makes an environment
        return Guess

More methods are optional: `reward()` gives a number or a dict of named numbers for the whole rollout after any kind of end;
`metrics()` gives named numbers that are recorded and do not count; `close()` frees what the environment holds. Every method may be
async.

An environment must depend only on the arguments of `reset` and on the completions: if its process is lost, another process creates
it again and repeats the same completions. `seed` is the same for all members of a group, so they all start the same; for random
numbers that differ between members, use `seed` and `member` together.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from groupwise.core.errors import TaskError
from groupwise.core.plugins import printable
from groupwise.core.reward_call.call import describe_value
from groupwise.core.types import Message, Prompt, RewardPart

Observation = str | list[Message] | None
"""An environment's answer: text, or messages of a chat. Text in a chat is a message of the user."""

DEFAULT_PART = "environment"
"""Name of a reward that is given as a plain number."""

GIVEN = ("prompt", "seed", "member")
"""Arguments that `reset` can request in addition to columns."""

CALLED_WITH: dict[str, tuple[str, ...]] = {
    "step": ("completion",),
    "reward": (),
    "metrics": (),
    "close": (),
}
"""Arguments of the other methods."""


@dataclass(frozen=True, slots=True)
class Step:
    """An environment's answer to one completion."""

    observation: Observation = None
    """Shown to the policy next. After the last turn it is only recorded."""
    done: bool = False
    """True if the rollout has ended."""
    reward: float | Mapping[str, float] | None = None
    """Reward of this turn: a number, or several by name. The rewards of all turns, and of `reward()`, are summed."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Numbers by name that are recorded and do not count."""


class Environment(Protocol):
    """The only method that an environment must have; the module docstring describes the others."""

    def step(self, completion: str) -> Any:
        """Answer a completion with a `Step`, sync or async."""
        ...


EnvironmentFactory = Callable[[], Environment]


def check_factory(factory: object, where: str) -> EnvironmentFactory:
    """Raise TaskError unless `factory` can be called without arguments to make an environment."""
    expected = "Expected a class with a method `step(self, completion)`, or a function that makes such an object"
    if not callable(factory):
        hint = ", not an object of it" if hasattr(factory, "step") else ""
        raise TaskError(f"{where} returned {type(factory).__name__}. {expected}{hint}.")
    if inspect.isclass(factory) and not callable(getattr(factory, "step", None)):
        raise TaskError(
            f"{where} returned the class {factory.__name__} without `step`. {expected}."
        )
    return cast("EnvironmentFactory", factory)


def check_reset(factory: EnvironmentFactory, columns: Collection[str], where: str) -> None:
    """Raise TaskError if a class's `reset` requires an argument that the rows do not provide."""
    reset = getattr(factory, "reset", None)  # of a class, or of a tools object that has one
    if reset is None:
        return
    needed = [
        p.name
        for p in list(inspect.signature(reset).parameters.values())[1:]
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    missing = [name for name in needed if name not in columns and name not in GIVEN]
    if missing:
        raise TaskError(
            f"{where}: `reset` asks for {' and '.join(f'`{name}`' for name in missing)}, but the dataset has no such "
            f"column. It has: {', '.join(sorted(columns)) or 'none but prompt'}. Besides columns it may ask for "
            f"{', '.join(GIVEN)}."
        )


def check_methods(environment: object, where: str) -> None:
    """Raise TaskError if a method cannot be called with its arguments. `environment`: an environment, or its class."""
    owner = environment if inspect.isclass(environment) else type(environment)
    for name, arguments in CALLED_WITH.items():
        method = getattr(environment, name, None)
        if method is None and name != "step":
            continue
        if not callable(method):
            raise TaskError(
                f"{where}: `{owner.__name__}.{name}` is {describe_value(method)}, no method."
            )
        static = isinstance(inspect.getattr_static(environment, name, None), staticmethod)
        unbound = inspect.isclass(environment) and inspect.isfunction(method) and not static
        expected = ("self", *arguments) if unbound else arguments
        signature = inspect.signature(method)
        try:
            signature.bind(*expected)
        except TypeError:
            raise TaskError(
                f"{where}: `{owner.__name__}.{name}` has the wrong parameters.\n"
                f"  expected: {name}({', '.join(expected)})\n"
                f"  found:    {name}{signature}"
            ) from None


def reset_arguments(reset: Callable[..., Any], available: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `available` that the method names; all of them if it takes any keyword."""
    parameters = list(inspect.signature(reset).parameters.values())
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(available)
    return {p.name: available[p.name] for p in parameters if p.name in available}


def as_step(result: object) -> Step:
    """The result of `step`, checked; raises ValueError that explains the expected type."""
    if not isinstance(result, Step):
        raise ValueError(f"`step` returned {describe_value(result)}; expected a groupwise Step")
    if not isinstance(cast("object", result.metrics), Mapping):
        raise ValueError(
            f"the metrics are {describe_value(result.metrics)}; expected a dict of named numbers"
        )
    return Step(
        observation=_checked_observation(result.observation),
        done=bool(result.done),
        reward=result.reward,
        metrics=result.metrics,
    )


def as_prompt(result: object) -> Prompt | None:
    """The first prompt that `reset` returned, checked; None keeps the row's."""
    try:
        return _checked_observation(result)
    except ValueError:
        raise ValueError(
            f"`reset` returned {describe_value(result)}; expected None, text, or a list of chat messages"
        ) from None


def as_parts(reward: object, turn: int | None, weight: float = 1.0) -> tuple[RewardPart, ...]:
    """A reward as parts by name; raises ValueError for anything but finite numbers."""
    if reward is None:
        return ()
    parts = cast(
        "Mapping[Any, Any]", reward if isinstance(reward, Mapping) else {DEFAULT_PART: reward}
    )
    return tuple(
        RewardPart(printable(str(name)), _finite_number(str(name), value), weight, turn)
        for name, value in parts.items()
        if value is not None
    )


def _finite_number(name: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(
            f"the reward `{name}` is {describe_value(value)}; expected a finite number"
        )
    return number


def _checked_observation(value: object) -> Observation:
    if value is None:
        return None
    if isinstance(value, str):
        return printable(value)
    messages = cast("object", [value] if isinstance(value, Mapping) else value)
    if not isinstance(messages, list | tuple) or not all(map(_is_message, cast("Any", messages))):
        raise ValueError(
            f"the observation is {describe_value(cast('object', value))}; expected text or chat messages with `role` and `content`"
        )
    return [
        {key: printable(text) if isinstance(text, str) else text for key, text in message.items()}
        for message in cast("Sequence[Message]", messages)
    ]


def _is_message(value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    message = cast("Mapping[Any, Any]", value)
    return isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
