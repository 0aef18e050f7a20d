"""What models have saved under names: listed, expired and deleted.

A checkpoint is a folder that the engine has written (`groupwise.server.engine.saved_adapters`). A file beside its weights says when
it expires, so a restart forgets nothing. An expired checkpoint is not listed and cannot be loaded. Its files are removed within
`SWEEP_INTERVAL` seconds, but not while a sampler of an open session uses them. Deleting a checkpoint lets it expire at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, replace

from groupwise.core.errors import StoreError, UsageError
from groupwise.core.waiting import cancel_and_wait
from groupwise.server.engine.saved_adapters import CheckpointNote, SavedFolders
from groupwise.server.engine.tinker_protocol import ModelSpec, Stored
from groupwise.server.tinker.sessions import NotFound, path_of

SWEEP_INTERVAL = 60.0
"""Expired checkpoints are looked for once in so many seconds."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Weights that a model has saved under a name."""

    stored: Stored
    spec: ModelSpec
    saved_at: float
    """Seconds since 1970."""
    size_bytes: int
    note: CheckpointNote


class Checkpoints:
    """The checkpoints of all models."""

    def __init__(
        self,
        folders: SavedFolders,
        is_sampled: Callable[[Stored], bool],
        clock: Callable[[], float],
    ) -> None:
        """`is_sampled`: whether a sampler of an open session uses these weights. `clock`: seconds since 1970."""
        self._folders = folders
        self._is_sampled = is_sampled
        self._clock = clock
        self._expires_at: dict[Stored, float] = {}
        """Expiry times in seconds since 1970, also of checkpoints that have expired and are still used."""
        self._saving: set[Stored] = set()
        """Names that are being saved, perhaps over a checkpoint that expires meanwhile."""
        self._sweeper: asyncio.Task[None] | None = None
        self.lock = asyncio.Lock()
        """Held while expired files are removed, and while a new sampler starts to use a checkpoint."""

    async def open(self) -> None:
        """Find when the checkpoints of earlier processes expire, and remove expired ones from now on. Call when samplers are restored, and
        no engine writes.
        """
        await asyncio.to_thread(self._folders.sweep)
        self._expires_at = await asyncio.to_thread(self._read_expiries)
        self._sweeper = asyncio.create_task(self._sweep())

    async def close(self) -> None:
        """Stop removing expired checkpoints."""
        await cancel_and_wait(self._sweeper)

    # --- saving and loading ----------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def saving(
        self, stored: Stored, ttl: int | None, user_metadata: Mapping[str, str] | None
    ) -> AsyncGenerator[None]:
        """Frees a name whose checkpoint has expired; the caller saves the weights inside. Then records when they expire, `ttl` seconds
        from now. UsageError if an expired checkpoint of that name is still used.
        """
        if self._has_expired(stored):
            await self.remove_expired()
        if self._has_expired(stored):
            raise UsageError(
                f"{path_of(stored)} has expired or was deleted, but a sampling client of an open session still uses it. Choose another "
                "name, or close that client first."
            )
        self._saving.add(stored)
        try:
            yield
            expires_at = None if ttl is None else self._clock() + ttl
            await self._write_note(stored, CheckpointNote(expires_at, user_metadata))
        finally:
            self._saving.discard(stored)

    def check_available(self, stored: Stored) -> None:
        """Raise NotFound if these weights have expired."""
        if self._has_expired(stored):
            raise NotFound(
                f"{path_of(stored)} has expired or was deleted. RestClient.list_checkpoints tells what its model has saved."
            )

    # --- for the REST client ---------------------------------------------------------------------

    async def of_model(self, model: str) -> list[Checkpoint]:
        """The checkpoints of a model, the oldest first."""
        return await asyncio.to_thread(self._list, model)

    async def of_all_models(self) -> list[Checkpoint]:
        """The checkpoints of all models, the newest first."""
        return (await asyncio.to_thread(self._list, None))[::-1]

    async def set_ttl(self, stored: Stored, ttl: int | None) -> None:
        """Let a checkpoint expire `ttl` seconds from now; None: never. NotFound if there is none."""
        await self._expire(stored, None if ttl is None else self._clock() + ttl)

    async def delete(self, stored: Stored) -> None:
        """Delete a checkpoint; its files stay while a sampler of an open session uses them. NotFound if there is none."""
        await self._expire(stored, self._clock())
        await self.remove_expired()

    async def _expire(self, stored: Stored, at: float | None) -> None:
        self.check_available(stored)
        try:
            await asyncio.to_thread(self._folders.read, stored)
            note = await asyncio.to_thread(self._folders.read_note, stored)
            await self._write_note(stored, replace(note, expires_at=at))
        except UsageError as error:
            raise NotFound(str(error)) from None

    def _list(self, model: str | None) -> list[Checkpoint]:
        checkpoints: list[Checkpoint] = []
        for stored in self._folders.checkpoints(model):
            with contextlib.suppress(FileNotFoundError, UsageError):  # removed meanwhile
                checkpoint = Checkpoint(
                    stored,
                    self._folders.read(stored).spec,
                    self._folders.saved_at(stored),
                    self._folders.size_of(stored),
                    self._folders.read_note(stored),
                )
                expires_at = checkpoint.note.expires_at
                if expires_at is None or expires_at > self._clock():
                    checkpoints.append(checkpoint)
        return sorted(checkpoints, key=lambda checkpoint: checkpoint.saved_at)

    # --- expiry ----------------------------------------------------------------------------------

    def _has_expired(self, stored: Stored) -> bool:
        expires_at = self._expires_at.get(stored)
        return expires_at is not None and expires_at <= self._clock()

    async def _write_note(self, stored: Stored, note: CheckpointNote) -> None:
        await asyncio.to_thread(self._folders.write_note, stored, note)
        if note.expires_at is None:
            self._expires_at.pop(stored, None)
        else:
            self._expires_at[stored] = note.expires_at

    def _read_expiries(self) -> dict[Stored, float]:
        notes = {stored: self._folders.read_note(stored) for stored in self._folders.checkpoints()}
        return {
            stored: note.expires_at for stored, note in notes.items() if note.expires_at is not None
        }

    async def remove_expired(self) -> None:
        """Remove the files of expired checkpoints that no sampler uses."""
        async with self.lock:
            for stored in [stored for stored in self._expires_at if self._has_expired(stored)]:
                if stored not in self._saving and not self._is_sampled(stored):
                    await asyncio.to_thread(self._folders.forget, stored)
                    self._expires_at.pop(stored, None)  # a request may have set no expiry meanwhile
                    logger.info("%s has expired, or was deleted: its files are removed", stored)

    async def _sweep(self) -> None:
        while True:
            try:
                await self.remove_expired()
            except (StoreError, OSError) as error:  # they are tried again at the next sweep
                logger.warning("expired checkpoints could not be removed: %s", error)
            await asyncio.sleep(SWEEP_INTERVAL)
