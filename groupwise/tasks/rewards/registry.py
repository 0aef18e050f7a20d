"""Rewards by name: those that come with the package, those that an installed package announces, and `module:function`.

    rewards:
      reward_funcs: [correctness_xml, {name: length, weight: 0.5, max_length: 400}, my_rewards.py:polite]

A reward is a function `f(prompts, completions, **columns) -> list[float | None]`, or a frozen dataclass with such a `__call__`,
whose fields are its parameters. `@reward("name")` registers either under a name. Rows are checked before a model is loaded: a
reward with the parameter `answer_column` needs a gold answer in each row, and a reward that needs anything else has a method
`check_row(row)`, which raises ValueError if it is missing.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

from groupwise.core.construct import accepted_parameters, instance
from groupwise.core.errors import TaskError
from groupwise.core.plugins import load, missing, nearest
from groupwise.core.reward_call.call import RewardCallable, check_function, name_of
from groupwise.tasks.rewards.gold import gold_of_row
from groupwise.tasks.rewards.nesting import accept_nested
from groupwise.tasks.rewards.other_names import meaning_of
from groupwise.tasks.rewards.router import Router
from groupwise.tasks.rewards.rubric import Rubric

ENTRY_POINTS = "groupwise.rewards"
"""The entry-point group in which installed packages announce their rewards."""

FAMILIES: tuple[str, ...] = (
    "groupwise.tasks.rewards.crossword",
    "groupwise.tasks.rewards.formats",
    "groupwise.tasks.rewards.matching",
    "groupwise.tasks.rewards.mathematics",
    "groupwise.tasks.rewards.overlap",
    "groupwise.tasks.rewards.judge",
    "groupwise.tasks.rewards.python_tests",
    "groupwise.tasks.rewards.rush_hour",
    "groupwise.tasks.rewards.shaping",
)
"""The modules with the package's rewards; they are imported when a name is first looked up."""

Kind = TypeVar("Kind", bound=Callable[..., Any])

Weighted = tuple[RewardCallable, float]

OWN_KEYS = ("name", "weight")
"""Keys of an entry that are not parameters of its reward."""

_OWN_PACKAGE = "groupwise.tasks.rewards."
_REWARDS: dict[str, Callable[..., Any]] = {}


def reward(name: str) -> Callable[[Kind], Kind]:
    """Register a reward function, or a class of reward functions, under a name that configs can use.

    Raises ValueError if another module has registered that name, or for a class with a parameter that a config cannot set.
    """

    def enter(kind: Kind) -> Kind:
        rewards = _REWARDS if kind.__module__.startswith(_OWN_PACKAGE) else registered_rewards()
        existing = rewards.get(name)
        if existing is not None and existing.__module__ != kind.__module__:
            raise ValueError(f"there is a reward {name!r} already, in {existing.__module__}")
        if inspect.isclass(cast("object", kind)):
            for parameter in accepted_parameters(cast("Any", kind)):
                if parameter.name in OWN_KEYS:
                    raise ValueError(
                        f"the reward {name!r} has a parameter {parameter.name!r}, which every entry has itself"
                    )
        cast("Any", kind).name = name
        _REWARDS[name] = kind
        return kind

    return enter


def registered_rewards() -> dict[str, Callable[..., Any]]:
    """All rewards by name, including those of the package."""
    for module in FAMILIES:
        importlib.import_module(module)
    return dict(_REWARDS)


def get_reward_funcs(
    names: Sequence[str | Mapping[str, Any]],
    config: Mapping[str, Any] | None = None,
    where: str = "get_reward_funcs",
) -> list[Weighted]:
    """Reward functions with their weights, from names or sections with `name`, `weight` and parameters.

    `config` is the config that hooks get: its `rewards.answer_column` is passed to every reward that has such a parameter. The
    functions may also be called directly, with completions flat or nested; see `groupwise.tasks.rewards.nesting`. Raises TaskError
    with a message that starts with `where`.
    """
    section: Mapping[str, Any] = (config or {}).get("rewards") or {}
    return _build_rewards(names, section.get("answer_column"), where)


def named_rubric(names: Sequence[str], answer_column: str | None, where: str) -> Rubric:
    """The rewards that an option lists by name. Raises TaskError with a message that starts with `where`."""
    return Rubric(_build_rewards(names, answer_column, where), where=where)


def configured_rubric(
    section: Mapping[str, Any], task_rewards: tuple[str, Rubric] | None = None
) -> Rubric | None:
    """The rewards that the config's section `rewards` names itself; None if it leaves them to the task. Raises TaskError.

    `task_rewards`: the name and rewards of a task. A router without another default uses them for rows with unknown labels.
    """
    answer_column, router = section.get("answer_column"), section.get("router")
    if section.get("reward_funcs") is not None:
        where = "rewards.reward_funcs"
        rubric = Rubric(_build_rewards(section["reward_funcs"], answer_column, where), where=where)
    elif router is not None:
        where = "rewards.router"
        lists: dict[str, object] = {
            label: _build_rewards(entries, answer_column, f"{where}.{label}")
            for label, entries in router.items()
        }
        default = section.get("default_task")
        if task_rewards is not None and default is None and task_rewards[0] not in lists:
            default = task_rewards[0]
            lists[default] = task_rewards[1]
        rubric = Router.of(lists, where=where, default=default)
    else:
        return None
    if answer_column is not None and not any(map(_takes_answer_column, rubric.functions)):
        raise TaskError(
            f"rewards.answer_column is {answer_column}, but none of {', '.join(rubric.names)} looks for a gold answer. "
            "Leave it out."
        )
    return rubric


