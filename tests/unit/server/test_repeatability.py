"""A run whose clients name their draws is the same for one client and for many, however fast each of them is, at every staleness."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest

from groupwise.api.schemas.problems import Refusal
from tests.unit.server.serving import Served, served

STEPS, SIZE = 5, 2


async def course(folder: Path, staleness: int, clients: int, seed: int) -> dict[str, object]:
    """What the run learnt from, and with which policies its draws were sampled."""
    async with served(folder, completions_wait=5.0) as server:
        chance = random.Random(seed)
        sampled: dict[int, tuple[int, str, tuple[str, ...]]] = {}

        async def client(first: int) -> None:
            for draw in range(first, STEPS * SIZE, clients):
                await asyncio.sleep(0.01 * chance.random())
                group = await _ask(server, draw)
                sampled[draw] = (group.model_version[1], group.fingerprint, (*group.completions,))
                await asyncio.sleep(0.01 * chance.random())
                await server.reward(group)

        run = await server.start(staleness=staleness, max_steps=STEPS, save_steps=1)
        await asyncio.gather(*(client(first) for first in range(clients)))
        await server.until(lambda seen: seen.phase == "finished")
        record = json.loads((folder / "runs" / run / "run.json").read_text())["manifests"]
        return {
            "sampled": sampled,
            "draws": [each["draws"] for each in record],
            "fingerprints": [each["fingerprint_out"] for each in record],
        }


async def _ask(server: Served, draw: int):
    while True:
        try:
            return await server.ask(draw=draw)
        except Refusal as refusal:
            if refusal.code != "too_busy":
                raise


@pytest.mark.parametrize("staleness", [0, 1, 2])
async def test_eight_clients_train_the_policy_of_one(staleness: int, tmp_path: Path) -> None:
    alone = await course(tmp_path / "alone", staleness, 1, seed=0)
    sampled = alone["sampled"]
    assert isinstance(sampled, dict)
    assert {draw: policy for draw, (policy, *_) in sampled.items()} == {
        draw: max(0, draw // SIZE - staleness) for draw in range(STEPS * SIZE)
    }
    assert alone["draws"] == [[step * SIZE, step * SIZE + 1] for step in range(STEPS)]
    for seed in range(3):
        assert await course(tmp_path / f"many-{seed}", staleness, 8, seed) == alone
