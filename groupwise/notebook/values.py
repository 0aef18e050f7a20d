"""Kinds of values that a reward may use: what they are made of, and of which nothing is known."""

from __future__ import annotations

import dataclasses
import functools
from argparse import Namespace
from array import array
from collections import UserDict, UserList, UserString
from collections.abc import Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from fractions import Fraction
from logging import Logger
from operator import attrgetter, itemgetter
from pathlib import PurePath
from string import Template
from types import EllipsisType, FunctionType, MethodType, ModuleType, NoneType, SimpleNamespace
from typing import Any, cast
from uuid import UUID

from pydantic import BaseModel

from groupwise.notebook.reached import (
    captured,
    is_users_class,
    is_users_function,
    of_this_package,
)

CONSTANTS: tuple[type, ...] = (
    *(NoneType, bool, int, float, complex, str, bytes, range, slice, EllipsisType),
)
"""Those that never change, where a value is of one of them and of no class below it."""
SAID: tuple[type, ...] = (
    *(bytearray, array, Decimal, Fraction, PurePath, date, time, timedelta, UUID),
    *(itemgetter, attrgetter),
)
"""Values of Python that say all of themselves in words."""
CACHED: Any = type(functools.lru_cache(len))
"""What `functools.cache` makes of a function."""
_BY_ATTRIBUTES = (SimpleNamespace, Namespace, Template, UserDict, UserList, UserString)
"""Objects of Python whose attributes say all."""
_SILENT = (ModuleType, Logger)
_SILENT_MODULES = (
    *("_abc", "abc", "dataclasses", "typing", "inspect", "weakref", "_weakref", "contextvars"),
    *("threading", "_thread", "_contextvars"),
)
"""Whose objects hold nothing that a reward could come to another value by."""


def parts_of(value: Any) -> Mapping[str, Any] | None:
    """What code, an object of the user's, or plain data is made of, by name; None for anything else, as collections and numbers."""
    for kinds, parts in _MADE_OF:
        if isinstance(value, kinds):
            return parts(value)
    if is_collection(value) or isinstance(value, CONSTANTS):
        return None
    if isinstance(value, BaseModel) or dataclasses.is_dataclass(value):
        return _fields(value)
    return state_of(value) if is_users_class(type(cast("object", value))) else None


def _of_function(value: FunctionType) -> dict[str, Any]:
    parts = captured(value)
    if is_users_function(value) or of_this_package(value):
        return parts
    return {name: part for name, part in parts.items() if _is_users_code(part)}


def _is_users_code(value: Any) -> bool:
    return isinstance(value, FunctionType) and is_users_function(value)


def _of_class(value: type) -> dict[str, Any]:
    if not is_users_class(value):
        return {}
    fields = getattr(value, "model_fields", {}) if issubclass(value, BaseModel) else {}
    return {
        **{
            name: each.default_factory or each.default
            for name, each in fields.items()
            if not each.is_required()
        },
        **{
            name: each
            for name, each in vars(value).items()
            if isinstance(each, FunctionType) or not name.startswith("__")
        },
    }


def _of_partial(value: functools.partial[Any] | functools.partialmethod[Any]) -> dict[str, Any]:
    given = {str(place): each for place, each in enumerate(value.args)}
    return {"function": value.func, **given, **value.keywords}


_MADE_OF: tuple[tuple[Any, Any], ...] = (
    (FunctionType, _of_function),
    (type, _of_class),
    (MethodType, lambda value: {"function": value.__func__, "self": value.__self__}),
    ((functools.partial, functools.partialmethod), _of_partial),
    ((staticmethod, classmethod), lambda value: {"function": value.__func__}),
    (property, lambda value: {"get": value.fget, "set": value.fset, "delete": value.fdel}),
    (functools.cached_property, lambda value: {"function": value.func}),
    (CACHED, lambda value: {"function": value.__wrapped__}),
    (_BY_ATTRIBUTES, vars),
)


def _fields(value: Any) -> dict[str, Any] | None:
    """Of data, or of the user's object all that it holds; None for data of this package that may change while it is used."""
    model = isinstance(value, BaseModel)
    if is_users_class(type(value)):
        return {**state_of(value), **((model and value.__pydantic_private__) or {})}
    frozen = value.model_config.get("frozen") if model else value.__dataclass_params__.frozen
    if of_this_package(type(value)) and not frozen:
        return None
    return (
        vars(value)
        if model
        else {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    )


def state_of(value: Any) -> dict[str, Any]:
    """What an object holds: its slots, and its attributes."""
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
    """Whether it holds others one after the other."""
    return isinstance(value, list | tuple | set | frozenset | dict)


def is_array(value: Any) -> bool:
    """Of numpy, or alike."""
    return _has(value, "tobytes", "tolist", "shape", "dtype")


def is_pattern(value: Any) -> bool:
    """Of `re`, or of `regex`."""
    return _has(value, "pattern", "flags", "fullmatch")


def is_silent(value: Any) -> bool:
    """Whether nothing needs to be known of it: it is no data, or its class is told elsewhere."""
    kind = cast("type[object]", type(value))
    return (
        isinstance(value, _SILENT)
        or kind is object
        or kind.__module__ in _SILENT_MODULES
        or of_this_package(kind)
        or hasattr(kind, "__get__")
    )


def _has(value: Any, *names: str) -> bool:
    """By its class: an object may answer to any name."""
    return all(hasattr(cast("type[object]", type(value)), name) for name in names)
