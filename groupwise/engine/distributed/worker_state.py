"""The objects that a rank hosts: the sampler and learner of one process, and the calls that they answer there.

For forked ranks they are made in the zygote, before the fork; `groupwise.engine.distributed.rank` says how their attributes are called.

`AdapterHost` holds further models over the same base (`groupwise.engine.distributed.multi_adapter` calls them). Each has its own adapters,
learner and sampler; base weights and their packed copies exist once. Calls are answered in one event loop: samplers take turns, one token
each, and learners yield to them after every micro-batch.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from groupwise.core.errors import UsageError
from groupwise.core.types import Learner, Policy, Sampler
from groupwise.engine.distributed.multi_adapter import AddedModel, NewModel
from groupwise.engine.learner.gradient_flow import Slope, trained_slopes
from groupwise.engine.learner.replicas import GradientSum
from groupwise.engine.learner.torch_learner import TorchLearner
from groupwise.engine.learner.weights import TrainedAdapter
from groupwise.engine.models.lora import AdaptedModel, layer_kinds
from groupwise.engine.models.machine import prepare_process
from groupwise.engine.models.native.weights import write_weight_caches
from groupwise.engine.models.probes import peak_memory, shared_memory
from groupwise.engine.models.profile import MarkedLearner, Trace, tracing
from groupwise.engine.sampler.weights import ServedAdapter


@dataclass(slots=True)
class WorkerState:
    """Sampler and learner over one model, and further models over the same base that only this process computes."""

    threads: int
    """Threads of each rank."""
    sampler: Sampler | None = None
    learner: Learner | None = None
    stop_token_ids: tuple[int, ...] = ()
    trained: Any = None
    """The learner's `groupwise.engine.learner.weights.TrainedWeights`."""
    replicas: GradientSum | None = None
    """Adds up gradients with the learners of the other ranks; None if this learner works alone, or there is none."""
    tracing: Tracing | None = None
    local_policy: Any = None
    """The policy that vLLM servers serve if they sample instead of the ranks (`groupwise.engine.sampler.servers.local_policy`)."""
    adapter_host: AdapterHost | None = None
    """Holds the further models; None if all weights of the base are trained."""

    def join(self, rank: int) -> None:
        """Act as a rank from now on."""
        prepare_process(self.threads)
        if self.replicas is not None:
            self.replicas.join(rank)

    def leave(self) -> None:
        """Called in the zygote after the ranks have been forked."""
        if self.replicas is not None:
            self.replicas.leave()
        write_weight_caches()  # the weights in the zygote's memory never change

    def slopes(self, learning_rate: float) -> list[Slope]:
        """See `groupwise.engine.learner.gradient_flow.trained_slopes`."""
        return trained_slopes(self.trained, learning_rate)

    def held_memory(self, device: str) -> tuple[int, int | None]:
        """Peak bytes of the device that this process used, and the bytes it shares with others now; None for the latter if unknown."""
        return peak_memory(device), shared_memory() if device == "cpu" else 0

    async def load_policy(self, policy: Policy) -> str:
        """Load a policy into the sampler; returns the fingerprint of the weights that it then serves."""
        assert self.sampler is not None
        await self.sampler.load(policy)
        return self.sampler.fingerprint()

    async def load_sent(self, name: str, source: Any, files: dict[str, bytes]) -> None:
        """Load files that were sent with the call into the learner, the sampler or the local policy: their folder is on another machine."""
        with TemporaryDirectory(prefix="groupwise-") as folder:
            for file, content in files.items():
                (Path(folder) / file).write_bytes(content)
            target = replace(source, path=folder) if isinstance(source, Policy) else folder
            result = attrgetter(name)(self)(target)
            if inspect.isawaitable(result):
                await result

    async def add_model(self, name: str, new: NewModel) -> AddedModel:
        """Add a model in this process; see `groupwise.engine.distributed.multi_adapter.ModelRegistry.add`."""
        return self._require_adapter_host().add(name, new)

    async def drop_model(self, name: str) -> None:
        """Remove an added model; see `groupwise.engine.distributed.multi_adapter.ModelRegistry.drop`."""
        await self._require_adapter_host().drop(name)

    async def of_model(self, name: str, method_path: str, *arguments: Any) -> Any:
        """Call a part of an added model, such as `learner.update`."""
        return await self._require_adapter_host().call(name, method_path, *arguments)

    def of_model_now(self, name: str, method_path: str, *arguments: Any) -> Any:
        """Like `of_model`, for code that is not async."""
        return self._require_adapter_host().call_now(name, method_path, *arguments)

    async def layer_kinds(self) -> dict[str, tuple[str, ...]]:
        """See `groupwise.engine.models.lora.layer_kinds`."""
        return self._require_adapter_host().layer_kinds()

    def _require_adapter_host(self) -> AdapterHost:
        if self.adapter_host is None:
            raise UsageError(
                "All weights of the model in memory are trained (lora is null), so others cannot share it as a base. Train an "
                "adapter instead (lora: {}), or end this training first."
            )
        return self.adapter_host

    def begin_trace(self) -> None:
        """Trace this process from now on; the learner's calls are marked with their names."""
        assert self.learner is not None
        work = tracing()
        self.tracing = Tracing(work, work.__enter__(), self.learner)
        self.learner = MarkedLearner(self.learner)

    def end_trace(self) -> None:
        """Stop the trace; `tracing` holds the result."""
        assert self.tracing is not None
        self.learner = self.tracing.learner
        self.tracing.work.__exit__(None, None, None)


