"""Sends a folder as one ZIP archive, made on the fly: only the piece being sent is in memory, and nothing is on disk.

Weights do not get smaller by packing, so files are stored as they are. Sizes and check sums follow each file, because they are known
only then; unpacking reads them at the archive's end, and notices there that it was broken off.
"""

from __future__ import annotations

import zipfile
from collections.abc import Generator
from pathlib import Path

PIECE = 1 << 20
"""Bytes that are read at once."""


class _OnItsWay:
    """Buffers the part of the archive that has been written but not sent."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._pieces.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Do nothing: the rest is still to be sent."""

    def take(self) -> bytes:
        data, self._pieces = b"".join(self._pieces), []
        return data


def files_of(folder: Path) -> list[Path]:
    """All files that lie below a folder, in the order of their names; none that a link only makes appear there."""
    root = folder.resolve()
    return sorted(
        each for each in folder.rglob("*") if each.is_file() and each.resolve().is_relative_to(root)
    )


def archive(folder: Path, name: str) -> Generator[bytes]:
    """The archive in pieces; its files lie in it below `name`."""
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
