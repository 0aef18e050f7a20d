"""Compiles the kernels in this folder (`kernel`), and caches them on disk for later runs: next to their source, or in the user's cache if
that is not writable.

This module uses the folders and contents of numba's cache, but its own files. numba's files have three faults: they depend only on the one
source file that has the kernel, though code of other files is compiled into it; they start with an index that two simultaneous first runs
can corrupt; and a write error ends the run. Here each kernel has its own file for every kind of arguments and CPU. Its name contains a
digest of all sources in this folder, and saving deletes files of other digests. A file starts with a digest of its content, so one damaged
by a crash is ignored. If nothing can be saved, every run compiles the kernels.

Compiling the same source twice may give other last bits, because the order of operations is not fixed. So a process locks a kernel before
it compiles it, others wait for its file, and what was saved first is never replaced.
"""

from __future__ import annotations

import fcntl
import logging
import pickle
import time
from collections.abc import Callable, Generator, Set
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import llvmlite
import llvmlite.binding as llvm
import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache, NullCache
from numba.core.runtime import rtsys
from numba.core.serialize import dumps

from groupwise.core.atomic_files import building_path
from groupwise.engine.models.native.tiles import has_tiles

logger = logging.getLogger(__name__)

PACKAGE = "groupwise.engine.models.native"
"""Package with all source code of the kernels."""
DIGEST_BYTES = 32
LOCK_SECONDS = 120.0
"""Longest wait for another process that compiles the same kernel, which takes it some seconds; after it this process compiles as well."""


def cache_of(function: Callable[..., Any]) -> Any:
    """The cache in which numba looks a function up before it compiles it, and saves it afterwards; `NullCache` if no folder is writable."""
    try:
        return KernelCache(function)
    except RuntimeError:  # numba found no folder to write to
        _tell_not_kept("no folder for them can be written to")
        return NullCache()


class MachineCode(CompileResultCacheImpl):
    """What is saved of a kernel, without two things that numba saves for others to inline it, and that take nine tenths of loading: its
    LLVM bitcode, and references to the modules of the functions that are inlined in it."""

    def reduce(self, cres: Any) -> Any:
        (name, kind, (code, _)), *others, _, reload_init, environments = super().reduce(cres)
        entry = llvm.parse_assembly(f'@"{cres.fndesc.llvm_cpython_wrapper_name}" = global i8 0')
        needed = tuple(each for each in environments if each.consts)
        return (name, kind, (code, entry.as_bitcode())), *others, "", reload_init, needed


class KernelCache(FunctionCache):
    """numba's cache of one function, with our own files; write errors are only logged."""

    _impl_class = MachineCode

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file = KernelFiles(Path(self._cache_path), self._impl.filename_base)
        self._compiling = ExitStack()
        """Holds the lock of a kernel from `load_overload`, which did not find it, to `save_overload`."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled function for arguments of these types; None if it is not cached.

        numba would first load all that it can compile, which takes a quarter of a second and is needed only if this has to be compiled.
        """
        rtsys.initialize(target_context)
        overload = self._load_overload(sig, target_context)
        if overload is None:
            _tell_of_compiling(self._cache_path)
            self._compiling.close()  # of a kernel that could not be compiled
            key = self._index_key(sig, target_context.codegen())
            self._compiling.enter_context(self._cache_file.locked(key))
            overload = self._load_overload(sig, target_context)
            if overload is not None:
                self._compiling.close()
        return overload

    def save_overload(self, sig: Any, data: Any) -> None:
        """Save a compiled function; a write error is only logged."""
        with self._compiling:
            try:
                super().save_overload(sig, data)
            except OSError as error:
                _tell_not_kept(f"{self._cache_path}: {error.strerror or error}")


