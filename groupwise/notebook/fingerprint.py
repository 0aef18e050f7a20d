"""What makes a function this one, in plain values: a notebook's functions stand in no file.

It is their compiled code with all of the user's own code that it reaches: so a comment may change; a number, a helper or a default may not.
What may change while a function is used is told apart: lists, dictionaries, arrays, attributes of objects, and what the code stores to.
"""

from __future__ import annotations

import copy
import dis
import enum
import functools
import hashlib
import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, cast

from pydantic import BaseModel

from groupwise.notebook.reached import (
    around,
    codes,
    is_ours,
    is_users,
    is_users_object,
    place_of,
)
from groupwise.notebook.values import (
    BY_ATTRIBUTES,
    CACHED,
    COLLECTIONS,
    CONSTANTS,
    PLAIN,
    attributes,
    bound_to,
    is_array,
    is_code,
    is_fixed,
    is_unseen,
    parts_of,
    state_of,
)
from groupwise.rewards.nesting import stood_for

_CONTAINERS = (list, tuple, deque, dict, MappingProxyType)
_STORES = ("STORE_GLOBAL", "STORE_DEREF")
_MAKING = ("__init__", "__post_init__", "__new__")
"""What these store belongs to an object as it was made."""


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
    if isinstance(value, set | frozenset):
        return sorted(map(_plain, cast("set[Any]", value)), key=str)
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    told = repr(value)
    return type(value).__qualname__ if " at 0x" in told else told


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
        self._known: dict[int, tuple[Any, str]] = {}
        """Fingerprints of contents, each beside what it is of, which so keeps its id."""
        self.stored: set[str] = set()
        self.set_on_objects: set[str] = set()
        self._contents: dict[str, set[str]] = {}
        """Fingerprints of what may change while it is used, by name; several things may have one."""
        self.unseen: dict[str, str] = {}
        """The types of what nothing else is known of, by name."""

    @property
    def used(self) -> dict[str, str]:
        """A fingerprint of what may change while it is used, by name."""
        return {path: digest(sorted(contents)) for path, contents in sorted(self._contents.items())}

    def told(self, value: Any) -> Any:
        if value is None or isinstance(value, CONSTANTS):
            return repr(value)
        if id(value) in self._seen:
            return "…"
        self._seen.add(id(value))
        return self._of(value)

    @functools.singledispatchmethod
    def _of(self, value: Any) -> Any:
        return self._of_object(value)

    def _of_object(self, value: Any) -> Any:
        kind = cast("type[object]", type(value))
        if is_fixed(value):
            return [self.told(kind), self._content(state_of(value))]
        if not is_users(kind):
            return place_of(kind)
        self._keep_state(value)
        return self.told(kind)

    @_of.register(enum.Enum)
    def _(self, value: Any) -> Any:
        return [repr(value), self.told(type(value))]

    @_of.register(tuple)
    def _(self, value: Any) -> Any:
        return [self.told(type(value)), *(self.told(each) for each in value)]

    @_of.register(frozenset)
    def _(self, value: Any) -> Any:
        return sorted(map(self.told, value), key=str)

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
        return self._of_object(value) if is_users_object(value) else repr(value)

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

    @_of.register(functools.cached_property)
    @_of.register(functools.partialmethod)
    def _(self, value: Any) -> Any:
        return [self.told(value.func), self._content(state_of(value).get("keywords"))]

    @_of.register(CACHED)
    def _(self, value: Any) -> Any:
        return self.told(value.__wrapped__)

    @_of.register(MethodType)
    def _(self, value: Any) -> Any:
        return [self.told(value.__func__), self.told(value.__self__)]

    @_of.register(BuiltinFunctionType)
    @_of.register(MethodDescriptorType)
    @_of.register(WrapperDescriptorType)
    def _(self, value: Any) -> Any:
        owner = getattr(value, "__self__", None)
        inside = "" if owner is None or isinstance(owner, ModuleType) else self._content(owner)
        return [str(getattr(value, "__module__", "")), value.__qualname__, inside]

    @_of.register(FunctionType)
    def _(self, value: Any) -> Any:
        return [place_of(value), *self._of_function(value)]

    @_of.register(type)
    def _(self, value: Any) -> Any:
        if not is_users(value):
            return place_of(value)
        above = [self.told(each) for each in value.__bases__ if each is not object]
        return [place_of(value), above, self._named(attributes(value), value.__name__)]

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
            if isinstance(value, FunctionType) or not name.startswith("__")
        }
        changes = {
            name: name in stored or ("." in name and _last(name) in self._changed_attributes)
            for name in shown
        }
        code = {
            name: [self.told(each) for each in _kept(value)]
            for name, value in shown.items()
            if not changes[name]
        }
        for name, value in shown.items():
            path = f"{owner}.{name}" if owner else name
            if changes[name] or not (is_fixed(value) or is_users_object(value)):
                self._keep(path, value)
            elif is_unseen(value):
                self._keep_unseen(path, value)
        return code

    def _keep(self, path: str, value: Any) -> None:
        self._contents.setdefault(path, set()).add(self._content_of(value))
        if is_unseen(value):
            self._keep_unseen(path, value)

    def _keep_unseen(self, path: str, value: Any) -> None:
        self.unseen[path] = place_of(cast("type[object]", type(bound_to(value))))

    def _keep_state(self, value: Any) -> None:
        """What is in an object of the user's: each attribute by itself, and those of objects in them."""
        name = type(value).__name__
        if isinstance(value, COLLECTIONS):
            self._keep(name, [*parts_of(value)])
        for attribute, held in state_of(value).items():
            if is_users_object(held) and not is_fixed(held):
                self.told(held)
            else:
                self._keep(f"{name}.{attribute}", held)

    def _content_of(self, value: Any) -> str:
        """A fingerprint of what is in it. What is met there counts as not seen elsewhere, since it may be gone the next time."""
        if id(value) in self._open:
            return "…"
        if id(value) not in self._known:
            within = copy.copy(self)
            within._seen, within._open = set(), self._open | {id(value)}
            self._known[id(value)] = (value, digest(within._content(value)))
        return self._known[id(value)][1]

    def _content(self, value: Any, above: frozenset[int] = frozenset()) -> Any:
        """Plain values for what is in it; objects of libraries are known by their type alone."""
        if value is None or isinstance(value, CONSTANTS):
            return repr(value)
        if id(value) in above:
            return "…"
        inside = functools.partial(self._content, above=above | {id(value)})
        if is_code(value) or isinstance(value, re.Pattern | enum.Enum):
            return self.told(value)
        kind = cast("type[object]", type(value))
        own = [self.told(kind), inside(state_of(value))] if is_users(kind) else [place_of(kind)]
        if isinstance(value, dict | MappingProxyType):
            parts = cast("Mapping[Any, Any]", value)
            pairs = ([inside(key), inside(each)] for key, each in parts.items())
            return [*own, sorted(pairs, key=str)]
        if isinstance(value, set | frozenset):
            return [*own, sorted(map(inside, cast("set[Any]", value)), key=str)]
        if isinstance(value, list | tuple | deque):
            return [*own, [inside(each) for each in cast("Sequence[Any]", value)]]
        if isinstance(value, BY_ATTRIBUTES):
            return [*own, inside(vars(value))]
        if is_array(value):
            objects = getattr(value.dtype, "hasobject", False)  # their bytes would be addresses
            held = (
                inside(value.tolist()) if objects else hashlib.sha256(value.tobytes()).hexdigest()
            )
            return [*own, str(value.shape), str(value.dtype), held]
        return [*own, repr(value) if isinstance(value, PLAIN) else ""]


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _kept(value: Any) -> Iterator[Any]:
    """A value that does not change, or an object of the user's; of a container the code that is in it."""
    if is_fixed(value) or is_users_object(value):
        yield value
    else:
        yield from _code_in(value)


def _code_in(value: Any, above: frozenset[int] = frozenset()) -> Iterator[Any]:
    if is_code(value):
        yield value
    elif id(value) not in above and isinstance(value, _CONTAINERS):
        above = above | {id(cast("object", value))}
        held = cast("Any", value)
        for each in held.values() if isinstance(value, dict | MappingProxyType) else held:
            yield from _code_in(each, above)
