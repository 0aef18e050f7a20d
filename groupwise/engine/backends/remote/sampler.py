"""A sampler on a training server."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from groupwise.api.schemas.parts import Fingerprint, Generate, Load
from groupwise.core.errors import PolicyMismatchError, UsageError
from groupwise.core.types import Completion, GroupRequest, Policy
from groupwise.engine.backends.remote.session import Session

_COMPLETIONS = TypeAdapter(tuple[Completion, ...])

Stamp = tuple[tuple[str, int, int], ...]
"""Files of a folder: name, size, time of the last change."""


@dataclass(frozen=True, slots=True)
class Published:
    """A fetched publication."""

    there: str
    """Its folder on the server."""
    stamp: Stamp
    """Stamp of its files here: if they change, they are no longer those that the server has."""


class RemoteSampler:
    """A `groupwise.core.types.Sampler` by the parts of a session."""

    def __init__(self, session: Session, fingerprint: str, published: dict[str, Published]) -> None:
        """`fingerprint`: of the weights that it serves. `published`: the learner's latest publications, by their paths here."""
        self._session = session
        self._fingerprint = fingerprint
        self._published = published

    async def generate(self, request: GroupRequest) -> tuple[Completion, ...]:
        """See `groupwise.core.types.Sampler.generate`."""
        return _COMPLETIONS.validate_python(await self._session.call(Generate(request=request)))

    async def load(self, policy: Policy) -> None:
        """See `groupwise.core.types.Sampler.load`. Files that the server does not have are sent to it."""
        await self._session.awaited(self._loaded(policy))

    def fingerprint(self) -> str:
        """Fingerprint of the tensors in the server's memory, as they were when they were loaded."""
        return self._fingerprint

    async def _loaded(self, policy: Policy) -> None:
        known = self._published.get(policy.path)
        if known is not None and known.stamp == stamp_of(Path(policy.path)):
            try:
                return await self._load(policy, known.there)
            except UsageError:  # it is kept there no longer
                del self._published[policy.path]
        sent = self._session.new_folder("policy")
        await self._session.upload(weight_files(Path(policy.path)), sent)
        try:
            await self._load(policy, sent)
        finally:
            await self._session.forget(sent)

    async def _load(self, policy: Policy, there: str) -> None:
        try:
            self._fingerprint = await self._session.called(Load(policy=replace(policy, path=there)))
        except PolicyMismatchError:  # the weights served now are no policy, but have a fingerprint
            self._fingerprint = await self._session.called(Fingerprint())
            raise


def stamp_of(folder: Path) -> Stamp:
    """Facts that change with the folder's files, as far as can be told without reading them."""
    facts = ((path.name, path.stat()) for path in sorted(folder.iterdir()))
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in facts)


def weight_files(folder: Path) -> list[Path]:
    """Weights and the files that describe them; not the record of a run that may lie beside them."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file() and path.suffix in (".safetensors", ".json", ".bin")
    )
