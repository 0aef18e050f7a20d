"""Adapters that clients train through the Tinker API, in the engine's process: over the base of the open run, or one of their own.

Each model has a learner, and saves its weights as folders. Samples are drawn by a few samplers separate from the models. Each serves one
set of saved weights at a time; weights no longer in use are replaced. The sampled weights therefore never change while their model
continues to train. Only saved weights are durable. The driver of the models has their calls on disk, and repeats those that came after the
last kept state (`keep_as`).
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from groupwise.core import atomic_files
from groupwise.core.errors import UsageError
from groupwise.core.types import (
    Completion,
    GroupRequest,
    LossSpec,
    OptimiserParams,
    Policy,
    Row,
    TopTokens,
    UpdateResult,
)
from groupwise.core.waiting import ChangeNotifier
from groupwise.engine.distributed import prefork
from groupwise.engine.distributed.multi_adapter import ModelParts, ModelRegistry, NewModel
from groupwise.engine.models.bundled import BUNDLED
from groupwise.engine.models.config import LoraConfig, ModelConfig
from groupwise.engine.models.tokenizer import resolve
from groupwise.server.engine.engine_protocol import OpenModels
from groupwise.server.engine.saved_adapters import Saved, SavedFolders
from groupwise.server.engine.tinker_protocol import (
    Base,
    Computed,
    ModelSpec,
    SampleRequest,
    SampleResult,
    Stored,
)
from groupwise.training import placement
from groupwise.training.assembly.parts import Parts
from groupwise.training.assembly.prepare import expect_ranks
from groupwise.training.assembly.start import models_over, start_base
from groupwise.training.config import load_config
from groupwise.training.placement import Layout

SAMPLERS = 4
"""Maximum number of weight sets served at once; each costs the memory of two adapters. Other requests wait until a sampler is free."""
UNDIVIDED = {"policy": 1.0}
"""Denominator 1 for the policy loss: the client's losses are sums."""


@dataclass(frozen=True, slots=True)
class Shared:
    """The parts of the run open in this engine that models over its base need."""

    name: str
    model: ModelConfig
    trains_all: bool
    parts: Parts
    layout: Layout


class FullFineTuning(UsageError):
    """A run that trains all weights cannot share its model."""

    code = "full_fine_tuning"


@dataclass(frozen=True, slots=True)
class _OpenBase:
    base: Base
    models: ModelRegistry
    folders: SavedFolders
    vocabulary: int
    longest_row: int
    room: int
    """Maximum number of models, not counting the run."""


@dataclass(frozen=True, slots=True)
class _Model:
    spec: ModelSpec
    parts: ModelParts


@dataclass(eq=False, slots=True)
class _Sampler:
    """Serves one set of weights at a time."""

    name: str
    shape: LoraConfig
    parts: ModelParts
    weights: Stored | None = None
    """None: the base without an adapter."""
    users: int = 0
    learner_reads: bool = False
    """The model's learner also holds these weights, so it can compute the log-probabilities of prompts."""


