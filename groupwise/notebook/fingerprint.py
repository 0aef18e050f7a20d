"""What a function comes to its values by, each thing by its name, as short fingerprints: a notebook's functions stand in no file.

A function is its compiled code, so that a comment may change, and a number or an operator may not. What it takes of the names around it
stands beside it under these names; what it holds, as defaults and closure, and what objects and classes of the user's hold, under names
below theirs, `SCORER.words`. What is in a list, a dictionary or another value belongs to that value. So it is known by name what was
edited, and what changes while the function is used.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from random import Random
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodDescriptorType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, cast

from groupwise.notebook.reached import (
    around,
    is_users_class,
    is_users_function,
    place_of,
)
from groupwise.notebook.values import (
    CONSTANTS,
    SAID,
    is_array,
    is_collection,
    is_pattern,
    is_silent,
    parts_of,
    state_of,
    users_code_in,
)

DEEPEST = 4
"""Names below each other, `a.b.c.d`; what is further down belongs to the last of them."""

_BUILT_IN = (
    *(BuiltinFunctionType, ClassMethodDescriptorType),
    *(MethodDescriptorType, MethodWrapperType, WrapperDescriptorType),
)


def digest(value: Any) -> str:
    """A short fingerprint of plain values, and of numbers, dates and texts of other libraries."""
    return _short(_plain(value))


def _short(told: Any) -> str:
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


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


class Look:
    """All that a function uses, followed as far as it is the user's; of other code the name is taken."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.found: dict[str, str] = {}
        """Fingerprints by name; that of the function itself under an empty one."""
        self.unseen: dict[str, str] = {}
        """The types of what nothing else is known of, by the name that it stands under."""
        self._names: dict[int, tuple[str, Any]] = {}
        """By identity the name under which something is told; held, so that no other gets its identity."""
        self._taken: set[str] = set()
        self._around: set[str] = set()
        self._next: deque[tuple[str, Any]] = deque()
        self._name("", function)
        while self._next:
            self._tell(*self._next.popleft())

    def _name(self, name: str, value: Any) -> None:
        """It is told under this name; what has one already, as being that."""
        if (known := self._names.get(id(value))) is not None:
            if known[0] != name:
                self.found[self._free(name)] = _short(["as", known[0]])
            return
        free = self._free(name)
        if _is_one(value):
            self._names[id(value)] = (free, value)
        self._next.append((free, value))

    def _free(self, name: str) -> str:
        """Several things may have a name, as closures of one function."""
        free, number = name, 1
        while free in self._taken:
            number += 1
            free = f"{name} ({number})"
        self._taken.add(free)
        return free

    def _tell(self, name: str, value: Any) -> None:
        try:
            self.found[name] = _short(self._named(name, value))
        except Exception:  # noqa: BLE001  a strange object, or one that goes too deep, shall not keep anybody from training
            self.found[name] = ""
            self.unseen[name] = place_of(cast("type[object]", type(value)))

    def _named(self, name: str, value: Any) -> Any:
        parts = parts_of(value)
        if parts is None or name.count(".") >= DEEPEST:
            return (
                f"json:{json.dumps(value)}" if _is_json(value) else self._content(name, value, {})
            )
        for part, each in sorted(parts.items()):
            self._name(f"{name}.{part}" if name else part, each)
        return self._itself(value)

    def _itself(self, value: Any) -> Any:
        """What it is, without its parts."""
        if isinstance(value, type):
            return [place_of(value), [self._class(each) for each in value.__bases__]]
        if not isinstance(value, FunctionType):
            return self._class(cast("type[object]", type(value)))
        if not is_users_function(value):
            return place_of(value)
        for around_it, each in sorted(around(value).items()):
            if around_it not in self._around:
                self._around.add(around_it)
                self._name(around_it, each)
        return [place_of(value), _code(value.__code__, value.__doc__)]

    def _class(self, value: type) -> str:
        """Its name, under which it is told if it is the user's."""
        if is_users_class(value) and id(value) not in self._names:
            self._name(place_of(value), value)
        return place_of(value)

    def _content(self, name: str, value: Any, within: dict[int, Any]) -> Any:
        """Plain values for all that is in it. `within`: what was told there already, as happens where things know each other."""
        kind = cast("type[object]", type(value))
        if kind in CONSTANTS:
            return repr(value)
        if isinstance(value, type):
            return ["class", self._class(value)]
        if id(value) in within:
            return ["again", place_of(value if isinstance(value, FunctionType) else kind)]
        within[id(value)] = value
        tell = functools.partial(self._content, name, within=within)
        if (parts := parts_of(value)) is not None:
            return [self._itself(value), [[part, tell(parts[part])] for part in sorted(parts)]]
        if is_collection(value):
            state = tell(state_of(value)) if is_users_class(kind) else ""
            return [self._class(kind), state, self._elements(name, value, within)]
        told = self._single(value, tell)
        return [self._class(kind), self._unseen(name, value, tell) if told is None else told]

    def _elements(self, name: str, value: Any, within: dict[int, Any]) -> Any:
        if isinstance(value, set | frozenset):
            plain = {repr(each) for each in value if type(each) in CONSTANTS}
            others = (each for each in value if type(each) not in CONSTANTS)
            # They come in no order, so that each is told as if it were the first.
            told = (json.dumps(self._content(name, each, {**within})) for each in others)
            return [*sorted(plain), *sorted(told)]
        tell = functools.partial(self._content, name, within=within)
        if not isinstance(value, dict):
            return [tell(each) for each in value]
        missing = value.default_factory if isinstance(value, defaultdict) else None
        return [tell(missing), [[tell(key), tell(each)] for key, each in value.items()]]

    def _single(self, value: Any, tell: Callable[[Any], Any]) -> Any:
        """What a value that is no collection says of itself; None where that is nothing."""
        if isinstance(value, CONSTANTS):  # of a class below one of them
            plain = next(each for each in type(value).__mro__ if each in CONSTANTS)
            return [plain.__repr__(value), tell(state_of(value))]
        if isinstance(value, Enum):  # of a library
            return [value.name, tell(value.value)]
        if isinstance(value, SAID):
            return repr(value)
        if isinstance(value, Random):
            return repr(value.getstate())
        if isinstance(value, deque):
            return [value.maxlen, [tell(each) for each in cast("deque[Any]", value)]]
        if isinstance(value, MappingProxyType):
            return tell({**cast("Mapping[Any, Any]", value)})
        if isinstance(value, _BUILT_IN):
            owner = getattr(value, "__self__", None)
            return [value.__qualname__, "" if isinstance(owner, ModuleType) else tell(owner)]
        if is_pattern(value):
            return [repr(value.pattern), value.flags]
        return _array(value, tell) if is_array(value) else None

    def _unseen(self, name: str, value: Any, tell: Callable[[Any], Any]) -> Any:
        if not is_silent(value):
            self.unseen.setdefault(name, place_of(cast("type[object]", type(value))))
        return [str(getattr(value, "__name__", "")), tell(users_code_in(value))]


