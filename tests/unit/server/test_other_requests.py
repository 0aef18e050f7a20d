"""A client that sends megabytes delays no other: the event loop never computes for long at once.

Measured is the computing time of the event loop's thread between two of its rounds, so a busy machine does not matter. What the thread that
parses a body holds up is measured in tests/unit/api/http/test_strict_json.py, both together in
tests/integration/server/test_large_bodies.py.
"""

from __future__ import annotations

import asyncio
import time

import pytest

from groupwise.api.http.route import SMALL_BODY
from groupwise.api.http.strict_json import MAX_KEYS, MAX_LISTS
from tests.unit.server.fake_service import FakeService
from tests.unit.server.http_client import app_of, client_of

LONGEST = 1.0
"""Seconds of computing for which another request may wait."""
GROUP = b'{"group_id": "g-1", "rewards": [0.5, 1, 0.25, 1]},'
TOKENS = b"[" + b"12345," * 3_300_000 + b"1]"
LARGE = 31 << 20
"""Bytes just below what the server reads."""
BODIES = {
    "a prompt of 4 MiB": ("/completions", b'{"prompt": "' + b"word " * ((4 << 20) // 5) + b'"}'),
    "rewards of one group": ("/rewards", b'{"rewards": [' + b"0.5," * 5_000_000 + b"1]}"),
    "rewards of many groups": ("/rewards", b'{"groups": [' + GROUP * 400_000 + b"{}]}"),
    "tokens of an echo": (
        "/rewards",
        b'{"group_id": "g-1", "rewards": [1], "completion_tokens": [' + TOKENS + b"]}",
    ),
    "unknown keys": (
        "/rewards",
        b"{" + b",".join(b'"k%d":1' % number for number in range(MAX_KEYS)) + b"}",
    ),
    "lists of prompts": ("/completions", b'{"prompts": [' + b"[]," * (MAX_LISTS - 5) + b"1]}"),
    "quotes in a prompt": ("/completions", b'{"prompt": "' + b'\\"' * (LARGE // 2) + b'"}'),
    "halves of characters": (
        "/completions",
        b'{"prompt": "' + b"\\ud83d\\ude00" * (LARGE // 12) + b'"}',
    ),
    "nothing for long": ("/completions", b'{"prompt": 1}' + b" " * LARGE),
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
            assert answer.is_success or len(answer.content) < 40_000
            await client.get("/healthz")
        watching.cancel()
    assert longest < LONGEST


async def test_settings_and_names_come_in_small_bodies() -> None:
    app = app_of(FakeService())
    async with client_of(app, **{"Content-Type": "application/json"}) as client:
        for path in ("/start", "/stop", "/step", "/model", "/checkpoints", "/trajectories/close"):
            answer = await client.post(path, content=b" " * SMALL_BODY + b"1")
            assert (answer.status_code, answer.json()["code"]) == (413, "too_large"), path
        answer = await client.post("/rewards", content=b" " * SMALL_BODY + b"1")
        assert answer.status_code == 422
