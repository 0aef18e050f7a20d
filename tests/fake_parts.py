"""The engine's parts for a loop on another machine, without a model: calls are recorded, can be held, and can be made to fail."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from groupwise.core.errors import UsageError
from groupwise.core.types import (
    Completion,
    GroupRequest,
    LossSpec,
    OptimiserParams,
    Policy,
    Row,
    UpdateResult,
)
from groupwise.server.engine.engine_protocol import OpenParts, PartsOpened

SUMS = {"loss/policy": 0.1 + 0.2, "tokens": 3.0, "ratio/max": float("inf")}
TRAINED = [(-0.1 - 0.2, float("-inf")), ()]
LAYOUT = {"device": "cpu", "slots": 8}


class FakeParts:
    """Has the methods of `groupwise.server.engine.hosted_parts.EngineParts` that the tests call."""

    def __init__(self) -> None:
        self.done: list[str] = []
        """The verbs, in the order in which they ended."""
        self.begun: list[str] = []
        self.held: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        """The events that held verbs wait for."""
        self.fails: dict[str, BaseException] = {}
        self.orders: list[OpenParts] = []
        self.planned: list[Any] = []
        self.cancelled: list[str] = []

    async def plan(
        self, kind: str, config: Any, longest_prompt: int | None, described: str | None = None
    ) -> dict[str, Any]:
        if described is not None and not (Path(described) / "config.json").read_text():
            raise UsageError(f"{described}: its config.json is empty.")
        self.planned.append((kind, config, longest_prompt))
        await self._at("plan")
        return LAYOUT

    async def open(self, request: OpenParts) -> PartsOpened:
        await self._at("open")
        self.orders.append(request)
        return PartsOpened((0,), LAYOUT, "f0")

    async def generate(self, request: GroupRequest) -> tuple[Completion, ...]:
        await self._at("generate")
        return tuple(Completion((5, 0), (-0.1, -0.2), "stop", s, 0, "f0") for s in request.seeds)

    async def load(self, policy: Policy) -> str:
        await self._at("load")
        return policy.fingerprint

    async def fingerprint(self) -> str:
        return "of what is served"

    async def forward_backward(self, rows: Sequence[Row], loss: LossSpec, denominators: Any) -> Any:
        await self._at("forward_backward")
        return SUMS

    async def trained_logprobs(self) -> list[tuple[float, ...]]:
        await self._at("trained_logprobs")
        return TRAINED

    async def update(self, params: OptimiserParams) -> UpdateResult:
        await self._at("update")
        return UpdateResult(float("nan"), False)

    async def discard(self) -> None:
        await self._at("discard")

    async def _at(self, verb: str) -> None:
        self.begun.append(verb)
        try:
            if verb in self.held:
                await self.held[verb].wait()
        except asyncio.CancelledError:
            self.cancelled.append(verb)
            raise
        if verb in self.fails:
            raise self.fails[verb]
        self.done.append(verb)


class FakeCore:
    """An engine with these parts only."""

    def __init__(self) -> None:
        self.parts = FakeParts()

    async def close(self) -> None:
        """There is nothing to close."""
