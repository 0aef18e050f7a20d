"""An engine for the Tinker API that is small enough to read: several adapters, each the table of logits of `groupwise.testing`.

It keeps the contract of `groupwise.server.engine.tinker_protocol` with the true gradient of the loss `given`, plain steps in place of
AdamW's, and what is saved as files. `calls` lists its calls in order.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from groupwise.core.errors import UsageError
from groupwise.core.types import (
    GroupRequest,
    LossSpec,
    OptimiserParams,
    Policy,
    Row,
    TopTokens,
    UpdateResult,
)
from groupwise.server.engine.saved_adapters import Saved, SavedFolders
from groupwise.server.engine.tinker_protocol import (
    Base,
    Computed,
    ModelSpec,
    NoRoom,
    SampleRequest,
    SampleResult,
    Stored,
)
from groupwise.testing import ALPHABET, END_ID, FakeLearner, FakeSampler

BASE = Base("letters", 64, (END_ID,), "table", "letters")


@dataclass
class FakeTinkerEngine:
    """A `groupwise.server.engine.tinker_protocol.TinkerEngine` of one base, in a folder."""

    folder: Path
    max_models: int = 4
    calls: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """Method and model of each call, in the order in which they started."""
    hold: asyncio.Event | None = None
    """Forward passes wait until this is set."""

    def __post_init__(self) -> None:
        self.folders = SavedFolders(self.folder)
        self._models: dict[str, tuple[ModelSpec, FakeLearner]] = {}

    def names(self) -> tuple[str, ...]:
        return (BASE.name,)

    def admit(self, base: str) -> None:
        if base != BASE.name:
            raise UsageError(f"The base model {base!r} is not served here. There are: {BASE.name}.")

    async def base(self, name: str) -> Base:
        return BASE

    def context_length(self, name: str) -> int | None:
        return BASE.longest

    async def tokenizer_folder(self, name: str) -> Path:
        self.admit(name)
        return self.folder / "tokenizer"

    async def create_model(self, model: str, spec: ModelSpec) -> None:
        self.calls.append(("create_model", model))
        if len(self._models) >= self.max_models:
            raise NoRoom(f"There are {self.max_models} models already.")
        self._models[model] = (spec, FakeLearner(model, self.folder))

    async def drop(self, model: str) -> None:
        self.calls.append(("drop", model))
        self._models.pop(model, None)

    async def forward(self, model: str, rows: Sequence[Row], loss: LossSpec) -> Computed:
        return await self._compute("forward", model, rows, loss)

    async def forward_backward(self, model: str, rows: Sequence[Row], loss: LossSpec) -> Computed:
        computed = await self._compute("forward_backward", model, rows, loss)
        learner = self._learner(model)
        for row, logprobs in zip(rows, computed.logprobs, strict=True):
            await learner.forward_backward(
                list(_slopes(row, logprobs, loss)), loss, {"policy": 1.0}
            )
        return computed

    async def optim_step(
        self, model: str, params: OptimiserParams, keep_as: int | None = None
    ) -> UpdateResult:
        self.calls.append(("optim_step", model))
        return await self._learner(model).update(params)

    async def save_state(self, model: str, name: str, *, overwrite: bool, call: int) -> None:
        self.calls.append(("save_state", model))
        await self._save(Stored(model, "weights", name), call, overwrite)

    async def load_state(
        self, model: str, stored: Stored, *, with_optimiser: bool, keep_as: int
    ) -> None:
        self.calls.append(("load_state", model))
        await self.saved(stored)
        if stored.kind != "weights":
            raise UsageError(
                f"{stored.name} is for samplers alone; save_state keeps what can be trained on."
            )
        self._learner(model).discard()
        self._learner(model).load(str(self.folders.path_of(stored)))

    async def save_for_sampler(self, model: str, name: str, call: int) -> None:
        self.calls.append(("save_for_sampler", model))
        await self._save(Stored(model, "sampler_weights", name), call, overwrite=False)

    async def drop_sampler(self, stored: Stored) -> None:
        self.calls.append(("drop_sampler", stored.name))
        self.folders.forget(stored)

    async def saved(self, stored: Stored) -> ModelSpec:
        return self.folders.read(stored).spec

    async def sample(self, weights: Stored | str, request: SampleRequest) -> SampleResult:
        self.calls.append(("sample", weights if isinstance(weights, str) else weights.name))
        learner = FakeLearner("sampler", self.folder / "served")
        if isinstance(weights, Stored):
            await self.saved(weights)
            learner.load(str(self.folders.path_of(weights)))
        sampler = FakeSampler()
        await sampler.load(await _published(learner))
        completions = await sampler.generate(
            GroupRequest(0, request.prompt_ids, request.seeds, request.params)
        )
        whole = Row(request.prompt_ids[:1], request.prompt_ids[1:], (), (), 0.0, 1.0)
        targets = tuple(max(token, 0) for token in request.prompt_targets)
        rows = [whole, replace(whole, targets=targets)]
        logprobs, of_targets = await learner.logprobs(rows)
        tops = [
            await _top(learner, replace(whole, completion_ids=ids, temperature=temperature), count)
            for ids, temperature, count in (
                (whole.completion_ids, 1.0, request.prompt_top),
                *(
                    (each.token_ids, request.params.temperature or 1.0, request.completion_top)
                    for each in completions
                ),
            )
        ]
        return SampleResult(
            completions,
            logprobs if request.prompt_logprobs else None,
            tops[0] if request.prompt_top else None,
            tuple(tops[1:]) if request.completion_top else None,
            tuple(
                0.0 if token < 0 else logprob
                for token, logprob in zip(request.prompt_targets, of_targets, strict=True)
            )
            if request.prompt_targets
            else None,
        )

    async def _compute(
        self, method: str, model: str, rows: Sequence[Row], loss: LossSpec
    ) -> Computed:
        self.calls.append((method, model))
        if self.hold is not None:
            await self.hold.wait()
        for row in rows:
            if not {*row.completion_ids, *row.target_ids} <= set(range(len(ALPHABET))):
                raise UsageError(f"A token is beyond the vocabulary of {len(ALPHABET)}.")
        logprobs = tuple(await self._learner(model).logprobs(rows))
        values = [
            _value(*token, loss)[0]
            for row, found in zip(rows, logprobs, strict=True)
            for token in _tokens(row, found)
        ]
        return Computed(logprobs, {"loss/policy": -math.fsum(values), "tokens": float(len(values))})

    def _learner(self, model: str) -> FakeLearner:
        if model not in self._models:
            raise UsageError(f"There is no model {model!r}.")
        return self._models[model][1]

    async def _save(self, stored: Stored, call: int, overwrite: bool) -> None:
        if overwrite:
            self.folders.forget(stored)
        else:
            self.folders.check_free(stored, call)
        spec, learner = self._models[stored.model]
        place = self.folders.path_of(stored)
        await learner.save(str(place))
        self.folders.describe(place, Saved(spec, "", call))


async def _published(learner: FakeLearner) -> Policy:
    return await learner.publish(0)


async def _top(learner: FakeLearner, row: Row, count: int) -> TopTokens:
    """The most likely letters at the position of each token of a row."""
    letters = range(len(ALPHABET))
    places = len(row.completion_ids)
    (found,) = await learner.logprobs([replace(row, targets=tuple(letters) * places)])
    best = [
        sorted((-found[place * len(letters) + each], each) for each in letters)[:count]
        for place in range(places)
    ]
    pairs = [pair for place in best for pair in place]
    return TopTokens(count, tuple(id for _, id in pairs), tuple(-value for value, _ in pairs))


def _tokens(row: Row, logprobs: Sequence[float]) -> list[tuple[float, float, float]]:
    """For each trained token: its credit, its log-probability, and the sampler's."""
    assert row.credits is not None
    each = zip(row.mask, row.credits, logprobs, row.sampling_logprobs, strict=True)
    return [(credit, now, then) for counts, credit, now, then in each if counts]


