"""Caches on disk what every start of a run would compute again from a model's files: weights in the run's number format, side by side, and
in the order for decoding. Later processes map these files.

`groupwise.engine.models.load.load_base` reads the weights of a model from here if they are cached, and `NativeModel` takes its matrices
from here. What had to be computed is written by `NativeModel.write_cache`, after the processes of the run were forked. All processes of
a machine that map a file share its pages. A mapping is private: a process that changes a weight gets its own copy of that page, and the
file never changes.

A file's name contains a digest of everything that decides its content: the model's files (path, size, time of change, and a sample of the
content), the CPU's instructions, and the source code of this folder; then the number format. A file is written under a temporary name,
flushed and renamed. It is used only if its size, its header's digest and the sum of its content are right. If a file cannot be read or
written, the weights are computed as without a cache.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from groupwise.core.atomic_files import BUILDING, building_path, publish_file
from groupwise.core.cache import cache_folder
from groupwise.core.errors import ConfigError, StoreError
from groupwise.engine.models.files import hash_sample, model_files
from groupwise.engine.models.native.facts import multiple
from groupwise.engine.models.native.kernel_cache import sources
from groupwise.engine.models.native.products import USE_PAIRS

logger = logging.getLogger(__name__)

Kind = Literal["matrices", "decoding", "int8"]
"""`matrices`: all parameters and the matrices of all products; `decoding`: the same matrices in the order for decoding; `int8`: in that
order too, those of the layers rounded to whole numbers."""

VARIABLE = "GROUPWISE_WEIGHT_CACHE_GIB"
"""The environment variable with the largest size of the cache in GiB; 0 turns it off."""
DEFAULT_GIB = 16.0
SPARE = 2 << 30
"""Bytes that must stay free on the disk."""
WORTH = 64 << 20
"""Bytes of a model's files from which the cache saves a noticeable time."""
ALIGNMENT = 64
"""Tensors start at multiples of this many bytes: a line of the CPU's cache, which is also one line of packed weights."""
ABANDONED = 3600
"""Seconds after which an unfinished file has no writer any more."""
PAGE = 4096
DIGEST_BYTES, LENGTH_BYTES = 32, 8


