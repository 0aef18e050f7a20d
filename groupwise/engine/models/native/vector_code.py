"""Writes LLVM code that numba cannot generate: sums that stay in registers over a whole loop.

The kernels in this folder use it. Vectors have 16 numbers; LLVM splits them into two or four on CPUs with shorter ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba.core import cgutils

from groupwise.engine.models.native.facts import LANES

BYTE, HALF, INT, LONG = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
FLOATS = ir.VectorType(ir.FloatType(), LANES)
WORDS = ir.VectorType(INT, LANES)
HALVES = ir.VectorType(HALF, LANES)

Body = Callable[[Any, list[Any]], list[Any]]


class NamedType(ir.types.Type):
    """A type of LLVM that llvmlite does not have, by its name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __str__(self) -> str:
        return self._name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NamedType) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(self._name)


class VectorCode:
    """Writes LLVM code; addresses, offsets and strides are in bytes."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def number(self, value: int) -> Any:
        """A constant 64-bit integer."""
        return ir.Constant(LONG, value)

    def function(self, name: str, result: Any, arguments: list[Any]) -> Any:
        """One of LLVM's intrinsic functions."""
        kind = ir.FunctionType(result, arguments)
        return cgutils.get_or_insert_function(self.builder.module, kind, name)

    def at(self, address: Any, offset: Any, kind: Any) -> Any:
        """A pointer to `address + offset`."""
        return self.builder.inttoptr(self.builder.add(address, offset), kind.as_pointer())

    def addresses(self, first: Any, stride: Any, count: int) -> list[Any]:
        """The start address of each of `count` rows."""
        builder = self.builder
        return [builder.add(first, builder.mul(stride, self.number(row))) for row in range(count)]

    def load(self, address: Any, offset: Any, kind: Any = FLOATS) -> Any:
        """Load adjacent numbers, which may be aligned to less than a vector."""
        return self.builder.load(self.at(address, offset, kind), align=2)

    def load_halves(self, address: Any, offset: Any) -> Any:
        """Load bfloat16 numbers, and convert them to float32."""
        return self.lower_halves(self.builder.zext(self.load(address, offset, HALVES), WORDS))

    def lower_halves(self, words: Any) -> Any:
        """The lower of the two bfloat16 numbers in each word, as float32."""
        builder = self.builder
        return builder.bitcast(builder.shl(words, ir.Constant(WORDS, [16] * LANES)), FLOATS)

    def upper_halves(self, words: Any) -> Any:
        """The upper of the two bfloat16 numbers in each word, as float32."""
        builder = self.builder
        mask = ir.Constant(WORDS, [0xFFFF0000] * LANES)
        return builder.bitcast(builder.and_(words, mask), FLOATS)

    def store(self, vector: Any, address: Any, offset: Any) -> None:
        """Store a vector at an address."""
        self.builder.store(vector, self.at(address, offset, vector.type), align=2)

    def spread(self, address: Any, offset: Any, kind: Any = FLOATS) -> Any:
        """A vector with the one number at this address in all places."""
        nothing, first = ir.Constant(kind, ir.Undefined), ir.Constant(INT, 0)
        number = self.load(address, offset, kind.element)
        vector = self.builder.insert_element(nothing, number, first)
        return self.builder.shuffle_vector(vector, nothing, ir.Constant(WORDS, [0] * LANES))

    def transposed(self, rows: list[Any]) -> list[Any]:
        """The columns of 16 vectors: four times, the numbers of the first half of them are interleaved with those of the second half."""
        low = [number // 2 + LANES * (number % 2) for number in range(LANES)]
        masks = [ir.Constant(WORDS, [place + first for place in low]) for first in (0, LANES // 2)]
        for _ in range(4):
            pairs = zip(rows[: LANES // 2], rows[LANES // 2 :], strict=True)
            rows = [
                self.builder.shuffle_vector(upper, lower, mask)
                for upper, lower in pairs
                for mask in masks
            ]
        return rows

    def highest(self, vector: Any) -> Any:
        """The highest number of a vector without NaN."""
        highest = self.function("llvm.vector.reduce.fmax.v16f32", FLOATS.element, [FLOATS])
        return self.builder.call(highest, [vector])

    def fused(self, left: Any, right: Any, total: Any) -> Any:
        """`left · right + total`, rounded once."""
        fma = self.function("llvm.fma.v16f32", FLOATS, [FLOATS] * 3)
        return self.builder.call(fma, [left, right, total])

    def prefetch(self, address: Any, offset: Any, *, first_cache: bool = True) -> None:
        """Start to fetch the memory there into all caches, or into all but the first."""
        kinds = [BYTE.as_pointer(), INT, INT, INT]
        fetch = self.function("llvm.prefetch.p0", ir.VoidType(), kinds)
        numbers = (0, 3 if first_cache else 2, 1)
        reading, locality, data = (ir.Constant(INT, number) for number in numbers)
        self.builder.call(fetch, [self.at(address, offset, BYTE), reading, locality, data])

    def loop(self, count: Any, sums: list[Any], body: Body) -> list[Any]:
        """The sums after running `body` `count` times, which may be 0."""
        builder = self.builder
        entry = builder.block
        check, inside, end = map(builder.append_basic_block, ("check", "inside", "after"))
        builder.branch(check)
        builder.position_at_end(check)
        index = builder.phi(LONG)
        index.add_incoming(self.number(0), entry)
        now = [builder.phi(begun.type) for begun in sums]
        for phi, begun in zip(now, sums, strict=True):
            phi.add_incoming(begun, entry)
        builder.cbranch(builder.icmp_signed("<", index, count), inside, end)
        builder.position_at_end(inside)
        later = body(index, cast("list[Any]", now))
        for phi, value in zip(now, later, strict=True):
            phi.add_incoming(value, builder.block)
        index.add_incoming(builder.add(index, self.number(1)), builder.block)
        builder.branch(check)
        builder.position_at_end(end)
        return cast("list[Any]", now)
