"""The Tinker API of one server over an engine that records the calls of each model."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from groupwise.core.errors import RunError
from groupwise.core.retry import Timing
from groupwise.core.types import Completion, UpdateResult
from groupwise.server.engine.engine_protocol import EngineLost
from groupwise.server.engine.saved_adapters import Saved, SavedFolders
from groupwise.server.engine.tinker_protocol import (
    Base,
    Computed,
    ModelSpec,
    SampleRequest,
    SampleResult,
    Stored,
)
from groupwise.server.ledger.writer import Ledger
from groupwise.server.run.engine_supervisor import EngineSupervisor, Limits
from groupwise.server.run.run_config import AllowedModels
from groupwise.server.tinker import requests
from groupwise.server.tinker.engine_manager import TinkerEngineManager
from groupwise.server.tinker.service import TinkerService
from groupwise.server.tinker.tensors import messages


@dataclass
class Disk:
    """What outlives engines, and when one is to end."""

    folders: SavedFolders
    states: dict[Path, list[str]] = field(default_factory=dict[Path, list[str]])
    called: int = 0
    ends: dict[int, str] = field(default_factory=dict[int, str])
    """`before` or `after` by the number of the call."""
    engines: int = 0
    poison: str | None = None
    """A method that ends every engine."""
    fails: int = 0
    """So many forward passes with gradient fail half done."""
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared, while every call waits before it is done."""

    def __post_init__(self) -> None:
        self.goes_on.set()


class FakeEngine:
    """In place of `EngineProcess`."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._gone = False
        self.models: dict[str, list[str]] = {}
        disk.engines += 1

    async def call(self, method: str, *arguments: Any) -> Any:
        await asyncio.sleep(0)
        await self._disk.goes_on.wait()
        name = method.removeprefix("models.")
        if self._gone:
            raise EngineLost("It has ended.")
        self._disk.called += 1
        ends = self._disk.ends.get(self._disk.called)
        if ends == "before" or name == self._disk.poison:
            self._gone = True
            raise EngineLost("It ended before.")
        result = getattr(self, name)(*arguments)
        if ends == "after":
            self._gone = True
            raise EngineLost("It ended after.")
        return result

    async def close(self) -> None:
        self._gone = True

    def open(self, order: Any) -> Base:
        return Base(order.base, 64, (0,), "table", order.base)

    def create_model(self, model: str, spec: ModelSpec, kept: int | None = None) -> None:
        assert model not in self.models
        place = self._disk.folders.automatic_path(model, kept or 0)
        self.models[model] = [] if kept is None else [*self._disk.states[place]]

    def drop(self, model: str) -> None:
        self.models.pop(model, None)

    def forward_backward(self, model: str, rows: list[Any], loss: Any) -> Computed:
        done = self.models[model]
        done.append(f"gradient of {rows[0].completion_ids}")
        if self._disk.fails:
            self._disk.fails -= 1
            raise RunError("no memory")
        return Computed(((-1.0,) * len(rows[0].mask),), {"loss/policy": float(len(done))})

    def forward(self, model: str, rows: list[Any], loss: Any) -> Computed:
        return Computed(
            ((-1.0,) * len(rows[0].mask),), {"loss/policy": float(len(self.models[model]))}
        )

    def optim_step(self, model: str, params: Any, keep_as: int | None = None) -> UpdateResult:
        done = self.models[model]
        done.append(f"update by {params.learning_rate}")
        self._keep(model, keep_as)
        return UpdateResult(float(len(done)), params.learning_rate != 9)

    def save_state(self, model: str, name: str, overwrite: bool, call: int) -> None:
        self._save(Stored(model, "weights", name), overwrite, call)

    def save_for_sampler(self, model: str, name: str, call: int) -> None:
        self._save(Stored(model, "sampler_weights", name), False, call)

    def sample(self, stored: Stored | None, request: SampleRequest) -> SampleResult:
        if stored is not None:
            self._disk.folders.read(stored)
        drawn = [Completion((7,), (-1.0,), "length", seed, 0, "") for seed in request.seeds]
        known = (-1.0,) * (len(request.prompt_ids) - 1) if request.prompt_logprobs else None
        return SampleResult(tuple(drawn), known)

    def _save(self, stored: Stored, overwrite: bool, call: int) -> None:
        model = stored.model
        if not overwrite:
            self._disk.folders.check_free(stored, call)
        place = self._disk.folders.path_of(stored)
        place.mkdir(parents=True, exist_ok=True)
        self._disk.folders.describe(place, Saved(ModelSpec("tiny", 4, 1), "", call))
        self._disk.states[place] = [*self.models[model]]

    def load_state(self, model: str, stored: Stored, optimiser: bool, keep_as: int) -> None:
        self._disk.folders.read(stored)
        place = self._disk.folders.path_of(stored)
        self.models[model][:] = [*self._disk.states[place], "loaded"]
        self._keep(model, keep_as)

    def _keep(self, model: str, keep_as: int | None) -> None:
        if keep_as is not None:
            place = self._disk.folders.automatic_path(model, keep_as)
            self._disk.states[place] = [*self.models[model]]


class NoRuns:
    """There is none."""

    def __init__(self) -> None:
        self.machine_lock = asyncio.Lock()

    async def make_room(self, for_user: str) -> None:
        """Nothing else is there."""

    def active_conductor(self) -> None:
        return None


async def _at_once(seconds: float) -> None:
    await asyncio.sleep(0)


class Server:
    """The Tinker API of a server, on one folder."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self.disk = disk
        self.engine: FakeEngine | None = None
        folder.mkdir(exist_ok=True)
        self.ledger = Ledger.open(folder / "server.db")

        async def make() -> Any:
            self.engine = FakeEngine(disk)
            return self.engine

        self.host = TinkerEngineManager(
            runs=cast("Any", NoRuns()),
            supervisor=EngineSupervisor(make, Limits(restarts=10), Timing(sleep=_at_once)),
            ledger=self.ledger,
            allowed=AllowedModels(folder / "models", ()),
            folder=str(folder),
            most=4,
            longest=64,
        )
        self.service = TinkerService(self.host, self.ledger, keep_every=2)

    async def begin(self) -> None:
        await self.host.open()
        await self.service.open()

    async def end(self) -> None:
        await self.service.close()
        await self.host.close()
        await self.ledger.close()


@asynccontextmanager
async def serving(folder: Path, disk: Disk) -> AsyncGenerator[Server]:
    server = Server(folder, disk)
    await server.begin()
    yield server
    await server.end()


def created(session: str, number: int = 0) -> requests.CreateModel:
    lora = requests.Lora(rank=4, seed=1)
    return requests.CreateModel(
        session_id=session, model_seq_id=number, base_model="tiny", lora_config=lora
    )


def gradient(model: str, sequence: int, token: int) -> bytes:
    request = messages().ForwardBackwardRequest(
        model_id=model, seq_id=sequence, loss_fn="cross_entropy"
    )
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = struct.pack("<2i", 5, token)
    target = datum.loss_fn_inputs["target_tokens"]
    target.dtype = messages().DTYPE_INT64
    target.dense = struct.pack("<2q", token, token + 1)
    weights = datum.loss_fn_inputs["weights"]
    weights.dtype = messages().DTYPE_FLOAT32
    weights.dense = struct.pack("<2f", 1.0, 1.0)
    return request.SerializeToString()


def update(model: str, sequence: int, rate: float = 1.0) -> requests.OptimStep:
    adam = requests.Adam(learning_rate=rate)
    return requests.OptimStep(model_id=model, seq_id=sequence, adam_params=adam)