def _is_one(value: Any) -> bool:
    """Whether it is one thing, however many names it has: equal numbers and texts may be one for Python."""
    kind = cast("type[object]", type(value))
    return isinstance(value, FunctionType | type) or (
        kind not in CONSTANTS and is_users_class(kind)
    )


def _code(code: CodeType, doc: str | None = None) -> Any:
    """What it computes. `doc`: the text that tells people what it is for."""
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    first, *others = code.co_consts or (None,)
    constants = [None if doc is not None and first == doc else first, *others]
    return [code.co_code.hex(), code.co_names, arguments, [_constant(each) for each in constants]]


def _constant(value: Any) -> Any:
    if isinstance(value, CodeType):
        return _code(value)
    if isinstance(value, tuple):
        return [_constant(each) for each in cast("tuple[Any, ...]", value)]
    if isinstance(value, frozenset):
        return sorted(json.dumps(_constant(each)) for each in cast("frozenset[Any]", value))
    return repr(value)


def _array(value: Any, tell: Callable[[Any], Any]) -> Any:
    objects = getattr(value.dtype, "hasobject", False)  # their bytes would be addresses
    held = tell(value.tolist()) if objects else hashlib.sha256(value.tobytes()).hexdigest()
    return [str(value.shape), str(value.dtype), held]


def _is_json(value: Any) -> bool:
    """Whether it is made of lists, dictionaries by texts, and constants alone, each once: such as word lists are, and large."""
    seen: set[int] = set()
    left: list[Any] = [value]
    while left:
        each = left.pop()
        if each is None or type(each) in (str, int, float, bool):
            continue
        if id(each) in seen:
            return False
        seen.add(id(each))
        if type(each) is list:
            left += each
        elif type(each) is dict and all(type(key) is str for key in each):
            left += each.values()
        else:
            return False
    return True
