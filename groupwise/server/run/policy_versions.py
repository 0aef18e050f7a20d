"""Lists the readable versions of a policy, and opens their files.

The last few policies are in the engine's publication folder, checkpoints and the final weights in the run's folder, and named checkpoints
in the server's output. All files of a version are opened at once: the engine deletes old publications, but an open file can be read to its
end.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from groupwise.api.schemas.problems import Refusal
from groupwise.core.errors import CheckpointError
from groupwise.core.types import Policy
from groupwise.engine.models.artefact import CARD, is_adapter, tokenizer_files, weight_files
from groupwise.runs import checkpoints, find
from groupwise.runs.folder import CHECKPOINTS, FINAL, RECORD
from groupwise.server.run.downloads import OpenFile, OpenVersion

LATEST = "latest"
OTHERS = "GET /checkpoints lists those of earlier runs, and those with a name."

WeightsFolder = tuple[Path, str]
"""A folder with weights, and the fingerprint of the weights."""


@dataclass(frozen=True, slots=True)
class Versions:
    """The versions of one run."""

    run: str
    folder: Path
    step: int
    """Number of completed steps."""
    published: Mapping[int, Policy]
    """Published policies, by step count."""
    named: Sequence[Path]
    """Folders of the run's named checkpoints."""
    tokenizer: Path
    """Folder with the run's tokenizer, which is part of every version."""

    def steps(self) -> list[int]:
        """Step counts of all readable versions, in order."""
        published = (step for step, policy in self.published.items() if Path(policy.path).is_dir())
        return sorted({*published, *self._saved_weights()})

    def open(self, version: str | None) -> OpenVersion:
        """Open the files of a version: its weights, the tokenizer, and a model card.

        Refuses with `unknown_version` if it never existed, with `version_gone` if it is no longer kept.
        """
        step = self.step
        if version is not None and version != LATEST:
            run, _, number = version.rpartition("@")
            of_this_run = run in ("", self.run) and number.isascii() and number.isdecimal()
            if not of_this_run or (
                int(number) > self.step and int(number) not in self._saved_weights()
            ):
                raise Refusal(
                    "unknown_version",
                    f"there is no version {version!r}: the run is {self.run}, and it has done {self.step} steps. Versions that can be "
                    f"read: {self._list_steps()}. {OTHERS}",
                )
            step = int(number)
        policy = self.published.get(step)
        published = policy and (Path(policy.path), policy.fingerprint)
        for weights in (published, self._saved_weights().get(step)):
            if weights is not None:
                try:
                    return self._open_version(step, *weights)
                except FileNotFoundError:  # it was deleted meanwhile
                    continue
        raise Refusal(
            "version_gone",
            f"version {self.run}@{step} is no longer kept. Versions that can be read: {self._list_steps()}. {OTHERS} Save a checkpoint by "
            "name to keep one.",
        )

    def _saved_weights(self) -> dict[int, WeightsFolder]:
        """Folders by step count: checkpoints, or the final weights in place of the checkpoint at the same step."""
        named_checkpoints = [
            complete for path in self.named if (complete := _complete_checkpoint(path)) is not None
        ]
        automatic = checkpoints.complete(self.folder / CHECKPOINTS)
        weights_by_step = {
            checkpoint.step: (
                checkpoint.path,
                str(checkpoint.extra["position"]["policy"]["fingerprint"]),
            )
            for checkpoint in (*named_checkpoints, *automatic)
            if "position" in checkpoint.extra
        }
        final = self.folder / FINAL
        if weights_by_step and final.is_dir() and (self.folder / RECORD).is_file():
            step = find.final_step(self.folder)
            if step in weights_by_step:
                weights_by_step[step] = (final, weights_by_step[step][1])
        return weights_by_step

    def _open_version(self, step: int, folder: Path, fingerprint: str) -> OpenVersion:
        from groupwise.engine.models.card import (
            model_card,  # imports a library for the hub: a third of a second
        )

        weights = list(weight_files(folder))
        if not any(path.suffix == ".safetensors" for path in weights):
            raise FileNotFoundError(folder)
        kind: Literal["adapter", "full"] = "adapter" if is_adapter(folder) else "full"
        with ExitStack() as stack:
            files = [
                OpenFile(path.name, path.stat().st_size, stack.enter_context(path.open("rb")))
                for path in (*weights, *tokenizer_files(self.tokenizer))
            ]
            stack.pop_all()
        if (self.folder / RECORD).is_file():  # a named checkpoint may outlive its run
            card = model_card(self.folder, folder, step).encode()
            files.append(OpenFile(CARD, len(card), io.BytesIO(card)))
        return OpenVersion((self.run, step), fingerprint, kind, files)

    def _list_steps(self) -> str:
        return ", ".join(f"{self.run}@{step}" for step in self.steps()) or "none"


def _complete_checkpoint(folder: Path) -> checkpoints.Checkpoint | None:
    """A named checkpoint; None if it is being deleted, or is damaged."""
    try:
        return checkpoints.read(folder)
    except CheckpointError:
        return None
