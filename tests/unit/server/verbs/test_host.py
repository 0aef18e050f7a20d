"""Verbs over engines that are lost, and servers that end, at every call of a loop.

The engine here is a list for each model of what was done to it, so that anything that is lost, done twice or out of order is seen.

1. Whichever call ends the engine, before or after it was done, the models end as they would have, and the answers are the same.
2. So it is where the server ends at any call, and another one goes on.
3. A call that fails half done has not been done; one that ends every engine is failed, and the model goes on.
4. There are as many models as may be, over one base; a run begins when there are none.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from groupwise.errors import RunError, UsageError
from groupwise.server.engine.port import EngineLost
from groupwise.server.keeper import Keeper, Limits, Time
from groupwise.server.ledger import calls
from groupwise.server.ledger.writer import Ledger
from groupwise.server.orders import Allowed
from groupwise.server.verbs import requests
from groupwise.server.verbs.futures import Answer, Failure
from groupwise.server.verbs.host import Host
from groupwise.server.verbs.journal import LedgerJournal
from groupwise.server.verbs.messages import messages
from groupwise.server.verbs.port import Base, Computed, ModelSpec, Stored
from groupwise.server.verbs.service import VerbService
from groupwise.server.verbs.stored import Saved, SavedFolders
from groupwise.types import UpdateResult
from groupwise.wire.problems import Refusal

LONG = 10.0


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
    """A verb that ends every engine."""
    fails: int = 0
    """So many forward passes with gradient fail half done."""


class FakeEngine:
    """In place of `EngineProcess`."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._gone = False
        self.models: dict[str, list[str]] = {}
        disk.engines += 1

    async def call(self, verb: str, *arguments: Any) -> Any:
        await asyncio.sleep(0)
        name = verb.removeprefix("models.")
        if self._gone:
            raise EngineLost("It has ended.")
        self._disk.called += 1
        ends = self._disk.ends.get(self._disk.called)
        if ends == "before" or name == self._disk.poison:
            self._gone = True
            raise EngineLost("It ended before.")
        found = getattr(self, name)(*arguments)
        if ends == "after":
            self._gone = True
            raise EngineLost("It ended after.")
        return found

    async def close(self) -> None:
        self._gone = True

    def open(self, order: Any) -> Base:
        return Base(order.base, 64, (0,), "table", order.base)

    def create_model(self, model: str, spec: ModelSpec, kept: int | None = None) -> None:
        assert model not in self.models
        place = self._disk.folders.automatic(model, kept or 0)
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

    def optim_step(self, model: str, params: Any, keep_as: int | None = None) -> UpdateResult:
        done = self.models[model]
        done.append(f"update by {params.learning_rate}")
        self._keep(model, keep_as)
        return UpdateResult(float(len(done)), params.learning_rate != 9)

    def save_state(self, model: str, name: str, overwrite: bool, call: int) -> None:
        stored = Stored(model, "weights", name)
        if not overwrite:
            self._disk.folders.check_free(stored, call)
        place = self._disk.folders.place(stored)
        place.mkdir(parents=True, exist_ok=True)
        self._disk.folders.describe(place, Saved(ModelSpec("tiny", 4, 1), "", call))
        self._disk.states[place] = [*self.models[model]]

    def load_state(self, model: str, stored: Stored, optimiser: bool, keep_as: int) -> None:
        place = self._disk.folders.place(stored)
        self.models[model][:] = [*self._disk.states[place], "loaded"]
        self._keep(model, keep_as)

    def _keep(self, model: str, keep_as: int | None) -> None:
        if keep_as is not None:
            place = self._disk.folders.automatic(model, keep_as)
            self._disk.states[place] = [*self.models[model]]


