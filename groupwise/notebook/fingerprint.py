"""Short fingerprints, by name, of everything that determines a function's results, because a notebook's functions are not in a
file.

A function is identified by its compiled code: a changed comment does not matter, a changed number or operator does. Globals that it
reads get entries under their names; its defaults and closure, and the parts of the user's objects and classes, get dotted names
such as `SCORER.words`. The content of a list, a dictionary or another value belongs to that value. So edits, and changes while the
function is used, can be reported by name.
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

from groupwise.notebook.code_dependencies import (
    CONSTANTS,
    REPR_TYPES,
    globals_used,
    has,
    is_collection,
    is_global,
    is_silent,
    is_users_class,
    is_users_code,
    is_users_function,
    parts_of,
    place_of,
    state_of,
)

DEEPEST = 4
"""Most levels of parts with a name of their own, `a.b.c.d`; deeper parts belong to the last of them."""
MAX_NAMES = 2000
"""Most names of a reward. Objects may refer to each other in many ways; further parts then belong to existing names."""

Within = dict[int, tuple[int, Any]]
"""Values described so far, by identity: number and value. Holding the value keeps its identity from being reused."""
_BUILT_IN = (
    *(BuiltinFunctionType, ClassMethodDescriptorType),
    *(MethodDescriptorType, MethodWrapperType, WrapperDescriptorType),
)


def digest(value: Any) -> str:
    """A short fingerprint of plain values, and of numbers, dates and texts of other libraries."""
    return _short_hash(_plain_value(value))


def _short_hash(description: Any) -> str:
    return hashlib.sha256(json.dumps(description).encode()).hexdigest()[:16]


def _plain_value(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        parts = cast("Mapping[Any, Any]", value)
        return sorted(([repr(key), _plain_value(part)] for key, part in parts.items()), key=str)
    if isinstance(value, list | tuple):
        return [_plain_value(item) for item in cast("Sequence[Any]", value)]
    if isinstance(value, set | frozenset):
        return sorted(map(_plain_value, cast("set[Any]", value)), key=str)
    if hasattr(value, "tolist"):
        return _plain_value(value.tolist())
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else text


class FunctionDescription:
    """Everything that a function uses, followed through the user's own code; other code is identified by name.

    Functions and classes that their module has under their own names are described under these names, even if they have aliases: so
    nothing changes if an alias is reassigned while the function is in use.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.fingerprints: dict[str, str] = {}
        """Fingerprints by name; the function itself has the empty name."""
        self.unseen: dict[str, str] = {}
        """Type names of objects that are known only by type, under the objects' names."""
        self._names_taken: set[str] = set()
        self._global_names: set[str] = set()
        self._classes: dict[str, type] = {}
        """Classes by the names under which they are described."""
        self._classes_met: dict[int, type] = {}
        self._queue: deque[tuple[str, Any, int]] = deque()
        self._enqueue("", function)
        while self._queue:
            self._describe_entry(*self._queue.popleft())

    def _enqueue(self, name: str, value: Any, depth: int = 0) -> str:
        """Queues a value for description under this name, with a number appended if the name is taken."""
        unique_name, number = name, 1
        while unique_name in self._names_taken:
            number += 1
            unique_name = f"{name} ({number})"
        self._names_taken.add(unique_name)
        self._queue.append((unique_name, value, depth))
        return unique_name

    def _enqueue_global(self, name: str, value: Any) -> None:
        """Queues a module's name once, even if it is met several times."""
        if isinstance(value, type) and name == place_of(value):
            self._class_name(value)
        elif name not in self._global_names:
            self._global_names.add(name)
            self._enqueue(name, value)

    def _describe_entry(self, name: str, value: Any, depth: int) -> None:
        try:
            self.fingerprints[name] = _short_hash(self._describe_value(name, value, depth))
        except Exception:  # noqa: BLE001  an unusual or deeply nested object must not prevent a training
            self.fingerprints[name] = ""
            self.unseen[name] = place_of(cast("type[object]", type(value)))

    def _describe_value(self, name: str, value: Any, depth: int) -> Any:
        if isinstance(value, type) and self._classes.get(name) is not value:
            return ["as", self._class_name(value)]
        if (
            isinstance(value, FunctionType)
            and name not in ("", place_of(value))
            and is_global(value)
        ):
            return self._describe_content(name, value, {})
        parts = parts_of(value)
        if parts is None or depth >= DEEPEST or len(self._names_taken) > MAX_NAMES:
            return repr(value) if _is_plain_data(value) else self._describe_content(name, value, {})
        for part, part_value in sorted(parts.items()):
            self._enqueue(f"{name}.{part}" if name else part, part_value, depth + 1)
        return self._describe_itself(value)

    def _describe_itself(self, value: Any) -> Any:
        """The value itself, without its parts."""
        if isinstance(value, type):
            class_names = [self._class_name(base) for base in (*value.__bases__, type(value))]
            return [place_of(value), class_names]
        if not isinstance(value, FunctionType):
            return self._class_name(cast("type[object]", type(value)))
        if not is_users_function(value):
            return place_of(value)
        for name, used_value in sorted(globals_used(value).items()):
            self._enqueue_global(name, used_value)
        return [place_of(value), _describe_code(value.__code__, value.__doc__)]

    def _class_name(self, value: type) -> str:
        """The class's name. A class of the user is also queued for description under it."""
        qualified_name = place_of(value)
        if is_users_class(value) and id(value) not in self._classes_met:
            self._classes_met[id(value)] = value
            namesakes = [
                known_class
                for known_class in self._classes.values()
                if place_of(known_class) == qualified_name
            ]
            # If a cell was run again, an object may still have the earlier class of the same name.
            if not namesakes or self._class_digest(value) not in map(self._class_digest, namesakes):
                self._classes[self._enqueue(qualified_name, value)] = value
        return qualified_name

    def _class_digest(self, value: type) -> str:
        """A fingerprint that distinguishes classes of one name."""
        seen = {id(value): (0, value)}
        parts, unseen = parts_of(value) or {}, dict(self.unseen)
        content = [[name, self._describe_content("", parts[name], seen)] for name in sorted(parts)]
        self.unseen = unseen
        return _short_hash(content)

    def _describe_content(self, name: str, value: Any, seen: Within) -> Any:
        """Plain values for everything in it. `seen`: values described already, which may recur if objects refer to each other."""
        kind = cast("type[object]", type(value))
        if kind in CONSTANTS:
            return repr(value)
        if isinstance(value, type):
            return ["class", self._class_name(value)]
        if isinstance(value, FunctionType) and is_users_function(value) and is_global(value):
            self._enqueue_global(place_of(value), value)
            return ["as", place_of(value)]
        if id(value) in seen:
            return ["again", seen[id(value)][0]]
        seen[id(value)] = (len(seen), value)
        describe = functools.partial(self._describe_content, name, seen=seen)
        if (parts := parts_of(value)) is not None:
            return [
                self._describe_itself(value),
                [[part, describe(parts[part])] for part in sorted(parts)],
            ]
        if is_collection(value):
            state = describe(state_of(value)) if is_users_class(kind) else ""
            return [self._class_name(kind), state, self._describe_elements(name, value, seen)]
        content = self._describe_single(value, describe)
        if content is None:  # only its class is known, and any functions of the user in it
            if not is_silent(value):
                self.unseen.setdefault(name, place_of(kind))
            object_name = getattr(value, "__name__", "")
            # The functions in an object of `numpy.vectorize` are an example.
            attributes = getattr(value, "__dict__", {}).items()
            code = {
                name: attribute_value
                for name, attribute_value in attributes
                if is_users_code(attribute_value)
            }
            content = [object_name if isinstance(object_name, str) else "", describe(code)]
        return [self._class_name(kind), content]

    def _describe_elements(self, name: str, value: Any, seen: Within) -> Any:
        if isinstance(value, set | frozenset):
            plain_texts, other_texts = list[str](), list[str]()
            for element in cast("set[Any]", value):
                if _is_plain_data(element):
                    plain_texts.append(repr(element))
                else:  # a set has no order, so each element is described as if it were the first
                    other_texts.append(json.dumps(self._describe_content(name, element, {**seen})))
            return [*sorted(plain_texts), *sorted(other_texts)]
        describe = functools.partial(self._describe_content, name, seen=seen)
        if not isinstance(value, dict):
            return [describe(element) for element in value]
        missing = value.default_factory if isinstance(value, defaultdict) else None
        pairs = cast("dict[Any, Any]", value).items()
        return [describe(missing), [[describe(key), describe(element)] for key, element in pairs]]

    def _describe_single(self, value: Any, describe: Callable[[Any], Any]) -> Any:
        """Description of a value that is not a collection; None if it cannot be described."""
        if isinstance(value, CONSTANTS):  # a value of a subclass
            base_type: Any = next(
                base_type for base_type in type(value).__mro__ if base_type in CONSTANTS
            )
            return [base_type.__repr__(value), describe(state_of(value))]
        if isinstance(value, Enum):  # of a library
            return [value.name, describe(value.value)]
        if isinstance(value, REPR_TYPES):
            return repr(value)
        if isinstance(value, Random):
            return repr(value.getstate())
        if isinstance(value, deque):
            return [value.maxlen, [describe(element) for element in cast("deque[Any]", value)]]
        if isinstance(value, MappingProxyType):
            return describe({**cast("Mapping[Any, Any]", value)})
        if isinstance(value, _BUILT_IN):
            owner = getattr(value, "__self__", None)
            return [value.__qualname__, "" if isinstance(owner, ModuleType) else describe(owner)]
        if has(value, "pattern", "flags", "fullmatch"):  # of `re` or `regex`
            return [repr(value.pattern), value.flags]
        if has(value, "tobytes", "tolist", "shape", "dtype"):  # an array of numpy or the like
            has_objects = getattr(value.dtype, "hasobject", False)  # their bytes would be addresses
            content = (
                describe(value.tolist())
                if has_objects
                else hashlib.sha256(value.tobytes()).hexdigest()
            )
            return [str(value.shape), str(value.dtype), content]
        return None