class WeightCache:
    """The cached files of one model in one number format."""

    def __init__(self, name: str) -> None:
        """`name`: the start of the files' names."""
        self._name = name
        self._mapped: dict[Kind, dict[str, Tensor]] = {}
        self._mappings: dict[Kind, mmap.mmap] = {}
        self._watched: tuple[tuple[nn.Parameter, int], ...] = ()
        self.parameters: dict[str, nn.Parameter] = {}
        """The model's parameters by the names of its files; an adapter does not rename these."""

    def watch(self, model: nn.Module) -> None:
        """Call once `model` has the weights of its files: `is_current` then says whether it still has them."""
        self.parameters = dict(model.named_parameters())
        self._watched = tuple((each, each._version) for each in self.parameters.values())

    def is_current(self) -> bool:
        """True if nothing has written to the model's weights."""
        return all(parameter._version == version for parameter, version in self._watched)

    def tensors(self, kind: Kind) -> dict[str, Tensor]:
        """The cached tensors as views of one private mapping; empty if there are none."""
        if kind not in self._mapped:
            self._mapped[kind] = self._map(kind)
        return self._mapped[kind]

    def release(self, kind: Kind) -> None:
        """Leave the pages of a mapping to the system's file cache, from which they are mapped again when they are read.

        Only if nothing was written to them here, because that would be lost.
        """
        if kind in self._mappings and self.is_current():
            self._mappings[kind].madvise(mmap.MADV_DONTNEED)

    def _map(self, kind: Kind) -> dict[str, Tensor]:
        path = self._path(kind)
        try:
            with path.open("rb") as file:
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError):  # there is none, or it is empty
            return {}
        try:
            tensors = _read(mapping)
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            logger.warning("%s is damaged (%s); it is made again", path, error)
            return {}
        self._mappings[kind] = mapping
        with suppress(OSError):  # a folder that cannot be written
            os.utime(path)  # the least recently used file is the first to be removed
        return tensors

    def write(self, kind: Kind, tensors: Mapping[str, Tensor]) -> bool:
        """Write a file, unless these tensors came from it. If that fails, returns False after a line in the log that says why."""
        if self._mapped.get(kind):
            return True
        path = self._path(kind)
        building = building_path(path)
        try:
            header, pieces = _layout(tensors)
            size = len(header) + sum(len(piece) for piece in pieces)
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _make_room(path.parent, size)
            with open(os.open(building, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(header)
                file.writelines(pieces)
            publish_file(building, path)
            return True
        except (OSError, StoreError) as error:
            logger.info(
                "the arranged weights cannot be cached, so that the next start takes a second or more longer: %s",
                error,
            )
            return False
        finally:
            with suppress(OSError):
                building.unlink()

    def _path(self, kind: Kind) -> Path:
        return weights_folder() / f"{self._name}-{kind}.weights"


def weight_cache_of(folder: Path, dtype: str) -> WeightCache | None:
    """The cache of the model in `folder`; None if it is turned off or the model is small. Raises `ModelError` if files are missing."""
    files = [(path, path.stat()) for path in model_files(folder)]
    if largest_size() == 0 or sum(status.st_size for _, status in files) < WORTH:
        return None
    digest = sha256((folder / "config.json").read_bytes())
    for path, status in files:
        digest.update(f"|{path.resolve()}|{status.st_mtime_ns}|".encode())
        hash_sample(digest, path)
    digest.update(f"|{sources()}|{USE_PAIRS}".encode())
    return WeightCache(f"{folder.name[:40]}-{digest.hexdigest()[:16]}-{dtype}")


def weights_folder() -> Path:
    """The folder of the cached files."""
    return cache_folder("weights")


def clear() -> int:
    """Delete all cached files; returns their bytes. Processes that have mapped some keep them until they end."""
    size = 0
    for _, file_size, path in _cached_files(weights_folder()):
        path.unlink(missing_ok=True)
        size += file_size
    return size


def largest_size() -> int:
    """The largest size of the cache, in bytes. Raises ConfigError if the environment variable holds no size."""
    given = os.environ.get(VARIABLE)
    try:
        size = DEFAULT_GIB if given is None else float(given)
    except ValueError:
        size = -1.0
    if not 0 <= size < 1 << 30:
        raise ConfigError(
            f"{VARIABLE} is {given!r}; expected the largest size of the cache of arranged weights in GiB, such as 16, or 0 for none."
        )
    return int(size * (1 << 30))


def _make_room(folder: Path, size: int) -> None:
    """Remove files of dead writers, and the least recently used files until `size` more bytes are allowed. Raises OSError if that is too
    much for the cache or its disk."""
    files = sorted(_cached_files(folder))
    total = sum(each_size for _, each_size, _ in files) + size
    free, most = shutil.disk_usage(folder).free, largest_size()
    if size > most or free < size + SPARE:
        raise OSError(
            f"{folder} has no room for {size / 2**30:.1f} GiB: {free / 2**30:.1f} GiB are free on that disk, of which "
            f"{SPARE / 2**30:.0f} stay free, and {VARIABLE} allows {most / 2**30:g}"
        )
    for used, each_size, path in files:
        unfinished = path.name.startswith(BUILDING) and used < time.time() - ABANDONED
        if total > most or unfinished:
            path.unlink(missing_ok=True)
            total -= each_size


def _cached_files(folder: Path) -> list[tuple[float, int, Path]]:
    """Time of last use, size and path of each file, without those that another process removes or renames meanwhile."""
    files: list[tuple[float, int, Path]] = []
    for path in folder.glob("*"):
        with suppress(FileNotFoundError):
            status = path.stat()
            files.append((status.st_mtime, status.st_size, path))
    return files


def _layout(tensors: Mapping[str, Tensor]) -> tuple[bytes, list[memoryview | bytes]]:
    """The header of a file with these tensors, and the pieces that follow it. Tensors that share memory share it in the file too."""
    # Of tensors that start at the same address, the largest comes first and holds the others.
    by_address = sorted(tensors, key=lambda name: (tensors[name].data_ptr(), -tensors[name].nbytes))
    holders: dict[str, str] = {}
    holder, end = "", 0
    for name in by_address:
        assert tensors[name].is_contiguous(), f"{name} is not contiguous"
        last = tensors[name].data_ptr() + tensors[name].nbytes
        if last > end:
            holder, end = name, last
        holders[name] = holder
    places: dict[str, int] = {}
    pieces: list[memoryview | bytes] = []
    total = checksum = 0
    for name in tensors:  # in the order of the model, in which they are also read
        if holders[name] == name:
            content = tensors[name].detach().flatten().view(torch.uint8)
            places[name] = total
            pieces += [content.numpy().data, bytes(-len(content) % ALIGNMENT)]
            total += multiple(len(content), ALIGNMENT)
            checksum = (checksum + _sum(content)) % (1 << 64)
    described: dict[str, Any] = {}
    for name, tensor in tensors.items():
        place = places[holders[name]] + tensor.data_ptr() - tensors[holders[name]].data_ptr()
        described[name] = [str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), place]
    header = {"bytes": total, "sum": checksum, "tensors": described}
    text = json.dumps(header).encode()
    begun = len(text).to_bytes(LENGTH_BYTES, "little") + sha256(text).digest() + text
    return begun + bytes(-len(begun) % PAGE), pieces


def _read(mapping: mmap.mmap) -> dict[str, Tensor]:
    """The tensors in a file. Raises ValueError, or another of the errors that wrong bytes cause, if it is not as it was written."""
    length = int.from_bytes(mapping[:LENGTH_BYTES], "little")
    begin = LENGTH_BYTES + DIGEST_BYTES
    text = mapping[begin : begin + length]
    if sha256(text).digest() != mapping[LENGTH_BYTES:begin]:
        raise ValueError("its header is not what was written")
    header, start = json.loads(text), multiple(begin + length, PAGE)
    if len(mapping) != start + header["bytes"]:
        raise ValueError(f"{len(mapping)} bytes instead of {start + header['bytes']}")
    content = torch.frombuffer(mapping, dtype=torch.uint8, offset=start)
    if _sum(content) != header["sum"]:
        raise ValueError("its content is not what was written")
    tensors: dict[str, Tensor] = {}
    for name, (dtype, shape, place) in header["tensors"].items():
        kind = getattr(torch, dtype)
        count = torch.Size(shape).numel() * kind.itemsize
        tensors[name] = content[place : place + count].view(kind).view(shape)
    return tensors


def _sum(content: Tensor) -> int:
    """The sum of all 64-bit words modulo 2⁶⁴, which takes no longer than reading them: it finds pages that were never written, and changed
    bits. By numpy, which starts no threads."""
    numbers = content.numpy()
    whole = len(numbers) // 8 * 8
    words = int(numbers[:whole].view(np.uint64).sum(dtype=np.uint64))
    return (words + int.from_bytes(numbers[whole:].tobytes(), "little")) % (1 << 64)
