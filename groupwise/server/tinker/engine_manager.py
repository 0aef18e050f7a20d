"""The Tinker API's side of the engine: finds an engine with the base, recreates the models there, and does so again when it is lost.

    a run is active     its engine: the models are trained alongside it, over the same base
    else                an engine of its own, started when it is first needed

Engines come and go: runs start and end, processes are killed. A model is recreated in an engine from its last kept state and the calls that
followed it, which are in the ledger; then the interrupted call is done there. The client notices only the delay. A call that ends one
engine after another is failed, and its model continues without it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from groupwise.api.http.bodies import read_body
from groupwise.api.schemas.problems import Refusal
from groupwise.core.errors import GroupwiseError, UsageError
from groupwise.core.types import LossSpec, OptimiserParams, Row, UpdateResult
from groupwise.engine.models.bundled import ALIASES, BUNDLED, cached_folder
from groupwise.server.engine.engine_protocol import CallableEngine, EngineLost, OpenModels
from groupwise.server.engine.saved_adapters import SavedFolders
from groupwise.server.engine.tinker_protocol import (
    Base,
    Computed,
    ModelSpec,
    NoRoom,
    SampleRequest,
    SampleResult,
    Stored,
)
from groupwise.server.ledger import calls
from groupwise.server.ledger.writer import Ledger
from groupwise.server.run.conductor import Conductor
from groupwise.server.run.engine_supervisor import EngineSupervisor, is_full
from groupwise.server.run.lifecycle import Runs
from groupwise.server.run.run_config import MODEL_FILE, AllowedModels, allowed_model, folders_in
from groupwise.server.tinker import requests, translate
from groupwise.server.tinker.training import FORWARD_BACKWARD, optimiser_of

logger = logging.getLogger(__name__)

NAME = "tinker"
"""Name under which the Tinker API asks for the machine; see `Service.machine_users`."""
HUB_IDS: Mapping[str, str] = {model.hub_id: alias for alias, model in BUNDLED.items()}
"""The aliases of bundled models by the names under which clients know their tokenizers and chat templates."""
LOSSES = 3
"""Number of engines that may be lost to one call before the call fails."""
RETRY_INTERVAL = 0.2
"""Seconds between two checks of a run that is starting, recovering or ending."""


@dataclass(eq=False, slots=True)
class _LoadedEngine:
    """An engine that has the base in memory."""

    engine: CallableEngine
    base: Base
    model_source: str
    """The base's name or folder, as the engine loads it."""
    run: Conductor | None
    """The run in the engine; None if there is none."""
    created_models: set[str] = field(default_factory=set[str])
    """Models that exist in this engine."""

    async def call(self, method: str, *arguments: Any) -> Any:
        return await self.engine.call(f"models.{method}", *arguments)


