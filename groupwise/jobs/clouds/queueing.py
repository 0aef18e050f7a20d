"""Engines as backends: the machine whose runner is spoken to gives jobs to one, and they wait in its queue for what they need."""

from __future__ import annotations

from abc import ABC, abstractmethod

from groupwise.jobs.clouds.backend import Capabilities, Order, Plan
from groupwise.jobs.clouds.machine import MachineBackend, refuse
from groupwise.jobs.hosts.driver import Engine, Launch, Resume
from groupwise.jobs.hosts.spec import JobSpec


class EngineBackend(MachineBackend, ABC):
    """See `groupwise.jobs.clouds.backend.Backend`."""

    capabilities = Capabilities(queues=True)

    @abstractmethod
    async def _engine(self, order: Order) -> Engine:
        """What is asked of it for this job. Raises UsageError for what would make another job of it."""
        ...

    @abstractmethod
    async def _asked(self, engine: Engine) -> tuple[str, str]:
        """How that is given to it, and what it says of it, in words. It is asked, and nothing is changed."""
        ...

    async def plan(self, order: Order) -> Plan:
        """See `Backend.plan`. The engine is asked whether it would have the job."""
        refuse(order)
        with self._told():
            engine = await self._engine(order)
        hello, sends = await self._sending(order)
        with self._told():
            gives, says = await self._asked(engine)
        lays = f"lay {order.name} out below {hello.root}, and give it to {gives}"
        return Plan(f"{self._where} ({hello.hostname})", (sends, lays, says), order.spec.arguments)

    async def _launch(
        self, order: Order, spec: JobSpec, epoch: int, attempt: int, resume: Resume | None
    ) -> Launch:
        with self._told():
            engine = await self._engine(order)
        return Launch(
            order.name,
            epoch,
            spec,
            environment={"ATTEMPT": str(attempt)},
            secrets=order.secrets,
            resume=resume,
            engine=engine,
            python=order.python,
        )
