"""A policy version as one zip file, created while it is sent: it is never completely in memory or on disk.

The service passes open files, so a version that is deleted meanwhile can still be read to its end. Weights are stored uncompressed, because
compressing them costs seconds and saves nothing; texts are deflated. Names, order and dates are fixed, so the same version always gives the
same file, byte for byte.
"""

from __future__ import annotations

import asyncio
import zipfile
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Literal

from groupwise.core.interruption import wait_until_done

CHUNK = 1 << 20
"""Bytes per read; about the same amount is sent at a time."""
STORED = (".safetensors", ".gguf", ".bin")
"""Extensions of files that compression does not make smaller."""
FIRST_DATE = (1980, 1, 1, 0, 0, 0)
"""The earliest date that a zip file can hold; a fixed one keeps the file reproducible."""
LARGE = 1 << 31
"""Size in bytes from which a zip file needs 64-bit sizes."""
READABLE = 0o644


@dataclass(frozen=True, slots=True)
class OpenFile:
    """One open file of a version."""

    name: str
    """Name in the zip file; `/` between folders."""
    size: int
    """Size in bytes."""
    file: BinaryIO


@dataclass(frozen=True, slots=True)
class OpenVersion:
    """A policy version with open files; its holder closes it."""

    model_version: tuple[str, int]
    fingerprint: str
    kind: Literal["adapter", "full"]
    files: Sequence[OpenFile]

    def close(self) -> None:
        """Release the files; a second call does nothing."""
        for entry in self.files:
            entry.file.close()

    @property
    def address(self) -> str:
        """`run@step`."""
        run, step = self.model_version
        return f"{run}@{step}"


async def zip_pieces(version: OpenVersion) -> AsyncGenerator[bytes]:
    """The zip file in pieces of about `CHUNK` bytes. Files are read in a thread, so a slow disk does not block the event loop."""
    chunks = _zip_chunks(version.files)
    while True:
        # To its end, else the files would be closed during the read.
        chunk = await wait_until_done(asyncio.to_thread(next, chunks, None))
        if chunk is None:
            return
        if chunk:
            yield chunk


def _zip_chunks(files: Sequence[OpenFile]) -> Iterator[bytes]:
    out = _Pipe()
    with zipfile.ZipFile(out, "w") as archive:
        for entry in files:
            info = zipfile.ZipInfo(entry.name, FIRST_DATE)
            is_stored = entry.name.endswith(STORED)
            info.compress_type = zipfile.ZIP_STORED if is_stored else zipfile.ZIP_DEFLATED
            info.external_attr = READABLE << 16
            info.file_size = entry.size
            with archive.open(info, "w", force_zip64=entry.size >= LARGE) as target:
                while chunk := entry.file.read(CHUNK):
                    target.write(chunk)
                    yield out.take()
    yield out.take()


class _Pipe:
    """A file object for `zipfile` to write to: it cannot seek, and `take` returns the written bytes."""

    def __init__(self) -> None:
        self._buffered: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._buffered.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        """Nothing is buffered."""

    def close(self) -> None:
        """There is nothing to close."""

    def take(self) -> bytes:
        """Bytes written since the last call."""
        chunks, self._buffered = self._buffered, []
        return b"".join(chunks)
