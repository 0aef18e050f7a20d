"""The protocol between two sandboxes: the tests in one call functions in the other.

Plain values (numbers, text, bytes, lists, dictionaries, dates and the like) are sent by content: the receiver gets objects of
built-in types, even for instances of subclasses. So a comparison uses the `==` of the side that compares. Any other object stays in
its process, and the other side gets its number: `mine` is an object of the sender, `yours` one of the receiver.

The sockets carry one JSON message at a time, in turns: a side that waits for an answer serves the other's requests in the meantime.
"""

from __future__ import annotations

import builtins
import collections
import datetime
import importlib
import itertools
import json
import math
import operator
import socket
import types
from collections.abc import (
    Callable,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    Sequence,
    ValuesView,
)
from decimal import Decimal
from fractions import Fraction
from itertools import islice
from typing import Any, cast

from groupwise.core.processes.frames import send_frame

Json = Any
MAX_MESSAGE = 4 << 20
"""Largest message in bytes. A longer one is not a reasonable test value and could fill the reader's memory."""

SHARED: Mapping[str, Sequence[str]] = {
    "builtins": (
        "abs all any ascii bin bool bytearray bytes callable chr complex dict divmod enumerate filter float format frozenset hash hex int "
        "isinstance issubclass iter len list map max min next object oct ord pow range repr reversed round set slice sorted str sum tuple "
        "zip"
    ).split(),
    "datetime": ["date", "datetime", "time", "timedelta"],
    "decimal": ["Decimal"],
    "fractions": ["Fraction"],
    "collections": ["ChainMap", "Counter", "OrderedDict", "defaultdict", "deque"],
    "functools": ["cmp_to_key", "reduce"],
    "itertools": [name for name in dir(itertools) if not name.startswith("_")],
    "math": [name for name in dir(math) if not name.startswith("_")],
    "operator": [
        name
        for name in dir(operator)
        if not name.startswith("_") and name not in ("attrgetter", "call", "methodcaller")
    ],
}
"""Functions and types that both sides have and that are sent by name, like built-in exceptions: calling one of them with plain
values gives a plain value. None of them executes text, reads attributes by name, or opens anything, so a solution gains nothing if
a test calls one that it returned.
"""

_OF_ASSERTS = tuple(base.__name__ for base in AssertionError.__mro__ if base is not object)
MAX_ITEMS = 100_000
"""Most items taken from an iterator that is sent: all of them are read at once."""
_HEADER = 8
"""Bytes of the header before a frame's content; it holds the length of the content."""
_SMALL = 1 << 63
_TIMES: dict[str, Any] = {
    "datetime": datetime.datetime,
    "date": datetime.date,
    "time": datetime.time,
}
_READERS: dict[str, Callable[[Any], Any]] = {
    **{name: kind.fromisoformat for name, kind in _TIMES.items()},
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "complex": lambda content: complex(*content),
    "decimal": Decimal,
    "global": lambda content: _from_module(*content),
    "int": lambda content: int(content, 16),
    "span": lambda content: datetime.timedelta(*content),
}
"""Readers, by kind, of values that hold no other values."""
MUTABLE = (list, dict, set, bytearray, collections.deque)


class ConnectionLost(BaseException):
    """The other side has ended or sent something invalid. No test's `except Exception` catches it."""


class NotPlainError(BaseException):
    """A value that cannot be sent to the other side."""


