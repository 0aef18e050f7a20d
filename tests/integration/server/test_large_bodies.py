"""Large bodies full of errors delay nobody for long, and occupy no memory permanently."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx2
import pytest

from benchmarks.small_requests import computing_seconds
from tests.integration.server.server_process import running
from tests.processes import wait_until

pytestmark = pytest.mark.soak(suite="attacks")
MANY = 2_000_000
KEYS = b"{" + b",".join(b'"k%d":1' % number for number in range(900_000)) + b"}"
NUMBERS = b'{"do": {"verb": "generate", "request": {"prompt_ids": [' + b"1," * 14_000_000 + b"1]}}}"
BODIES = {
    "/completions": KEYS,
    "/api/v1/create_session": b'{"sdk_version": "1", "tags": [' + b"1," * MANY + b"1]}",
    "/rewards": b'{"rewards": [' + b'"",' * MANY + b"1]}",
    "/step": b'{"group_ids": [' + b"null," * MANY + b"1]}",
    "/v1/chat/completions": b'{"model": "latest", "messages": [' + b"1," * MANY + b"1]}",
    "/api/v1/asample": b'{"sampling_params": {"stop": [' + b"null," * MANY + b"1]}}",
}


def memory(pid: int, name: str) -> int:
    """In megabytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith(name))


async def longest_silence(url: str, pid: int, work: asyncio.Task[None]) -> float:
    """Seconds that the server computed, at most, while somebody else waited for an answer. The machine may be busy."""
    longest = 0.0
    async with httpx2.AsyncClient(base_url=url, timeout=60) as other:
        while not work.done():
            before = computing_seconds(pid)
            assert (await other.get("/healthz")).status_code == 200
            longest = max(longest, computing_seconds(pid) - before)
            await asyncio.sleep(0.02)
    await work
    return longest


@pytest.mark.parametrize("path", [*BODIES, "/parts"])
async def test_large_bodies_block_no_other_request_and_memory_is_freed(
    tmp_path: Path, path: str
) -> None:
    with running(tmp_path / "out") as server:
        async with httpx2.AsyncClient(base_url=server.url, timeout=120) as client:
            headers = {"Content-Type": "application/json"}

            async def attack() -> None:
                for _ in range(3):
                    if path == "/parts":
                        await client.put("/parts/attacked-1", json={"owner": "me"})
                        where, body = "/parts/attacked-1/calls/1?wait=0", NUMBERS
                        answer = await client.put(where, content=body, headers=headers)
                    else:
                        answer = await client.post(path, content=BODIES[path], headers=headers)
                    assert answer.status_code in (400, 413, 422), answer.text[:300]
                    assert len(answer.content) < 20_000

            before = memory(server.pid, "VmRSS")
            silence = await longest_silence(server.url, server.pid, asyncio.create_task(attack()))
            assert silence < 1
            assert memory(server.pid, "VmHWM") < 2_500
            wait_until(lambda: memory(server.pid, "VmRSS") < before + 250, "its memory comes back")