@dataclass(eq=False, slots=True)
class _Model:
    spec: ModelSpec
    kept: int | None = None
    """Number of the call after which its state was last kept."""
    recreation_lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class TinkerEngineManager:
    """A `groupwise.server.engine.tinker_protocol.TinkerEngine` that uses the active run's engine, or one of its own."""

    def __init__(
        self,
        *,
        runs: Runs,
        supervisor: EngineSupervisor,
        ledger: Ledger,
        allowed: AllowedModels,
        folder: str,
        most: int,
        longest: int,
    ) -> None:
        """`supervisor` starts an engine without a run. `most`: maximum number of models at once, including a run; `longest`: see
        `OpenModels`.
        """
        self._runs = runs
        self._supervisor = supervisor
        self._ledger = ledger
        self._allowed = allowed
        self._folder = folder
        self._most = most
        self._longest = longest
        self.folders = SavedFolders(Path(folder))
        self._models: dict[str, _Model] = {}
        self._loaded_engine: _LoadedEngine | None = None
        self._engine_lock = asyncio.Lock()
        """Held while an engine is being found or started."""

    async def open(self) -> None:
        """Load the clients' models from the ledger; call before anything else."""
        for row in await self._ledger.do(calls.all_models):
            self._models[row.id] = _Model(ModelSpec(**row.spec), row.kept)

    async def release_machine(self, sessions: Mapping[str, str]) -> None:
        """Called before a run starts in an engine of its own. Refuses with `run_active` while there are models; `sessions` describes their
        owners.
        """
        if self._models:
            owners = "; ".join(sessions.values()) or ", ".join(self._models)
            raise Refusal(
                "run_active",
                f"Clients that train through the Tinker API have models in memory ({owners}). A run begins in an engine of its "
                "own: end their sessions first, or start with `replace: true`, which ends them; what they have saved stays. Once it is "
                "active, models can be made beside it.",
            )
        if self._loaded_engine is not None and self._loaded_engine.run is None:
            self._loaded_engine = None
        await self._supervisor.end()

    async def close(self) -> None:
        """End the engine, if it has no run."""
        await self._supervisor.end()

    # --- which bases -----------------------------------------------------------------------------

    def names(self) -> tuple[str, ...]:
        """See `TinkerEngine.names`."""
        bound = self._required_base()
        if bound is not None:
            return (bound[0],)
        names = (*ALIASES, *HUB_IDS, *folders_in(self._allowed.model_dir), *self._allowed.models)
        return tuple(dict.fromkeys(names))

    def admit(self, base: str) -> None:
        """See `TinkerEngine.admit`."""
        model_source = self._source_of(base)
        bound = self._required_base()
        if bound is not None and self._source_of(bound[0]) != model_source:
            kind = NoRoom if self._runs.active_conductor() is None else UsageError
            raise kind(
                f"The base model {base!r} is not available now: {bound[0]} is in memory, for {bound[1]}, and there is one base at a time. "
                f"Take {bound[0]}, or wait until it is not needed any more."
            )

    def _required_base(self) -> tuple[str, str] | None:
        """The base that must stay in memory, and a description of its user."""
        run = self._runs.active_conductor()
        if run is not None:
            return run.model, "the run that is active"
        if self._models:
            return next(iter(self._models.values())).spec.base, "models of other clients"
        return None

    def _source_of(self, base: str) -> str:
        """Name or folder to load; raises UsageError if it is not allowed."""
        run = self._runs.active_conductor()
        if run is not None and base in (run.model, run.model_source):
            return run.model_source
        try:
            return allowed_model("base_model", base, self._allowed)
        except Refusal as refusal:
            if base in HUB_IDS:
                return HUB_IDS[base]
            raise UsageError(f"The base model {base!r} is not served here. {refusal}") from None

    async def base(self, name: str) -> Base:
        """A base model that may be used, with the engine started if need be: `TinkerEngine.base`."""
        base = (await self._engine_with(name)).base
        # A remote client cannot read a folder of this machine. It loads its own folder of this name: see `tokenizer_folder`.
        tokenizer = name if Path(base.tokenizer).is_absolute() else base.tokenizer
        return replace(base, name=name, tokenizer=tokenizer)

    def context_length(self, name: str) -> int | None:
        """See `TinkerEngine.context_length`."""
        model_source, loaded = self._source_of(name), self._loaded_engine
        if loaded is not None and loaded.model_source == model_source:
            return loaded.base.longest
        if self._runs.active_conductor() is not None:
            return None
        config = Path(
            cached_folder(model_source) or model_source
            if model_source in ALIASES
            else model_source,
            MODEL_FILE,
        )
        if not config.is_file():
            return None
        positions = json.loads(config.read_text("utf-8")).get("max_position_embeddings")
        return min(self._longest, positions) if isinstance(positions, int) else None

    async def tokenizer_folder(self, name: str) -> Path:
        """See `TinkerEngine.tokenizer_folder`."""
        model_source = self._source_of(name)
        folder = cached_folder(model_source) if model_source in ALIASES else Path(model_source)
        if folder is None or not folder.is_dir():
            folder = Path((await self._engine_with(name)).base.tokenizer)
        if model_source in ALIASES and not folder.is_dir():  # the engine has made it
            folder = cached_folder(model_source) or folder
        if not folder.is_dir():
            raise UsageError(
                f"The tokenizer of {name} comes from the hub: AutoTokenizer.from_pretrained({str(folder)!r})."
            )
        return folder

    # --- models ----------------------------------------------------------------------------------

    async def create_model(self, model: str, spec: ModelSpec) -> None:
        """See `TinkerEngine.create_model`. If the model exists already, it was created by an earlier attempt of the same call."""
        is_new = model not in self._models
        if is_new:
            run = self._runs.active_conductor()
            users = [*self._models, *([] if run is None else ["the run"])]
            if len(users) >= self._most:
                raise NoRoom(
                    f"There are {len(users)} models in memory already ({', '.join(users)}), as many as there may be: the server's "
                    f"max_models is {self._most}; the operator of the server can raise it."
                )
            self.admit(spec.base)
            self._models[model] = _Model(spec)
        try:
            await self._call_model(model, None)
        except BaseException:
            if is_new:
                del self._models[model]
            raise

    async def drop(self, model: str) -> None:
        """See `TinkerEngine.drop`."""
        self._models.pop(model, None)
        engine = self._loaded_engine
        if engine is not None and model in engine.created_models:
            engine.created_models.discard(model)
            with suppress(EngineLost):
                await engine.call("drop", model)
        await asyncio.to_thread(self.folders.forget_automatic, model)

    async def forward(self, model: str, rows: Sequence[Row], loss: LossSpec) -> Computed:
        """See `TinkerEngine.forward`."""
        return await self._call_model(model, "forward", [*rows], loss)

    async def forward_backward(self, model: str, rows: Sequence[Row], loss: LossSpec) -> Computed:
        """See `TinkerEngine.forward_backward`."""
        return await self._call_model(model, "forward_backward", [*rows], loss)

    async def optim_step(
        self, model: str, params: OptimiserParams, keep_as: int | None = None
    ) -> UpdateResult:
        """See `TinkerEngine.optim_step`."""
        result = await self._call_model(model, "optim_step", params, keep_as)
        self._note_kept(model, keep_as)
        return result

    async def save_state(self, model: str, name: str, *, overwrite: bool, call: int) -> None:
        """See `TinkerEngine.save_state`."""
        await self._call_model(model, "save_state", name, overwrite, call)

    async def load_state(
        self, model: str, stored: Stored, *, with_optimiser: bool, keep_as: int
    ) -> None:
        """See `TinkerEngine.load_state`."""
        await self._call_model(model, "load_state", stored, with_optimiser, keep_as)
        self._note_kept(model, keep_as)

    async def save_for_sampler(self, model: str, name: str, call: int) -> None:
        """See `TinkerEngine.save_for_sampler`."""
        await self._call_model(model, "save_for_sampler", name, call)

    def _note_kept(self, model: str, call: int | None) -> None:
        if call is not None and model in self._models:
            self._models[model].kept = call

    # --- saved weights ---------------------------------------------------------------------------

    async def drop_sampler(self, stored: Stored) -> None:
        """See `TinkerEngine.drop_sampler`."""
        await asyncio.to_thread(self.folders.forget, stored)

    async def saved(self, stored: Stored) -> ModelSpec:
        """See `TinkerEngine.saved`."""
        return (await asyncio.to_thread(self.folders.read, stored)).spec

    async def sample(self, weights: Stored | str, request: SampleRequest) -> SampleResult:
        """See `TinkerEngine.sample`."""
        stored = weights if isinstance(weights, Stored) else None
        base = weights if isinstance(weights, str) else (await self.saved(weights)).base
        losses = 0
        while True:
            engine = await self._engine_with(base)
            try:
                return await engine.call("sample", stored, request)
            except EngineLost as error:
                losses += 1
                await self._release_lost(engine, error)
                if losses == LOSSES:
                    raise

    # --- engines ---------------------------------------------------------------------------------

    async def _call_model(self, model: str, method: str | None, *arguments: Any) -> Any:
        """Call a method of a model, after recreating the model in an engine if necessary; without a method only recreate it."""
        losses = 0
        while True:
            if model not in self._models:
                raise UsageError(f"There is no model {model!r}: its session has ended.")
            model_state = self._models[model]
            engine = await self._engine_with(model_state.spec.base)
            try:
                await self._recreate(engine, model, model_state)
                return None if method is None else await engine.call(method, model, *arguments)
            except EngineLost as error:
                losses += 1
                await self._release_lost(engine, error)
                if losses == LOSSES:
                    raise
            except UsageError:
                raise  # nothing was done
            except GroupwiseError:
                await self._drop_half_done(engine, model)
                raise

    async def _recreate(self, engine: _LoadedEngine, model: str, model_state: _Model) -> None:
        """Recreate the model in this engine, in its current state."""
        async with model_state.recreation_lock:
            if model in engine.created_models:
                return
            last_kept = -1 if model_state.kept is None else model_state.kept
            calls_to_repeat = await self._ledger.do(calls.calls_to_repeat, model, last_kept)
            await engine.call("create_model", model, model_state.spec, model_state.kept)
            engine.created_models.add(model)
            try:
                for kind, content in calls_to_repeat:
                    # Repeat a call whose answer the client already has.
                    if kind == FORWARD_BACKWARD:
                        forward = (await read_body(content, translate.read)).forward
                        assert isinstance(forward, translate.Forward)  # because it was answered
                        await engine.call("forward_backward", model, [*forward.rows], forward.loss)
                    elif kind == requests.OptimStep.__name__:
                        params = optimiser_of(requests.OptimStep.model_validate_json(content))
                        await engine.call("optim_step", model, params)
                    else:
                        # Every other kind of call keeps the model's state at once, so it never has to be repeated.
                        raise AssertionError(f"{kind} cannot be repeated")
            except BaseException:
                await self._drop_half_done(engine, model)
                raise
        if calls_to_repeat or model_state.kept is not None:
            logger.info("the model %s was made again, with %d calls", model, len(calls_to_repeat))

    async def _drop_half_done(self, engine: _LoadedEngine, model: str) -> None:
        """A call failed half done: drop the model, so that it is recreated before its next call."""
        engine.created_models.discard(model)
        with suppress(GroupwiseError):  # the engine is gone, and the model with it
            await engine.call("drop", model)

    async def _engine_with(self, base: str) -> _LoadedEngine:
        model_source = self._source_of(base)
        while True:
            async with self._engine_lock:
                run = self._runs.active_conductor()
                engine = await (
                    self._own_engine(base, model_source)
                    if run is None
                    else self._run_engine(run, model_source)
                )
            if engine is not None:
                return engine
            await asyncio.sleep(RETRY_INTERVAL)

    async def _run_engine(self, run: Conductor, model_source: str) -> _LoadedEngine | None:
        """The run's engine; None while it accepts no calls."""
        if run.phase != "running":
            return None
        engine = cast("object", run.engine)
        loaded = self._loaded_engine
        if loaded is not None and loaded.engine is engine:
            if loaded.model_source != model_source:
                raise UsageError(
                    f"The base model {model_source} is not available now: {loaded.model_source} is in memory, and there is one "
                    "base at a time."
                )
            return loaded
        if not isinstance(engine, CallableEngine):
            raise UsageError("The engine of the active run trains nothing else.")
        try:
            return await self._open_base(engine, model_source, run)
        except EngineLost:
            return None

    async def _own_engine(self, base: str, model_source: str) -> _LoadedEngine | None:
        """An engine without a run; None if a run has started meanwhile, or the engine ended before it was ready."""
        loaded = self._loaded_engine
        if loaded is not None and loaded.run is None and loaded.model_source == model_source:
            return loaded
        async with self._runs.machine_lock:
            if self._runs.active_conductor() is not None:
                return None
            try:
                await self._runs.make_room(NAME)
            except Refusal as refusal:
                raise UsageError(refusal.message) from None
            self.admit(base)
            self._loaded_engine = None
            engine = cast("CallableEngine", await self._supervisor.begin())
            try:
                return await self._open_base(engine, model_source, None)
            except EngineLost as error:
                await self._supervisor.pause(error)
                return None
            except BaseException:
                await self._supervisor.end()
                raise

    async def _open_base(
        self, engine: CallableEngine, model_source: str, run: Conductor | None
    ) -> _LoadedEngine:
        order = OpenModels(model_source, self._folder, self._most, self._longest)
        base: Base = await engine.call("models.open", order)
        self._loaded_engine = _LoadedEngine(engine, base, model_source, run)
        return self._loaded_engine

    async def _release_lost(self, lost: _LoadedEngine, error: EngineLost) -> None:
        """Forget an engine that has ended. Raises TooManyRestarts if that has happened too often."""
        async with self._engine_lock:
            if self._loaded_engine is not lost:
                return
            self._loaded_engine = None
            if lost.run is not None:  # its conductor starts the next engine, or ends
                await asyncio.sleep(RETRY_INTERVAL)
            elif not is_full(error):
                logger.warning("restarting the engine of the models: %s", error)
                await self._supervisor.pause(error)
