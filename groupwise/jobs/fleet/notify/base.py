"""Notifications of new jobs: a process that has made a job sends its id, and a waiting dispatcher wakes up and reads the database.

The database is authoritative. A notification only means "look, and look at these first", so nothing depends on one: lost, doubled, late,
reordered or forged ones are harmless, and if every notifier fails, the dispatcher's own sweep finds the same jobs within two seconds. A
notification carries ids of jobs; the receiver looks them up and trusts only the row.

There are four: within this process and through a socket in the fleet's folder (`local.py`), through PostgreSQL (`postgres.py`), through
NATS (`nats.py`), and all of them together (`composite.py`). This file has the protocol, the format of messages, and the set of pending ids.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol, cast

from groupwise.jobs.hosts.spec import JOB_ID

LARGEST = 64 * 1024
"""Maximum bytes of a message that is read; no legitimate list of ids is longer."""
DEEPEST = 8
"""Maximum depth of nested brackets in a list of ids."""
MAX_PENDING = 10_000
"""Maximum ids that are kept for a waiter that does not come."""


class Notifier(Protocol):
    """One listener for each process; any number of callers may notify it, from any thread."""

    def open(self) -> None:
        """Start the background tasks that sending needs, on the running loop; `wait` does so too. Raises nothing."""
        ...

    def notify(self, job_ids: Iterable[str]) -> None:
        """Wake waiting listeners, here and in other processes. Returns at once and raises nothing; delivery is best effort.

        Call it from any thread. Ids from before `open` are sent after it.
        """
        ...

    async def wait(self, timeout: float) -> frozenset[str]:
        """Return the ids announced since the last call, as soon as there are any; empty after `timeout` seconds without one."""
        ...

    async def close(self) -> None:
        """Send pending ids, if that takes only a moment, and close all connections."""
        ...


def ids_in(message: bytes) -> frozenset[str]:
    """Read the ids from an untrusted message; empty for anything that has none of these forms.

    An id as plain text, a JSON string, `{"job_id": "…"}`, `{"job_ids": ["…"]}`, or a JSON list of strings and such objects. Entries
    of a list that are not ids are ignored.
    """
    if len(message) > LARGEST:
        return frozenset()
    try:
        text = message.decode("utf-8").strip()
    except UnicodeDecodeError:
        return frozenset()
    if JOB_ID.fullmatch(text):
        return frozenset({text})
    if not text.startswith(("{", "[", '"')):
        return frozenset()
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return frozenset()
    return frozenset(name for name in _ids_within(document, DEEPEST) if JOB_ID.fullmatch(name))


def _ids_within(document: Any, depth: int) -> Iterator[str]:
    if isinstance(document, str):
        yield document
    elif isinstance(document, dict) and depth:
        fields = cast("dict[str, Any]", document)
        for key in ("job_id", "job_ids"):
            yield from _ids_within(fields.get(key), depth - 1)
    elif isinstance(document, list) and depth:
        for entry in cast("list[Any]", document):
            yield from _ids_within(entry, depth - 1)


def messages(job_ids: Iterable[str], largest: int) -> Iterator[bytes]:
    """Encode the ids as messages of at most `largest` bytes for `ids_in`. Texts that are not ids are left out, because listeners
    ignore them.
    """
    batch: list[str] = []
    size = 2
    for name in filter(JOB_ID.fullmatch, job_ids):  # ids are ASCII: one byte for each letter
        if batch and size + len(name) + 3 > largest:
            yield _encode_ids(batch)
            batch, size = [], 2
        batch.append(name)
        size += len(name) + 3
    if batch:
        yield _encode_ids(batch)


def _encode_ids(job_ids: Sequence[str]) -> bytes:
    if len(job_ids) == 1:
        return job_ids[0].encode()
    return json.dumps(list(job_ids), separators=(",", ":")).encode()


class PendingIds:
    """A bounded set of ids with one waiter, which takes all at once: received ids, for a dispatcher, or unsent ids, for the sending task.

    Ids may be put from any thread. Those beyond MAX_PENDING are dropped: the waiter is awake anyway, and a dispatcher that is woken reads
    the whole queue.
    """

    def __init__(self) -> None:
        self._ids: set[str] = set()
        self._lock = threading.Lock()
        self._has_ids = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def put(self, job_ids: Iterable[str]) -> None:
        """Keep the ids and wake the waiter; from any thread."""
        with self._lock:
            for name in job_ids:
                if len(self._ids) >= MAX_PENDING:
                    break
                self._ids.add(name)
            anything, loop = bool(self._ids), self._loop
        if anything and loop is None:
            self._has_ids.set()  # no task waits yet; the event only remembers
        elif anything and loop is not None:
            with suppress(RuntimeError):  # the loop has ended, and the waiter with it
                loop.call_soon_threadsafe(self._has_ids.set)

    async def wait(self, timeout: float | None) -> frozenset[str]:
        """Return all ids, as soon as there are any; empty after `timeout` seconds without one. None: wait without a limit."""
        self._loop = asyncio.get_running_loop()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while True:
                    await self._has_ids.wait()
                    if ids := self.take():
                        return ids
        return self.take()

    def take(self) -> frozenset[str]:
        """Take and return all present ids."""
        with self._lock:
            self._has_ids.clear()
            ids, self._ids = frozenset(self._ids), set()
        return ids