class EngineModels:
    """See the module. The caller issues the calls of one model one at a time."""

    def __init__(self, shared: Callable[[], Shared | None], scope: AsyncExitStack) -> None:
        """`shared` returns the run that is open in this engine, if any. A base loaded without a run is closed with `scope`."""
        self._shared = shared
        self._scope = scope
        self._opening = asyncio.Lock()
        self._opened: _OpenBase | None = None
        self._models: dict[str, _Model] = {}
        self._samplers: list[_Sampler] = []
        self._assigning = asyncio.Lock()
        """Held while a sampler is assigned other weights."""
        self._free = ChangeNotifier()
        self._numbers = itertools.count()

    async def open(self, request: OpenModels) -> Base:
        """Share the base of the open run, or load one. Opening the same base again is harmless.

        UsageError if another base is in memory, or if the run trains all of its weights.
        """
        async with self._opening:
            shared = self._shared()
            if shared is not None:
                _refuse_other_base(request.base, shared.model.name, f"the run {shared.name}")
                if self._opened is None and shared.trains_all:
                    raise FullFineTuning(
                        f"The run {shared.name} trains all weights of {shared.model.name}, so nothing else can be trained meanwhile. "
                        "Stop it first, or have it train an adapter."
                    )
            if self._opened is None and shared is not None:
                models = models_over(shared.parts, request.most + SAMPLERS, shared.name)
                stops, most = shared.parts.stop_token_ids, request.most - 1
                self._opened = _describe_base(
                    request, shared.model, shared.layout, models, stops, most
                )
            elif self._opened is None:
                self._opened = await self._load_base(request)
            _refuse_other_base(request.base, self._opened.base.name, "other models")
            return self._opened.base

    async def _load_base(self, request: OpenModels) -> _OpenBase:
        config = load_config(
            {
                "model": {"name": request.base},
                "sampler": {"max_completion_length": 1},
                "run": {"name": "models"},
            }
        ).config
        expect_ranks(config)
        self._scope.callback(prefork.end_zygote)
        longest = min(request.longest, prefork.prompt_room(config.model, 0))
        layout = placement.choose_layout(config, longest - 1)
        parts = await start_base(config, layout)
        self._scope.callback(parts.close)
        models = models_over(parts, request.most + SAMPLERS)
        return _describe_base(
            request, config.model, layout, models, parts.stop_token_ids, request.most
        )

    @property
    def _base_state(self) -> _OpenBase:
        if self._opened is None:
            raise UsageError("No base is open in this engine.")
        return self._opened

    # --- models ----------------------------------------------------------------------------------

    async def create_model(self, model: str, spec: ModelSpec, kept: int | None = None) -> None:
        """Create a new adapter; with `kept`, load the state that was kept after that call."""
        current = self._base_state
        if len(self._models) >= current.room:
            raise UsageError(
                f"The model {model} would be one more than the {current.room} that there is room for ({', '.join(self._models)}). End the "
                "session of one that is not needed any more, or let there be more (max_models)."
            )
        lora = await self._lora_config(spec)
        parts = await current.models.add(model, _new_model(model, spec.seed, lora))
        try:
            if kept is not None:
                parts.learner.load(str(current.folders.automatic_path(model, kept)))
        except BaseException:
            await current.models.drop(model)
            raise
        self._models[model] = _Model(spec, parts)

    async def drop(self, model: str) -> None:
        """Release a model; its saved weights stay. A missing model is not an error."""
        if self._models.pop(model, None) is not None:
            await self._base_state.models.drop(model)

    async def forward(self, model: str, rows: Sequence[Row], loss: LossSpec) -> Computed:
        """See `TinkerEngine.forward`."""
        parts = self._find_model(model).parts
        self._check_rows(rows)
        sums, logprobs = await parts.model.call("learner.measure", [*rows], loss)
        return Computed(tuple(logprobs), sums)

    async def forward_backward(self, model: str, rows: Sequence[Row], loss: LossSpec) -> Computed:
        """See `TinkerEngine.forward_backward`."""
        parts = self._find_model(model).parts
        self._check_rows(rows)
        sums, logprobs = await parts.model.call(
            "learner.forward_backward_logprobs", [*rows], loss, UNDIVIDED, droppable=True
        )
        return Computed(tuple(logprobs), sums)

    async def optim_step(
        self, model: str, params: OptimiserParams, keep_as: int | None = None
    ) -> UpdateResult:
        """See `TinkerEngine.optim_step`."""
        result = await self._find_model(model).parts.learner.update(params)
        await self._keep_state(model, keep_as)
        return result

    async def save_state(self, model: str, name: str, overwrite: bool, call: int) -> None:
        """See `TinkerEngine.save_state`."""
        learner = self._find_model(model).parts.learner
        stored = Stored(model, "weights", name)
        if not overwrite:
            self._base_state.folders.check_free(stored, call)
        await self._write_saved(stored, call, lambda folder: learner.save(str(folder)))

    async def save_for_sampler(self, model: str, name: str, call: int) -> None:
        """See `TinkerEngine.save_for_sampler`."""
        handle = self._find_model(model).parts.model
        stored = Stored(model, "sampler_weights", name)
        self._base_state.folders.check_free(stored, call)
        await self._write_saved(stored, call, lambda folder: handle.call("trained.save", folder))

    async def load_state(
        self, model: str, stored: Stored, with_optimiser: bool, keep_as: int | None = None
    ) -> None:
        """See `TinkerEngine.load_state`."""
        model_state = self._find_model(model)
        saved = self._base_state.folders.read(stored)
        if stored.kind != "weights":
            raise UsageError(
                f"{stored.name} is for samplers alone; save_state keeps what can be trained on."
            )
        saved_spec, own_spec = saved.spec, model_state.spec
        if replace(saved_spec, seed=own_spec.seed) != own_spec:
            raise UsageError(
                f"{stored.name} was saved by a model on {saved_spec.base} with rank {saved_spec.rank}, attn {saved_spec.train_attn}, mlp "
                f"{saved_spec.train_mlp}, unembed {saved_spec.train_unembed}; this model is on {own_spec.base} with rank {own_spec.rank}, "
                f"attn {own_spec.train_attn}, mlp {own_spec.train_mlp}, unembed {own_spec.train_unembed}. They must be equal."
            )
        folder = self._base_state.folders.path_of(stored)
        with self._base_state.folders.using(stored):
            if with_optimiser:
                model_state.parts.learner.load(str(folder))
            else:
                model_state.parts.model.call_now("learner.load_weights", str(folder))
        await self._keep_state(model, keep_as)

    def _find_model(self, name: str) -> _Model:
        if name not in self._models:
            raise UsageError(f"There is no model {name!r} in this engine.")
        return self._models[name]

    def _check_rows(self, rows: Sequence[Row]) -> None:
        """UsageError for rows that would otherwise fail in the middle, with half a gradient accumulated."""
        current = self._base_state
        for index, row in enumerate(rows):
            length = len(row.prompt_ids) + len(row.completion_ids)
            if length > current.longest_row:
                raise UsageError(
                    f"data[{index}] has {length} tokens; {current.base.name} has room for {current.longest_row}."
                )
            _check_tokens((*row.prompt_ids, *row.completion_ids), current, f"data[{index}]")
            _check_tokens(row.targets or (), current, f"data[{index}].target_tokens")

    async def _lora_config(self, spec: ModelSpec) -> LoraConfig:
        """The adapter that a client requests."""
        if spec.train_attn and spec.train_mlp and not spec.train_unembed:
            return LoraConfig(r=spec.rank)
        kinds = await self._base_state.models.layer_kinds()
        trained = {
            "attention": spec.train_attn,
            "mlp": spec.train_mlp,
            "unembed": spec.train_unembed,
        }
        paths = [path for kind, is_trained in trained.items() if is_trained for path in kinds[kind]]
        return LoraConfig(r=spec.rank, target_modules=tuple(paths))

    async def _keep_state(self, model: str, call: int | None) -> None:
        """Save the state after a call, so that later calls can be repeated from it; older states are deleted."""
        if call is None:
            return
        learner, folders = self._find_model(model).parts.learner, self._base_state.folders
        folder_of_state = folders.automatic_path(model, call)
        with atomic_files.making_folder(folder_of_state, replace=True) as folder:
            await learner.save(str(folder))
        folders.forget_automatic(model, before=call)

    async def _write_saved(
        self, stored: Stored, call: int, write: Callable[[Path], Awaitable[Any]]
    ) -> None:
        model_state, folders = self._find_model(stored.model), self._base_state.folders
        saved = Saved(
            model_state.spec, model_state.parts.model.call_now("learner.fingerprint"), call
        )
        with atomic_files.making_folder(folders.path_of(stored), replace=True) as folder:
            await write(folder)
            folders.describe(folder, saved)
        for sampler in self._samplers:
            if sampler.weights == stored:  # a new sampler of this name gets the new weights
                sampler.weights = _OVERWRITTEN

    # --- sampling --------------------------------------------------------------------------------

    async def sample(self, stored: Stored | None, request: SampleRequest) -> SampleResult:
        """Complete a prompt with saved weights, or with the base if `stored` is None. See `TinkerEngine.sample`."""
        current = self._base_state
        length = len(request.prompt_ids) + request.params.max_tokens
        if length > current.base.longest:
            raise UsageError(
                f"Prompt and completion would have up to {length} tokens; there is room for {current.base.longest}."
            )
        _check_tokens(request.prompt_ids, current, "prompt")
        targets = [token for token in request.prompt_targets if token >= 0]
        _check_tokens(targets, current, "target_prompt_logprobs")
        most = max(request.prompt_top, request.completion_top)
        if most > current.vocabulary:
            raise UsageError(
                f"The {most} most likely tokens are wanted; {current.base.name} has {current.vocabulary} tokens in all."
            )
        group_request = GroupRequest(
            next(self._numbers), request.prompt_ids, request.seeds, request.params
        )
        sampler = await self._take_sampler(stored)
        try:
            completions = await sampler.parts.sampler.generate(group_request)
            return await self._scored_sample(sampler, stored, request, completions)
        finally:
            sampler.users -= 1
            self._free.notify()

    async def _scored_sample(
        self,
        sampler: _Sampler,
        stored: Stored | None,
        request: SampleRequest,
        completions: tuple[Completion, ...],
    ) -> SampleResult:
        """The completions with the numbers that the request wants of prompt and completions, by the sampler's learner."""
        top = request.prompt_top or request.completion_top
        if not (request.prompt_logprobs or request.prompt_targets or top):
            return SampleResult(completions)
        if stored is not None and not sampler.learner_reads:
            folder = self._base_state.folders.path_of(stored)
            sampler.parts.model.call_now("learner.load_weights", str(folder))
            sampler.learner_reads = True
        parts = sampler.parts
        prompt = _context_row(request.prompt_ids[:1], request.prompt_ids[1:])
        prompt_logprobs = prompt_top = completion_tops = target_logprobs = None
        if not prompt.completion_ids:  # nothing comes before the only token
            prompt_logprobs = () if request.prompt_logprobs else None
            prompt_top = TopTokens(request.prompt_top, (), ()) if request.prompt_top else None
        elif request.prompt_top:
            (logprobs,), (prompt_top,) = await parts.model.call(
                "learner.top_logprobs", [prompt], request.prompt_top
            )
            prompt_logprobs = logprobs if request.prompt_logprobs else None
        elif request.prompt_logprobs:
            (prompt_logprobs,) = await parts.learner.logprobs([prompt])
        if request.completion_top:
            temperature = request.params.temperature or 1.0
            rows = [
                replace(
                    _context_row(request.prompt_ids, completion.token_ids), temperature=temperature
                )
                for completion in completions
            ]
            _, tops = await parts.model.call("learner.top_logprobs", rows, request.completion_top)
            completion_tops = tuple(tops)
        if request.prompt_targets:
            targets = tuple(max(token, 0) for token in request.prompt_targets)
            row = replace(prompt, targets=targets, mask=(1,) * len(targets))
            (values,) = await parts.learner.logprobs([row])
            pairs = zip(request.prompt_targets, values, strict=True)
            target_logprobs = tuple(0.0 if token < 0 else logprob for token, logprob in pairs)
        return SampleResult(
            completions, prompt_logprobs, prompt_top, completion_tops, target_logprobs
        )

    async def _take_sampler(self, weights: Stored | None) -> _Sampler:
        """A sampler that serves these weights, with its user count raised; waits while all samplers are in use."""
        while True:
            beat = self._free.next_event
            async with self._assigning:
                sampler = next(
                    (candidate for candidate in self._samplers if candidate.weights == weights),
                    None,
                )
                is_full = len(self._samplers) >= SAMPLERS and all(
                    sampler.users for sampler in self._samplers
                )
                if sampler is None and not is_full:
                    sampler = await self._assign_sampler(weights)
                if sampler is not None:
                    sampler.users += 1
                    self._samplers.remove(sampler)
                    self._samplers.append(sampler)  # the least recently used is first
                    return sampler
            await beat.wait()

    async def _assign_sampler(self, weights: Stored | None) -> _Sampler:
        """Assign these weights to an idle sampler or to a new one."""
        saved = None if weights is None else self._base_state.folders.read(weights)
        shape = _UNTRAINED_ADAPTER if saved is None else await self._lora_config(saved.spec)
        idle = [sampler for sampler in self._samplers if not sampler.users]
        fitting = [sampler for sampler in idle if sampler.shape == shape]
        full = len(self._samplers) >= SAMPLERS
        if full and fitting and saved is not None:
            sampler = fitting[0]  # same shape: only its weights are replaced
        else:
            if full:
                self._samplers.remove(idle[0])
                await self._base_state.models.drop(idle[0].name)
            name = f"sampler {next(self._numbers)}"
            sampler = _Sampler(
                name, shape, await self._base_state.models.add(name, _new_model(name, 0, shape))
            )
            self._samplers.append(sampler)
        if weights is not None and saved is not None:
            folder = str(self._base_state.folders.path_of(weights))
            policy = Policy(weights.model, 0, saved.fingerprint, "adapter", folder)
            self._samplers.remove(sampler)  # a failed read leaves it in an unknown state
            try:
                await sampler.parts.sampler.load(policy)
            except BaseException:
                await self._base_state.models.drop(sampler.name)
                raise
            self._samplers.append(sampler)
        sampler.weights, sampler.learner_reads = weights, False
        return sampler


