"""What makes a function this one, in plain values: a notebook's functions stand in no file.

It is their compiled code with all of the user's own code that it reaches: so a comment may change; a number, a helper or a default may not.
What may change while a function is used is told apart: lists, dictionaries, arrays, and what the code itself stores to.
"""

from __future__ import annotations

import copy
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
from datetime import date, time, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePath
from types import (
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    SimpleNamespace,
)
from typing import Any, cast
from uuid import UUID

from pydantic import BaseModel

from groupwise.notebook.reached import (
    OURS,
    around,
    codes,
    is_ours,
    is_users,
    is_users_object,
    place_of,
)
from groupwise.rewards.nesting import stood_for

_STORES = ("STORE_GLOBAL", "STORE_DEREF")
_MAKING = ("__init__", "__post_init__", "__new__")
"""What these store belongs to an object as it was made."""
_OWN_METHODS = (*_MAKING, "__call__")
_CACHED: Any = type(functools.lru_cache(len))
"""What `functools.cache` makes of a function."""
_CONTAINERS = (list, tuple, deque, dict, MappingProxyType)
_PLAIN = (complex, range, bytearray, Decimal, Fraction, PurePath, date, time, timedelta, UUID)
"""Values of Python that say all of themselves."""


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
    return second_look(function)[0]


def second_look(function: Callable[..., Any]) -> tuple[Any, Teller]:
    """What is told of a function where it is known what its code stores to; and who told it."""
    given = stood_for(function)
    first = Teller(frozenset(), frozenset())
    first.told(given)
    second = Teller(frozenset(first.stored), frozenset(first.set_on_objects))
    return second.told(given), second


class Teller:
    """Goes from a function to what it uses, as far as that is code of the user; of other code it takes the name."""

    def __init__(self, changed: frozenset[str], changed_attributes: frozenset[str]) -> None:
        """`changed`: names around functions, and attributes, that the code itself changes."""
        self._changed, self._changed_attributes = changed, changed_attributes
        self._seen: set[int] = set()
        self._open: frozenset[int] = frozenset()
        """What is being told of that has this within it."""
        self.stored: set[str] = set()
        self.set_on_objects: set[str] = set()
        self.used: dict[str, str] = {}
        """Fingerprints of what may change while it is used, by name."""
        self.unseen: dict[str, str] = {}
        """The types of what nothing else is known of, by name."""

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
        return [place_of(value), *self._of_function(value)]

    @_of.register(type)
    def _(self, value: Any) -> Any:
        if not is_users(value):
            return place_of(value)
        above = [self.told(each) for each in value.__bases__ if each is not object]
        return [place_of(value), above, self._named(_attributes(value), value.__name__)]

    def _of_function(self, function: FunctionType) -> list[Any]:
        if not is_users(function) and not is_ours(function):
            return []
        self._note(function)
        defaults = {str(place): each for place, each in enumerate(function.__defaults__ or ())}
        own = f"{function.__name__}()"
        given = self._named({**defaults, **(function.__kwdefaults__ or {})}, own)
        code = self.told(function.__code__) if is_users(function) else ""
        return [given, self._named(around(function)), code]

    def _note(self, function: FunctionType) -> None:
        """What it changes, so that a second look tells it apart."""
        for code in codes(function.__code__):
            for each in dis.get_instructions(code):
                if each.opname in _STORES:
                    self.stored.add(each.argval)
                elif each.opname == "STORE_ATTR" and function.__name__ not in _MAKING:
                    self.set_on_objects.add(each.argval)

    def _named(self, values: Mapping[str, Any], owner: str = "") -> dict[str, Any]:
        """Constants, functions, classes and the user's objects under their names. Of what may change while it is used, the functions that
        are in it; the rest is noted. `owner`: whose attributes they are."""
        stored = self._changed_attributes if owner else self._changed
        shown = {
            name: value
            for name, value in sorted(values.items())
            if name in _OWN_METHODS or not name.startswith("__")
        }
        code = {
            name: [self.told(each) for each in _kept(value)]
            for name, value in shown.items()
            if name not in stored
        }
        for name, value in shown.items():
            path = f"{owner}.{name}" if owner else name
            if name in stored or not (_is_fixed(value) or is_users_object(value)):
                self.used[path] = self._content_of(value)
            if _is_unseen(value):
                self.unseen[path] = place_of(cast("type[object]", type(value)))
        return code

    def _content_of(self, value: Any) -> str:
        """A fingerprint of what is in it. What is met there counts as not seen elsewhere, since it may be gone the next time."""
        if id(value) in self._open:
            return "…"
        within = copy.copy(self)
        within._seen, within._open = set(), self._open | {id(value)}
        return digest(within._content(value))

    def _content(self, value: Any, above: frozenset[int] = frozenset()) -> Any:
        """Plain values for what is in it; objects of libraries are known by their type alone."""
        if value is None or isinstance(value, bool | int | float | str | bytes | enum.Enum):
            return repr(value)
        if id(value) in above:
            return "…"
        inside = functools.partial(self._content, above=above | {id(value)})
        if _is_code(value) or isinstance(value, re.Pattern):
            return self.told(value)
        if isinstance(value, dict | MappingProxyType):
            parts = cast("Mapping[Any, Any]", value)
            return sorted(([inside(key), inside(each)] for key, each in parts.items()), key=str)
        if isinstance(value, set | frozenset):
            return sorted(map(inside, cast("set[Any]", value)), key=str)
        if isinstance(value, list | tuple | deque):
            return [inside(each) for each in cast("Sequence[Any]", value)]
        if isinstance(value, SimpleNamespace):
            return inside(vars(value))
        if _is_array(value):
            return [str(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
        kind = cast("type[object]", type(value))
        if is_users(kind):
            return [self.told(kind), inside(_state(value))]
        return [place_of(kind), repr(value) if isinstance(value, _PLAIN) else ""]


def _attributes(value: Any) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", getattr(value, "__dict__", {}))


def _state(value: Any) -> dict[str, Any]:
    kind = cast("type[object]", type(value))
    slots = {name: getattr(value, name, None) for name in getattr(kind, "__slots__", ())}
    return {**slots, **_attributes(value)}


def _kept(value: Any) -> Iterator[Any]:
    """A value that does not change, or an object of the user's; of a container the code that is in it."""
    if _is_fixed(value) or is_users_object(value):
        yield value
    else:
        yield from _code_in(value)


def _code_in(value: Any, above: frozenset[int] = frozenset()) -> Iterator[Any]:
    if _is_code(value):
        yield value
    elif id(value) not in above and isinstance(value, _CONTAINERS):
        above = above | {id(cast("object", value))}
        held = cast("Any", value)
        for each in held.values() if isinstance(value, dict | MappingProxyType) else held:
            yield from _code_in(each, above)


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


def _is_unseen(value: Any) -> bool:
    """Whether it is an object of a library, of which nothing is compared but its type."""
    if _is_fixed(value) or is_users_object(value) or _is_array(value):
        return False
    return str(type(value).__module__).partition(".")[0] not in (OURS, *sys.stdlib_module_names)


def _is_array(value: Any) -> bool:
    return hasattr(value, "tobytes") and hasattr(value, "shape")


def _is_code(value: Any) -> bool:
    code = (FunctionType, MethodType, type, functools.partial, _CACHED)
    return isinstance(value, (*code, staticmethod, classmethod, property))
