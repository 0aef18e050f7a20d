"""Whether a training is the same as an earlier one: its rows, its marks and the code of its rewards, each as a short fingerprint.

A notebook's functions stand in no file. What is compared is their compiled code: so a comment may change; a number, a helper that they call
or a default may not. Lists and dictionaries beside a function are left out, because functions collect things in them.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import CodeType, FunctionType, MethodType
from typing import Any, cast

from pydantic import BaseModel

from groupwise.data.chat import Row
from groupwise.notebook.config import TrainingConfig
from groupwise.rewards.rubric import Rubric

OURS = "groupwise"
_STORES = ("STORE_GLOBAL", "STORE_DEREF")


def facts_of(
    config: TrainingConfig, train: Sequence[Row], test: Sequence[Row], rewards: Rubric | None = None
) -> dict[str, Any]:
    """What two trainings must agree in to be one, beside the core's config; of `rewards` where they are known."""
    found: dict[str, Any] = {
        "rows to train on": digest(list(train)),
        "rows to test": digest(list(test)),
        "marks": digest([config.tags.reasoning, config.tags.answer]),
    }
    if rewards is not None:
        parts = zip(rewards.names, rewards.weights, rewards.functions, strict=True)
        found["rewards"] = {name: digest([weight, told_of(each)]) for name, weight, each in parts}
    return found


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """In what the facts of `now` differ, in words; parts of the reward by their names."""
    found: list[str] = []
    for name, value in now.items():
        was = before.get(name)
        if isinstance(value, Mapping) and isinstance(was, Mapping):
            one, other = cast("Mapping[str, str]", was), cast("Mapping[str, str]", value)
            parts = sorted(each for each in {*one, *other} if one.get(each) != other.get(each))
            found += [f"the reward {part}" for part in parts]
        elif was != value:
            found.append(name)
    return found


def digest(value: Any) -> str:
    """A short fingerprint; of what JSON does not know its type."""
    text = json.dumps(value, sort_keys=True, default=lambda other: type(other).__qualname__)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def told_of(function: Callable[..., Any]) -> Any:
    """What makes a function this one, in plain values."""
    given = inspect.unwrap(function)
    kind = given if isinstance(given, FunctionType | type) else type(given)
    return _Teller({"__main__", _package(kind)}).told(given)


class _Teller:
    """Goes from a function to what it uses, as far as that is code of the same packages; of others it takes the name."""

    def __init__(self, home: set[str]) -> None:
        self._home = home
        self._seen: set[int] = set()

    def told(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float | str | bytes):
            return repr(value)
        if id(value) in self._seen:
            return "…"
        self._seen.add(id(value))
        return self._of(value)

    @functools.singledispatchmethod
    def _of(self, value: Any) -> Any:
        kind = cast("type[object]", type(value))
        if is_dataclass(kind):
            return [self.told(getattr(value, each.name)) for each in fields(kind)]
        return [self.told(kind), self._named(_attributes(value)) if _is_ours(kind) else {}]

    @_of.register(tuple)
    def _(self, value: Any) -> Any:
        return [self.told(each) for each in value]

    @_of.register(frozenset)
    def _(self, value: Any) -> Any:
        return sorted(map(repr, value))

    @_of.register(CodeType)
    def _(self, value: Any) -> Any:
        return [value.co_code.hex(), value.co_names, [self.told(each) for each in value.co_consts]]

    @_of.register(BaseModel)
    def _(self, value: Any) -> Any:
        return value.model_dump_json()

    @_of.register(functools.partial)
    def _(self, value: Any) -> Any:
        return [self.told(value.func), self.told(value.args), self._named(value.keywords)]

    @_of.register(MethodType)
    def _(self, value: Any) -> Any:
        return [self.told(value.__func__), self.told(value.__self__)]

    @_of.register(FunctionType)
    def _(self, value: Any) -> Any:
        return [_place(value), *self._of_function(value)]

    @_of.register(type)
    def _(self, value: Any) -> Any:
        return [_place(value), self._named(_attributes(value)) if self._is_users(value) else {}]

    def _of_function(self, function: FunctionType) -> list[Any]:
        if not self._is_users(function) and not _is_ours(function):
            return []
        given = [self.told(function.__defaults__), self._named(function.__kwdefaults__ or {})]
        around = self._named(_around(function))
        return [*given, around, self.told(function.__code__) if self._is_users(function) else ""]

    def _named(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Constants, functions and classes under their names; other objects may change from call to call."""
        return {
            name: self.told(value)
            for name, value in sorted(values.items())
            if _is_fixed(value) and (name == "__call__" or not name.startswith("__"))
        }

    def _is_users(self, value: FunctionType | type) -> bool:
        return _package(value) in self._home and not _is_ours(value)


def _around(function: FunctionType) -> dict[str, Any]:
    """What a function uses of the names around it, but for those that it changes."""
    codes = list(_codes(function.__code__))
    changed = {
        each.argval
        for code in codes
        for each in dis.get_instructions(code)
        if each.opname in _STORES
    }
    own = {} if _is_ours(function) else function.__globals__
    names = {name: own[name] for code in codes for name in code.co_names if name in own}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    closed = {name: cell.cell_contents for name, cell in cells}
    return {name: value for name, value in {**names, **closed}.items() if name not in changed}


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's, and those of the functions and comprehensions within it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def _attributes(value: Any) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", getattr(value, "__dict__", {}))


def _is_fixed(value: Any) -> bool:
    kinds = (bool, int, float, str, bytes, tuple, frozenset, FunctionType, MethodType, type)
    written = (functools.partial, BaseModel)
    return value is None or is_dataclass(value) or isinstance(value, (*kinds, *written))


def _place(value: FunctionType | type) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _package(value: FunctionType | type) -> str:
    return str(value.__module__).partition(".")[0]


def _is_ours(value: FunctionType | type) -> bool:
    return _package(value) == OURS