def _takes_answer_column(function: RewardCallable) -> bool:
    return hasattr(inspect.unwrap(function), "answer_column")


def _build_rewards(names: object, answer_column: str | None, where: str) -> list[Weighted]:
    """The rewards with their weights. Raises TaskError with a line for each invalid entry."""
    if isinstance(names, str | Mapping) or not isinstance(names, Sequence):
        raise TaskError(f"{where}: expected a list of names or sections, got {names!r:.60}.")
    rewards: list[Weighted] = []
    problems: list[str] = []
    for entry in cast("Sequence[Any]", names):
        try:
            section = (
                cast("Mapping[str, Any]", entry) if isinstance(entry, Mapping) else {"name": entry}
            )
            name = section.get("name")
            if not isinstance(name, str) or not name:
                raise TaskError(
                    f"the entry {entry!r:.60} does not say which reward it is; write a name, or a section with `name:` and parameters."
                )
            parameters = {key: value for key, value in section.items() if key not in OWN_KEYS}
            target = registered_rewards().get(name) or _load_object(name)
            if inspect.isclass(target):
                shared = {"answer_column": answer_column} if answer_column is not None else {}
                accepted = {parameter.name for parameter in accepted_parameters(target)}
                defaults = {key: value for key, value in shared.items() if key in accepted}
                function = cast(
                    "RewardCallable", instance(target, {**defaults, **parameters}, name)
                )
            else:
                if parameters:
                    raise TaskError(
                        f"{name} is not a class, so it takes no parameters ({', '.join(parameters)}). Only a class has parameters: "
                        "make it a dataclass with these fields and `__call__(self, prompts, completions, **columns)`."
                    )
                function = cast("RewardCallable", target)
            check_function(function, name)
            wrapped: Any = accept_nested(function, name if ":" not in name else name_of(function))
            if hasattr(function, "answer_column") and not hasattr(function, "check_row"):
                wrapped.check_row = functools.partial(_need_gold, function)
            weight = section.get("weight", 1.0)
            is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
            if not is_number or not math.isfinite(weight):
                raise TaskError(f"{name}: its weight is {weight!r}; expected a finite number.")
            rewards.append((wrapped, float(weight)))
        except TaskError as error:
            problems.append(f"{where}: {error}")
    if problems:
        raise TaskError("\n".join(problems))
    return rewards


def _need_gold(reward: Any, row: Mapping[str, Any]) -> None:
    gold_of_row(row, reward.answer_column, getattr(reward, "answer_tag", "answer"))


def _load_object(name: str) -> object:
    """The function, class or object with this name."""
    modules_by_name = {
        reward_name: kind.__module__ for reward_name, kind in registered_rewards().items()
    }
    if _is_nothing(name, modules_by_name):
        raise TaskError(_unknown_name_message(name, modules_by_name))
    try:
        plugin = load(
            name,
            kind="reward",
            builtins=modules_by_name,
            entry_points=ENTRY_POINTS,
            instantiate=False,
        )
    except TaskError as error:
        meant = meaning_of(name, modules_by_name)
        raise TaskError(f"{error}\n{meant.hint}" if meant else str(error)) from error
    if isinstance(plugin.object, ModuleType):
        functions = [
            attribute
            for attribute, value in vars(plugin.object).items()
            if inspect.isroutine(value) and value.__module__ == plugin.module.__name__
        ]
        raise TaskError(
            f"{name} is a module. Name the function in it, {name}:function; there are: {', '.join(functions) or 'none'}."
        )
    return plugin.object


def unknown_reward(name: str) -> str | None:
    """The reason why no reward has this name, as far as it can be found without loading foreign code; None otherwise.

    The content of a module or a file is only known once it runs. A name without a function must be registered, or announced by an
    installed package.
    """
    modules_by_name = {
        reward_name: kind.__module__ for reward_name, kind in registered_rewards().items()
    }
    return (
        None
        if ":" in name or name in modules_by_name or name in _entry_point_names()
        else _unknown_name_message(name, modules_by_name)
    )


@functools.cache
def _entry_point_names() -> frozenset[str]:
    """Cached, because iterating over all installed packages takes 0.1 s."""
    return frozenset(point.name for point in importlib.metadata.entry_points(group=ENTRY_POINTS))


def _is_nothing(name: str, modules_by_name: Mapping[str, str]) -> bool:
    """True if `load` would find nothing under this name, even if Python or another package has an object of that name."""
    if Path(name).is_file() or any(
        point.name == name for point in importlib.metadata.entry_points(group=ENTRY_POINTS)
    ):
        return False
    absent = (
        missing(name, kind="reward", builtins=modules_by_name, entry_points=ENTRY_POINTS)
        is not None
    )
    return name in sys.stdlib_module_names or (
        absent and meaning_of(name, modules_by_name) is not None
    )


def _unknown_name_message(name: str, modules_by_name: Mapping[str, str]) -> str:
    meant = meaning_of(name, modules_by_name)
    quoted = f"`{name:.80}`" if name.isprintable() else f"{name!r:.80}"
    if meant is None:
        suggestions = nearest(name, modules_by_name)
        hint = (
            f" Did you mean {' or '.join(f'`{suggestion}`' for suggestion in suggestions)}?"
            if suggestions
            else ""
        )
        of_python = ", which is a module of Python itself" * (name in sys.stdlib_module_names)
        message = f"There is no reward {quoted}{of_python}.{hint}"
    else:
        message = f"There is no reward {quoted}. {meant.hint}"
    return f"{message}\nBuilt-in: {', '.join(sorted(modules_by_name))}.\nYour own are named path/to/file.py:function or module:function."
