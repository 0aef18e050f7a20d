"""kill -9 of the engine and of the server, at random instants, while clients work: nothing acknowledged is lost, nothing trained twice.

The clients know nothing of it: they ask and post until they are answered. Afterwards each draw is part of exactly one step, in the
server's ledger and in the run's record alike, and the policy is that of an undisturbed server, bit for bit.

Each run of the tests kills five times, most of them with the fake engine, which begins quickly; `make soak SUITE=kills` kills KILLS
times (default 200), half of them with the real one. The instants are drawn from SEED, or from a seed that is printed.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from groupwise.api.client import AsyncTrainingClient
from tests.integration.server.server_process import FAKE, Server

SIZE = 4
MAX_DELAY_S = 0.25
"""From a step to the kill: a few steps take as long."""
STEPS_PER_KILL = 6
"""Clients do not begin the last of them before the kill."""
CLIENTS = 6
TIMEOUT_S = 300.0
SETTINGS: dict[str, Any] = {
    "model_id": "tiny", "max_completion_length": 6, "num_completions_per_prompt": 4,
    "groups_per_step": SIZE, "staleness": 0, "max_prompt_length": 16, "save_steps": 3,
    "training": {"seed": 3}, "run_name": "killed",
}  # fmt: skip
NO_END_OF_RESTARTS = "max_engine_restarts=100000"


def begun(folder: Path, real: bool) -> Server:
    words = [NO_END_OF_RESTARTS, "log_format=json"]
    server = Server(folder, *words, command=None if real else FAKE)
    server.begin()
    return server


async def work(server: Server, steps: int, killed: Sequence[int] | None = None) -> None:
    """What the clients do: every draw once, each its share, whatever happens. With `killed`, the steps at kills, they wait for the next."""

    def may_begin(draw: int) -> bool:
        return killed is None or draw // SIZE < STEPS_PER_KILL * (len(killed) + 1) - 1

    async def client(first: int) -> None:
        async with AsyncTrainingClient(server.url, retry_timeout=TIMEOUT_S) as one:
            for draw in range(first, steps * SIZE, CLIENTS):
                while not may_begin(draw):  # noqa: ASYNC110 — the killer works on it
                    await asyncio.sleep(0.01)
                group = await one.completions(f"abc{draw % 7}", draw=draw)
                rewards = [float(text.count("a")) + len(text) / 10 for text in group.completions]
                answer = await one.rewards(group, rewards)
                assert answer.group_id == group.group_id

    async with AsyncTrainingClient(server.url, retry_timeout=TIMEOUT_S) as one:
        await one.start(**SETTINGS, max_steps=steps)
    await asyncio.gather(*(client(first) for first in range(CLIENTS)))
    async with AsyncTrainingClient(server.url, retry_timeout=TIMEOUT_S) as one:
        run = (await one.status()).run_id
        async for event in one.events(after=0):
            if event.kind == "finished" and event.run_id == run:
                return


async def killing(server: Server, rng: random.Random, kills: int, killed: list[int]) -> None:
    """Kill the engine at first, then it or the server, and start the latter again; notes the steps that were done at each kill."""
    step = 0
    for number in range(kills):
        # An engine works since the first step. What dies twice over one plan would rightly put it aside.
        while await _trained(server) <= step:  # noqa: ASYNC110 — another process works on it
            await asyncio.sleep(0.02)
        await asyncio.sleep(rng.uniform(0.0, MAX_DELAY_S))
        if number and rng.random() < 0.5:
            server.kill()
            await asyncio.sleep(rng.uniform(0.0, 0.2))
            await asyncio.to_thread(server.begin)
        else:
            while (engine := server.engine()) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            os.kill(engine, signal.SIGKILL)
        step = await _trained(server)
        killed.append(step)


async def _trained(server: Server) -> int:
    """Steps that the ledger knows of."""

    def look() -> int:
        with suppress(sqlite3.Error):
            return _asked(server, "SELECT count(*) FROM plans WHERE state = 'trained'")[0][0]
        return 0

    return await asyncio.to_thread(look)


def course(server: Server) -> list[tuple[int, str, Sequence[int]]]:
    """Of each step: its index, the fingerprint that it left, its draws."""
    steps_taken = _asked(
        server,
        """SELECT plans.step, fingerprint_out, draw FROM plans JOIN groups ON groups.plan = plans.id
        WHERE groups.state = 'trained' ORDER BY plans.step, position""",
    )
    draws: dict[tuple[int, str], list[int]] = {}
    for step, fingerprint, draw in steps_taken:
        draws.setdefault((step, fingerprint), []).append(draw)
    return [(step, fingerprint, tuple(each)) for (step, fingerprint), each in draws.items()]


def _asked(server: Server, query: str) -> list[Any]:
    address = f"file:{server.folder}/server.db?mode=ro"
    with closing(sqlite3.connect(address, uri=True)) as ledger:
        return ledger.execute(query).fetchall()


async def _undisturbed(folder: Path, steps: int, real: bool) -> list[Any]:
    server = begun(folder, real)
    try:
        await work(server, steps)
        return course(server)
    finally:
        server.kill()


async def _killed(folder: Path, steps: int, real: bool, kills: int, seed: int) -> list[Any]:
    server = begun(folder, real)
    killed: list[int] = []
    killer = asyncio.create_task(killing(server, random.Random(seed), kills, killed))
    try:
        await work(server, steps, killed)
        await killer
        assert killed[-1] < steps, "the last kill came when all was done"
        return course(server)
    finally:
        killer.cancel()
        await asyncio.gather(killer, return_exceptions=True)
        server.kill()


async def _holds(tmp_path: Path, real: bool, kills: int) -> None:
    seed = int(os.environ.get("SEED") or random.randrange(2**32))
    print(f"SEED={seed}")
    steps = STEPS_PER_KILL * kills
    calm = await _undisturbed(tmp_path / "calm", steps, real)
    steps_taken = await _killed(tmp_path / "killed", steps, real, kills, seed)
    assert [step for step, _, _ in steps_taken] == list(range(steps))
    assert sorted(draw for _, _, draws in steps_taken for draw in draws) == list(
        range(steps * SIZE)
    )
    assert steps_taken == calm


@pytest.mark.timeout(300)
async def test_kills_with_the_fake_engine(tmp_path: Path) -> None:
    await _holds(tmp_path, real=False, kills=4)


@pytest.mark.timeout(300)
async def test_kills_with_the_real_engine(tmp_path: Path) -> None:
    await _holds(tmp_path, real=True, kills=1)


@pytest.mark.soak(suite="kills")
@pytest.mark.parametrize("real", [False, True])
async def test_server_kills(tmp_path: Path, real: bool) -> None:
    await _holds(tmp_path, real, int(os.environ.get("KILLS", "200")) // 2)
