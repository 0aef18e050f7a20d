"""Reads the client's tensors: one number for each token [N], or K for each token [N, K], dense or sparse.

A sparse tensor lists its cells row by row (CSR); all other cells hold a filling. It travels in protobuf with the data of training, and in
JSON with a request to sample. Both are read into the same `Cells`, and what does not fit is refused by name (`UsageError`).

The classes of the client's protobuf messages (`messages`) come with its package `tinker`. Importing the package itself takes more than a
second and starts threads; the file with the classes needs only protobuf. So the file is loaded directly from the package's folder, without
running the package.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from itertools import pairwise
from pathlib import Path
from typing import Any

from groupwise.core.errors import UsageError
from groupwise.core.extras import not_installed

MAX_CELLS = 4_000_000
"""Largest N · K of a tensor: 20 for each of 200,000 tokens. A sparse one could otherwise name more cells than there is memory for."""


@dataclass(frozen=True, slots=True)
class Cells:
    """The numbers of a tensor, row by row."""

    values: tuple[Any, ...]
    """N numbers, or N · K."""
    width: int | None
    """K of a tensor [N, K]; None for [N]."""


@dataclass(frozen=True, slots=True)
class Sparse:
    """The listed cells of a sparse tensor."""

    values: Sequence[Any]
    row_starts: Sequence[int]
    """Index of the first listed cell of each row, and after the last row the number of all; N + 1."""
    columns: Sequence[int]
    """The column of each listed cell."""


def cells_of(tensor: Any, where: str, length: int, *, integers: bool) -> Cells:
    """Read a protobuf tensor for `length` tokens; cells that a sparse one does not list are 0. Numbers are finite."""
    classes = messages()
    formats = {classes.DTYPE_FLOAT32: "f", classes.DTYPE_INT64: "q", classes.DTYPE_INT32: "i"}
    if tensor.dtype not in formats or (integers and formats[tensor.dtype] == "f"):
        dtype = "int64" if integers else "float32"
        raise UsageError(f"{where} has a dtype that does not fit; it must be {dtype}.")
    kind, shape = formats[tensor.dtype], list(tensor.shape)
    if tensor.WhichOneof("encoding") == "sparse_csr":
        csr = tensor.sparse_csr
        listed = Sparse(
            unpacked(csr.values, kind, where),
            unpacked(csr.crow_indices, "q", where),
            unpacked(csr.col_indices, "q", where),
        )
        return filled(listed, shape, where, length, filling=0)
    return dense(unpacked(tensor.dense, kind, where), shape, where, length)


def dense(values: Sequence[Any], shape: Sequence[int], where: str, length: int) -> Cells:
    """The cells of a dense tensor for `length` tokens; without a shape it has one dimension."""
    width = width_of(shape, where, length) if shape else None
    expected = length * (1 if width is None else width)
    if len(values) != expected:
        raise UsageError(
            f"{where} has {len(values)} numbers, but there are {length} tokens; they must be as many."
            if width is None
            else f"{where} has {len(values)} numbers; its shape {list(shape)} has {expected}."
        )
    check_finite(values, where)
    return Cells(tuple(values), width)


def filled(
    listed: Sparse, shape: Sequence[int], where: str, length: int, *, filling: float
) -> Cells:
    """The cells of a sparse tensor for `length` tokens, with `filling` in those that it does not list."""
    width = width_of(shape, where, length)
    if width is None:
        raise UsageError(
            f"{where} is sparse and has the shape {list(shape)}; it needs two dimensions."
        )
    check_finite(listed.values, where)
    values: list[Any] = [filling] * (length * width)
    for cell, value in zip(places_of(listed, length, width, where), listed.values, strict=True):
        values[cell] = value
    return Cells(tuple(values), width)


def places_of(listed: Sparse, length: int, width: int, where: str) -> list[int]:
    """The index of each listed cell among all N · K. UsageError if rows and columns do not fit together."""
    starts, columns = listed.row_starts, listed.columns
    fits = (
        len(starts) == length + 1
        and starts[0] == 0
        and starts[-1] == len(listed.values) == len(columns)
        and all(before <= after for before, after in pairwise(starts))
        and all(0 <= column < width for column in columns)
    )
    places = (
        [
            row * width + column
            for row, (start, end) in enumerate(pairwise(starts))
            for column in columns[start:end]
        ]
        if fits
        else []
    )
    if not fits or len({*places}) < len(places):
        raise UsageError(
            f"{where} is not a sparse tensor of the shape {[length, width]}: it needs {length + 1} row starts that rise from 0 to the "
            "number of values, and a column for each value, none twice in a row."
        )
    return places


def width_of(shape: Sequence[int], where: str, length: int) -> int | None:
    """K of the shape [N, K], None for [N]. UsageError for other shapes, another N, and too many cells."""
    if len(shape) not in (1, 2) or shape[0] != length:
        raise UsageError(
            f"{where} has the shape {list(shape)}; there are {length} tokens, so it must be [{length}], or [{length}, K] for K numbers "
            "for each token."
        )
    if len(shape) == 1:
        return None
    if shape[1] < 1 or length * shape[1] > MAX_CELLS:
        raise UsageError(
            f"{where} has the shape {list(shape)}; it needs at least one number for each token, and has at most {MAX_CELLS:,} in all."
        )
    return shape[1]


def check_finite(values: Sequence[float], where: str) -> None:
    """UsageError for the first number that is NaN or infinite."""
    for at, value in enumerate(values):
        if not math.isfinite(value):
            raise UsageError(f"{where}[{at}] is {value}; it must be a finite number.")


def unpacked(data: bytes, kind: str, where: str) -> list[Any]:
    """The numbers in some bytes, by their format in `struct`, little-endian."""
    size = struct.calcsize(f"<{kind}")
    if len(data) % size:
        raise UsageError(f"{where} has {len(data)} bytes, which is not a multiple of {size}.")
    return list(struct.unpack(f"<{len(data) // size}{kind}", data))


MODULE = "tinker.proto.tinker_public_pb2"
FILE = "tinker_public_pb2.py"


@cache
def messages() -> Any:
    """The module with the classes. UsageError if the package is not installed."""
    if MODULE in sys.modules:
        return sys.modules[MODULE]
    package = find_spec("tinker")
    folders = list(package.submodule_search_locations or ()) if package is not None else []
    files = [path for folder in folders if (path := Path(folder) / "proto" / FILE).is_file()]
    if not files:
        raise UsageError(
            not_installed("Reading the messages of the Tinker client", "tinker", "tinker")
        )
    spec = spec_from_file_location("groupwise_tinker_messages", files[0])
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def is_installed() -> bool:
    """True if `messages` will find them."""
    return find_spec("tinker") is not None
