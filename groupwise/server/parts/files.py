"""Folders exchanged between a training loop and its parts: all within one folder of the server; names cannot lead out of it."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from groupwise.api.schemas.parts import MAX_PATH, PATH_PATTERN, PIECE, FileFacts, FolderAnswer
from groupwise.api.schemas.problems import Refusal
from groupwise.core.atomic_files import files_below
from groupwise.server.run.engine_supervisor import DISK_FULL_RETRY_SECONDS, is_full

_PATH = re.compile(PATH_PATTERN)


class Files:
    """The files of one client's parts."""

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.root = root
        self._changing = threading.Lock()
        """Requests write in threads, even while the parts are being ended."""
        self._removed = False
        self._sealed: Counter[str] = Counter()
        """Folders that are loaded or being loaded, with the number of loads."""

    @staticmethod
    def check(path: str) -> None:
        """Refuse an invalid path; see `PATH_PATTERN`."""
        if len(path) > MAX_PATH or not _PATH.fullmatch(path):
            problem = (
                f"must be up to four names with `/` between them, of letters, digits, `.`, `_` and `-`, none of which begins with a dot; "
                f"{MAX_PATH} characters at most"
            )
            raise Refusal("invalid_request", f"path: {problem}.", field="path", problem=problem)

    def path_in_root(self, path: str) -> Path:
        """Path of the file, which need not exist."""
        self.check(path)
        return self.root / path

    def folder(self, path: str) -> Path:
        """An existing folder; refuses with `unknown_file` if it is missing."""
        folder = self.path_in_root(path)
        if not folder.is_dir():
            raise _unknown_file(path)
        return folder

    def file(self, path: str) -> Path:
        """An existing file; refuses with `unknown_file` if it is missing."""
        file = self.path_in_root(path)
        if not file.is_file():
            raise _unknown_file(path)
        return file

    def list(self, path: str) -> FolderAnswer:
        """The files of a folder, sorted by name, with their sizes."""
        folder = self.folder(path)
        try:
            return FolderAnswer(
                files=[
                    FileFacts(path=str(path.relative_to(folder)), size=path.stat().st_size)
                    for path in files_below(folder)
                ]
            )
        except FileNotFoundError:  # another request deletes the folder at the moment
            raise _unknown_file(path) from None

    def read(self, path: str, offset: int) -> bytes:
        """A piece of a file, of at most `PIECE` bytes; empty at or after the end."""
        try:
            with self.file(path).open("rb") as file:
                file.seek(min(offset, os.fstat(file.fileno()).st_size))
                return file.read(PIECE)
        except FileNotFoundError:  # another request has just deleted it
            raise _unknown_file(path) from None

    def seal(self, *paths: str | None) -> list[str]:
        """Accept no more files in these folders, because their checked contents are being loaded, possibly several times. Returns them, for
        `unseal`.
        """
        folders = [path for path in paths if path is not None]
        for path in folders:
            self.check(path)
        with self._changing:
            self._sealed.update(folders)
        return folders

    def unseal(self, paths: Iterable[str]) -> None:
        """Undo a seal after a failed load: the files may be replaced again, unless another call has loaded them or is loading them."""
        with self._changing:
            self._sealed.subtract(paths)
            self._sealed = +self._sealed

    def write(self, path: str, offset: int, content: bytes) -> FolderAnswer:
        """Write a piece of a file at `offset`, at most at its end; the file then ends with this piece. Returns the new size."""
        file = self.path_in_root(path)
        with self._changing:
            if self._removed:
                raise _unknown_file(path)
            if {path, *map(str, Path(path).parents)} & self._sealed.keys():
                problem = "is in a folder that was loaded, which stays as it is; send it to another"
                raise Refusal(
                    "invalid_request", f"{path} {problem}.", field="path", problem=problem
                )
            return self._write_piece(file, path, offset, content)

    def _write_piece(self, target: Path, path: str, offset: int, content: bytes) -> FolderAnswer:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("ab") as file:
                if (size := file.tell()) < offset:
                    problem = f"is {offset}, but the file has {size} bytes so far; send the pieces in their order"
                    raise Refusal(
                        "invalid_request", f"offset {problem}.", field="offset", problem=problem
                    )
                file.truncate(offset)
                file.write(content)
        except OSError as error:
            if is_full(error):
                raise Refusal("disk_full", retry_after=DISK_FULL_RETRY_SECONDS) from None
            problem = f"{path} cannot be written: {os.strerror(error.errno or 0)}"
            raise Refusal("invalid_request", f"{problem}.", field="path", problem=problem) from None
        return FolderAnswer(files=[FileFacts(path=target.name, size=offset + len(content))])

    def delete(self, path: str) -> None:
        """Delete a folder; a missing one is not an error."""
        shutil.rmtree(self.path_in_root(path), ignore_errors=True)

    def remove(self) -> None:
        """Delete all files, and accept no more."""
        with self._changing:
            self._removed = True
            shutil.rmtree(self.root, ignore_errors=True)


def _unknown_file(path: str) -> Refusal:
    return Refusal(
        "unknown_file",
        f"There is no {path}: it was never sent, saved or published, or is kept no longer.",
    )
