"""The doorbell: whoever has made a job rings, a dispatcher that waits hears it and looks into the database.

The database is the truth. A ring says no more than "look, and look at these first", so nothing depends on one: lost, doubled, late,
reordered or forged rings are harmless, and with every doorbell dead the dispatcher's own sweep finds the same jobs two seconds later.
What is rung are ids of jobs; whoever hears one looks it up and believes the row.

There are four: in this process and through a socket in the fleet's folder (`local.py`), through PostgreSQL (`postgres.py`), through NATS
(`nats.py`), and all of them together (`composite.py`). How messages read is told here, `pending_ids.py` is where ids wait.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, cast

from groupwise.jobs.hosts.spec import JOB_ID

LARGEST = 64 * 1024
"""Bytes of a message that is still read; no list of ids that anybody means is longer."""
DEEPEST = 8
"""Brackets within brackets; more is no list of ids."""


class Doorbell(Protocol):
    """One listener a process; as many ringers as like, from any thread."""

    def open(self) -> None:
        """Begin, in the background of the running loop, what ringing needs; `wait` does it too. Raises nothing."""
        ...

    def ring(self, job_ids: Iterable[str]) -> None:
        """Wake those who wait, here and in other processes. Returns at once and raises nothing; delivery is tried, not promised.

        From any thread. What is rung before `open` is sent after it.
        """
        ...

    async def wait(self, timeout: float) -> frozenset[str]:
        """The ids rung since the last call, as soon as there are any; empty after `timeout` seconds without."""
        ...

    async def close(self) -> None:
        """Send what was rung, if that can be done in a moment, and let go of everything."""
        ...


def ids_in(message: bytes) -> frozenset[str]:
    """The ids that a message of a stranger names; empty for everything that is none of the forms below.

    An id as plain text, a JSON string, `{"job_id": "…"}`, `{"job_ids": ["…"]}`, or a JSON list of strings and such objects. Entries
    of a list that are no ids are passed over.
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
    return frozenset(name for name in _names(document, DEEPEST) if JOB_ID.fullmatch(name))


def _names(document: Any, depth: int) -> Iterator[str]:
    if isinstance(document, str):
        yield document
    elif isinstance(document, dict) and depth:
        named = cast("dict[str, Any]", document)
        for key in ("job_id", "job_ids"):
            yield from _names(named.get(key), depth - 1)
    elif isinstance(document, list) and depth:
        for entry in cast("list[Any]", document):
            yield from _names(entry, depth - 1)


def messages(job_ids: Iterable[str], largest: int) -> Iterator[bytes]:
    """The ids as messages of at most `largest` bytes, as `ids_in` reads them; what is no id would be heard by nobody, and is left out."""
    held: list[str] = []
    size = 2
    for name in filter(JOB_ID.fullmatch, job_ids):  # so that each letter is one byte
        if held and size + len(name) + 3 > largest:
            yield _message(held)
            held, size = [], 2
        held.append(name)
        size += len(name) + 3
    if held:
        yield _message(held)


def _message(job_ids: Sequence[str]) -> bytes:
    if len(job_ids) == 1:
        return job_ids[0].encode()
    return json.dumps(list(job_ids), separators=(",", ":")).encode()
