"""Sends a folder as one ZIP archive, created on the fly: only the piece being sent is in memory, and nothing is written to disk.

Weights do not compress, so files are stored uncompressed. Sizes and checksums follow each file, because they are not known before;
unpacking reads them at the end of the archive, and so detects a truncated download.
"""

from __future__ import annotations

import zipfile
from collections.abc import Generator
from pathlib import Path

from groupwise.core import atomic_files
from groupwise.core.errors import RunNotFoundError

CHUNK_BYTES = 1 << 20
"""Bytes read at once."""


class _ArchiveBuffer:
    """Buffers archive bytes that have been written but not sent."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._chunks.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        """Does nothing: `take` returns the buffered bytes."""

    def close(self) -> None:
        """Does nothing: the rest is still to be sent."""

    def take(self) -> bytes:
        data, self._chunks = b"".join(self._chunks), []
        return data


def files_of(folder: Path) -> list[Path]:
    """All files below a folder, sorted; files outside of it that a link points to are left out."""
    root = folder.resolve()
    return [
        path for path in atomic_files.files_below(folder) if path.resolve().is_relative_to(root)
    ]


def archive(folder: Path, name: str) -> Generator[bytes]:
    """The archive in pieces; paths in it start with `name`. Raises RunNotFoundError if a file is removed meanwhile, so that a part is not
    taken for the whole.
    """
    pipe = _ArchiveBuffer()
    with zipfile.ZipFile(pipe, "w", zipfile.ZIP_STORED) as zip_file:
        for file in files_of(folder):
            archive_name = f"{name}/{file.relative_to(folder).as_posix()}"
            try:
                info = zipfile.ZipInfo.from_file(file, archive_name, strict_timestamps=False)
                source = file.open("rb")
            except FileNotFoundError:
                raise RunNotFoundError(f"{folder.name} was removed while it was sent.") from None
            with source, zip_file.open(info, "w", force_zip64=True) as target:
                while chunk := source.read(CHUNK_BYTES):
                    target.write(chunk)
                    yield pipe.take()
    yield pipe.take()
