"""Ray as a backend: the machine whose runner is spoken to reaches Ray's head, and jobs wait until Ray has what they need free on a node."""

from __future__ import annotations

import json
from typing import Any

from groupwise.clouds.port import Order
from groupwise.clouds.queueing import EngineBackend
from groupwise.errors import UsageError
from groupwise.hosts.driver import Engine
from groupwise.hosts.ray import RayRunner

USUAL_CPUS = 1
"""What asks for nothing, Ray does not count, and runs beside its own processes on the head."""
OWN = {"CPU": "--cpus", "GPU": "--gpus", "memory": "--memory"}
"""Resources that are asked for under names of their own."""


class RayBackend(EngineBackend):
    """See `groupwise.clouds.port.Backend`."""

    def __init__(self, name: str, runner: RayRunner, where: str) -> None:
        """`where`: the head, for people."""
        super().__init__(name, runner, where)
        self._ray = runner

    async def _engine(self, order: Order) -> Engine:
        """See `EngineBackend._engine`."""
        return Engine(await self._ray.word(), (json.dumps(entrypoint(order)),))

    async def _asked(self, engine: Engine) -> tuple[str, str]:
        """See `EngineBackend._asked`. Whether there is so much anywhere Ray says of no job: it waits for a node that may come."""
        return f"Ray, with {engine.options[0]}", f"Ray has free: {await self._ray.free()}"


def entrypoint(order: Order) -> dict[str, Any]:
    """What Ray is asked for this job, in the words of its Jobs API. Raises UsageError."""
    asks = order.asks
    found: dict[str, Any] = {"entrypoint_num_cpus": asks.get("cpus") or USUAL_CPUS}
    if order.gpus:
        found["entrypoint_num_gpus"] = order.gpus
    if asks.get("memory"):
        found["entrypoint_memory"] = asks["memory"]
    if resources := dict(asks.get("resources") or {}):
        for name in OWN.keys() & resources:
            raise UsageError(f"--resource {name}: this one is asked for by {OWN[name]}.")
        found["entrypoint_resources"] = resources
    return found
