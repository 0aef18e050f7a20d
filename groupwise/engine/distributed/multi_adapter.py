"""Models beside each other: adapters that are trained and sampled over one base, each with a learner and a sampler of its own.

The caller drives them through `Models`, in the main process. Without ranks their work is done in that process, by its
`groupwise.engine.distributed.worker_state.Hosted`. With ranks each model is bound to one of them, so that nothing of it need exist before
the fork: that rank alone learns and samples for it, and several models keep several ranks busy. Calls name the function to call, like
calls of ranks.

A model that is dropped is removed with its adapter, optimiser and sampler once its running calls have ended; calls that come later
are refused.
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
    Row,
    UpdateResult,
)
from groupwise.engine.distributed.rpc import Calls
from groupwise.engine.models.config import LoraConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class NewModel:
    """The start of a model over a base that is in memory."""

    run: str
    """Name of its policies."""
    folder: str
    """Folder in which it publishes its weights; no other model may use it."""
    seed: int
    """Seed of a new adapter's numbers and of dropout."""
    lora: LoraConfig
    """Its shape. A stored adapter that it starts from decides its own; keys that are given must agree with it."""
    start: str | None = None
    """The folder of that adapter, which is then the reference, too."""


@dataclass(frozen=True, slots=True)
class Added:
    """Facts from `groupwise.engine.distributed.worker_state.Hosted.add_model` about a model that it has made."""

    fingerprint: str
    """Fingerprint of the weights that its sampler serves."""


class Host(Protocol):
    """Does the work of some models; implementations in this process and in a rank."""

    async def call(self, name: str, *arguments: Any, droppable: bool = False) -> Any: ...

    def call_now(self, name: str, *arguments: Any) -> Any: ...


class LocalWorker:
    """Calls the models hosted in this process."""

    def __init__(self, hosted: Any) -> None:
        """`hosted` is a `groupwise.engine.distributed.worker_state.Hosted`."""
        self._hosted = hosted

    async def call(self, name: str, *arguments: Any, droppable: bool = False) -> Any:
        """Cancelling the wait cancels the call."""
        return await getattr(self._hosted, name)(*arguments)

    def call_now(self, name: str, *arguments: Any) -> Any:
        return getattr(self._hosted, f"{name}_now")(*arguments)


class RemoteWorker:
    """Calls the models hosted by one rank."""

    def __init__(self, ranks: Calls, rank: int) -> None:
        self._ranks = ranks
        self._rank = rank

    async def call(self, name: str, *arguments: Any, droppable: bool = False) -> Any:
        """See `groupwise.engine.distributed.forked_workers.Ranks.call`."""
        return await self._ranks.call(self._rank, name, *arguments, droppable=droppable)

    def call_now(self, name: str, *arguments: Any) -> Any:
        return self._ranks.call_each_now([(self._rank, name, arguments)])[0]


class Model:
    """One of the models, for its callers; refuses calls once it has been dropped."""

    def __init__(self, name: str, host: Host) -> None:
        self.name = name
        self._host = host
        self._dropped = False

    async def call(self, what: str, *arguments: Any, droppable: bool = False) -> Any:
        """Call something of the model, `learner.update`; see `Host`."""
        self._refuse_if_dropped()
        return await self._host.call("of_model", self.name, what, *arguments, droppable=droppable)

    def call_now(self, what: str, *arguments: Any) -> Any:
        """The same, for code that is not async."""
        self._refuse_if_dropped()
        return self._host.call_now("of_model", self.name, what, *arguments)

    async def drop(self) -> None:
        """Refuse further calls, and free all that it holds when its running calls have ended."""
        self._refuse_if_dropped()
        self._dropped = True
        await self._host.call("drop_model", self.name)

    def _refuse_if_dropped(self) -> None:
        if self._dropped:
            raise UsageError(
                f"The model {self.name} was dropped, and its weights are gone from memory. Create a model anew; it can "
                "start from what was saved of this one."
            )