@dataclass(frozen=True, slots=True)
class Tracing:
    """A running trace, the context manager that ends it, and the learner without trace marks."""

    work: AbstractContextManager[Trace]
    trace: Trace
    learner: Learner


MakeWeights = Callable[[AdaptedModel, str, NewModel], tuple[TrainedAdapter, ServedAdapter]]
"""Makes the trained and the served copy of a new model's adapter, under a name that no other adapter has."""
MakeLearner = Callable[[TrainedAdapter, NewModel], TorchLearner]
MakeSampler = Callable[[ServedAdapter], Sampler]


@dataclass(slots=True)
class _HostedModel:
    """One added model."""

    trained: TrainedAdapter
    served: ServedAdapter
    learner: TorchLearner
    sampler: Sampler
    running_calls: int = 0
    """Number of its running calls."""
    dropped: bool = False
    removed: asyncio.Event = field(default_factory=asyncio.Event)


class AdapterHost:
    """Holds the added models over one base, and makes them."""

    def __init__(
        self,
        adapted: AdaptedModel,
        make_weights: MakeWeights,
        make_learner: MakeLearner,
        make_sampler: MakeSampler,
    ) -> None:
        self._adapted = adapted
        self._make_weights = make_weights
        self._make_learner = make_learner
        self._make_sampler = make_sampler
        self._models: dict[str, _HostedModel] = {}
        self._numbers = itertools.count()

    def add(self, name: str, new: NewModel) -> AddedModel:
        """Make a model; see `groupwise.engine.distributed.multi_adapter.ModelRegistry.add`."""
        assert name not in self._models, f"there is a model {name} already"
        # torch refuses dots in module names, and the given name may have some.
        inner = f"added-{next(self._numbers)}"
        try:
            trained, served = self._make_weights(self._adapted, inner, new)
            learner = self._make_learner(trained, new)
            sampler = self._make_sampler(served)
        except BaseException:
            for adapter in [*self._adapted.configs]:
                if adapter == inner or adapter.startswith(f"{inner}-"):
                    self._adapted.remove(adapter)
            raise
        self._models[name] = _HostedModel(trained, served, learner, sampler)
        return AddedModel(sampler.fingerprint())

    async def drop(self, name: str) -> None:
        """Remove a model when all its calls have ended. The caller makes no further calls of it."""
        model = self._models.pop(name, None)
        if model is None:
            raise _unknown_model(name, self._models)
        model.dropped = True
        if model.running_calls:
            await model.removed.wait()
        else:
            self._remove(model)

    async def call(self, name: str, method_path: str, *arguments: Any) -> Any:
        """Call a part of a model, such as `learner.update`."""
        model = self._find(name)
        model.running_calls += 1
        try:
            value = _call_model(model, method_path, arguments)
            return await value if inspect.isawaitable(value) else value
        finally:
            model.running_calls -= 1
            if model.dropped and not model.running_calls:
                self._remove(model)

    def call_now(self, name: str, method_path: str, *arguments: Any) -> Any:
        """Like `call`, for code that is not async."""
        return _call_model(self._find(name), method_path, arguments)

    def layer_kinds(self) -> dict[str, tuple[str, ...]]:
        """See `groupwise.engine.models.lora.layer_kinds`."""
        return layer_kinds(self._adapted.base)

    def _find(self, name: str) -> _HostedModel:
        if name not in self._models:
            raise _unknown_model(name, self._models)
        return self._models[name]

    def _remove(self, model: _HostedModel) -> None:
        model.trained.remove()
        model.served.remove()
        model.removed.set()


def _call_model(model: _HostedModel, method_path: str, arguments: tuple[Any, ...]) -> Any:
    attribute = attrgetter(method_path)(model)
    return attribute(*arguments) if callable(attribute) else attribute


def _unknown_model(name: str, models: dict[str, _HostedModel]) -> UsageError:
    return UsageError(
        f"There is no model {name} in this process; there are {', '.join(models) or 'none'}."
    )
