"""A learner in another process, called by verbs (`groupwise.api.schemas.parts`): on a training server, or in Tunix's worker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter

from groupwise.api.schemas.parts import (
    ForwardBackward,
    Logprobs,
    Predictions,
    TrainedLogprobs,
    Update,
)
from groupwise.core.types import (
    LossSpec,
    OptimiserParams,
    PolicyRole,
    Prediction,
    Row,
    UpdateResult,
)

Verb = ForwardBackward | TrainedLogprobs | Update | Logprobs | Predictions

_SUMS = TypeAdapter(dict[str, float])
_RESULT = TypeAdapter(UpdateResult)
_LOGPROBS = TypeAdapter(list[tuple[float, ...]])
_PREDICTIONS = TypeAdapter(list[Prediction])


class VerbLearner(ABC):
    """The methods of a `groupwise.core.types.Learner` that compute."""

    @abstractmethod
    async def _call_verb(self, verb: Verb) -> Any:
        """Execute a verb in the other process, after all earlier calls; returns its answer as parsed JSON."""

    async def forward_backward(
        self, rows: Sequence[Row], loss: LossSpec, denominators: Mapping[str, float]
    ) -> dict[str, float]:
        """See `groupwise.core.types.Learner.forward_backward`."""
        verb = ForwardBackward(rows=[*rows], loss=loss, denominators=dict(denominators))
        return _SUMS.validate_python(await self._call_verb(verb))

    async def trained_logprobs(self) -> list[tuple[float, ...]] | None:
        """See `groupwise.core.types.Learner.trained_logprobs`."""
        logprobs = await self._call_verb(TrainedLogprobs())
        return None if logprobs is None else _LOGPROBS.validate_python(logprobs)

    async def update(self, params: OptimiserParams) -> UpdateResult:
        """See `groupwise.core.types.Learner.update`."""
        return _RESULT.validate_python(await self._call_verb(Update(params=params)))

    async def logprobs(
        self, rows: Sequence[Row], role: PolicyRole = "policy"
    ) -> list[tuple[float, ...]]:
        """See `groupwise.core.types.Learner.logprobs`."""
        return _LOGPROBS.validate_python(await self._call_verb(Logprobs(rows=[*rows], role=role)))

    async def predictions(self, rows: Sequence[Row]) -> list[Prediction]:
        """See `groupwise.core.types.Learner.predictions`."""
        return _PREDICTIONS.validate_python(await self._call_verb(Predictions(rows=[*rows])))
