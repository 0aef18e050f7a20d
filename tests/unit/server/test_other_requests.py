"""A client that sends megabytes holds up no other: the event loop never computes for long at one go.

Measured is the computing time of the event loop's thread between two of its rounds, so a busy machine does not matter. What the thread that
parses a body holds up is measured in tests/unit/api/http/test_strict_json.py.
"""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.unit.server.fake_service import FakeService
from tests.unit.server.http_client import app_of, client_of

LONGEST = 0.5
"""Seconds of computing for which another request may wait."""
GROUP = b'{"group_id": "g-1", "rewards": [0.5, 1, 0.25, 1]},'
TOKENS = b"[" + b"12345," * 3_300_000 + b"1]"
BODIES = {
    "a prompt of 4 MiB": ("/completions", b'{"prompt": "' + b"word " * ((4 << 20) // 5) + b'"}'),
    "rewards of one group": ("/rewards", b'{"rewards": [' + b"0.5," * 5_000_000 + b"1]}"),
    "rewards of many groups": ("/rewards", b'{"groups": [' + GROUP * 400_000 + b"{}]}"),
    "tokens of an echo": (
        "/rewards",
        b'{"group_id": "g-1", "rewards": [1], "completion_tokens": [' + TOKENS + b"]}",
    ),
}


@pytest.mark.parametrize("name", BODIES)
async def test_the_event_loop_is_free_again_soon(name: str) -> None:
    path, body = BODIES[name]
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        while True:
            before = time.thread_time()
            await asyncio.sleep(0.001)
            longest = max(longest, time.thread_time() - before)

    headers = {"Content-Type": "application/json"}
    async with client_of(app_of(FakeService()), **headers) as client:
        watching = asyncio.create_task(watch())
        for _ in range(2):
            answer = await client.post(path, content=body)
            assert answer.status_code in (200, 422), answer.text[:300]
            await client.get("/healthz")
        watching.cancel()
    assert longest < LONGEST
