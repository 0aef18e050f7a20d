"""Records what clients opened and asked for, and the results, before clients are told.

`LedgerJournal` keeps it in `server.db`. If the disk refuses, it waits: meanwhile clients get no answers, and are to ask again.
`NoJournal` keeps nothing; then all that clients have opened ends with the process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Concatenate, ParamSpec, Protocol

from groupwise.core.errors import StoreError
from groupwise.server.engine.verb_protocol import ModelSpec, Stored
from groupwise.server.ledger import calls
from groupwise.server.ledger.calls import CallRow, Everything, Outcome
from groupwise.server.ledger.transaction import Transaction
from groupwise.server.ledger.writer import Ledger

logger = logging.getLogger(__name__)

AGAIN = 1.0
"""Seconds between two attempts to write to a disk that refuses."""

P = ParamSpec("P")


class Journal(Protocol):
    """See the module. Each returns when it is on the disk."""

    durable: bool

    async def everything(self) -> Everything: ...

    async def add_session(self, id: str, name: str | None) -> None: ...

    async def end_session(self, id: str) -> None: ...

    async def add_model(self, id: str, session: str, spec: ModelSpec) -> None: ...

    async def add_sampler(
        self, id: str, session: str, base: str, weights: Stored | None
    ) -> None: ...

    async def accept(self, call: CallRow) -> None: ...

    async def settle(self, id: str, outcome: Outcome) -> None: ...

    async def to_repeat(self, model: str, after: int) -> list[tuple[str, bytes]]: ...

    async def forget(self, ids: Sequence[str]) -> None: ...


class NoJournal:
    """Keeps nothing."""

    durable = False

    async def everything(self) -> Everything:
        return Everything((), (), (), ())

    async def add_session(self, id: str, name: str | None) -> None: ...

    async def end_session(self, id: str) -> None: ...

    async def add_model(self, id: str, session: str, spec: ModelSpec) -> None: ...

    async def add_sampler(
        self, id: str, session: str, base: str, weights: Stored | None
    ) -> None: ...

    async def accept(self, call: CallRow) -> None: ...

    async def settle(self, id: str, outcome: Outcome) -> None: ...

    async def to_repeat(self, model: str, after: int) -> list[tuple[str, bytes]]:
        return []

    async def forget(self, ids: Sequence[str]) -> None: ...


class LedgerJournal:
    """Journal in the ledger of a server."""

    durable = True

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def everything(self) -> Everything:
        return await self._ledger.do(calls.everything)

    async def add_session(self, id: str, name: str | None) -> None:
        await self._ledger.do(calls.add_session, id, name)

    async def end_session(self, id: str) -> None:
        await self._written(calls.end_session, id)

    async def add_model(self, id: str, session: str, spec: ModelSpec) -> None:
        await self._written(calls.add_model, id, session, asdict(spec))

    async def add_sampler(self, id: str, session: str, base: str, weights: Stored | None) -> None:
        stored: Any = None if weights is None else asdict(weights)
        await self._written(calls.add_sampler, id, session, base, stored)

    async def accept(self, call: CallRow) -> None:
        await self._written(calls.accept, call)

    async def settle(self, id: str, outcome: Outcome) -> None:
        await self._written(calls.settle, id, outcome)

    async def to_repeat(self, model: str, after: int) -> list[tuple[str, bytes]]:
        return await self._ledger.do(calls.to_repeat, model, after)

    async def forget(self, ids: Sequence[str]) -> None:
        await self._written(calls.forget_answers, list(ids))

    async def _written(
        self,
        operation: Callable[Concatenate[Transaction, P], None],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        while True:
            try:
                return await self._ledger.do(operation, *args, **kwargs)
            except StoreError as error:
                logger.warning("what a client asked for waits until it can be written: %s", error)
                await asyncio.sleep(AGAIN)
