"""Whether a training is the same as an earlier one: its rows, its marks and the code of its rewards, each as a short fingerprint.

A notebook's functions stand in no file. What is compared is their compiled code with all of the user's own code that it reaches: so a
comment may change; a number, a helper or a default may not. Variables that this code stores to are left out. Lists and dictionaries are
known by what is in them; `groupwise.notebook.collected` tells which of them a training itself changed, as where a function collects.
"""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import json
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, cast

from pydantic import BaseModel

from groupwise.data.chat import Row
from groupwise.notebook.config import TrainingConfig
from groupwise.rewards.nesting import stood_for
from groupwise.rewards.rubric import Rubric

OURS = "groupwise"
_STORES = ("STORE_GLOBAL", "STORE_DEREF")
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME")
_MAKING = ("__init__", "__post_init__", "__new__")
"""What these store belongs to an object as it was made."""
_OWN_METHODS = (*_MAKING, "__call__")
_CACHED: Any = type(functools.lru_cache(len))
"""What `functools.cache` makes of a function."""
USED = "used by rewards"
"""The fact that says what is in their lists, dictionaries and arrays."""
ROWS = ("rows to train on", "rows to test")
"""The facts that hang on the split."""
_INSTALLED = ("site-packages", "dist-packages")


def facts_of(
    config: TrainingConfig, train: Sequence[Row], test: Sequence[Row], rewards: Rubric | None = None
) -> dict[str, Any]:
    """What two trainings must agree in to be one, beside the core's config; of `rewards` where they are known."""
    found: dict[str, Any] = {
        **{name: digest(list(rows)) for name, rows in zip(ROWS, (train, test), strict=True)},
        "marks": digest([config.tags.reasoning, config.tags.answer]),
    }
    if rewards is not None:
        found |= {"rewards": known_by(rewards), USED: used_by(rewards)}
    return found


def known_by(rewards: Rubric) -> dict[str, str]:
    """For each part its weight and code, as a fingerprint."""
    parts = zip(rewards.names, rewards.weights, rewards.functions, strict=True)
    return {name: digest([weight, told_of(each)]) for name, weight, each in parts}


