"""Kinds of values that a reward may use: which are code, which do not change, what is in an object, and of what nothing is known."""

from __future__ import annotations

import enum
import functools
import re
from argparse import Namespace
from array import array
from collections import UserDict, UserList, UserString, deque
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from fractions import Fraction
from logging import Logger
from operator import attrgetter, itemgetter, methodcaller
from pathlib import PurePath
from string import Template
from types import (
    BuiltinFunctionType,
    EllipsisType,
    FunctionType,
    MappingProxyType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
    WrapperDescriptorType,
)
from typing import Any, cast
from uuid import UUID

from pydantic import BaseModel

from groupwise.notebook.reached import OURS, is_users_object

CACHED: Any = type(functools.lru_cache(len))
"""What `functools.cache` makes of a function."""
COLLECTIONS = (list, tuple, deque, dict, set, frozenset)
CONSTANTS: tuple[type, ...] = (bool, int, float, complex, str, bytes, range, slice, EllipsisType)
PLAIN: tuple[type, ...] = (
    *(*CONSTANTS, bytearray, array, Decimal, Fraction, PurePath, date, time, timedelta, UUID),
    *(itemgetter, attrgetter, methodcaller),
)
"""Values of Python that say all of themselves."""
BY_ATTRIBUTES: tuple[type, ...] = (
    SimpleNamespace,
    Namespace,
    Template,
    UserDict,
    UserList,
    UserString,
)
"""Objects of Python whose attributes say all."""
_SILENT = (ModuleType, Logger)
"""Of which nothing needs to be known."""
_BUILT_IN = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)


def attributes(value: Any) -> Mapping[str, Any]:
    """Those of an object, or a class, by name."""
    return cast("Mapping[str, Any]", getattr(value, "__dict__", {}))


def state_of(value: Any) -> dict[str, Any]:
    """What an object holds: its attributes, and its slots."""
    found: dict[str, Any] = {}
    for kind in reversed(type(value).__mro__):
        named = kind.__dict__.get("__slots__", ())
        for name in (named,) if isinstance(named, str) else named:
            if not name.startswith("__"):
                found[name] = getattr(value, name, None)
    return {**found, **attributes(value)}


def parts_of(value: Any) -> Iterator[Any]:
    """The elements of a collection; of a dictionary its pairs."""
    yield from value.items() if isinstance(value, dict) else value


def is_fixed(value: Any) -> bool:
    """Whether it says what a function does, and does not change while it is used."""
    if isinstance(value, BaseModel):
        return bool(value.model_config.get("frozen"))
    if is_dataclass(value) and not isinstance(value, type):
        return bool(cast("Any", type(value)).__dataclass_params__.frozen)
    if isinstance(value, tuple):
        return all(is_fixed(each) for each in cast("tuple[Any, ...]", value))
    fixed = (*CONSTANTS, frozenset, re.Pattern, enum.Enum)
    return value is None or isinstance(value, fixed) or is_code(value)


def is_unseen(value: Any) -> bool:
    """Whether nothing is compared of an object but its type, or of a method's: most of those of libraries."""
    owner = bound_to(value)
    told = (*COLLECTIONS, MappingProxyType, *PLAIN, *BY_ATTRIBUTES, *_SILENT)
    if is_fixed(owner) or is_users_object(owner) or is_array(owner) or isinstance(owner, told):
        return False
    return str(type(owner).__module__).partition(".")[0] != OURS


def bound_to(value: Any) -> Any:
    """Of a bound method what it is bound to."""
    bound = isinstance(value, MethodType | BuiltinFunctionType)
    return value if not bound or value.__self__ is None else value.__self__


def is_array(value: Any) -> bool:
    """Of numpy, or alike."""
    return all(hasattr(value, name) for name in ("tobytes", "tolist", "shape", "dtype"))


def is_code(value: Any) -> bool:
    """Whether it is a function in any of its forms, or a class."""
    functions = (FunctionType, MethodType, *_BUILT_IN, functools.partial, CACHED)
    described = (staticmethod, classmethod, property, functools.cached_property)
    return isinstance(value, (*functions, type, *described, functools.partialmethod))
