"""Finds the names and modules that a function uses, and decides if they are the user's."""

from __future__ import annotations

import dis
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import CodeType, FunctionType, ModuleType
from typing import Any

OURS = "groupwise"
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME")
_INSTALLED = ("site-packages", "dist-packages")
_COMPILED = 1 << 8
"""Class flag Py_TPFLAGS_IMMUTABLETYPE: the class is written in C, and cannot be changed."""


def around(function: FunctionType) -> dict[str, Any]:
    """Globals that a user's function reads, and what it uses of the user's modules, each under its full name."""
    own = function.__globals__
    loaded: dict[str, Any] = {}
    every = [*codes(function.__code__)]
    names = sorted({name for code in every for name in code.co_names})
    for code in every:
        found = {
            each.argval: own[each.argval]
            for each in dis.get_instructions(code)
            if each.opname in _LOADS and each.argval in own
        }
        modules = _imported(code, str(own.get("__package__") or ""))
        for name, value in {**found, **modules}.items():
            if isinstance(value, ModuleType):
                loaded |= dict(_parts(value, names))
            else:
                loaded[whole_name(str(own.get("__name__")), name)] = value
    return loaded


def captured(function: FunctionType) -> dict[str, Any]:
    """Values that a function holds: its closure, its defaults by the names of the parameters, and its attributes."""
    code = function.__code__
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    defaults = function.__defaults__ or ()
    named = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    return {
        **(vars(function) if is_users_function(function) else {}),
        **{name: _held(cell) for name, cell in cells},
        **dict(zip(named, defaults, strict=True)),
        **(function.__kwdefaults__ or {}),
    }


def _imported(code: CodeType, package: str) -> dict[str, ModuleType]:
    """The user's modules that it imports when it runs; imported now, where they were not yet."""
    instructions = [*dis.get_instructions(code)]
    found: dict[str, ModuleType] = {}
    for place, each in enumerate(instructions):
        if each.opname == "IMPORT_NAME":
            level = instructions[place - 2].argval
            wanted = instructions[place - 1].argval or ()
            with suppress(Exception, SystemExit):  # the function will say so itself
                name = importlib.util.resolve_name("." * level + each.argval, package)
                if _is_of_the_user(name.partition(".")[0]):
                    found[name] = importlib.import_module(name)
                    _import_below(name, wanted)
    return found


def _import_below(package: str, names: Sequence[str]) -> None:
    """Modules of a package that `from package import …` would import."""
    for name in names:
        if not hasattr(sys.modules[package], name):
            importlib.import_module(f"{package}.{name}")


def _parts(
    module: ModuleType, names: Sequence[str], above: tuple[ModuleType, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Names that code may use of a user's module and of the modules in it, with their values."""
    if not _is_of_the_user(module.__name__) or module in above:
        return
    for name in names:
        inside = vars(module).get(name)
        if isinstance(inside, ModuleType):
            yield from _parts(inside, names, (*above, module))
        elif name in vars(module):
            yield whole_name(module.__name__, name), inside


def _held(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return None


def codes(code: CodeType) -> Iterator[CodeType]:
    """A function's, and those of the functions and comprehensions within it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from codes(each)


def whole_name(module: str, name: str) -> str:
    """A name with its module; of the notebook itself the name alone."""
    return name if module == "__main__" else f"{module}.{name}"


def place_of(value: FunctionType | type) -> str:
    """Its name, with its module."""
    return whole_name(str(value.__module__), value.__qualname__)


def is_global(value: FunctionType) -> bool:
    """True if its module has it under its own name."""
    return value.__globals__.get(value.__qualname__) is value


def of_this_package(value: FunctionType | type) -> bool:
    """True if it is Groupwise's own."""
    users = is_users_class(value) if isinstance(value, type) else is_users_function(value)
    return not users and str(value.__module__).partition(".")[0] == OURS


def is_users_function(value: FunctionType) -> bool:
    """True if the user wrote it, or the function it wraps; `functools.wraps` gives a wrapper the module of the wrapped function."""
    modules = (value.__module__, value.__globals__.get("__name__", "__main__"))
    return any(_is_of_the_user(str(module)) for module in modules)


def is_users_class(value: type) -> bool:
    """True if the user wrote it, and in Python."""
    return not value.__flags__ & _COMPILED and _is_of_the_user(str(value.__module__))


def _is_of_the_user(module: str) -> bool:
    """True for a module that is neither of this package, nor of Python, nor installed."""
    if module == "__main__":
        return True
    package = module.partition(".")[0]
    if package == OURS or package in sys.stdlib_module_names:
        return False
    return not any(part in _file_of(module) for part in _INSTALLED)


def _file_of(module: str) -> str:
    """File of a module, imported or not; empty if it has none, like the cells of a notebook."""
    if module in sys.modules:
        return str(getattr(sys.modules[module], "__file__", None) or "")
    with suppress(ImportError, ValueError):
        return str(getattr(importlib.util.find_spec(module), "origin", None) or "")
    return ""
