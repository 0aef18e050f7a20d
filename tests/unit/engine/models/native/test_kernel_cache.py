"""Compiled kernels on the disk.

1. What was compiled once is loaded afterwards, if it was made of the same sources; what was made of others is deleted.
2. All code that kernels are made of counts.
3. What others keep at the same time, or a crash has damaged, is never loaded for something else. Processes that need a kernel at the
   same time compile it once.
4. A disk that refuses costs one warning and no result.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numba
import numpy as np
import pytest
from numba.core.dispatcher import Dispatcher

from groupwise.engine.models.native import (
    kernel_cache,
    kernels,
    products,
    text_attention,
    vocabulary_kernels,
)
from groupwise.engine.models.native.kernel_cache import kernel
from groupwise.engine.models.native.kernels import ROUNDING_KEPT
from groupwise.engine.models.native.vocabulary_kernels import _write_weights
from tests.disks import fill, small_disk

SOURCES = Path(kernel_cache.__file__).parent
INTEGERS, FLOATS = np.arange(5), np.arange(5, dtype=np.float32)


def doubled(numbers: Any) -> None:
    for place in range(numbers.shape[0]):
        numbers[place] *= 2


def tripled(numbers: Any) -> None:
    for place in range(numbers.shape[0]):
        numbers[place] *= 3


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """Where kernels are kept, and nothing told yet."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "kept"))
    kernel_cache._tell_of_compiling.cache_clear()
    kernel_cache._tell_not_kept.cache_clear()
    return tmp_path / "kept"


def new(function: Callable[..., None] = doubled) -> Any:
    """The kernel as a process has it that has just begun."""
    return kernel(cached=True)(function)


def is_loaded(numbers: Any) -> bool:
    """Whether a process that begins now finds the kernel for these numbers; what it finds is right."""
    begun, found = new(), numbers.copy()
    begun(found)
    assert found.tolist() == [0, 2, 4, 6, 8]
    return bool(begun.stats.cache_hits)


def kept_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


# 1


def test_no_code_outside_its_file_is_called(folder):
    """A process that compiles would call another copy of it than one that loads."""

    @kernel(ROUNDING_KEPT, cached=True)
    def weights_of_two(logits: Any, weights: Any) -> None:
        one, two = np.float32(1.0), np.float32(2.0)
        _write_weights(logits, one, one, weights)
        _write_weights(weights, two, one, logits)

    weights_of_two(FLOATS.copy(), FLOATS.copy())
    (code,) = cast("Any", weights_of_two).inspect_asm().values()
    functions = re.findall(r"\.type\s+(\S+),@function", code)
    assert any("weights_of_two" in name for name in functions)
    assert not any("_write_weights" in name for name in functions)


def test_a_compiled_kernel_is_loaded_from_the_cache(folder, caplog):
    """Compiling is told once, loading is not."""
    with caplog.at_level(logging.INFO, "groupwise"):
        assert [is_loaded(INTEGERS) for _ in range(3)] == [False, True, True]
        assert [is_loaded(FLOATS) for _ in range(2)] == [False, True]
        assert is_loaded(INTEGERS)
    assert len(kept_files(folder)) == 2
    (told,) = caplog.messages
    assert str(folder) in told


def test_loading_takes_no_module_of_the_functions_that_are_inlined(tmp_path):
    """numba's implementations of array functions, which take longer to import than all kernels to load."""
    (tmp_path / "summing.py").write_text(
        """
import sys, numpy
from groupwise.engine.models.native.kernel_cache import kernel

@kernel(cached=True)
def summed(numbers):
    return numpy.empty(numbers.max(), numpy.float32).shape[0] + numbers.sum()

print(summed(numpy.arange(5)), "numba.np.arraymath" in sys.modules)
"""
    )
    command = [sys.executable, str(tmp_path / "summing.py")]
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    for compiles in (True, False):
        shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert shown.stdout == f"14 {compiles}\n"


def test_kernels_that_are_saved_are_called_by_no_other():
    """What is saved has no bitcode that could be inlined: a kernel that calls it is lost where only that one is loaded."""
    compiled: set[Any] = {
        each
        for module in (kernels, products, text_attention, vocabulary_kernels)
        for each in vars(module).values()
        if isinstance(each, Dispatcher)
    }
    saved = {each for each in compiled if isinstance(each._cache, kernel_cache.KernelCache)}
    assert len(saved) == 13
    for each in compiled:
        called = (each.py_func.__globals__.get(name) for name in each.py_func.__code__.co_names)
        assert saved.isdisjoint(one for one in called if isinstance(one, Dispatcher)), each


def test_kernels_compiled_from_other_sources_are_deleted_and_not_loaded(folder, monkeypatch):
    monkeypatch.setattr(kernel_cache, "sources", lambda: "0" * 16)
    for numbers in (INTEGERS, FLOATS):
        is_loaded(numbers)
    before = kept_files(folder)
    before[0].with_name("kernels.norm-1.py311.nbi").touch()  # as numba itself names what it keeps
    before[0].with_name("kernels.cpython-311.pyc").touch()
    monkeypatch.setattr(kernel_cache, "sources", lambda: "1" * 16)
    assert [is_loaded(INTEGERS) for _ in range(2)] == [False, True]
    assert {path.suffix for path in kept_files(folder)} == {".nbc", ".pyc"}
    assert len(kept_files(folder)) == 2
    assert not {*before} & {*kept_files(folder)}


