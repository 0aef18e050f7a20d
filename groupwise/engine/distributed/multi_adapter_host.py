"""Hosts the models over one base, in the process that computes them; `groupwise.engine.distributed.multi_adapter` calls it.

Each has adapters of its own on the base, a learner and a sampler; base weights, and their packed copies, are there once. Calls
are answered in one event loop: samplers decode a token each in turn, and learners give way to them after every micro-batch.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from groupwise.core.errors import UsageError
from groupwise.core.types import Sampler
from groupwise.engine.distributed.multi_adapter import Added, NewModel
from groupwise.engine.learner.torch_learner import TorchLearner
from groupwise.engine.learner.weights import TrainedAdapter
from groupwise.engine.models.lora import AdaptedModel, layer_kinds
from groupwise.engine.sampler.weights import ServedAdapter

MakeWeights = Callable[[AdaptedModel, str, NewModel], tuple[TrainedAdapter, ServedAdapter]]
"""Both copies of a new model's adapter, under a name that no other adapter has."""
MakeLearner = Callable[[TrainedAdapter, NewModel], TorchLearner]
MakeSampler = Callable[[ServedAdapter], Sampler]


@dataclass(slots=True)
class _Standing:
    """One hosted model."""

    trained: TrainedAdapter
    served: ServedAdapter
    learner: TorchLearner
    sampler: Sampler
    under_way: int = 0
    """Number of calls of it that have not ended."""
    dropped: bool = False
    gone: asyncio.Event = field(default_factory=asyncio.Event)


class AdapterHost:
    """Holds the models over one base, and makes more of them."""

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
        self._models: dict[str, _Standing] = {}
        self._numbers = itertools.count()

    def add(self, name: str, new: NewModel) -> Added:
        """Make a model; see `groupwise.engine.distributed.multi_adapter.Models.add`."""
        assert name not in self._models, f"there is a model {name} already"
        # Not the name that was given: that may have dots, which torch refuses.
        inner = f"added-{next(self._numbers)}"
        try:
            trained, served = self._make_weights(self._adapted, inner, new)
            learner = self._make_learner(trained, new)
            sampler = self._make_sampler(served)
        except BaseException:
            self._remove_adapters(inner)
            raise
        self._models[name] = _Standing(trained, served, learner, sampler)
        return Added(sampler.fingerprint())

    async def drop(self, name: str) -> None:
        """Remove a model when all calls of it have ended; no call comes after this one."""
        standing = self._models.pop(name, None)
        if standing is None:
            raise _unknown(name, self._models)
        standing.dropped = True
        if standing.under_way:
            await standing.gone.wait()
        else:
            self._remove(standing)

    async def call(self, name: str, what: str, *arguments: Any) -> Any:
        """Call something of a model, `learner.update`."""
        standing = self._standing(name)
        standing.under_way += 1
        try:
            value = _called(standing, what, arguments)
            return await value if inspect.isawaitable(value) else value
        finally:
            standing.under_way -= 1
            if standing.dropped and not standing.under_way:
                self._remove(standing)

    def call_now(self, name: str, what: str, *arguments: Any) -> Any:
        """The same for calls that are not async."""
        return _called(self._standing(name), what, arguments)

    def layer_kinds(self) -> dict[str, tuple[str, ...]]:
        """See `groupwise.engine.models.lora.layer_kinds`."""
        return layer_kinds(self._adapted.base)

    def _standing(self, name: str) -> _Standing:
        if name not in self._models:
            raise _unknown(name, self._models)
        return self._models[name]

    def _remove(self, standing: _Standing) -> None:
        standing.trained.remove()
        standing.served.remove()
        standing.gone.set()

    def _remove_adapters(self, inner: str) -> None:
        """Remove the adapters of a model that could not be made completely."""
        for each in [*self._adapted.configs]:
            if each == inner or each.startswith(f"{inner}-"):
                self._adapted.remove(each)


def _called(standing: _Standing, what: str, arguments: tuple[Any, ...]) -> Any:
    found = attrgetter(what)(standing)
    return found(*arguments) if callable(found) else found


def _unknown(name: str, there: dict[str, _Standing]) -> UsageError:
    return UsageError(
        f"There is no model {name} in this process; there are {', '.join(there) or 'none'}."
    )
