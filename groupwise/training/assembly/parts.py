"""The parts of a run: what `groupwise.training.assembly.start` returns, and ends with `close`.

The parts may be in this process, in ranks or other processes of this machine, or behind a server or service; callers see no difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from groupwise.core.types import Learner, Sampler
from groupwise.engine.models import probes

if TYPE_CHECKING:
    from groupwise.engine.backends.remote.session import Session
    from groupwise.engine.backends.tinker.service import Service
    from groupwise.engine.backends.tunix.process import WorkerProcess
    from groupwise.engine.distributed.rpc import WorkerCalls
    from groupwise.engine.distributed.spawned_workers import SpawnedWorkers
    from groupwise.engine.distributed.worker_state import WorkerState
    from groupwise.engine.learner.gradient_flow import Slope
    from groupwise.engine.sampler.servers.sampler import ServerSampler

Kind = Literal["training", "learning", "sampling", "supervised", "serving", "base"]
"""The sets of parts that are built together. `learning` and `sampling` are the halves of a training with separate processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closable:
    """Parts that may be in other processes, which `close` ends."""

    ranks: WorkerCalls | None = None
    samplers: SpawnedWorkers | None = None
    """Processes that only sample, so that the ranks only learn; None if all do both."""
    sharded: bool = False
    """True if each rank has only a part of the weights."""
    hosted: WorkerState | None = None
    """The parts in this process, if there are no ranks and further models could be added."""
    session: Session | None = None
    """The session with the server that has the parts; None without `run.server`."""
    worker: WorkerProcess | None = None
    """The worker that has the parts in its own environment; None for other backends than tunix."""
    service: Service | None = None
    """The session with the Tinker service that has the parts; None for other backends than tinker."""
    by_http: ServerSampler | None = None
    """The vLLM sampler whose servers hold adapters; None for other samplers."""

    def close(self) -> None:
        """End the other processes and connections, if any."""
        processes = (self.ranks, self.samplers, self.worker)
        for part in (*processes, self.session, self.service, self.by_http):
            if part is not None:
                part.close()

    def peak_memory(self, device: str) -> int | None:
        """Peak memory in bytes, as measured by `groupwise.engine.models.probes.peak_memory`.

        With ranks, an estimate over all processes; None if the system does not report how much memory they share.
        """
        if self.ranks is None:
            return probes.peak_memory(device)
        own_peak = probes.peak_memory(device) if device == "cpu" else 0
        rank_memory = self.ranks.call_all_now("held_memory", device)
        if self.samplers is not None:
            rank_memory += self.samplers.call_all_now("held_memory", device)
        if any(shared_bytes is None for _, shared_bytes in rank_memory):
            return None
        return (
            own_peak
            + sum(peak - shared_bytes for peak, shared_bytes in rank_memory)
            + max(shared_bytes for _, shared_bytes in rank_memory)
        )


@dataclass(frozen=True, slots=True)
class Parts(Closable):
    """The parts that the training loop uses."""

    sampler: Sampler
    learner: Learner
    stop_token_ids: tuple[int, ...]
    trained: Any = None
    """The learner's `groupwise.engine.learner.weights.TrainedWeights`; None if the ranks have them."""

    async def slopes(self, learning_rate: float) -> list[Slope]:
        """How much of a step's change reaches the outputs of the adapter's layers; empty if all weights are trained, or divided."""
        if self.sharded:
            return []  # slopes are computed on unsharded layers
        if self.service is not None:
            return []  # nor does this machine see a service's layers
        if self.ranks is not None:
            return await self.ranks.call(0, "slopes", learning_rate)
        from groupwise.engine.learner.gradient_flow import trained_slopes

        return trained_slopes(self.trained, learning_rate)


@dataclass(frozen=True, slots=True)
class ServingParts(Closable):
    """A sampler alone: of an evaluation, or of a base that is not trained."""

    sampler: Sampler
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LearningParts(Closable):
    """The learner of a supervised run."""

    learner: Learner
