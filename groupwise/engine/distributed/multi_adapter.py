"""Several models over one base: adapters that are trained and sampled concurrently, each with its own learner and sampler.

The caller drives them through `ModelRegistry`, in the main process. Without ranks their work is done in that process, by its
`groupwise.engine.distributed.worker_state.WorkerState`. With ranks each model is bound to one rank, so it can be added after the fork: that
rank alone learns and samples for it, and several models keep several ranks busy. A call names the method to call, as a call of a rank
does.

A dropped model is removed with its adapter, optimiser and sampler once its running calls have ended; later calls are refused.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from groupwise.core.errors import GroupwiseError, UsageError
from groupwise.core.types import (
    Completion,
    GroupRequest,
    LossSpec,
    OptimiserParams,
    Policy,
    PolicyRole,
    Prediction,
    PromptLogprobs,
    Row,
    UpdateResult,
)
from groupwise.engine.distributed.rpc import WorkerCalls
from groupwise.engine.models.config import LoraConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class NewModel:
    """Description of a model to add over a base that is in memory."""

    run: str
    """Run name in its policies."""
    folder: str
    """Folder in which it publishes its weights; no other model may use it."""
    seed: int
    """Seed for the initial weights of a new adapter and for dropout."""
    lora: LoraConfig
    """Shape of the adapter. A stored adapter that it starts from decides its shape; keys that are set here must then agree with it."""
    start: str | None = None
    """Folder of the stored adapter to start from, which then is the reference policy as well; None: a new adapter."""


@dataclass(frozen=True, slots=True)
class AddedModel:
    """Result of `groupwise.engine.distributed.worker_state.WorkerState.add_model`."""

    fingerprint: str
    """Fingerprint of the weights that its sampler serves."""


class ModelHost(Protocol):
    """Calls the worker that hosts some models, in this process or in a rank."""

    async def call(self, name: str, *arguments: Any, droppable: bool = False) -> Any: ...

    def call_now(self, name: str, *arguments: Any) -> Any: ...


class LocalWorker:
    """Calls the models hosted in this process."""

    def __init__(self, hosted: Any) -> None:
        """`hosted` is a `groupwise.engine.distributed.worker_state.WorkerState`."""
        self._hosted = hosted

    async def call(self, name: str, *arguments: Any, droppable: bool = False) -> Any:
        """Call a method of `WorkerState`. Cancelling the wait cancels the call."""
        return await getattr(self._hosted, name)(*arguments)

    def call_now(self, name: str, *arguments: Any) -> Any:
        return getattr(self._hosted, f"{name}_now")(*arguments)


class RemoteWorker:
    """Calls the models hosted by one rank."""

    def __init__(self, ranks: WorkerCalls, rank: int) -> None:
        self._ranks = ranks
        self._rank = rank

    async def call(self, name: str, *arguments: Any, droppable: bool = False) -> Any:
        """See `groupwise.engine.distributed.forked_workers.ForkedWorkers.call`."""
        return await self._ranks.call(self._rank, name, *arguments, droppable=droppable)

    def call_now(self, name: str, *arguments: Any) -> Any:
        return self._ranks.call_each_now([(self._rank, name, arguments)])[0]


class ModelHandle:
    """Handle of one model; refuses calls once the model has been dropped."""

    def __init__(self, name: str, host: ModelHost) -> None:
        self.name = name
        self._host = host
        self._dropped = False

    async def call(self, method_path: str, *arguments: Any, droppable: bool = False) -> Any:
        """Call a part of the model, such as `learner.update`; see `ModelHost`."""
        self._refuse_if_dropped()
        return await self._host.call(
            "of_model", self.name, method_path, *arguments, droppable=droppable
        )

    def call_now(self, method_path: str, *arguments: Any) -> Any:
        """Like `call`, for code that is not async."""
        self._refuse_if_dropped()
        return self._host.call_now("of_model", self.name, method_path, *arguments)

    async def drop(self) -> None:
        """Refuse further calls, and free the model's memory when its running calls have ended."""
        self._refuse_if_dropped()
        self._dropped = True
        await self._host.call("drop_model", self.name)

    def _refuse_if_dropped(self) -> None:
        if self._dropped:
            raise UsageError(
                f"The model {self.name} was dropped, and its weights are gone from memory. Create the model again; it can "
                "start from what was saved of this one."
            )


class ModelSampler:
    """A `groupwise.core.types.Sampler` of one model."""

    def __init__(self, model: ModelHandle, fingerprint: str) -> None:
        self._model = model
        self._fingerprint = fingerprint

    async def generate(self, request: GroupRequest) -> tuple[Completion, ...]:
        """See `groupwise.core.types.Sampler.generate`."""
        return await self._model.call("sampler.generate", request, droppable=True)

    async def prompt_logprobs(self, prompt_ids: tuple[int, ...], top: int) -> PromptLogprobs:
        """See `groupwise.engine.sampler.torch_sampler.TorchSampler.prompt_logprobs`."""
        return await self._model.call("sampler.prompt_logprobs", prompt_ids, top, droppable=True)

    async def load(self, policy: Policy) -> None:
        """See `groupwise.core.types.Sampler.load`."""
        try:
            await self._model.call("sampler.load", policy)
        finally:  # files with a wrong fingerprint have been loaded all the same
            self._fingerprint = await self._model.call("sampler.fingerprint")

    def fingerprint(self) -> str:
        """Fingerprint of the weights as they were when they were loaded."""
        return self._fingerprint


