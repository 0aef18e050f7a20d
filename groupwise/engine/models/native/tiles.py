"""Writes LLVM code for products of tiles, by Intel's Advanced Matrix Extensions (AMX).

A tile register holds 16 rows of 64 bytes. One instruction multiplies 16 rows of 16 words with 16 words of each of 16 outputs, and adds to
16 × 16 sums; a word is 2 bfloat16 or 4 int8 numbers. A sum depends on its own row and output only. LLVM chooses the registers.

Linux gives tile registers to a process that asks for them, and to those that it forks (Documentation/arch/x86/xstate.rst).
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba.core import cgutils

from groupwise.engine.models.native.facts import LANES
from groupwise.engine.models.native.vector_code import BYTE, HALF, LONG, NamedType, VectorCode

WIDTH = 64
"""Bytes in a row of a tile."""

_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18
"""A system call of Linux on x86-64, its code that asks for a feature, and the number of the tiles' data."""


_TESTED_LLVM = (16, 0, 0)
"""numba has a newer one from 0.62. Older ones compile this code as well, but no test has run it."""

_TILE = NamedType("x86_amx")
"""A tile register."""


@cache
def has_tiles() -> bool:
    """True if the CPU has tiles of bfloat16 and int8, and Linux lets this process use them. The first call asks for them."""
    if llvmlite.binding.llvm_version_info < _TESTED_LLVM:
        return False
    features = llvmlite.binding.get_host_cpu_features()
    if sys.platform != "linux" or not (features.get("amx-bf16") and features.get("amx-int8")):
        return False
    call = map(ctypes.c_long, (_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA))
    return ctypes.CDLL(None).syscall(*call) == 0


class TileCode:
    """Writes code for tile registers; addresses, offsets, strides and depths are in bytes."""

    def __init__(self, code: VectorCode) -> None:
        self._code = code

    def zero(self, rows: int) -> Any:
        """A tile of zeros."""
        return self._call("tilezero", _TILE, (rows, WIDTH), [])

    def load(
        self, address: Any, offset: Any, stride: Any, rows: int = LANES, width: int = WIDTH
    ) -> Any:
        """Load rows that are `stride` apart."""
        pointer = self._code.at(address, offset, BYTE)
        return self._call("tileloadd64", _TILE, (rows, width), [pointer, stride])

    def store(self, tile: Any, address: Any, offset: Any, stride: Any, rows: int = LANES) -> None:
        """Store rows that are `stride` apart."""
        pointer = self._code.at(address, offset, BYTE)
        self._call("tilestored64", ir.VoidType(), (rows, WIDTH), [pointer, stride, tile])

    def vectors(self, tile: Any, rows: int, kind: Any) -> list[Any]:
        """The rows of a tile as vectors of this type."""
        builder = self._code.builder
        memory = cgutils.alloca_once(builder, ir.ArrayType(kind, rows))
        address, width = builder.ptrtoint(memory, LONG), self._code.number(WIDTH)
        self.store(tile, address, self._code.number(0), width, rows)
        return [
            self._code.load(at, self._code.number(0), kind)
            for at in self._code.addresses(address, width, rows)
        ]

    def multiply(
        self,
        instruction: str,
        total: Any,
        left: Any,
        right: Any,
        rows: int = LANES,
        depth: int = WIDTH,
    ) -> Any:
        """`total` plus the product of the rows of `left`, which are `depth` wide, with the words of `right`, one for each output."""
        return self._call(instruction, _TILE, (rows, WIDTH, depth), [total, left, right])

    def _call(self, name: str, result: Any, sizes: tuple[int, ...], operands: list[Any]) -> Any:
        """Call an intrinsic function, whose first arguments are the sizes of tiles."""
        given = [*(ir.Constant(HALF, size) for size in sizes), *operands]
        function = self._code.function(
            f"llvm.x86.{name}.internal", result, [each.type for each in given]
        )
        return self._code.builder.call(function, given)
