"""A run whose clients name their draws is the same for one client and for many, however fast each of them is, at every staleness."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest

from groupwise.api.schemas.problems import Refusal
from tests.unit.server.restarting_server import PointedServer
from tests.unit.server.serving import Served

STEPS = 5
MAX_ROUNDS = 20
"""Rounds of the event loop, at most, for which a call waits at one point."""


async def course(
    folder: Path, staleness: int, clients: int, seed: int, size: int
) -> dict[str, object]:
    """What the run learnt from, and with which policies its draws were sampled.

    Every client, and every point that a call to the engine or the ledger passes, waits for a number of rounds that `seed` chooses.
    """
    rng = random.Random(seed)

    async def wait(point: str = "") -> None:
        del point
        for _ in range(rng.randrange(MAX_ROUNDS)):
            await asyncio.sleep(0)

    server = PointedServer(folder, wait, completions_wait=20.0)
    await server.service.begin()
    try:
        sampled: dict[int, tuple[int, str, tuple[str, ...]]] = {}

        async def client(first: int) -> None:
            for draw in range(first, STEPS * size, clients):
                await wait()
                group = await _ask(server, draw)
                sampled[draw] = (group.model_version[1], group.fingerprint, (*group.completions,))
                await wait()
                await server.reward(group)

        settings = {"groups_per_step": size, "max_steps": STEPS, "save_steps": 1}
        run = await server.start(staleness=staleness, **settings)
        await asyncio.gather(*(client(first) for first in range(clients)))
        await server.until(lambda seen: seen.phase == "finished")
        record = json.loads((folder / "runs" / run / "run.json").read_text())["manifests"]
        return {
            "sampled": sampled,
            "draws": [each["draws"] for each in record],
            "fingerprints": [each["fingerprint_out"] for each in record],
        }
    finally:
        await server.service.shut_down(5)
        await server.ledger.close()


async def _ask(server: Served, draw: int):
    while True:
        try:
            return await server.ask(draw=draw)
        except Refusal as refusal:
            if refusal.code != "too_busy":
                raise


@pytest.mark.parametrize(
    ("clients", "size", "seeds"), [(8, 2, 3), (64, 16, 2)], ids=["8 clients", "64 clients"]
)
@pytest.mark.parametrize("staleness", [0, 1, 2])
async def test_many_clients_train_the_policy_of_one(
    staleness: int, clients: int, size: int, seeds: int, tmp_path: Path
) -> None:
    alone = await course(tmp_path / "alone", staleness, 1, seed=0, size=size)
    sampled = alone["sampled"]
    assert isinstance(sampled, dict)
    assert {draw: policy for draw, (policy, *_) in sampled.items()} == {
        draw: max(0, draw // size - staleness) for draw in range(STEPS * size)
    }
    assert alone["draws"] == [[*range(step * size, (step + 1) * size)] for step in range(STEPS)]
    for seed in range(seeds):
        assert await course(tmp_path / f"many-{seed}", staleness, clients, seed, size) == alone
