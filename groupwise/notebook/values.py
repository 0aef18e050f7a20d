"""Kinds of values that a reward may use: the parts that they are made of, and the kinds whose content is unknown."""

from __future__ import annotations

import dataclasses
import functools
from argparse import Namespace
from array import array
from collections import UserDict, UserList, UserString
from collections.abc import Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from itertools import chain
from logging import Logger
from operator import attrgetter, itemgetter
from pathlib import PurePath
from string import Template
from types import EllipsisType, FunctionType, MethodType, ModuleType, NoneType, SimpleNamespace
from typing import Any, cast
from uuid import UUID

from pydantic import BaseModel

from groupwise.notebook.code_dependencies import (
    captured,
    is_users_class,
    is_users_function,
    of_this_package,
)

CONSTANTS: tuple[type, ...] = (
    *(NoneType, bool, int, float, complex, str, bytes, range, slice, EllipsisType),
)
"""Types whose values never change, if a value is of exactly this type and of no subclass."""
SAID: tuple[type, ...] = (
    *(bytearray, array, Decimal, Fraction, PurePath, date, time, timedelta, UUID),
    *(itemgetter, attrgetter),
)
"""Values of Python that say all of themselves in words."""
CACHED: Any = type(functools.lru_cache(len))
"""Type of a function wrapped by `functools.cache`."""
_MADE_OF: tuple[tuple[Any, dict[str, str]], ...] = (
    (MethodType, {"function": "__func__", "self": "__self__"}),
    ((staticmethod, classmethod), {"function": "__func__"}),
    (property, {"get": "fget", "set": "fset", "delete": "fdel"}),
    (functools.cached_property, {"function": "func"}),
    (functools.singledispatchmethod, {"function": "func", "dispatcher": "dispatcher"}),
    (CACHED, {"function": "__wrapped__"}),
)
"""Code around code, with the attributes that say which."""
_BY_ATTRIBUTES = (SimpleNamespace, Namespace, Template, UserDict, UserList, UserString)
"""Objects of Python whose attributes say all."""
_METHODS = (
    *(staticmethod, classmethod, property, functools.partialmethod),
    *(functools.singledispatchmethod, CACHED),
)
_SILENT = (ModuleType, Logger)
_SILENT_MODULES = (
    *("_abc", "abc", "dataclasses", "typing", "inspect", "weakref", "_weakref", "contextvars"),
    *("threading", "_thread", "_contextvars", "asyncio.locks", "types", "torch.autograd.grad_mode"),
)
"""Modules whose objects hold nothing that could change a reward's value."""


def parts_of(value: Any) -> Mapping[str, Any] | None:
    """The parts of code, a user's object, or plain data, by name; None for anything else, such as collections and numbers."""
    if isinstance(value, FunctionType):
        return _of_function(value)
    if isinstance(value, type):
        return _of_class(cast("type[object]", value))
    if isinstance(value, functools.partial | functools.partialmethod):
        return _of_partial(cast("functools.partial[Any]", value))
    for kinds, attributes in _MADE_OF:
        if isinstance(value, kinds):
            return {name: getattr(value, each) for name, each in attributes.items()}
    if isinstance(value, _BY_ATTRIBUTES):
        return vars(value)
    if is_collection(value) or isinstance(value, CONSTANTS):
        return None
    if isinstance(value, BaseModel) or dataclasses.is_dataclass(value):
        return _fields(value)
    return state_of(value) if is_users_class(type(cast("object", value))) else None


def _of_function(value: FunctionType) -> dict[str, Any]:
    """The function's parts; of a library's, those that the user may have given it: code, numbers, texts, collections."""
    parts = captured(value)
    if is_users_function(value) or of_this_package(value):
        return parts
    given = (*CONSTANTS, list, tuple, set, frozenset, dict)
    return {
        name: part
        for name, part in parts.items()
        if isinstance(part, given) or _is_users_code(part)
    }


def _is_users_code(value: Any) -> bool:
    return isinstance(value, FunctionType) and is_users_function(value)


def _of_class(value: type[object]) -> dict[str, Any]:
    if not is_users_class(value):
        return {}
    fields = getattr(value, "model_fields", {}) if issubclass(value, BaseModel) else {}
    return {
        **{
            name: each.default_factory or each.default
            for name, each in fields.items()
            if not each.is_required()
        },
        **{name: each for name, each in vars(value).items() if _is_written(value, name, each)},
    }


def _is_written(owner: type, name: str, value: Any) -> bool:
    """True if the user wrote it, rather than Python for the class."""
    if name.startswith("__"):
        return isinstance(value, (FunctionType, *_METHODS))
    made_by_enum = name.startswith("_") and name.endswith("_") and issubclass(owner, Enum)
    return not made_by_enum


def _of_partial(value: functools.partial[Any]) -> dict[str, Any]:
    given = {f"argument {place}": each for place, each in enumerate(value.args, 1)}
    return {"function": value.func, **given, **value.keywords}


def _fields(value: Any) -> dict[str, Any] | None:
    """The fields of data, and all that a user's object holds; None for data of this package that may change while it is used."""
    model = isinstance(value, BaseModel)
    kind = cast("type[object]", type(value))
    if is_users_class(kind):
        hidden = (value.__pydantic_private__, value.__pydantic_extra__) if model else ()
        return {
            **state_of(value),
            **dict(chain.from_iterable((each or {}).items() for each in hidden)),
        }
    frozen = value.model_config.get("frozen") if model else value.__dataclass_params__.frozen
    if of_this_package(kind) and not frozen:
        return None
    return (
        vars(value)
        if model
        else {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    )


def state_of(value: Any) -> dict[str, Any]:
    """An object's slots and attributes."""
    found: dict[str, Any] = {}
    for kind in reversed(type(value).__mro__):
        named = kind.__dict__.get("__slots__", ())
        for name in (named,) if isinstance(named, str) else named:
            hidden = name.startswith("__") and not name.endswith("__")
            place = f"_{kind.__name__.lstrip('_')}{name}" if hidden else name
            if not place.startswith("__"):
                found[place] = getattr(value, place, None)
    held = getattr(value, "__dict__", None)
    return {**found, **(cast("dict[str, Any]", held) if isinstance(held, dict) else {})}


def users_code_in(value: Any) -> dict[str, Any]:
    """Functions of the user's that an object of a library holds, as one of `numpy.vectorize`."""
    held = getattr(value, "__dict__", {})
    return {name: each for name, each in held.items() if _is_users_code(each)}


def is_collection(value: Any) -> bool:
    """True if it is a container of other values."""
    return isinstance(value, list | tuple | set | frozenset | dict)


def is_array(value: Any) -> bool:
    """True for an array of numpy or the like."""
    return _has(value, "tobytes", "tolist", "shape", "dtype")


def is_pattern(value: Any) -> bool:
    """True for a pattern of `re` or `regex`."""
    return _has(value, "pattern", "flags", "fullmatch")


def is_silent(value: Any) -> bool:
    """True if nothing needs to be known of it: it is no data, or its class is described elsewhere."""
    kind = cast("type[object]", type(value))
    return (
        isinstance(value, _SILENT)
        or kind is object
        or kind.__module__ in _SILENT_MODULES
        or of_this_package(kind)
        or hasattr(kind, "__get__")
    )


def _has(value: Any, *names: str) -> bool:
    """True if its class has all these names; the class decides, since an object may answer to any name."""
    return all(hasattr(cast("type[object]", type(value)), name) for name in names)
