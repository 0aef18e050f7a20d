"""Requests that are refused leave nothing behind: the memory of server and engine stays what it was."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx2
import pytest

from benchmarks.small_requests import START
from tests.integration.server.server_process import running

WARM_UP, AT_ONCE = 60, 8
MAX_GROWTH = 16.0
"""Megabytes. A long prompt has a quarter of one."""
TEXT = {"model": "latest", "prompt": "abc"}


def schema(number: int) -> dict[str, Any]:
    """One that cannot be enforced."""
    properties = {f"k{number}": {"type": "string", "pattern": f"({'a' * 30}{number}"}}
    described = {"name": "n", "schema": {"type": "object", "properties": properties}}
    return {
        "model": "latest",
        "messages": [{"role": "user", "content": "abc"}],
        "response_format": {"type": "json_schema", "json_schema": described},
    }


REFUSED: Mapping[str, tuple[str, Callable[[int], Any]]] = {
    "prompts": ("/completions", lambda number: {"prompt": f"a{number} " * 10}),
    "long prompts": ("/completions", lambda number: {"prompt": f"a{number} " * 60_000}),
    "tokens": ("/v1/completions", lambda number: {**TEXT, "prompt": [10**6 + number, 1]}),
    "stop tokens": ("/v1/completions", lambda number: {**TEXT, "stop_token_ids": [10**6 + number]}),
    "biases": ("/v1/completions", lambda number: {**TEXT, "logit_bias": {str(10**6 + number): 5}}),
    "fields": ("/v1/completions", lambda number: {**TEXT, f"field_{number}": 1}),
    "schemas": ("/v1/chat/completions", schema),
}


def memory(pid: int) -> float:
    """In megabytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


@pytest.mark.parametrize(
    "requests", [160, pytest.param(3_000, marks=pytest.mark.soak(suite="attacks"))]
)
async def test_the_memory_of_server_and_engine_stays(requests: int, tmp_path: Path) -> None:
    with running(tmp_path / "out") as server:
        async with httpx2.AsyncClient(base_url=server.url, timeout=120) as client:
            (await client.post("/start", json=START)).raise_for_status()

            async def send(numbers: range) -> None:
                for number in numbers:
                    for path, body in REFUSED.values():
                        answer = await client.post(path, json=body(number))
                        assert answer.status_code in (400, 422), answer.text

            async def send_many(first: int, last: int) -> None:
                shares = (range(first + share, last, AT_ONCE) for share in range(AT_ONCE))
                await asyncio.gather(*map(send, shares))

            await send_many(0, WARM_UP)
            engine = server.engine()
            assert engine is not None
            before = [memory(pid) for pid in (engine, server.pid)]
            await send_many(WARM_UP, WARM_UP + requests)
            growth = [
                memory(pid) - had for pid, had in zip((engine, server.pid), before, strict=True)
            ]
            assert server.engine() == engine
            assert max(growth) < MAX_GROWTH, growth
