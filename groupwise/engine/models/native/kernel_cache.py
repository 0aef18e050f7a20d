"""Compiles the kernels in this folder (`kernel`), and keeps them on the disk for later runs: beside their source, or in the user's cache
if that cannot be written.

numba has a cache, whose folders and contents are used here, but not its files. Those depend only on the one source file that holds a
kernel, though code of other files goes into it; they begin with a list that two simultaneous first runs can spoil for each other; and a
disk that refuses one ends the run. Here each kernel has a file of its own for every kind of arguments and processor, named after the
sources it was made of: all of this folder. Code of other sources is deleted when something is saved. A file begins with a digest of the
rest, so one damaged by a crash is ignored. If nothing can be saved, kernels are compiled by every run.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Set
from functools import cache
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite
import numba
from numba.core.caching import FunctionCache, NullCache
from numba.core.serialize import dumps

from groupwise.core.atomic_files import building_path

logger = logging.getLogger(__name__)

PACKAGE = "groupwise.engine.models.native"
"""Package with all code that kernels are made of."""
DIGEST_BYTES = 32


def cache_of(function: Callable[..., Any]) -> Any:
    """The cache that numba looks in before it compiles a function, and saves to afterwards; an empty one if no folder can be written."""
    try:
        return KernelCache(function)
    except RuntimeError:  # numba found no folder to write to
        _tell_not_kept("no folder for them can be written to")
        return NullCache()


class KernelCache(FunctionCache):
    """numba's cache of one function, with files of our own; writing may fail."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file = KernelFiles(Path(self._cache_path), self._impl.filename_base)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled function for arguments of these types; None if it is not kept."""
        found = super().load_overload(sig, target_context)
        if found is None:
            _tell_of_compiling(self._cache_path)
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        """Save it, if the disk accepts it."""
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _tell_not_kept(f"{self._cache_path}: {error.strerror or error}")


class KernelFiles:
    """The files of one kernel."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name, self._sources = folder, name, sources()

    def load(self, key: Any) -> Any:
        """The function saved under this key; None if there is none, or it is damaged."""
        try:
            stored = self._path(key).read_bytes()
        except OSError:
            return None
        digest, content = stored[:DIGEST_BYTES], stored[DIGEST_BYTES:]
        return pickle.loads(content) if digest == sha256(content).digest() else None

    def save(self, key: Any, value: Any) -> None:
        """Save a value; OSError if the disk refuses."""
        for other in self._folder.glob(
            "*.nb[ci]*"
        ):  # made of other sources, also by numba's own cache
            if self._sources not in other.name:
                other.unlink(missing_ok=True)
        content = dumps(value)
        path = self._path(key)
        building = building_path(path)
        try:
            building.write_bytes(sha256(content).digest() + content)
            building.replace(path)
        finally:
            building.unlink(missing_ok=True)

    def _path(self, key: Any) -> Path:
        versions = numba.__version__, llvmlite.__version__
        kind = sha256(repr((versions, key)).encode()).hexdigest()[:16]
        return self._folder / f"{self._name}.{self._sources}-{kind}.nbc"


@cache
def sources() -> str:
    """A digest of the code that kernels are made of."""
    return digest_of(files(PACKAGE))


def digest_of(folder: Traversable) -> str:
    """Digest of all Python files in a folder."""
    found = sha256()
    for file in sorted(folder.iterdir(), key=lambda each: each.name):
        if file.name.endswith(".py"):
            content = file.read_bytes()
            found.update(f"{file.name} {len(content)} ".encode() + content)
    return found.hexdigest()[:16]


@cache
def _tell_of_compiling(folder: str) -> None:
    """Log it once in a process."""
    logger.info("Compiling kernels for this processor; kept in %s", folder)


@cache
def _tell_not_kept(reason: str) -> None:
    """Log it once in a process for each reason."""
    logger.warning(
        "kernels compiled for this processor cannot be kept (%s), so that every run compiles them, for some seconds: "
        "set NUMBA_CACHE_DIR to a folder with room that can be written to",
        reason,
    )


Function = TypeVar("Function", bound=Callable[..., Any])


def kernel(order: Set[str] = frozenset(), *, kept: bool = False) -> Callable[[Function], Function]:
    """Compile a function when it is first called with arguments of some kind.

    `order` are LLVM's names for what it may do to the order of sums and to special numbers. If `kept`, the result is cached for later runs;
    use it for functions called from outside, which contain the others.
    """
    options: dict[str, Any] = {"fastmath": set(order), "error_model": "numpy", "nogil": True}

    def decorate(function: Function) -> Function:
        compiled: Any = numba.njit(**options)(function)
        if kept:
            compiled._cache = cache_of(function)  # as numba itself does for cache=True
        return cast("Function", compiled)

    return decorate