_OVERWRITTEN = Stored("", "sampler_weights", "")
"""Marks a sampler whose weights were saved again under their name: it serves only the requests that it has."""
_UNTRAINED_ADAPTER = LoraConfig(r=1)
"""Shape of the untrained adapter with which the plain base is served; it adds nothing."""


def _describe_base(
    request: OpenModels,
    config: ModelConfig,
    layout: Layout,
    models: ModelRegistry,
    stop_token_ids: tuple[int, ...],
    room: int,
) -> _OpenBase:
    longest_row = prefork.prompt_room(config, 0)
    location = resolve(config)
    architecture = config.name
    if location.local:
        model_config = json.loads(
            Path(location.location, "config.json").read_text(encoding="utf-8")
        )
        architecture = str(model_config.get("model_type", ""))
    base = Base(
        name=request.base,
        longest=min(layout.key_length, longest_row),
        stop_token_ids=stop_token_ids,
        architecture=architecture,
        tokenizer=BUNDLED[config.name].hub_id if config.name in BUNDLED else location.location,
    )
    folders = SavedFolders(Path(request.folder))
    return _OpenBase(base, models, folders, prefork.vocabulary(config), longest_row, room)


def _context_row(prompt_ids: tuple[int, ...], completion_ids: tuple[int, ...]) -> Row:
    """A row whose completion is only measured."""
    count = len(completion_ids)
    return Row(prompt_ids, completion_ids, (1,) * count, (0.0,) * count, 0.0, 1.0)


def _new_model(name: str, seed: int, lora: LoraConfig) -> NewModel:
    # Nothing is published: samplers serve saved weights.
    return NewModel(run=name, folder="", seed=seed, lora=lora)


def _refuse_other_base(requested: str, loaded: str, user: str) -> None:
    if requested != loaded:
        raise UsageError(
            f"The base model {requested} is not available now: {loaded} is in memory, for {user}, and there is one base at a time. "
            f"Take {loaded}, or wait until it is not needed any more."
        )


def _check_tokens(tokens: Sequence[int], base_state: _OpenBase, where: str) -> None:
    unknown = next((token for token in tokens if not 0 <= token < base_state.vocabulary), None)
    if unknown is not None:
        raise UsageError(
            f"{where} has the token {unknown}; those of {base_state.base.name} are 0 to {base_state.vocabulary - 1}."
        )