class ModelLearner:
    """A `groupwise.core.types.Learner` of one model."""

    def __init__(self, model: ModelHandle) -> None:
        self._model = model

    async def forward_backward(
        self, rows: Sequence[Row], loss: LossSpec, denominators: Mapping[str, float]
    ) -> dict[str, float]:
        """See `groupwise.core.types.Learner.forward_backward`."""
        return await self._model.call(
            "learner.forward_backward", [*rows], loss, dict(denominators), droppable=True
        )

    async def trained_logprobs(self) -> list[tuple[float, ...]] | None:
        """See `groupwise.core.types.Learner.trained_logprobs`."""
        return await self._model.call("learner.trained_logprobs")

    async def update(self, params: OptimiserParams) -> UpdateResult:
        """See `groupwise.core.types.Learner.update`."""
        return await self._model.call("learner.update", params)

    def discard(self) -> None:
        """See `groupwise.core.types.Learner.discard`."""
        self._model.call_now("learner.discard")

    async def publish(self, version: int) -> Policy:
        """See `groupwise.core.types.Learner.publish`."""
        return await self._model.call("learner.publish", version)

    async def logprobs(
        self, rows: Sequence[Row], role: PolicyRole = "policy"
    ) -> list[tuple[float, ...]]:
        """See `groupwise.core.types.Learner.logprobs`."""
        return await self._model.call("learner.logprobs", [*rows], role)

    async def predictions(self, rows: Sequence[Row]) -> list[Prediction]:
        """See `groupwise.core.types.Learner.predictions`."""
        return await self._model.call("learner.predictions", [*rows])

    async def save(self, folder: str) -> None:
        """See `groupwise.core.types.Learner.save`."""
        await self._model.call("learner.save", folder)

    def load(self, folder: str) -> None:
        """See `groupwise.core.types.Learner.load`."""
        self._model.call_now("learner.load", folder)


@dataclass(frozen=True, slots=True)
class ModelParts:
    """Parts that drive a model: like the parts of a run, but they use the processes of the base."""

    sampler: ModelSampler
    learner: ModelLearner
    model: ModelHandle
    """For all other calls, such as `learner.fingerprint`."""
    stop_token_ids: tuple[int, ...]


class ModelRegistry:
    """Registry of the models over one base; holds at most `max_models` of them."""

    def __init__(
        self,
        hosts: Sequence[ModelHost],
        max_models: int,
        stop_token_ids: tuple[int, ...],
        base_name: str | None = None,
    ) -> None:
        """`base_name`: the model that the base was loaded with. It counts towards `max_models`, and all hosts compute it."""
        self._hosts = tuple(hosts)
        self._max_models = max_models
        self._stop_token_ids = stop_token_ids
        self._base_name = base_name
        self._models: dict[str, tuple[ModelHandle, int]] = {}
        self._next = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all models, the oldest first."""
        return (*((self._base_name,) if self._base_name is not None else ()), *self._models)

    async def add(self, name: str, new: NewModel) -> ModelParts:
        """Add a model with its own learner and sampler; the other models are not disturbed.

        It is bound to the host with the fewest models; ties are broken round-robin. Raises UsageError if the limit of models is reached, if
        the name is taken, or if the weights of the base are trained themselves; ModelError if the adapter cannot be made.
        """
        if name in self.names:
            raise UsageError(f"There is a model {name} already; {self._there_are()}.")
        if len(self.names) >= self._max_models:
            raise UsageError(
                f"The model {name} would be one more than the {self._max_models} that may be in memory at once; {self._there_are()}. "
                "Drop one that is not needed any more (what was saved of it can be loaded again), or let there be more "
                "(max_models): each takes memory for its adapter, its optimiser and what it samples."
            )
        busy = Counter(number for _, number in self._models.values())
        count = len(self._hosts)
        number = min(range(count), key=lambda index: (busy[index], (index - self._next) % count))
        self._next = (number + 1) % count
        model = ModelHandle(name, self._hosts[number])
        # Registered before the first await, so a concurrent `add` sees the name and the count.
        self._models[name] = model, number
        try:
            added: AddedModel = await self._hosts[number].call("add_model", name, new)
        except BaseException as error:
            # A cancelled wait does not stop the rank, so the model may exist there by now.
            if isinstance(error, asyncio.CancelledError):
                with suppress(GroupwiseError):
                    await self._hosts[number].call("drop_model", name)
            del self._models[name]
            raise
        sampler = ModelSampler(model, added.fingerprint)
        return ModelParts(sampler, ModelLearner(model), model, self._stop_token_ids)

    async def drop(self, name: str) -> None:
        """Remove an added model once its running calls have ended. Raises UsageError if no such model was added."""
        if name not in self._models:
            raise UsageError(f"There is no model {name} to drop; {self._there_are()}.")
        model, _ = self._models[name]
        try:
            await model.drop()
        finally:
            self._models.pop(name, None)

    async def layer_kinds(self) -> dict[str, tuple[str, ...]]:
        """The base's linear layers by their full names, grouped by the kinds of `lora.target_modules`: `attention`, `mlp`, `unembed`."""
        return await self._hosts[0].call("layer_kinds")

    def host_of(self, name: str) -> int:
        """Index of the host (rank) of an added model."""
        return self._models[name][1]

    def _there_are(self) -> str:
        return f"there are {', '.join(self.names)}" if self.names else "there are none"
