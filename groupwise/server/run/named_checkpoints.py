"""Checkpoints that clients saved by name: kept until they are deleted, even if the run is.

D/checkpoints/<name>/             the files of the checkpoint, hard-linked if the disk supports it
D/checkpoints/<name>/saved.json   its run and step, the settings for a new run from it, and the request that made it
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.api.schemas.keys import Caller
from groupwise.api.schemas.problems import Refusal
from groupwise.api.schemas.training import CheckpointAnswer
from groupwise.core import atomic_files
from groupwise.runs import checkpoints
from groupwise.runs.checkpoints import MANIFEST, Checkpoint
from groupwise.runs.find import SAVED, saved_facts
from groupwise.runs.folder import CHECKPOINTS
from groupwise.server.ledger.runs import RunRow


@dataclass(frozen=True, slots=True)
class StartCheckpoint:
    """A checkpoint that a new run can start from."""

    folder: Path
    settings: Mapping[str, Any]
    """Settings of the checkpoint's run, as posted."""
    run: str
    step: int


class NamedCheckpoints:
    """The named checkpoints of one server, and access to the automatic ones of its runs."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._root = output / CHECKPOINTS

    def refuse_taken(self, name: str) -> None:
        """Refuse with `checkpoint_exists` if the name is taken."""
        if (self._root / name).exists():
            raise Refusal(
                "checkpoint_exists", f"there is a checkpoint {name!r} already; choose another name."
            )

    def saved_by_request(self, name: str, caller: Caller) -> CheckpointAnswer | None:
        """The checkpoint of this name, if this same request (by its Idempotency-Key) has made it."""
        facts = saved_facts(self._root / name)
        if caller.answer_key is None or facts is None:
            return None
        if facts.get("asked") != _request_name(caller):
            return None
        return CheckpointAnswer(name=name, run_id=facts["run"], step=facts["step"], address=name)

    def keep(self, name: str, checkpoint: Path, row: RunRow, caller: Caller) -> CheckpointAnswer:
        """Save a checkpoint under a name. StoreError or CheckpointError if it is pruned meanwhile."""
        self.refuse_taken(name)
        saved_checkpoint = checkpoints.read(checkpoint)

        def fill(folder: Path) -> None:
            # Not the files that are there: the run may be deleting them.
            for file in (*saved_checkpoint.files, MANIFEST):
                copy = folder / file
                copy.parent.mkdir(parents=True, exist_ok=True)
                atomic_files.keep_file(checkpoint / file, copy)
            facts = {"run": row.run, "step": saved_checkpoint.step, "settings": row.settings}
            (folder / SAVED).write_text(json.dumps({**facts, "asked": _request_name(caller)}))

        try:
            atomic_files.make_folder(self._root / name, fill, replace=False)
        except FileExistsError:  # another request has taken the name meanwhile
            self.refuse_taken(name)
            raise
        return CheckpointAnswer(name=name, run_id=row.run, step=saved_checkpoint.step, address=name)

    def list_checkpoints(self) -> Iterator[CheckpointAnswer]:
        """All named checkpoints, sorted by name; not those that are being written."""
        for file in sorted(self._root.glob(f"[!.]*/{SAVED}")):
            name = file.parent.name
            if (facts := saved_facts(self._root / name)) is not None:
                yield CheckpointAnswer(
                    name=name, run_id=facts["run"], step=facts["step"], address=name
                )

    def automatic(self, row: RunRow) -> list[Checkpoint]:
        """The automatic checkpoints in a run's folder, oldest first."""
        return list(checkpoints.complete(self._output / row.folder / CHECKPOINTS))

    def find(self, name: str) -> StartCheckpoint | None:
        """The named checkpoint; None if it does not exist."""
        folder = self._root / name
        if folder.parent != self._root or (facts := saved_facts(self._root / name)) is None:
            return None
        return StartCheckpoint(folder, facts["settings"], facts["run"], facts["step"])

    def of_run(self, run: str) -> list[Path]:
        """The folders of a run's named checkpoints."""
        return [
            self._root / checkpoint.address
            for checkpoint in self.list_checkpoints()
            if checkpoint.run_id == run
        ]


def _request_name(caller: Caller) -> list[str] | None:
    """API key id and Idempotency-Key of the request that makes a checkpoint."""
    return None if caller.answer_key is None else [caller.key_id, caller.answer_key.key]
