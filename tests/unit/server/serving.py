"""A service over the fake engine, and clients of it, for tests that need no HTTP."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from groupwise.api.schemas.keys import Caller, Role
from groupwise.api.schemas.problems import Refusal
from groupwise.api.schemas.training import (
    CompletionsRequest,
    GroupAnswer,
    RewardAnswer,
    RewardsOfOne,
    StartRequest,
    StatusAnswer,
)
from groupwise.server.ledger.writer import Ledger
from groupwise.server.run.service import Service
from groupwise.server.settings import ServerConfig
from tests.fake_engine import FakeEngine, Fault

ME = Caller("me", Role.ADMIN)
SETTINGS = {
    "model_id": "tiny", "max_completion_length": 6, "num_completions_per_prompt": 4,
    "groups_per_step": 2, "learning_rate": 0.5, "max_steps": 5, "save_steps": 2, "staleness": 0,
    "training": {"seed": 3},
}  # fmt: skip


class Served:
    """A service, what it stands on, and short forms of what clients do."""

    def __init__(self, folder: Path, faults: Sequence[Fault] = (), **config: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.engines: list[FakeEngine] = []
        self._faults = faults
        settings = {"output_dir": str(folder), "completions_wait": 0.05, **config}
        self.config = ServerConfig(**settings)
        self.ledger = Ledger.open(folder / "server.db")
        self.service = Service(self.config, self.ledger, self._engine)

    async def _engine(self) -> FakeEngine:
        engine = FakeEngine(self._faults)
        self.engines.append(engine)
        return engine

    async def start(self, **settings: Any) -> str:
        request = StartRequest.model_validate({**SETTINGS, **settings})
        return (await self.service.start(request, ME)).run_id

    async def ask(self, prompt: str = "abc", **more: Any) -> GroupAnswer:
        request = CompletionsRequest(prompt=prompt, **more)
        (group,) = await self.service.completions(request, ME)
        return group

    async def reward(
        self, group: GroupAnswer, rewards: Sequence[float | None] | None = None, **more: Any
    ) -> RewardAnswer:
        values = list(rewards) if rewards is not None else letters(group)
        request = RewardsOfOne(group_id=group.group_id, rewards=values, **more)
        (answer,) = await self.service.rewards(request, ME)
        return answer

    async def round(self, step: int, size: int = 2) -> list[RewardAnswer]:
        """The groups of one step, asked for, rewarded and trained."""
        draws = range(step * size, (step + 1) * size)
        groups = [await self.ask(draw=draw) for draw in draws]
        return await asyncio.gather(*(self.reward(group, wait=True) for group in groups))

    async def until(self, seen: Callable[[StatusAnswer], bool]) -> StatusAnswer:
        """The first status that is as it should be."""

        async def looked() -> StatusAnswer:
            while not seen(status := await self.service.status()):  # noqa: ASYNC110 — it has no event
                await asyncio.sleep(0.005)
            return status

        return await asyncio.wait_for(looked(), 20)

    async def kill(self) -> None:
        """The server's process is gone: nothing is finished, and what is on the disk stands."""
        conductor = self.service._active_run.conductor  # pyright: ignore[reportPrivateUsage]
        periodic = self.service._periodic._tasks  # pyright: ignore[reportPrivateUsage]
        tasks = [*periodic, conductor._task if conductor else None]  # pyright: ignore[reportPrivateUsage]
        for task in tasks:
            if task is not None:
                task.cancel()
        await asyncio.gather(*filter(None, tasks), return_exceptions=True)
        await self.ledger.close()
        with closing(sqlite3.connect(self.ledger.path)) as ledger, ledger:
            ledger.execute("DELETE FROM meta WHERE key = 'uptime'")  # stored only now and then


def letters(group: GroupAnswer) -> list[float | None]:
    """More a, more reward."""
    return [float(text.count("a")) for text in group.completions]


@asynccontextmanager
async def served(
    folder: Path, faults: Sequence[Fault] = (), **config: Any
) -> AsyncGenerator[Served]:
    """A service that has begun, and is shut down afterwards."""
    made = Served(folder, faults, **config)
    await made.service.begin()
    try:
        yield made
    finally:
        await made.service.shut_down(5)
        await made.ledger.close()


async def expect_refusal(code: str, work: Awaitable[Any]) -> Refusal:
    """That the work is refused with this code; the refusal."""
    with pytest.raises(Refusal) as raised:
        await work
    assert raised.value.code == code, raised.value
    return raised.value
