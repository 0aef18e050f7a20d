"""What clients read of server and run: the status, the events as they come, and the files of a version."""

from __future__ import annotations

import asyncio
import time

from groupwise.server import keeping
from groupwise.server.clockwork import Clockwork
from groupwise.server.current import Current
from groupwise.server.downloads import OpenVersion
from groupwise.server.keeper import Keeper
from groupwise.server.ledger import events
from groupwise.server.ledger.writer import Ledger
from groupwise.server.status import status_of
from groupwise.server.tokenizers import tokenizer_answer
from groupwise.wire.problems import Refusal
from groupwise.wire.training import EventData, StatusAnswer, TokenizerAnswer


class Reading:
    """Of the run that is, or was last."""

    def __init__(
        self, current: Current, ledger: Ledger, keeper: Keeper, clockwork: Clockwork
    ) -> None:
        self._keeper = keeper
        self._clockwork = clockwork
        self._current = current
        self._ledger = ledger

    async def status(self) -> StatusAnswer:
        """Where server and run stand."""
        row, conductor = self._current.latest, self._current.conductor
        if row is None:
            return StatusAnswer(phase="idle")
        versions = await asyncio.to_thread(self._current.versions(row).steps)
        told = await self._ledger.do(keeping.told, row.run)  # last, so that it fits the phase
        return status_of(told, conductor, self._clockwork.probed, versions, self._keeper.restarts)

    async def events(self, after: int | None, limit: int) -> list[EventData]:
        """At most so many events after this one, the oldest first; None: those that come from now on."""
        if after is None:
            return []
        found = await self._ledger.do(events.events_after, after, limit)
        return [
            EventData(id=each.id, kind=each.kind, at=each.at, run_id=each.run, **each.data)
            for each in found
        ]

    async def last_event(self) -> int:
        """The id of the newest event."""
        return await self._ledger.do(events.last_event)

    async def next_event(self, after: int, seconds: float) -> None:
        """Return when there is an event after this one, or so many seconds are over, or the server shuts down."""
        deadline = time.monotonic() + seconds
        while True:
            beat = self._current.changed.next
            if self._current.shutting_down or await self.last_event() > after:
                return
            try:
                async with asyncio.timeout(max(deadline - time.monotonic(), 0)):
                    await beat.wait()
            except TimeoutError:
                return

    async def open_version(self, version: str | None) -> OpenVersion:
        """The files of a version, open."""
        versions = self._current.versions(self._current.any_run())
        return await asyncio.to_thread(versions.open, version)

    async def tokenizer(self) -> TokenizerAnswer:
        """What a client needs to render and tokenise as the server does."""
        standing = self._current.standing
        if standing is None:
            conductor = self._current.conductor
            raise conductor.refusal() if conductor else Refusal("not_started")
        opened = standing.opened
        folder = self._current.tokenizer_folder(opened.tokenizer_hash)
        return await asyncio.to_thread(tokenizer_answer, folder, opened)
