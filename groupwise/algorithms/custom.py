"""Algorithms in a user's own file: `algorithm.type: my_file.py:Mine`.

The class is a frozen dataclass that derives from an algorithm here, or from `group_relative.GroupRelative`. Its fields are its knobs, and
it has the same methods as the built-in ones. Its name is the full path of its file with the class, so that a process that gets only a
`LossSpec` finds it.

A process keeps the class that it has loaded: a file that is edited while a run goes on changes nothing in it. Only a new config looks at
the file again.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from groupwise.algorithms.group_relative import GroupRelative
from groupwise.core import plugins
from groupwise.core.errors import TaskError, UsageError

_OWN = re.compile(r".+\.py:[A-Za-z_]\w*")
_loaded: dict[str, tuple[str, type[GroupRelative]]] = {}
"""The classes that were loaded, by their full name, each with the digest of its file."""


def is_custom(name: str) -> bool:
    """True if a name is that of a class in a file, `path/to/file.py:Class`."""
    return _OWN.fullmatch(name) is not None


def load_custom(name: str, *, again: bool = False) -> type[GroupRelative]:
    """The class of that name. With `again`, the file is loaded once more if it was changed. Raises TaskError if it is not usable."""
    file, _, attribute = name.rpartition(":")
    full_name = f"{Path(file).expanduser().resolve()}:{attribute}"
    if full_name in _loaded and not again:
        return _loaded[full_name][1]
    digest = file_digest(name) if Path(file).expanduser().is_file() else ""
    if full_name not in _loaded or _loaded[full_name][0] != digest:
        kind = plugins.load(full_name, kind="algorithm", instantiate=False).object
        _check(kind, name, full_name)
        _loaded[full_name] = digest, kind
    return _loaded[full_name][1]


def file_digest(name: str) -> str:
    """The first 16 hex digits of the SHA-256 of the file that has the class."""
    file = Path(name.rpartition(":")[0]).expanduser()
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def refuse_custom(name: object) -> None:
    """Raise UsageError for a class in a file: a server runs no code that a client names."""
    if isinstance(name, str) and is_custom(name):
        raise UsageError(
            f"algorithm.type is {name}, a class in a file, and a training server runs no code that a client names. Train without "
            f"a server, or take one of its own algorithms."
        )


def _check(kind: Any, name: str, full_name: str) -> None:
    """Give the class its full name. Raises TaskError if it is not an algorithm, or cannot be made from its defaults."""
    base = f"{GroupRelative.__module__}.{GroupRelative.__name__}"
    if not inspect.isclass(kind) or not issubclass(kind, GroupRelative):
        raise TaskError(
            f"algorithm.type is {name}, which is {kind!r:.80}; it must be a class that derives from an algorithm of "
            f"groupwise.algorithms, such as groupwise.algorithms.grpo.Grpo, or from {base}."
        )
    if not is_dataclass(kind) or "__dataclass_fields__" not in vars(kind):
        raise TaskError(
            f"algorithm.type is {name}, which is not a dataclass, so that its knobs would not be seen. Put "
            "@dataclass(frozen=True, kw_only=True) before the class."
        )
    if missing := sorted(getattr(kind, "__abstractmethods__", ())):
        raise TaskError(
            f"algorithm.type is {name}, which lacks {', '.join(missing)}; {base} says what each returns."
        )
    for knob in fields(kind):
        if knob.default is MISSING:
            raise TaskError(
                f"algorithm.type is {name}, whose knob {knob.name} has no default value; give it one (default=…), so that a config may "
                "leave it out."
            )
    kind.name = full_name
    try:
        kind()
    except (TypeError, ValueError) as error:
        raise TaskError(
            f"algorithm.type is {name}, which cannot be made from the defaults of its knobs: {error}"
        ) from error
