"""Parses streams: events, and the files of a model. Receives bytes as they arrive, and does no network I/O.

An `EventReader` turns a stream of server-sent events into events, and knows where the next stream has to continue. A `Download` writes
a zip to a temporary file next to its final path, and renames it only when it is complete.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import zipfile
import zlib
from pathlib import Path
from types import TracebackType

from pydantic import ValidationError

from groupwise.api.client.errors import BrokenDownload, StrangeAnswer
from groupwise.api.schemas.training import EventData

LONGEST_EVENT = 16 * 2**20
"""The most bytes that may arrive without the end of an event."""


class EventReader:
    """Reads server-sent events; one reader continues over several streams."""

    def __init__(self, after: int | None = None) -> None:
        self.last_id = after
        """Id of the newest event that was read; a new stream starts after it."""
        self._buffer = b""

    def begin(self) -> None:
        """Start reading a new stream; drop the incomplete event of the old one, which the server sends again."""
        self._buffer = b""

    def feed(self, chunk: bytes) -> list[EventData]:
        """The events that are complete with these bytes, each once. Raises StrangeAnswer."""
        self._buffer += chunk
        if len(self._buffer) > LONGEST_EVENT:
            raise StrangeAnswer(
                f"The event stream sent {len(self._buffer)} bytes without an event."
            )
        # A carriage return at the end may be the first half of a line end.
        has_open_return = self._buffer.endswith(b"\r")
        text = (
            self._buffer[: len(self._buffer) - has_open_return]
            .replace(b"\r\n", b"\n")
            .replace(b"\r", b"\n")
        )
        *blocks, rest = text.split(b"\n\n")
        self._buffer = rest + b"\r" * has_open_return
        parsed = [event for block in blocks if (event := _parse_event(block)) is not None]
        new_events: list[EventData] = []
        for event in parsed:
            if self.last_id is None or event.id > self.last_id:
                self.last_id = event.id
                new_events.append(event)
        return new_events


def _parse_event(block: bytes) -> EventData | None:
    """The event in a block of lines; None if there is only a comment that keeps the connection alive."""
    lines = [line for line in block.split(b"\n") if line.startswith(b"data:")]
    if not lines:
        return None
    data = b"\n".join(line.removeprefix(b"data:").removeprefix(b" ") for line in lines)
    try:
        return EventData.model_validate_json(data)
    except ValidationError:
        text = data[:200].decode("utf-8", "replace")
        raise StrangeAnswer(f"The event stream has what is not an event: {text}") from None


class Download:
    """A zip being downloaded. Use it as a context manager: an unfinished file is deleted."""

    def __init__(self, to: Path, *, unpack: bool) -> None:
        self._to = to
        self._unpack = unpack
        to.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{to.name}.", suffix=".part", dir=to.parent)
        self._file = os.fdopen(handle, "wb")
        self._partial_path = Path(name)

    def __enter__(self) -> Download:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        self._partial_path.unlink(missing_ok=True)

    def write(self, chunk: bytes) -> None:
        """Write the next bytes."""
        self._file.write(chunk)

    def finish(self) -> Path:
        """Finish, and return the path of the zip or of the folder with its files. Raises BrokenDownload if it is incomplete."""
        self._file.close()
        try:
            with zipfile.ZipFile(self._partial_path) as packed:
                if self._unpack:
                    folder = Path(
                        tempfile.mkdtemp(prefix=f".{self._to.name}.", dir=self._to.parent)
                    )
                    try:
                        packed.extractall(folder)
                        folder.chmod(0o755)  # the usual mode; mkdtemp denies access to other users
                        folder.rename(self._to)
                    except BaseException:
                        shutil.rmtree(folder, ignore_errors=True)
                        raise
                elif (torn := packed.testzip()) is not None:
                    raise zipfile.BadZipFile(f"{torn} is torn")
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise BrokenDownload(f"The model did not arrive whole: {error}.") from None
        if not self._unpack:
            self._partial_path.replace(self._to)
        return self._to


def checked_target(to: str | os.PathLike[str], *, unpack: bool) -> Path:
    """Path for a model's files. Raises FileExistsError if unpacking would mix its files with others."""
    path = Path(to)
    if unpack and path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path} is there already; name a new folder for the model's files.")
    return path