class KernelFiles:
    """The cache files of one kernel."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name, self._sources = folder, name, sources()

    def load(self, key: Any) -> Any:
        """The function saved under this key; None if none is, or it is damaged."""
        try:
            stored = self._kernel_path(key).read_bytes()
        except OSError:
            return None
        digest, content = stored[:DIGEST_BYTES], stored[DIGEST_BYTES:]
        return pickle.loads(content) if digest == sha256(content).digest() else None

    @contextmanager
    def locked(self, key: Any) -> Generator[None]:
        """Lock a kernel for as long as it is compiled. Nothing is locked after `LOCK_SECONDS`, or if the folder cannot be written."""
        path = self._kernel_path(key)
        lock_path = path.with_name(f"{path.name}.lock")
        with ExitStack() as stack:
            with suppress(OSError):
                _wait_for_lock(stack.enter_context(lock_path.open("wb")))
            yield
            with suppress(OSError):
                lock_path.unlink()

    def save(self, key: Any, value: Any) -> None:
        """Save a value, unless another process was first; raises OSError if it cannot be written."""
        # Delete kernels of other sources; these names also match files of numba's own cache.
        for other in self._folder.glob("*.nb[ci]*"):
            if self._sources not in other.name:
                other.unlink(missing_ok=True)
        content = dumps(value)
        path = self._kernel_path(key)
        building = building_path(path)
        try:
            building.write_bytes(sha256(content).digest() + content)
            if self.load(key) is None:
                building.replace(path)
        finally:
            building.unlink(missing_ok=True)

    def _kernel_path(self, key: Any) -> Path:
        abilities = numba.__version__, llvmlite.__version__, has_tiles()
        kind = sha256(repr((abilities, key)).encode()).hexdigest()[:16]
        return self._folder / f"{self._name}.{self._sources}-{kind}.nbc"


def _wait_for_lock(lock: IO[bytes]) -> None:
    """Lock an open file; closing it ends the lock. Raises OSError if it cannot be locked, or if others hold it for `LOCK_SECONDS`."""
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.02)


@cache
def sources() -> str:
    """A digest of the kernels' source code."""
    return digest_of(files(PACKAGE))


def digest_of(folder: Traversable) -> str:
    """A digest of all Python files in a folder."""
    digest = sha256()
    for file in sorted(folder.iterdir(), key=lambda path: path.name):
        if file.name.endswith(".py"):
            content = file.read_bytes()
            digest.update(f"{file.name} {len(content)} ".encode() + content)
    return digest.hexdigest()[:16]


@cache
def _tell_of_compiling(folder: str) -> None:
    """Log it once per process (the function is cached)."""
    logger.info(
        "Compiling kernels for this processor, once, which takes 20 to 30 seconds of a core; kept in %s",
        folder,
        extra={"notice": True},
    )


@cache
def _tell_not_kept(reason: str) -> None:
    """Log each reason once per process (the function is cached)."""
    logger.warning(
        "kernels compiled for this processor cannot be kept (%s), so that every run compiles them, for some seconds: "
        "set NUMBA_CACHE_DIR to a folder with room that can be written to",
        reason,
    )


Function = TypeVar("Function", bound=Callable[..., Any])


def kernel(
    order: Set[str] = frozenset(), *, cached: bool = False
) -> Callable[[Function], Function]:
    """Compile a function when it is first called with arguments of some kind.

    `order` are LLVM's fast-math flags: permitted changes to the order of sums and to special numbers. If `cached`, the result is saved for
    later runs; use it for functions called from Python, which have the other kernels compiled into them.
    """
    options: dict[str, Any] = {
        "fastmath": set(order),
        "error_model": "numpy",
        "nogil": True,
        # Else a process that compiles calls the code of a helper compiled alone, and one that loads calls the copy in the file. Their
        # last bits may differ.
        "forceinline": not cached,
    }

    def decorate(function: Function) -> Function:
        compiled: Any = numba.njit(**options)(function)
        if cached:
            compiled._cache = cache_of(function)  # as numba itself does for cache=True
        return cast("Function", compiled)

    return decorate
