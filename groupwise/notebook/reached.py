"""What a function takes of the names and modules around it, and whose these are."""

from __future__ import annotations

import dis
import functools
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import CodeType, FunctionType, ModuleType
from typing import Any, cast

OURS = "groupwise"
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME")
_INSTALLED = ("site-packages", "dist-packages")


def around(function: FunctionType) -> dict[str, Any]:
    """What a function takes of the names around it; of the user's modules what it takes of them."""
    own = {} if is_ours(function) else function.__globals__
    loaded: dict[str, Any] = {}
    for code in codes(function.__code__):
        found = {
            each.argval: own[each.argval]
            for each in dis.get_instructions(code)
            if each.opname in _LOADS and each.argval in own
        }
        if is_users(function):
            found |= _imported(code, str(own.get("__package__") or ""))
        loaded |= found
        for name, value in found.items():
            loaded |= dict(_parts(name, value, code.co_names))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        loaded[name] = _held(cell)
    return loaded


def _imported(code: CodeType, package: str) -> dict[str, ModuleType]:
    """The user's modules that it imports when it runs; imported now, where they were not yet."""
    instructions = [*dis.get_instructions(code)]
    found: dict[str, ModuleType] = {}
    for place, each in enumerate(instructions):
        if each.opname == "IMPORT_NAME":
            level = instructions[place - 2].argval
            with suppress(Exception):  # the function will say so itself
                name = importlib.util.resolve_name("." * level + each.argval, package)
                if _is_of_the_user(name.partition(".")[0]):
                    found[name] = importlib.import_module(name)
    return found


def _parts(
    name: str, value: Any, names: Sequence[str], above: tuple[Any, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """What code takes of a module of the user's, and of the modules in it."""
    if not isinstance(value, ModuleType) or not _is_of_the_user(value.__name__) or value in above:
        return
    for part in names:
        inside = getattr(value, part, None)
        yield f"{name}.{part}", inside
        yield from _parts(f"{name}.{part}", inside, names, (*above, value))


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


def place_of(value: FunctionType | type) -> str:
    """Its module, and its name there."""
    return f"{value.__module__}.{value.__qualname__}"


def is_ours(value: FunctionType | type) -> bool:
    """Whether it is of this package."""
    return str(value.__module__).partition(".")[0] == OURS and not is_users(value)


def is_users(value: FunctionType | type) -> bool:
    """Whether the user wrote it, or what it wraps; `functools.wraps` says of a wrapper that it is of the other's module."""
    modules = [value.__module__]
    if isinstance(value, FunctionType):
        modules.append(value.__globals__.get("__name__", "__main__"))
    return any(_is_of_the_user(str(module)) for module in modules)


def is_users_object(value: Any) -> bool:
    """Whether the user wrote an object's class."""
    return is_users(cast("type[object]", type(value)))


@functools.cache
def _is_of_the_user(module: str) -> bool:
    """Neither of this package, nor of Python, nor installed."""
    if module == "__main__":
        return True
    if module.partition(".")[0] in (OURS, *sys.stdlib_module_names):
        return False
    return not any(part in _file_of(module) for part in _INSTALLED)


def _file_of(module: str) -> str:
    """Of one that is imported, or would be; empty for what has none, as cells of a notebook."""
    if module in sys.modules:
        return str(getattr(sys.modules[module], "__file__", None) or "")
    with suppress(ImportError, ValueError):
        return str(getattr(importlib.util.find_spec(module), "origin", None) or "")
    return ""
