"""Finds what a function uses: names and modules of the user, and the parts that values consist of."""

from __future__ import annotations

import dataclasses
import dis
import functools
import importlib.util
import sys
from argparse import Namespace
from array import array
from collections import UserDict, UserList, UserString
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from itertools import chain
from logging import Logger
from operator import attrgetter, itemgetter
from pathlib import PurePath
from string import Template
from types import (
    CodeType,
    EllipsisType,
    FunctionType,
    MethodType,
    ModuleType,
    NoneType,
    SimpleNamespace,
)
from typing import Any, cast
from uuid import UUID

from pydantic import BaseModel

OURS = "groupwise"
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME")
_INSTALLED = ("site-packages", "dist-packages")
_COMPILED = 1 << 8
"""Class flag Py_TPFLAGS_IMMUTABLETYPE: the class is written in C and cannot be changed."""


def globals_used(function: FunctionType) -> dict[str, Any]:
    """Globals that a user's function reads, and the names that it uses from the user's modules, each under its full name."""
    module_globals = function.__globals__
    globals_by_name: dict[str, Any] = {}
    code_objects = [*codes(function.__code__)]
    names = sorted({name for code in code_objects for name in code.co_names})
    for code in code_objects:
        used_globals = {
            instruction.argval: module_globals[instruction.argval]
            for instruction in dis.get_instructions(code)
            if instruction.opname in _LOADS and instruction.argval in module_globals
        }
        modules = _imported_modules(code, str(module_globals.get("__package__") or ""))
        for name, value in {**used_globals, **modules}.items():
            if isinstance(value, ModuleType):
                globals_by_name |= dict(_module_parts(value, names))
            else:
                globals_by_name[whole_name(str(module_globals.get("__name__")), name)] = value
    return globals_by_name