class NoRuns:
    """There is none."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()

    def conducted(self) -> None:
        return None


async def _at_once(seconds: float) -> None:
    await asyncio.sleep(0)


class Server:
    """What a server has of the verbs, on one folder."""

    def __init__(self, folder: Path, disk: Disk, most: int = 4) -> None:
        self.engine: FakeEngine | None = None
        folder.mkdir(exist_ok=True)
        self.ledger = Ledger.open(folder / "server.db")
        journal = LedgerJournal(self.ledger)

        async def make() -> Any:
            self.engine = FakeEngine(disk)
            return self.engine

        self.host = Host(
            runs=cast("Any", NoRuns()),
            keeper=Keeper(make, Limits(restarts=10), Time(sleep=_at_once)),
            journal=journal,
            allowed=Allowed(folder / "models", ()),
            folder=str(folder),
            most=most,
            longest=64,
        )
        self.service = VerbService(self.host, journal=journal, keep_every=2)

    async def begin(self) -> None:
        await self.host.open()
        await self.service.open()

    async def end(self) -> None:
        await self.service.close()
        await self.host.close()
        await self.ledger.close()


@asynccontextmanager
async def serving(folder: Path, disk: Disk, **more: Any) -> AsyncGenerator[Server]:
    server = Server(folder, disk, **more)
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


class Loop:
    """A client: sends each call, again where the server has ended, and asks for the answers at the end."""

    def __init__(self, session: str) -> None:
        self.session, self.model = session, f"{session}:train:0"
        self.ids: list[str] = []

    def send(self, service: VerbService, number: int) -> str:
        """The so-many-th call."""
        model = self.model
        path = f"tinker://{model}/weights/one"
        if number == 0:
            return service.create_model(created(self.session))[1]
        if number == 4:
            body = requests.SaveWeights(model_id=model, seq_id=number, path="one")
            return service.save_weights(body)[1]
        if number == 8:
            body = requests.LoadWeights(model_id=model, seq_id=number, path=path, optimizer=True)
            return service.load_weights(body)[1]
        if number % 3 == 0:
            rate = 9 if number == 9 else number  # one is left out
            return service.optim_step(update(model, number, rate))[1]
        return service.forward_backward(gradient(model, number, 10 * number))[1]

    async def go(self, service: VerbService, first: int = 0, last: int = 15) -> None:
        for number in range(first, last):
            id = self.send(service, number)
            await service.kept(id)
            self.ids[number:] = [id]

    async def answers(self, service: VerbService) -> list[Answer | Failure | None]:
        return [await service.answer(id, LONG) for id in self.ids]


async def undisturbed(folder: Path) -> tuple[list[Any], list[str], int]:
    """The answers, what the model came to, and how many calls that took."""
    disk = Disk(SavedFolders(folder))
    async with serving(folder, disk) as server:
        loop = Loop(await server.service.create_session(None))
        await loop.go(server.service)
        answers = _plain(await loop.answers(server.service), loop.session)
        assert server.engine is not None
        return answers, server.engine.models[loop.model], disk.called


def _plain(answers: list[Any], session: str) -> list[Any]:
    return [
        each.body.replace(session.encode(), b"s") if isinstance(each, Answer) else each.message
        for each in answers
    ]


@pytest.mark.parametrize("when", ["before", "after"])
async def test_engines_that_end_at_any_call(tmp_path: Path, when: str) -> None:
    answers, state, count = await undisturbed(tmp_path / "undisturbed")
    assert any(isinstance(each, str) and "left out" in each for each in answers)
    for number in range(1, count + 1):
        folder = tmp_path / str(number)
        disk = Disk(SavedFolders(folder), ends={number: when, number + 5: when})
        async with serving(folder, disk) as server:
            loop = Loop(await server.service.create_session(None))
            await loop.go(server.service)
            assert _plain(await loop.answers(server.service), loop.session) == answers
            assert server.engine is not None
            if loop.model in server.engine.models:
                assert server.engine.models[loop.model] == state
            assert disk.engines > 1


async def test_servers_that_end_at_any_call(tmp_path: Path) -> None:
    answers, state, _ = await undisturbed(tmp_path / "undisturbed")
    for number in range(16):
        folder = tmp_path / str(number)
        disk = Disk(SavedFolders(folder))
        async with serving(folder, disk) as server:
            loop = Loop(await server.service.create_session("key"))
            await loop.go(server.service, last=number)
            if number % 2:  # all answers are known, or some calls wait
                await loop.answers(server.service)
        async with serving(folder, disk) as server:
            assert await server.service.create_session("key") == loop.session
            await loop.go(server.service, first=max(0, number - 1))  # the last one comes again
            assert _plain(await loop.answers(server.service), loop.session) == answers
            assert server.engine is None or server.engine.models.get(loop.model, state) == state
            steps = await server.ledger.do(calls.steps_of, loop.model)
            assert [step.grad_norm is None for step in steps] == [False, False, True, False]


async def test_what_fails_half_done_has_not_been_done(tmp_path: Path) -> None:
    disk = Disk(SavedFolders(tmp_path))
    async with serving(tmp_path, disk) as server:
        loop = Loop(await server.service.create_session(None))
        await loop.go(server.service, last=2)
        await loop.answers(server.service)
        disk.fails = 1
        await loop.go(server.service, first=2, last=4)
        failed = (await loop.answers(server.service))[2]
        assert isinstance(failed, Failure)
        assert (failed.message, failed.category) == ("no memory", "server")
        assert server.engine is not None
        assert server.engine.models[loop.model] == ["gradient of (10, 11)", "update by 3.0"]


async def test_what_ends_every_engine_is_failed(tmp_path: Path) -> None:
    disk = Disk(SavedFolders(tmp_path), poison="save_state")
    async with serving(tmp_path, disk) as server:
        loop = Loop(await server.service.create_session(None))
        await loop.go(server.service, last=7)
        answers = await loop.answers(server.service)
        assert [isinstance(each, Failure) for each in answers] == [*[False] * 4, True, False, False]


async def test_models_up_to_so_many_and_runs_without_any(tmp_path: Path) -> None:
    disk = Disk(SavedFolders(tmp_path))
    async with serving(tmp_path, disk, most=1) as server:
        service, host = server.service, server.host
        session = await service.create_session(None)
        first = service.create_model(created(session))[1]
        assert isinstance(await service.answer(first, LONG), Answer)
        second = await service.answer(service.create_model(created(session, 1))[1], LONG)
        assert isinstance(second, Failure)
        assert "max_models" in second.message
        with pytest.raises(Refusal, match="end their sessions first"):
            await host.make_way()
        with pytest.raises(UsageError, match="tiny is in memory"):
            host.admit("smollm2-135m-instruct")
        with pytest.raises(UsageError, match="not served here"):
            host.admit("somebody/else")
        await service.finish(session)
        await host.make_way()
        assert host.names() == ("tiny", "smollm2-135m-instruct")
        everything = await server.ledger.do(calls.everything)
        assert not everything.calls