def used_by(rewards: Rubric) -> dict[str, str]:
    """The lists, dictionaries and arrays that rewards use: a fingerprint of what is in each now."""
    return {
        f"{path} of the reward {name}": content
        for name, each in zip(rewards.names, rewards.functions, strict=True)
        for path, content in _second_look(each)[1].used.items()
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """In what the facts of `now` differ, in words; parts of the reward by their names."""
    found: list[str] = []
    for name, value in now.items():
        was = before.get(name)
        if isinstance(value, Mapping) and isinstance(was, Mapping):
            one, other = cast("Mapping[str, str]", was), cast("Mapping[str, str]", value)
            parts = sorted(each for each in {*one, *other} if one.get(each) != other.get(each))
            found += parts if name == USED else [f"the reward {part}" for part in parts]
        elif was != value:
            found.append(name)
    return found


def digest(value: Any) -> str:
    """A short fingerprint of plain values, and of numbers, dates and texts of other libraries."""
    return hashlib.sha256(json.dumps(_plain(value)).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        parts = cast("Mapping[Any, Any]", value)
        return sorted(([repr(key), _plain(each)] for key, each in parts.items()), key=str)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in cast("Sequence[Any]", value)]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    told = repr(value)
    return type(value).__qualname__ if " at 0x" in told else told


def told_of(function: Callable[..., Any]) -> Any:
    """What makes a function this one, in plain values."""
    return _second_look(function)[0]


def _second_look(function: Callable[..., Any]) -> tuple[Any, _Teller]:
    """What is told of a function where it is known what its code stores to; and who told it."""
    given = stood_for(function)
    first = _Teller(frozenset(), frozenset())
    first.told(given)
    second = _Teller(frozenset(first.stored), frozenset(first.set_on_objects))
    return second.told(given), second


class _Teller:
    """Goes from a function to what it uses, as far as that is code of the user; of other code it takes the name."""

    def __init__(self, changed: frozenset[str], changed_attributes: frozenset[str]) -> None:
        """`changed`: names around functions, and attributes, that the code itself changes."""
        self._changed, self._changed_attributes = changed, changed_attributes
        self._seen: set[int] = set()
        self.stored: set[str] = set()
        self.set_on_objects: set[str] = set()
        self.used: dict[str, str] = {}
        """Fingerprints of what may change while it is used, by name."""

    def told(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float | str | bytes | enum.Enum):
            return repr(value)
        if id(value) in self._seen:
            return "…"
        self._seen.add(id(value))
        return self._of(value)

    @functools.singledispatchmethod
    def _of(self, value: Any) -> Any:
        kind = cast("type[object]", type(value))
        return [self.told(kind), self._named(_state(value), kind.__name__)]

    @_of.register(tuple)
    def _(self, value: Any) -> Any:
        return [self.told(each) for each in value]

    @_of.register(frozenset)
    def _(self, value: Any) -> Any:
        return sorted(map(repr, value))

    @_of.register(re.Pattern)
    def _(self, value: Any) -> Any:
        return [repr(value.pattern), value.flags]

    @_of.register(CodeType)
    def _(self, value: Any) -> Any:
        arguments = value.co_varnames[: value.co_argcount + value.co_kwonlyargcount]
        constants = [self.told(each) for each in value.co_consts]
        return [value.co_code.hex(), value.co_names, arguments, constants]

    @_of.register(BaseModel)
    def _(self, value: Any) -> Any:
        return repr(value)

    @_of.register(functools.partial)
    def _(self, value: Any) -> Any:
        given: dict[str, Any] = {str(place): each for place, each in enumerate(value.args)}
        return [self.told(value.func), self._named({**given, **value.keywords}, "partial")]

    @_of.register(staticmethod)
    @_of.register(classmethod)
    def _(self, value: Any) -> Any:
        return self.told(value.__func__)

    @_of.register(property)
    def _(self, value: Any) -> Any:
        return self.told(value.fget)

    @_of.register(_CACHED)
    def _(self, value: Any) -> Any:
        return self.told(value.__wrapped__)

    @_of.register(MethodType)
    def _(self, value: Any) -> Any:
        return [self.told(value.__func__), self.told(value.__self__)]

    @_of.register(FunctionType)
    def _(self, value: Any) -> Any:
        return [_place(value), *self._of_function(value)]

    @_of.register(type)
    def _(self, value: Any) -> Any:
        if not _is_users(value):
            return _place(value)
        above = [self.told(each) for each in value.__bases__ if each is not object]
        return [_place(value), above, self._named(_attributes(value), value.__name__)]

    def _of_function(self, function: FunctionType) -> list[Any]:
        if not _is_users(function) and not _is_ours(function):
            return []
        self._note(function)
        defaults = {str(place): each for place, each in enumerate(function.__defaults__ or ())}
        own = f"{function.__name__}()"
        given = self._named({**defaults, **(function.__kwdefaults__ or {})}, own)
        around = {
            name: value for name, value in _around(function).items() if name not in self._changed
        }
        code = self.told(function.__code__) if _is_users(function) else ""
        return [given, self._named(around), code]

    def _note(self, function: FunctionType) -> None:
        """What it changes, so that a second look leaves it out."""
        for code in _codes(function.__code__):
            for each in dis.get_instructions(code):
                if each.opname in _STORES:
                    self.stored.add(each.argval)
                elif each.opname == "STORE_ATTR" and function.__name__ not in _MAKING:
                    self.set_on_objects.add(each.argval)

    def _named(self, values: Mapping[str, Any], owner: str = "") -> dict[str, Any]:
        """Constants, functions, classes and the user's objects under their names. Of what may change while it is used, the functions that
        are in it; the rest is noted. `owner`: whose attributes they are."""
        hidden = self._changed_attributes if owner else frozenset[str]()
        shown = {
            name: value
            for name, value in sorted(values.items())
            if name not in hidden and (name in _OWN_METHODS or not name.startswith("__"))
        }
        for name, value in shown.items():
            if not _is_fixed(value) and not _is_users_object(value):
                self.used[f"{owner}.{name}" if owner else name] = digest(_content(value))
        return {name: self._code_of(value) for name, value in shown.items()}

    def _code_of(self, value: Any) -> Any:
        if _is_fixed(value) or _is_users_object(value):
            return self.told(value)
        inside: Any = cast("dict[Any, Any]", value).values() if isinstance(value, dict) else value
        if not isinstance(value, dict | list | tuple):
            return ""
        return [self.told(each) for each in inside if _is_code(each)]


def _around(function: FunctionType) -> dict[str, Any]:
    """What a function takes of the names around it; of the user's modules what it takes of them."""
    own = {} if _is_ours(function) else function.__globals__
    loaded: dict[str, Any] = {}
    for code in _codes(function.__code__):
        for each in dis.get_instructions(code):
            if each.opname in _LOADS and each.argval in own:
                loaded[each.argval] = own[each.argval]
        for name, module in [*loaded.items()]:
            if isinstance(module, ModuleType) and _is_of_the_user(module.__name__):
                inside = {part: getattr(module, part, None) for part in code.co_names}
                loaded |= {f"{name}.{part}": value for part, value in inside.items()}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        loaded[name] = _held(cell)
    return loaded


def _held(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return None


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's, and those of the functions and comprehensions within it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def _attributes(value: Any) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", getattr(value, "__dict__", {}))


def _state(value: Any) -> dict[str, Any]:
    kind = cast("type[object]", type(value))
    slots = {name: getattr(value, name, None) for name in getattr(kind, "__slots__", ())}
    return {**slots, **_attributes(value)}


def _content(value: Any, above: frozenset[int] = frozenset()) -> Any:
    """Plain values for what is in it; objects of libraries are known by their type alone."""
    if value is None or isinstance(value, bool | int | float | str | bytes | enum.Enum):
        return repr(value)
    if id(value) in above:
        return "…"
    inside = functools.partial(_content, above=above | {id(value)})
    if isinstance(value, dict):
        parts = cast("dict[Any, Any]", value)
        return sorted(([repr(key), inside(each)] for key, each in parts.items()), key=str)
    if isinstance(value, set | frozenset):
        return sorted(map(repr, cast("set[Any]", value)))
    if isinstance(value, list | tuple | deque):
        return [inside(each) for each in cast("Sequence[Any]", value)]
    if hasattr(value, "tobytes") and hasattr(value, "shape"):
        return [str(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
    kind = cast("type[object]", type(value))
    return [_place(kind), inside(_state(value)) if _is_users(kind) else ""]


def _is_fixed(value: Any) -> bool:
    """Whether it says what a function does, and does not change while it is used."""
    if isinstance(value, BaseModel):
        return bool(value.model_config.get("frozen"))
    if is_dataclass(value) and not isinstance(value, type):
        return bool(cast("Any", type(value)).__dataclass_params__.frozen)
    if isinstance(value, tuple):
        return all(_is_fixed(each) for each in cast("tuple[Any, ...]", value))
    plain = (bool, int, float, str, bytes, frozenset, re.Pattern, enum.Enum)
    return value is None or isinstance(value, plain) or _is_code(value)


def _is_code(value: Any) -> bool:
    code = (FunctionType, MethodType, type, functools.partial, _CACHED)
    return isinstance(value, (*code, staticmethod, classmethod, property))


def _place(value: FunctionType | type) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _is_ours(value: FunctionType | type) -> bool:
    return str(value.__module__).partition(".")[0] == OURS


def _is_users(value: FunctionType | type) -> bool:
    return _is_of_the_user(str(value.__module__))


def _is_users_object(value: Any) -> bool:
    """Whether an object's class is."""
    return _is_users(cast("type[object]", type(value)))


@functools.cache
def _is_of_the_user(module: str) -> bool:
    """Neither of this package, nor of Python, nor installed."""
    if module == "__main__":
        return True
    if module.partition(".")[0] in (OURS, *sys.stdlib_module_names):
        return False
    file = str(getattr(sys.modules.get(module), "__file__", None) or "")
    return not any(part in file for part in _INSTALLED)
