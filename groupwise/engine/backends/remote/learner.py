"""A learner on a training server. Its publications and states are files here, as if it were in this process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from groupwise.api.schemas.parts import (
    Discard,
    LoadState,
    Publish,
    SaveState,
)
from groupwise.core import atomic_files
from groupwise.core.types import (
    Policy,
)
from groupwise.engine.backends.remote.sampler import Published, stamp_of, weight_files
from groupwise.engine.backends.remote.session import Session
from groupwise.engine.backends.verb_learner import Verb, VerbLearner
from groupwise.runs import publications

ADAPTER_CONFIG, BASE = "adapter_config.json", "base_model_name_or_path"
"""File of an adapter that names the model it belongs to, and the key for that."""
_POLICY = TypeAdapter(Policy)


class RemoteLearner(VerbLearner):
    """A `groupwise.core.types.Learner` by the parts of a session."""

    def __init__(
        self,
        session: Session,
        publish_folder: Path,
        published: dict[str, Published],
        keep_publications: int = 2,
        base: str | None = None,
        *,
        tells_trained_logprobs: bool = True,
    ) -> None:
        """`published` receives publications; see `RemoteSampler`. `keep_publications`: number of the newest ones whose files stay. `base`:
        the adapters' name for the model that they belong to, which has another path on the server. `tells_trained_logprobs`: see
        `groupwise.api.schemas.parts.PartsOpenedAnswer`."""
        self._session = session
        self._publish_folder = publish_folder
        self._published = published
        self._keep = keep_publications
        self._base = base
        self._tells_trained_logprobs = tells_trained_logprobs

    async def _call(self, do: Verb) -> Any:
        """See `VerbLearner._call`."""
        return await self._session.call(do, ordered=True)

    async def trained_logprobs(self) -> list[tuple[float, ...]] | None:
        """See `groupwise.core.types.Learner.trained_logprobs`; None if the server's version does not tell them."""
        if not self._tells_trained_logprobs:
            return None
        return await super().trained_logprobs()

    def discard(self) -> None:
        """See `groupwise.core.types.Learner.discard`."""
        self._session.call_now(Discard(), ordered=True)

    async def publish(self, version: int) -> Policy:
        """See `groupwise.core.types.Learner.publish`. The files are fetched; old publications are removed."""
        return await self._session.awaited(self._publish(version))

    def save(self, folder: str) -> None:
        """See `groupwise.core.types.Learner.save`. StoreError if the disk here refuses."""
        with atomic_files.explained(Path(folder)):
            self._session.now(self._save(Path(folder)))

    def load(self, folder: str) -> None:
        """See `groupwise.core.types.Learner.load`."""
        self._session.now(self._load(Path(folder)))

    # --- within the session's thread --------------------------------------------------------------

    async def _publish(self, version: int) -> Policy:
        policy = _POLICY.validate_python(
            await self._session.called(Publish(version=version), ordered=True)
        )
        folder = publications.version_folder(self._publish_folder, version)
        with atomic_files.explained(folder):
            await self._fetch_files(policy.path, folder)
        self._published[str(folder)] = Published(policy.path, stamp_of(folder))
        for old in publications.remove_old(self._publish_folder, version, self._keep):
            self._published.pop(str(old), None)
        return replace(policy, path=str(folder))

    async def _fetch_files(self, there: str, folder: Path) -> None:
        await self._session.download(there, folder)
        described = folder / ADAPTER_CONFIG
        if self._base is not None and described.is_file():
            facts = {**json.loads(described.read_bytes()), BASE: self._base}
            described.write_text(json.dumps(facts, indent=2, sort_keys=True))

    async def _save(self, folder: Path) -> None:
        there = self._session.new_folder("state")
        await self._session.called(SaveState(folder=there), ordered=True)
        await self._fetch_files(there, folder)
        await self._session.forget(there)

    async def _load(self, folder: Path) -> None:
        there = self._session.new_folder("state")
        await self._session.upload(weight_files(folder), there)
        await self._session.called(LoadState(folder=there), ordered=True)
        await self._session.forget(there)