def captured_values(function: FunctionType) -> dict[str, Any]:
    """Values that a function holds: its closure, its defaults by parameter name, and its attributes."""
    code = function.__code__
    cells: dict[str, Any] = {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        cells[name] = None
        with suppress(ValueError):  # the cell is still empty
            cells[name] = cell.cell_contents
    defaults = function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    return {
        **(vars(function) if is_users_function(function) else {}),
        **cells,
        **dict(zip(names, defaults, strict=True)),
        **(function.__kwdefaults__ or {}),
    }


def _imported_modules(code: CodeType, package: str) -> dict[str, ModuleType]:
    """The user's modules that the code imports when it runs; those that are not imported yet are imported now."""
    instructions = [*dis.get_instructions(code)]
    imported: dict[str, ModuleType] = {}
    for index, instruction in enumerate(instructions):
        if instruction.opname == "IMPORT_NAME":
            level = instructions[index - 2].argval
            # The names of `from … import names`.
            imported_names = instructions[index - 1].argval or ()
            with suppress(Exception, SystemExit):  # the function will raise it itself
                name = importlib.util.resolve_name("." * level + instruction.argval, package)
                if _is_user_module(name.partition(".")[0]):
                    imported[name] = importlib.import_module(name)
                    for submodule in imported_names:
                        if not hasattr(sys.modules[name], submodule):
                            importlib.import_module(f"{name}.{submodule}")
    return imported


def _module_parts(
    module: ModuleType, names: Sequence[str], parents: tuple[ModuleType, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Names in a user's module, and in modules within it, that code may use, with their values."""
    if not _is_user_module(module.__name__) or module in parents:
        return
    for name in names:
        value = vars(module).get(name)
        if isinstance(value, ModuleType):
            yield from _module_parts(value, names, (*parents, module))
        elif name in vars(module):
            yield whole_name(module.__name__, name), value


def codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function, and the code of functions and comprehensions within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def whole_name(module: str, name: str) -> str:
    """A name with its module; names of the notebook itself have no module."""
    return name if module == "__main__" else f"{module}.{name}"


def place_of(value: FunctionType | type) -> str:
    """The value's qualified name, with its module."""
    return whole_name(str(value.__module__), value.__qualname__)


def is_global(value: FunctionType) -> bool:
    """True if the function's module has it under its own name."""
    return value.__globals__.get(value.__qualname__) is value


def of_this_package(value: FunctionType | type) -> bool:
    """True if it belongs to Groupwise."""
    users = is_users_class(value) if isinstance(value, type) else is_users_function(value)
    return not users and str(value.__module__).partition(".")[0] == OURS


def is_users_function(value: FunctionType) -> bool:
    """True if the user wrote it or the function that it wraps; `functools.wraps` gives a wrapper the module of the wrapped function."""
    modules = (value.__module__, value.__globals__.get("__name__", "__main__"))
    return any(_is_user_module(str(module)) for module in modules)


def is_users_class(value: type) -> bool:
    """True if the user wrote the class, in Python."""
    return not value.__flags__ & _COMPILED and _is_user_module(str(value.__module__))


def _is_user_module(module: str) -> bool:
    """True for a module that is neither of this package, nor of Python, nor installed."""
    if module == "__main__":
        return True
    package = module.partition(".")[0]
    if package == OURS or package in sys.stdlib_module_names:
        return False
    file = None  # cells of a notebook have no file
    if module in sys.modules:
        file = getattr(sys.modules[module], "__file__", None)
    else:
        with suppress(ImportError, ValueError):
            file = getattr(importlib.util.find_spec(module), "origin", None)
    return not any(part in str(file or "") for part in _INSTALLED)


CONSTANTS: tuple[type, ...] = (
    *(NoneType, bool, int, float, complex, str, bytes, range, slice, EllipsisType),
)
"""Types whose values never change, for values of exactly this type (not of a subclass)."""
REPR_TYPES: tuple[type, ...] = (
    *(bytearray, array, Decimal, Fraction, PurePath, date, time, timedelta, UUID),
    *(itemgetter, attrgetter),
)
"""Standard library values whose repr describes them completely."""
CACHED: Any = type(functools.lru_cache(len))
"""Type of a function wrapped by `functools.cache`."""
_WRAPPED_ATTRIBUTES: tuple[tuple[Any, dict[str, str]], ...] = (
    (MethodType, {"function": "__func__", "self": "__self__"}),
    ((staticmethod, classmethod), {"function": "__func__"}),
    (property, {"get": "fget", "set": "fset", "delete": "fdel"}),
    (functools.cached_property, {"function": "func"}),
    (functools.singledispatchmethod, {"function": "func", "dispatcher": "dispatcher"}),
    (CACHED, {"function": "__wrapped__"}),
)
"""Wrappers of code, with the attributes that hold the wrapped code."""
_BY_ATTRIBUTES = (SimpleNamespace, Namespace, Template, UserDict, UserList, UserString)
"""Standard library objects that are fully described by their attributes."""
_METHODS = (
    *(staticmethod, classmethod, property, functools.partialmethod),
    *(functools.singledispatchmethod, CACHED),
)
_SILENT = (ModuleType, Logger)
_SILENT_MODULES = (
    *("_abc", "abc", "dataclasses", "typing", "inspect", "weakref", "_weakref", "contextvars"),
    *("threading", "_thread", "_contextvars", "asyncio.locks", "types", "torch.autograd.grad_mode"),
)
"""Modules whose objects hold nothing that could change the value of a reward."""


def parts_of(value: Any) -> Mapping[str, Any] | None:
    """The parts of code, a user's object, or plain data, by name; None for anything else, such as collections and numbers."""
    if isinstance(value, FunctionType):
        parts = captured_values(value)
        if is_users_function(value) or of_this_package(value):
            return parts
        # Of a library function, only values that the user may have passed to it: code, numbers, texts, collections.
        plain_types = (*CONSTANTS, list, tuple, set, frozenset, dict)
        return {
            name: part
            for name, part in parts.items()
            if isinstance(part, plain_types) or is_users_code(part)
        }
    if isinstance(value, type):
        return _class_entries(cast("type[object]", value))
    if isinstance(value, functools.partial | functools.partialmethod):
        partial_object = cast("functools.partial[Any]", value)
        arguments = {
            f"argument {position}": argument
            for position, argument in enumerate(partial_object.args, 1)
        }
        return {"function": partial_object.func, **arguments, **partial_object.keywords}
    for kinds, attributes in _WRAPPED_ATTRIBUTES:
        if isinstance(value, kinds):
            return {name: getattr(value, attribute) for name, attribute in attributes.items()}
    if isinstance(value, _BY_ATTRIBUTES):
        return vars(value)
    if is_collection(value) or isinstance(value, CONSTANTS):
        return None
    if isinstance(value, BaseModel) or dataclasses.is_dataclass(value):
        return _fields(value)
    return state_of(value) if is_users_class(type(cast("object", value))) else None


def is_users_code(value: Any) -> bool:
    return isinstance(value, FunctionType) and is_users_function(value)


def _class_entries(value: type[object]) -> dict[str, Any]:
    """The entries of a class that the user wrote, and the defaults of a model's fields; empty for other classes."""
    if not is_users_class(value):
        return {}
    fields = getattr(value, "model_fields", {}) if issubclass(value, BaseModel) else {}
    entries = {
        name: field.default_factory or field.default
        for name, field in fields.items()
        if not field.is_required()
    }
    for name, entry in vars(value).items():
        if name.startswith("__"):
            by_python = not isinstance(entry, (FunctionType, *_METHODS))
        else:
            by_python = name.startswith("_") and name.endswith("_") and issubclass(value, Enum)
        if not by_python:
            entries[name] = entry
    return entries


def _fields(value: Any) -> dict[str, Any] | None:
    """The fields of a dataclass or model, and all state of a user's object; None for mutable data of this package, which may change
    in use.
    """
    model = isinstance(value, BaseModel)
    kind = cast("type[object]", type(value))
    if is_users_class(kind):
        hidden = (value.__pydantic_private__, value.__pydantic_extra__) if model else ()
        return {
            **state_of(value),
            **dict(chain.from_iterable((attributes or {}).items() for attributes in hidden)),
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
    state: Any = object.__getstate__(value)
    attributes, slots = cast("tuple[Any, Any]", state) if type(state) is tuple else (state, None)
    slot_items = cast("dict[str, Any]", slots or {}).items()
    return {name: slot_value for name, slot_value in slot_items if not name.startswith("__")} | (
        attributes or {}
    )


def is_collection(value: Any) -> bool:
    """True if it is a container of other values."""
    return isinstance(value, list | tuple | set | frozenset | dict)


def is_silent(value: Any) -> bool:
    """True if it needs no description: it is not data, or its class is described elsewhere."""
    kind = cast("type[object]", type(value))
    return (
        isinstance(value, _SILENT)
        or kind is object
        or kind.__module__ in _SILENT_MODULES
        or of_this_package(kind)
        or hasattr(kind, "__get__")
    )


def has(value: Any, *names: str) -> bool:
    """True if its class has all these names. The class is checked, because an object may respond to any name."""
    return all(hasattr(cast("type[object]", type(value)), name) for name in names)