class MessageSocket:
    """One end of a stream socket, for whole messages."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._reader = self._socket.makefile("rb")

    def send(self, message: Json) -> None:
        """Send a message. Raises ConnectionLost if the other side has ended, NotPlainError if the message is too long."""
        text = json.dumps(message).encode()
        if len(text) > MAX_MESSAGE:
            raise NotPlainError(f"a value of {len(text)} bytes is too large")
        try:
            send_frame(self._socket, text)
        except OSError as error:
            raise ConnectionLost(str(error)) from error

    def receive(self) -> dict[str, Json]:
        """The next message. Raises ConnectionLost if there is none."""
        try:
            length = int.from_bytes(self._read_bytes(_HEADER), "big")
            if length > MAX_MESSAGE:
                raise ConnectionLost(f"a message of {length} bytes")
            message = json.loads(self._read_bytes(length))
        except (OSError, ValueError, RecursionError) as error:
            raise ConnectionLost(str(error)) from error
        if not isinstance(message, dict):
            raise ConnectionLost("no message")
        return cast("dict[str, Json]", message)

    def close(self) -> None:
        """Close the connection."""
        self._reader.close()
        self._socket.close()

    def _read_bytes(self, count: int) -> bytes:
        piece = self._reader.read(count)
        if len(piece) < count:
            raise ConnectionLost("the other side has ended")
        return piece


class ObjectTable:
    """The objects that this side has sent by number, and the stand-ins for those of the other side."""

    def __init__(
        self,
        stays: Callable[[Any], bool],
        stand_in: Callable[[int], object],
        *,
        of_tests: bool = False,
    ) -> None:
        """`stays` decides which non-plain values may be sent by number; `stand_in` creates the local stand-in for an object of the
        other side.

        `of_tests`: this is the side of the tests. Its iterators are sent as their items. A received AssertionError, or a base class
        of it, is replaced by a new class, so a test cannot catch its own failed assert with it.
        """
        self._of_tests = of_tests
        self._stays = stays
        self._stand_in = stand_in
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._stand_ins: dict[int, Any] = {}
        self._stand_in_numbers: dict[int, int] = {}
        self._kept_alive: list[Any] = []
        self.showing: set[int] = set()
        """Numbers of the objects sent as shown (mutable arguments); the caller clears it before each request."""

    def number_of(self, value: object) -> int:
        """The number of an object of this side."""
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return self._numbers[id(value)]

    def local_object(self, number: int) -> Any:
        """The object of this side with a number."""
        return self._objects[number]

    def remote_object(self, number: int) -> Any:
        """The stand-in for the other side's object with that number."""
        return self._stand_ins[number]

    # Sending values

    def to_json(self, value: Any, *, shown: bool = False) -> Json:
        """A value as JSON. `shown`: mutable containers get a number, so the other side can report how it changed them."""
        if value is None or isinstance(value, bool):
            return value
        if id(value) in self._stand_in_numbers:
            return {"yours": self._stand_in_numbers[id(value)]}
        if isinstance(value, int):
            number = int.__int__(value)
            return number if -_SMALL < number < _SMALL else {"int": hex(number)}
        if isinstance(value, float):
            return float.__float__(value)
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, MUTABLE):
            return self._numbered_content(value) if shown else self.content(value)
        return self._of_other_kind(value, shown)

    def content(self, value: Any, *, shown: bool = False) -> dict[str, Json]:
        """The contents of a list, dictionary, set, deque or bytearray."""
        match value:
            case list():
                return {"list": self._list_to_json(cast("list[Any]", value), shown)}
            case dict():
                items = cast("dict[Any, Any]", value).items()
                return {"dict": [self._list_to_json(pair, shown) for pair in items]}
            case set():
                return {"set": self._list_to_json(cast("set[Any]", value), shown)}
            case collections.deque():
                queue = cast("collections.deque[Any]", value)
                return {"deque": [self._list_to_json(queue, shown), queue.maxlen]}
            case _:
                return {"bytearray": bytes(value).hex()}

    def _numbered_content(self, value: Any) -> Json:
        number = self.number_of(value)
        if number in self.showing:
            return {"again": number}
        self.showing.add(number)
        return {**self.content(value, shown=True), "at": number}

    def _list_to_json(self, values: Iterable[Any], shown: bool) -> list[Json]:
        return [self.to_json(value, shown=shown) for value in values]

    def _of_other_kind(self, value: Any, shown: bool) -> Json:
        match value:
            case tuple():
                return {"tuple": self._list_to_json(cast("tuple[Any, ...]", value), shown)}
            case frozenset():
                return {"frozenset": self._list_to_json(cast("frozenset[Any]", value), shown)}
            case bytes():
                return {"bytes": value.hex()}
            case complex():
                return {"complex": [value.real, value.imag]}
            case Decimal():
                return {"decimal": str(value)}
            case Fraction():
                return {"fraction": self._list_to_json((value.numerator, value.denominator), shown)}
            case range():
                return {"range": self._list_to_json((value.start, value.stop, value.step), shown)}
            case datetime.timedelta():
                return {"span": [value.days, value.seconds, value.microseconds]}
            case datetime.date() | datetime.time():
                kind = next(
                    name for name, time_type in _TIMES.items() if isinstance(value, time_type)
                )
                return {kind: value.isoformat()}
            case _:
                return self._name_reference(value) or self._by_number(value)

    def _name_reference(self, value: Any) -> Json:
        module, name = getattr(value, "__module__", None), getattr(value, "__name__", None)
        if not (isinstance(module, str) and isinstance(name, str)):
            return None
        module = module.removeprefix("_")  # without the underscore of a module's C part
        is_importable = is_shared(module, name) and _from_module(module, name) is value
        return {"global": [module, name]} if is_importable else None

    def _by_number(self, value: Any) -> Json:
        if self._of_tests and isinstance(value, Iterator | KeysView | ValuesView | ItemsView):
            items = self._list_to_json(islice(cast("Iterable[Any]", value), MAX_ITEMS), shown=False)
            return {"iterator" if isinstance(value, Iterator) else "list": items}
        if not self._stays(value):
            raise NotPlainError(f"{type(value).__name__}")
        return self.by_number(value)

    def by_number(self, value: object) -> Json:
        """Sends an object that stays here by its number."""
        return {"mine": self.number_of(value)}

    # Receiving values

    def read(self, encoded: Json) -> Any:
        """The value that was sent. Raises ConnectionLost for input that `to_json` never produces."""
        if not isinstance(encoded, dict):
            return encoded
        try:
            return self._read_one(cast("dict[str, Json]", encoded))
        except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise ConnectionLost(f"no value: {error}") from error

    def _read_one(self, encoded: dict[str, Json]) -> Any:
        (kind, content), *_ = encoded.items()
        value = self._build_value(kind, content)
        if "at" in encoded:
            self._register_stand_in(encoded["at"], value)
        return value

    def _build_value(self, kind: str, content: Json) -> Any:
        match kind:
            case "yours":
                return self._objects[content]
            case "again":
                return self._stand_ins[content]
            case "mine":
                return self._stand_in_for(content)
            case "list" | "tuple" | "set" | "frozenset":
                return getattr(builtins, kind)(self._read_each(content))
            case "dict":
                return {self.read(key): self.read(value) for key, value in content}
            case "deque":
                return collections.deque(self._read_each(content[0]), content[1])
            case "fraction" | "range":
                return {"fraction": Fraction, "range": range}[kind](*self._read_each(content))
            case "global" if self._of_tests and content[1] in _OF_ASSERTS:
                return types.new_class(content[1], (Exception,))
            case "iterator":
                return iter(self._read_each(content))
            case _:
                return _READERS[kind](content)

    def _read_each(self, content: list[Json]) -> list[Any]:
        return [self.read(item) for item in content]

    def _stand_in_for(self, number: Json) -> Any:
        if number not in self._stand_ins:
            self._register_stand_in(number, self._stand_in(number))
        return self._stand_ins[number]

    def _register_stand_in(self, number: int, value: Any) -> None:
        self._kept_alive.append(value)  # kept for good, or its id could be reused
        self._stand_ins[number] = value
        self._stand_in_numbers[id(value)] = number

    def put(self, number: int, encoded: dict[str, Json]) -> None:
        """Replace the content of an object here by what the other side has made of it."""
        target, value = self._objects[number], self.read(encoded)
        if isinstance(target, dict | set):
            cast("dict[Any, Any]", target).clear()
            cast("dict[Any, Any]", target).update(value)
        else:
            target.clear()
            target.extend(value)