# 2


def test_every_source_counts(tmp_path):
    copied = tmp_path / "copied"
    shutil.copytree(SOURCES, copied, ignore=shutil.ignore_patterns("__pycache__"))
    digest = kernel_cache.digest_of(copied)
    assert kernel_cache.sources() == digest
    for path in sorted(copied.iterdir()):
        before = path.read_bytes()
        path.write_bytes(before + b"\n")
        assert kernel_cache.digest_of(copied) != digest, path.name
        path.write_bytes(before)
    assert kernel_cache.digest_of(copied) == digest
    (copied / "more.py").touch()
    assert kernel_cache.digest_of(copied) != digest


@pytest.mark.parametrize("module", ["kernels", "products", "vector_code"])
def test_kernels_are_made_of_nothing_that_stands_elsewhere(module):
    text = (SOURCES / f"{module}.py").read_text()
    ours = re.findall(r"^\s*(?:from|import) (groupwise\S*)", text, re.MULTILINE)
    assert ours
    assert all(name.startswith(f"{kernel_cache.PACKAGE}.") for name in ours), ours


# 3


def test_two_that_begin_at_once_do_not_take_each_others_code(folder, monkeypatch):
    """While one keeps its code, another begins and keeps code for other numbers."""
    dumps, others = kernel_cache.dumps, iter([FLOATS])

    def dumped(value: Any) -> bytes:
        for numbers in others:
            assert not is_loaded(numbers)
        return dumps(value)

    monkeypatch.setattr(kernel_cache, "dumps", dumped)
    assert not is_loaded(INTEGERS)
    assert is_loaded(INTEGERS)
    assert is_loaded(FLOATS)
    assert len(kept_files(folder)) == 2


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_only_one_of_two_processes_compiles_a_kernel(folder, monkeypatch):
    """The processes meet when both have found none."""
    processes = multiprocessing.get_context("fork")
    both, compiled = processes.Barrier(2, timeout=60), processes.SimpleQueue()
    monkeypatch.setattr(kernel_cache, "_tell_of_compiling", lambda folder: both.wait())

    def begin() -> None:
        begun, found = new(), INTEGERS.copy()
        begun(found)
        compiled.put((len(begun.stats.cache_misses), found.tolist()))

    begun = [processes.Process(target=begin) for _ in range(2)]
    for process in begun:
        process.start()
    assert sorted(compiled.get() for _ in begun) == [(n, [0, 2, 4, 6, 8]) for n in (0, 1)]
    for process in begun:
        process.join()
    (path,) = kept_files(folder)
    assert path.suffix == ".nbc", "no lock is left"


def test_the_first_saved_kernel_stays_if_another_process_did_not_wait(folder, monkeypatch):
    monkeypatch.setattr(kernel_cache, "LOCK_SECONDS", 0.0)
    saved: list[bytes] = []
    dumps = kernel_cache.dumps

    def dumped(value: Any) -> bytes:
        if not saved:  # while the first one saves, and holds the lock
            saved.append(b"")
            assert not is_loaded(INTEGERS)
            saved[:] = [path.read_bytes() for path in kept_files(folder) if path.suffix == ".nbc"]
        return dumps(value) + b"other bits"

    monkeypatch.setattr(kernel_cache, "dumps", dumped)
    assert not is_loaded(INTEGERS)
    assert [path.read_bytes() for path in kept_files(folder)] == saved


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: b"",
        lambda whole: whole[: len(whole) // 2],
        lambda whole: whole[:-1] + bytes([whole[-1] ^ 1]),
    ],
    ids=["empty", "cut", "a bit"],
)
def test_a_damaged_kernel_file_is_compiled_again(folder, damage):
    is_loaded(INTEGERS)
    (path,) = kept_files(folder)
    path.write_bytes(damage(path.read_bytes()))
    assert [is_loaded(INTEGERS) for _ in range(2)] == [False, True]
    assert kept_files(folder) == [path]


# 4


def test_a_full_disk(tmp_path, monkeypatch, caplog):
    """Two kernels that are new here work, one after the other."""
    with small_disk(tmp_path / "disk", "64k") as disk:
        monkeypatch.setattr(numba.config, "CACHE_DIR", str(disk))
        ballast = fill(disk)
        for function, wanted in ((doubled, [0, 2, 4, 6, 8]), (tripled, [0, 3, 6, 9, 12])):
            numbers = INTEGERS.copy()
            new(function)(numbers)
            assert numbers.tolist() == wanted
        (told,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
        assert "No space left on device" in told
        assert "NUMBA_CACHE_DIR" in told
        assert kept_files(disk) == [ballast], "nothing half written"
