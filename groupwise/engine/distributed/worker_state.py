"""The state that a rank hosts: a sampler and a learner as they are in a process of their own, and the calls that they answer there.

Made in the zygote, before the fork; see `groupwise.engine.distributed.rank` for how its attributes are called.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from groupwise.core.errors import UsageError
from groupwise.core.types import Learner, Policy, Sampler
from groupwise.engine.distributed.multi_adapter import Added, NewModel
from groupwise.engine.distributed.multi_adapter_host import AdapterHost
from groupwise.engine.learner.gradient_flow import Slope, trained_slopes
from groupwise.engine.learner.replicas import Summed
from groupwise.engine.models.machine import prepare_process
from groupwise.engine.models.probes import peak_memory, shared_memory
from groupwise.engine.models.profile import MarkedLearner, Trace, traced


@dataclass(slots=True)
class Hosted:
    """Sampler and learner over one model, and models beside it that this process alone computes."""

    threads: int
    """Threads of each rank."""
    sampler: Sampler | None = None
    learner: Learner | None = None
    stop_token_ids: tuple[int, ...] = ()
    trained: Any = None
    """The learner's `groupwise.engine.learner.weights.TrainedWeights`."""
    replicas: Summed | None = None
    """Shared by its learner and those of the other ranks; None if it learns alone, or not at all."""
    tracing: Tracing | None = None
    witness: Any = None
    """Checks the answers of vLLM servers that sample in the ranks' place (`groupwise.engine.sampler.vllm.witness`)."""
    bench: AdapterHost | None = None
    """Holds the models beside this one; None if all weights of the base are trained."""

    def join(self, rank: int) -> None:
        """Be a rank from now on."""
        prepare_process(self.threads)
        if self.replicas is not None:
            self.replicas.join(rank)

    def leave(self) -> None:
        """Be the zygote of ranks that have been forked."""
        if self.replicas is not None:
            self.replicas.leave()

    def slopes(self, learning_rate: float) -> list[Slope]:
        """See `groupwise.engine.learner.gradient_flow.trained_slopes`."""
        return trained_slopes(self.trained, learning_rate)

    def held_memory(self, device: str) -> tuple[int, int | None]:
        """Peak bytes of the device that this process held, and those that it shares now, if that is known."""
        return peak_memory(device), shared_memory() if device == "cpu" else 0

    async def served(self, policy: Policy) -> str:
        """Have the sampler load a policy; returns the fingerprint of the weights that it serves then."""
        assert self.sampler is not None
        await self.sampler.load(policy)
        return self.sampler.fingerprint()

    async def load_sent(self, name: str, given: Any, files: dict[str, bytes]) -> None:
        """Have the learner or the sampler load files that came with the call, because the named ones are on another machine."""
        with TemporaryDirectory(prefix="groupwise-") as folder:
            for file, content in files.items():
                (Path(folder) / file).write_bytes(content)
            moved = replace(given, path=folder) if isinstance(given, Policy) else folder
            done = attrgetter(name)(self)(moved)
            if inspect.isawaitable(done):
                await done

    async def add_model(self, name: str, new: NewModel) -> Added:
        """Make a model beside this one in this process; see `groupwise.engine.distributed.multi_adapter.Models.add`."""
        return self._bench().add(name, new)

    async def drop_model(self, name: str) -> None:
        """Forget it; see `groupwise.engine.distributed.multi_adapter.Models.drop`."""
        await self._bench().drop(name)

    async def of_model(self, name: str, what: str, *arguments: Any) -> Any:
        """Call something of it, `learner.update`."""
        return await self._bench().call(name, what, *arguments)

    def of_model_now(self, name: str, what: str, *arguments: Any) -> Any:
        """The same for calls that are not async."""
        return self._bench().call_now(name, what, *arguments)

    async def layer_kinds(self) -> dict[str, tuple[str, ...]]:
        """See `groupwise.engine.models.lora.layer_kinds`."""
        return self._bench().layer_kinds()

    def _bench(self) -> AdapterHost:
        if self.bench is None:
            raise UsageError(
                "All weights of the model in memory are trained (lora is null), so it is no base that others could share. Train an "
                "adapter instead (lora: {}), or end this training first."
            )
        return self.bench

    def begin_trace(self) -> None:
        """Trace this process from now on, the learner's calls by their names."""
        assert self.learner is not None
        work = traced()
        self.tracing = Tracing(work, work.__enter__(), self.learner)
        self.learner = MarkedLearner(self.learner)

    def end_trace(self) -> None:
        """Stop the trace; `tracing` holds the result."""
        assert self.tracing is not None
        self.learner = self.tracing.learner
        self.tracing.work.__exit__(None, None, None)


@dataclass(frozen=True, slots=True)
class Tracing:
    """A trace, the context that ends it, and the learner without marks."""

    work: AbstractContextManager[Trace]
    trace: Trace
    learner: Learner