def is_shared(module: str, name: str) -> bool:
    """True if both sandboxes may use it by name: it is in `SHARED`, or a built-in exception."""
    if name in SHARED.get(module, ()):
        return True
    value = getattr(builtins, name, None) if module == "builtins" else None
    return isinstance(value, type) and issubclass(value, BaseException)


def _from_module(module: str, name: str) -> Any:
    if not is_shared(module, name):
        raise ValueError(f"{module}.{name}")
    return getattr(importlib.import_module(module), name)


# Exceptions


def written_error(objects: ObjectTable, error: BaseException) -> dict[str, Json]:
    """An exception as JSON: its name, its nearest built-in class, its arguments and its text."""
    try:
        arguments = [objects.to_json(argument) for argument in error.args]
    except (NotPlainError, RecursionError):
        arguments = None
    text = str(error)[:2000]
    kind = type(error)
    return {"name": kind.__name__[:200], "kind": builtin_of(kind), "args": arguments, "text": text}


def builtin_of(kind: type[BaseException]) -> str:
    """The name of the nearest built-in base class of an exception class."""
    return next(base.__name__ for base in kind.__mro__ if base.__module__ == "builtins")


class Errors:
    """Turns received errors into exceptions; exceptions that are not built in get one class for each name."""

    def __init__(self, objects: ObjectTable) -> None:
        self._objects = objects
        self._kinds: dict[str, type[Exception]] = {}

    def kind(self, name: str, builtin_name: str) -> type[Exception]:
        """The class for a name. Exceptions that end programs, such as SystemExit, become RuntimeError, so they end nothing here."""
        base = getattr(builtins, builtin_name, None)
        if not (isinstance(base, type) and issubclass(base, Exception)):
            base = RuntimeError
        if base.__name__ == name:
            return base
        if name not in self._kinds:
            self._kinds[name] = cast("type[Exception]", types.new_class(name, (base,)))
        return self._kinds[name]

    def class_named(self, name: str, builtin_name: str) -> type[Exception]:
        """The same for a class that a name of the other side refers to: it never catches a failed assert of this side."""
        kind = self.kind(name[:200], builtin_name)
        return types.new_class(name, (Exception,)) if issubclass(AssertionError, kind) else kind

    def read(self, message: Mapping[str, Json]) -> Exception:
        """The exception that was sent."""
        kind = self.kind(str(message.get("name")), str(message.get("kind")))
        arguments, text = message.get("args"), str(message.get("text"))
        try:
            return kind(*[self._objects.read(argument) for argument in arguments or [text]])
        except TypeError:  # some constructors take other arguments than they store
            return RuntimeError(f"{kind.__name__}: {text}")
