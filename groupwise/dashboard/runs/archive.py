"""Sends a folder as one ZIP archive, created on the fly: only the piece being sent is in memory, and nothing is written to disk.

Weights do not compress, so files are stored uncompressed. Sizes and checksums follow each file, because they are not known before;
unpacking reads them at the end of the archive, and so detects a truncated download.
"""

from __future__ import annotations

import zipfile
from collections.abc import Generator
from pathlib import Path

PIECE = 1 << 20
"""Bytes read at once."""


class _OnItsWay:
    """Buffers archive bytes that have been written but not sent."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._pieces.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        """Does nothing: `take` returns the buffered bytes."""

    def close(self) -> None:
        """Does nothing: the rest is still to be sent."""

    def take(self) -> bytes:
        data, self._pieces = b"".join(self._pieces), []
        return data


def files_of(folder: Path) -> list[Path]:
    """All files below a folder, sorted; files outside of it that a link points to are left out."""
    root = folder.resolve()
    return sorted(
        path for path in folder.rglob("*") if path.is_file() and path.resolve().is_relative_to(root)
    )


def archive(folder: Path, name: str) -> Generator[bytes]:
    """The archive in pieces; paths in it start with `name`."""
    pipe = _OnItsWay()
    with zipfile.ZipFile(pipe, "w", zipfile.ZIP_STORED) as made:
        for file in files_of(folder):
            inside = f"{name}/{file.relative_to(folder).as_posix()}"
            about = zipfile.ZipInfo.from_file(file, inside, strict_timestamps=False)
            with file.open("rb") as source, made.open(about, "w", force_zip64=True) as target:
                while piece := source.read(PIECE):
                    target.write(piece)
                    yield pipe.take()
    yield pipe.take()