class ModelSampler:
    """A `groupwise.core.types.Sampler` of one model."""

    def __init__(self, model: Model, fingerprint: str) -> None:
        self._model = model
        self._fingerprint = fingerprint

    async def generate(self, request: GroupRequest) -> tuple[Completion, ...]:
        """See `groupwise.core.types.Sampler.generate`."""
        return await self._model.call("sampler.generate", request, droppable=True)

    async def load(self, policy: Policy) -> None:
        """See `groupwise.core.types.Sampler.load`."""
        try:
            await self._model.call("sampler.load", policy)
        finally:  # files that are not what they should be have been read all the same
            self._fingerprint = await self._model.call("sampler.fingerprint")

    def fingerprint(self) -> str:
        """Fingerprint of the tensors in memory, as they were when they were loaded."""
        return self._fingerprint


class ModelLearner:
    """A `groupwise.core.types.Learner` of one model."""

    def __init__(self, model: Model) -> None:
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

    def save(self, folder: str) -> None:
        """See `groupwise.core.types.Learner.save`."""
        self._model.call_now("learner.save", folder)

    def load(self, folder: str) -> None:
        """See `groupwise.core.types.Learner.load`."""
        self._model.call_now("learner.load", folder)


@dataclass(frozen=True, slots=True)
class ModelParts:
    """Parts that drive a model: like the parts of a run, but the processes are those of the base."""

    sampler: ModelSampler
    learner: ModelLearner
    model: Model
    """Used for other calls, such as `learner.fingerprint`."""
    stop_token_ids: tuple[int, ...]


class Models:
    """The models over one base, at most `most` of them."""

    def __init__(
        self,
        hosts: Sequence[Host],
        most: int,
        stop_token_ids: tuple[int, ...],
        first: str | None = None,
    ) -> None:
        """`first`: the model that the base was loaded with, which counts, and in which all hosts take part."""
        self._hosts = tuple(hosts)
        self._most = most
        self._stop_token_ids = stop_token_ids
        self._first = first
        self._models: dict[str, tuple[Model, int]] = {}
        self._next = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all models there are, the oldest first."""
        return (*((self._first,) if self._first is not None else ()), *self._models)

    async def add(self, name: str, new: NewModel) -> ModelParts:
        """Make a model with a learner and a sampler; all others go on as they are.

        Its work is done by the host that has the fewest; of several by the one after the last that was chosen. Raises UsageError if
        the limit of models is reached, if the name is taken, and if the base is trained itself; ModelError for an adapter
        that cannot be.
        """
        if name in self.names:
            raise UsageError(f"There is a model {name} already; {self._there_are()}.")
        if len(self.names) >= self._most:
            raise UsageError(
                f"The model {name} would be one more than the {self._most} that may be in memory at once; {self._there_are()}. "
                "Drop one that is not needed any more (what was saved of it can be loaded again), or let there be more "
                "(max_models): each takes memory for its adapter, its optimiser and what it samples."
            )
        busy = Counter(number for _, number in self._models.values())
        count = len(self._hosts)
        number = min(range(count), key=lambda each: (busy[each], (each - self._next) % count))
        self._next = (number + 1) % count
        model = Model(name, self._hosts[number])
        # Before anything is awaited, so that the next one finds it.
        self._models[name] = model, number
        try:
            added: Added = await self._hosts[number].call("add_model", name, new)
        except BaseException as error:
            # A rank goes on even if the caller does not wait any more.
            if isinstance(error, asyncio.CancelledError):
                with suppress(GroupwiseError):
                    await self._hosts[number].call("drop_model", name)
            del self._models[name]
            raise
        sampler = ModelSampler(model, added.fingerprint)
        return ModelParts(sampler, ModelLearner(model), model, self._stop_token_ids)

    async def drop(self, name: str) -> None:
        """Remove an added model, once its running calls have ended. Raises UsageError if there is none."""
        if name not in self._models:
            raise UsageError(f"There is no model {name} to drop; {self._there_are()}.")
        model, _ = self._models[name]
        try:
            await model.drop()
        finally:
            self._models.pop(name, None)

    async def layer_kinds(self) -> dict[str, tuple[str, ...]]:
        """The base's linear layers by their full names, as `lora.target_modules` takes them: `attention`, `mlp`, `unembed`."""
        return await self._hosts[0].call("layer_kinds")

    def host_of(self, name: str) -> int:
        """Number of the rank that hosts a model that was added."""
        return self._models[name][1]

    def _there_are(self) -> str:
        return f"there are {', '.join(self.names)}" if self.names else "there are none"
