"""Engines as backends: the machine whose runner is called gives jobs to an engine, in whose queue they wait for what they need."""

from __future__ import annotations

from abc import ABC, abstractmethod

from groupwise.jobs.clouds.backend import Capabilities, Order, Plan
from groupwise.jobs.clouds.machine import MachineBackend, refuse
from groupwise.jobs.hosts.driver import Engine, Launch, Resume
from groupwise.jobs.hosts.spec import JobSpec


class EngineBackend(MachineBackend, ABC):
    """A `Backend` that gives jobs to an engine."""

    capabilities = Capabilities(queues=True)

    @abstractmethod
    async def _engine(self, order: Order) -> Engine:
        """The engine and its options for this job. Raises UsageError for options that would make it another job."""
        ...

    @abstractmethod
    async def _describe(self, engine: Engine) -> tuple[str, str]:
        """Describe in words how the job is given to the engine, and the engine's answer. Changes nothing."""
        ...

    async def plan(self, order: Order) -> Plan:
        """See `Backend.plan`. The engine is asked whether it would accept the job."""
        refuse(order)
        with self._cloud_errors():
            engine = await self._engine(order)
        hello, sends = await self._sending(order)
        with self._cloud_errors():
            gives, says = await self._describe(engine)
        lays = f"lay {order.name} out below {hello.root}, and give it to {gives}"
        return Plan(f"{self._where} ({hello.hostname})", (sends, lays, says), order.spec.arguments)

    async def _launch(
        self, order: Order, spec: JobSpec, epoch: int, attempt: int, resume: Resume | None
    ) -> Launch:
        with self._cloud_errors():
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