def _describe_code(code: CodeType, doc: str | None = None) -> Any:
    """Plain values that identify the code's behaviour. `doc`: the docstring, which is left out."""
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    first, *remaining = code.co_consts or (None,)
    constants = [None if doc is not None and first == doc else first, *remaining]
    jumps = code.co_exceptiontable.hex()
    described_constants = [_describe_constant(constant) for constant in constants]
    return [code.co_code.hex(), jumps, code.co_names, arguments, described_constants]


def _describe_constant(value: Any) -> Any:
    if isinstance(value, CodeType):
        return _describe_code(value)
    if isinstance(value, tuple):
        return [_describe_constant(item) for item in cast("tuple[Any, ...]", value)]
    if isinstance(value, frozenset):
        return sorted(
            json.dumps(_describe_constant(item)) for item in cast("frozenset[Any]", value)
        )
    return repr(value)


def _is_plain_data(value: Any) -> bool:
    """True if it consists only of constants, lists, tuples and dictionaries. These need no closer look, and word lists are large."""
    seen_ids: set[int] = set()
    pending: list[Any] = [value]
    while pending:
        item = pending.pop()
        kind = cast("type[object]", type(item))
        if kind in CONSTANTS:
            continue
        if kind not in (list, tuple, dict):
            return False
        if id(item) in seen_ids:
            if kind is not tuple:  # other containers could contain themselves
                return False
            continue
        seen_ids.add(id(item))
        pending += [*item.keys(), *item.values()] if isinstance(item, dict) else item
    return True
