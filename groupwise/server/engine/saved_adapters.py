"""Adapters saved by models, as folders of the server: read and deleted here, written by the engine.

    verbs/<model>/weights/<name>/          adapter and optimiser, to train on
    verbs/<model>/sampler_weights/<name>/  the adapter
    verbs/<model>/automatic/<call>/        adapter and optimiser after the call of that number; later calls are repeated from it

`saved.json`, in each of the first two, describes the saved weights; a folder is created completely or not at all. Beside it the server may
write `checkpoint.json`: when the weights expire, and what the client noted about them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from groupwise.core import atomic_files
from groupwise.core.errors import GroupwiseError, UsageError
from groupwise.server.engine.tinker_protocol import ModelSpec, Stored, StoredKind

DESCRIPTION = "saved.json"
NOTE = "checkpoint.json"
AUTOMATIC = "automatic"
AUTOMATIC_KEPT = 2
"""The newest, and the one before it, which is still needed until the ledger has recorded the newest."""


@dataclass(frozen=True, slots=True)
class Saved:
    """Describes a saved adapter."""

    spec: ModelSpec
    fingerprint: str
    """Fingerprint of the weights; see `groupwise.core.types.Policy.fingerprint`."""
    call: int
    """Number of the call that saved it. If that call is repeated, it may overwrite its own result."""


@dataclass(frozen=True, slots=True)
class CheckpointNote:
    """What a Tinker client may say when it saves weights under a name."""

    expires_at: float | None = None
    """Seconds since 1970; None: never."""
    user_metadata: Mapping[str, str] | None = None


class SavedFolders:
    """The weights saved on a server: paths, descriptions and deletion."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def sweep(self) -> None:
        """Delete what earlier engines were writing or deleting when they were killed."""
        for folder in self._root.glob("s-*/*"):
            with suppress(OSError):  # one that is just ending still writes: at the next start
                atomic_files.sweep(folder)

    def path_of(self, stored: Stored) -> Path:
        """Path of its folder, which need not exist."""
        return self._model_folder(stored.model) / stored.kind / stored.name

    def automatic_path(self, model: str, call: int) -> Path:
        """Path of the state after a call, which need not exist."""
        return self._model_folder(model) / AUTOMATIC / f"{call:09d}"

    def read(self, stored: Stored) -> Saved:
        """Read its description; raises UsageError if it is missing."""
        path = self.path_of(stored) / DESCRIPTION
        try:
            description: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            folder = self._model_folder(stored.model) / stored.kind
            saved_names = sorted(
                path.name for path in folder.glob("[A-Za-z0-9]*") if (path / DESCRIPTION).is_file()
            )
            raise UsageError(
                f"There is nothing saved as {stored.kind}/{stored.name} by {stored.model}. It has saved: "
                f"{', '.join(saved_names) or 'nothing of this kind'}."
            ) from None
        return Saved(
            ModelSpec(**description["spec"]), description["fingerprint"], description["call"]
        )

    @contextmanager
    def using(self, stored: Stored) -> Generator[None]:
        """Inside, the folder of saved weights is used. If they are removed meanwhile, because they expire or a client deletes them, any
        error becomes a UsageError that says so.
        """
        try:
            yield
        except (OSError, GroupwiseError):
            self.read(stored)
            raise

    def check_free(self, stored: Stored, call: int) -> None:
        """Raise UsageError if the name is taken, unless by this same call."""
        if not self.path_of(stored).is_dir() or self.read(stored).call == call:
            return
        raise UsageError(f"There is something saved as {stored.name} already; choose another name.")

    def describe(self, folder: Path, saved: Saved) -> None:
        """Write the description into a folder that is being made."""
        text = json.dumps(asdict(saved), indent=2)
        (folder / DESCRIPTION).write_text(text, encoding="utf-8")

    def write_note(self, stored: Stored, note: CheckpointNote) -> None:
        """Write the note of saved weights; an earlier one is replaced. If there was none and nothing is noted, nothing is written.

        Raises UsageError if the weights have been removed.
        """
        path = self.path_of(stored) / NOTE
        if note != CheckpointNote() or path.is_file():
            with self.using(stored):
                atomic_files.write_json(path, asdict(note))

    def read_note(self, stored: Stored) -> CheckpointNote:
        """The note of saved weights; an empty one if none was written."""
        try:
            return CheckpointNote(**json.loads((self.path_of(stored) / NOTE).read_text("utf-8")))
        except FileNotFoundError:
            return CheckpointNote()

    def saved_at(self, stored: Stored) -> float:
        """When the weights were saved, in seconds since 1970. FileNotFoundError if they are missing."""
        return (self.path_of(stored) / DESCRIPTION).stat().st_mtime

    def size_of(self, stored: Stored) -> int:
        """Size of the saved files in bytes. FileNotFoundError if the weights are missing."""
        size = 0
        for path in self.path_of(stored).iterdir():
            with suppress(FileNotFoundError):  # a note under construction, which was renamed
                size += path.stat().st_size
        return size

    def checkpoints(self, model: str | None = None) -> Iterator[Stored]:
        """All weights saved under names that clients chose, of one model or of all."""
        folders = sorted(self._root.glob("s-*")) if model is None else [self._model_folder(model)]
        for folder in folders:
            for kind in get_args(StoredKind):
                for path in sorted((folder / kind).glob("[A-Za-z0-9]*")):
                    if (path / DESCRIPTION).is_file():
                        yield Stored(folder.name.replace("_", ":"), kind, path.name)

    def forget(self, stored: Stored) -> None:
        """Delete the weights, if they exist."""
        if self.path_of(stored).is_dir():
            atomic_files.remove_folder(self.path_of(stored))

    def forget_automatic(self, model: str, *, before: int | None = None) -> None:
        """Delete the automatic states of a model. With `before`, only those of earlier calls are deleted, and so many stay that
        `AUTOMATIC_KEPT` remain, counting the state of that call.
        """
        folder = self._model_folder(model) / AUTOMATIC
        if before is None:
            shutil.rmtree(folder, ignore_errors=True)
            return
        older_states = sorted(path for path in folder.glob("[0-9]*") if int(path.name) < before)
        for path in older_states[: max(0, len(older_states) - (AUTOMATIC_KEPT - 1))]:
            atomic_files.remove_folder(path)

    def _model_folder(self, model: str) -> Path:
        return self._root / model.replace(":", "_")