def _value(credit: float, now: float, then: float, loss: LossSpec) -> tuple[float, float]:
    """The value maximised at a token, and its slope with the log-probability; see `groupwise.algorithms.given`."""
    low, high = loss.knobs.get("clip_low", 0.8), loss.knobs.get("clip_high", 1.2)
    kind = loss.knobs["surrogate"]
    if kind == "log_probability":
        return credit * now, credit
    if kind == "quadratic_penalty":
        beta = loss.knobs["beta"]
        return credit * now - 0.5 * beta * (now - then) ** 2, credit - beta * (now - then)
    assert kind != "clipped_sequence_ratio", "a ratio of a whole row is not computed here"
    ratio = math.exp(now - then)
    held = min(max(ratio, low), high)
    if kind == "clipped_weight":
        return credit * held * now, credit * held
    if kind == "clipped_ratio" and credit * held < credit * ratio:
        return credit * held, 0.0
    return credit * ratio, credit * ratio


def _slopes(row: Row, logprobs: Sequence[float], loss: LossSpec) -> list[Row]:
    """A row for each token, whose advantage is the slope at that token: the fake policy does not look at its context."""
    pairs = zip(row.target_ids, row.mask, strict=True)
    slopes = iter([_value(*token, loss)[1] for token in _tokens(row, logprobs)])
    return [
        replace(
            row,
            completion_ids=(token,),
            mask=(1,),
            sampling_logprobs=(0.0,),
            advantage=next(slopes),
            credits=None,
            targets=None,
        )
        for token, counts in pairs
        if counts
    ]
