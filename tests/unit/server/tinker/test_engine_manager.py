"""Models over engines that are lost, and servers that end, at every call of a loop.

The engine here is a list for each model of what was done to it, so that anything that is lost, done twice or out of order is seen.
"""

from __future__ import annotations

import asyncio
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from groupwise.core.errors import UsageError
from groupwise.server.engine.saved_adapters import SavedFolders
from groupwise.server.engine.tinker_protocol import NoRoom
from groupwise.server.ledger import calls
from groupwise.server.ledger.calls import Outcome
from groupwise.server.ledger.writer import Ledger
from groupwise.server.tinker import requests
from groupwise.server.tinker.futures import LedgerUnavailable, failed_outcome
from groupwise.server.tinker.service import TinkerService
from groupwise.server.tinker.sessions import ROOM_SILENCE, NotFound
from groupwise.server.tinker.translate import read
from tests.processes import wait_until_async
from tests.unit.server.tinker.tinker_service import Disk, created, gradient, serving, update

TIMEOUT_S = 10.0
CALLS = 15


class Loop:
    """A client: sends each call, again where the server has ended, and asks for the answers at the end."""

    def __init__(self, session: str) -> None:
        self.session, self.model = session, f"{session}:train:0"
        self.ids: list[str] = []

    def send(self, service: TinkerService, number: int) -> str:
        """The so-many-th call."""
        model = self.model
        path = f"tinker://{model}/weights/one"
        if number == 0:
            return service.training.create_model(created(self.session))[1]
        if number == 4:
            body = requests.SaveWeights(model_id=model, seq_id=number, path="one")
            return service.training.save_weights(body)[1]
        if number == 8:
            body = requests.LoadWeights(model_id=model, seq_id=number, path=path, optimizer=True)
            return service.training.load_weights(body)[1]
        if number % 3 == 0:
            rate = 9 if number == 9 else number  # one is left out
            return service.training.optim_step(update(model, number, rate))[1]
        return service.training.forward_backward(read(gradient(model, number, 10 * number)))[1]

    async def go(self, service: TinkerService, first: int = 0, last: int = CALLS) -> None:
        for number in range(first, last):
            id = self.send(service, number)
            await service.wait_until_persisted(id)
            self.ids[number:] = [id]

    async def answers(self, service: TinkerService) -> list[Outcome | None]:
        return [await service.answer(id, TIMEOUT_S) for id in self.ids]


async def undisturbed(folder: Path) -> tuple[list[Any], list[str], int]:
    """The answers, what the model came to, and how many calls that took."""
    disk = Disk(SavedFolders(folder))
    async with serving(folder, disk) as server:
        loop = Loop(await server.service.registry.create_session(None))
        await loop.go(server.service)
        answers = plain(await loop.answers(server.service), loop.session)
        assert server.engine is not None
        return answers, server.engine.models[loop.model], disk.called


def plain(answers: list[Any], session: str) -> list[Any]:
    return [
        each.body.replace(session.encode(), b"s")
        if each.state == "answered"
        else each.body.decode()
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
            loop = Loop(await server.service.registry.create_session(None))
            await loop.go(server.service)
            assert plain(await loop.answers(server.service), loop.session) == answers
            assert server.engine is not None
            assert server.engine.models.get(loop.model, state) == state
            assert disk.engines > 1


async def test_servers_that_end_at_any_call(tmp_path: Path) -> None:
    answers, state, _ = await undisturbed(tmp_path / "undisturbed")
    ledger = Ledger.open(tmp_path / "undisturbed" / "server.db")
    rows = await ledger.do(lambda t: t.all("SELECT metrics FROM verb_steps ORDER BY step"))
    await ledger.close()
    metrics = [json.loads(row[0]) for row in rows]
    assert all(metrics[:2])
    for number in range(16):
        folder = tmp_path / str(number)
        disk = Disk(SavedFolders(folder))
        async with serving(folder, disk) as server:
            loop = Loop(await server.service.registry.create_session("key"))
            await loop.go(server.service, last=number)
            if number % 2:  # all answers are known, or some calls wait
                await loop.answers(server.service)
        async with serving(folder, disk) as server:
            assert await server.service.registry.create_session("key") == loop.session
            await loop.go(server.service, first=max(0, number - 1))  # the last one comes again
            assert plain(await loop.answers(server.service), loop.session) == answers
            assert server.engine is None or server.engine.models.get(loop.model, state) == state
            steps = await server.ledger.do(calls.steps_of, loop.model)
            assert [step.grad_norm is None for step in steps] == [False, False, True, False]
            assert [step.metrics for step in steps] == metrics


async def test_a_model_is_kept_as_often_when_servers_end(tmp_path: Path) -> None:
    """Otherwise ever more calls would be repeated after each end."""
    disk = Disk(SavedFolders(tmp_path))
    async with serving(tmp_path, disk) as server:
        session = await server.service.registry.create_session("key")
        model, made = server.service.training.create_model(created(session))
        await server.service.answer(made, TIMEOUT_S)
    for number in range(1, 5):
        async with serving(tmp_path, disk) as server:
            _, id = server.service.training.optim_step(update(model, number))
            await server.service.answer(id, TIMEOUT_S)
            (row,) = await server.ledger.do(calls.all_models)
            assert row.kept == (number - number % 2 or None)


async def test_a_server_that_ends_leaves_what_waits_to_the_next_one(tmp_path: Path) -> None:
    answers, _, _ = await undisturbed(tmp_path / "undisturbed")
    folder = tmp_path / "ended"
    disk = Disk(SavedFolders(folder))
    async with serving(folder, disk) as server:
        loop = Loop(await server.service.registry.create_session(None))
        await loop.go(server.service, last=3)
        known = await loop.answers(server.service)
        disk.goes_on.clear()
        await loop.go(server.service, first=3)
        polled = asyncio.create_task(server.service.answer(loop.ids[3], TIMEOUT_S))
        await asyncio.sleep(0)
    assert await polled is None
    assert await server.service.answer(loop.ids[4], TIMEOUT_S) is None
    assert await loop.answers(server.service) == [*known, *[None] * 12]
    with pytest.raises(LedgerUnavailable, match="shutting down"):
        server.service.training.optim_step(update(loop.model, 15))
    disk.goes_on.set()
    async with serving(folder, disk) as server:
        assert plain(await loop.answers(server.service), loop.session) == answers


async def test_a_call_that_fails_midway_is_rolled_back(tmp_path: Path) -> None:
    disk = Disk(SavedFolders(tmp_path), poison="save_state")
    async with serving(tmp_path, disk) as server:
        loop = Loop(await server.service.registry.create_session(None))
        await loop.go(server.service, last=2)
        await loop.answers(server.service)
        disk.fails = 1
        await loop.go(server.service, first=2, last=4)
        assert (await loop.answers(server.service))[2] == failed_outcome("no memory", "server")
        assert server.engine is not None
        assert server.engine.models[loop.model] == ["gradient of (10, 11)", "update by 3.0"]
        await loop.go(server.service, first=4, last=7)
        answers = await loop.answers(server.service)
        assert [each and each.state == "failed" for each in answers[3:]] == [
            False,
            True,
            False,
            False,
        ]


async def test_a_session_that_ends_while_an_answer_is_written_down_keeps_the_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, Disk(SavedFolders(tmp_path))) as server:
        loop = Loop(await server.service.registry.create_session(None))
        await loop.go(server.service, last=1)
        await loop.answers(server.service)
        writing, goes_on = asyncio.Event(), asyncio.Event()
        do = Ledger.do_when_writable

        async def slow(ledger: Ledger, operation: Any, *args: Any) -> Any:
            await do(ledger, operation, *args)
            if operation is calls.record_outcome:
                writing.set()
                await goes_on.wait()

        monkeypatch.setattr(Ledger, "do_when_writable", slow)
        await loop.go(server.service, first=1, last=2)
        await writing.wait()
        ending = asyncio.create_task(server.service.registry.finish(loop.session))
        await asyncio.sleep(0)
        goes_on.set()
        await ending
        answer = await server.service.answer(loop.ids[1], TIMEOUT_S)
        assert answer is not None
        assert answer.state == "answered"
    assert not caplog.records


async def test_a_refused_call_of_a_model_that_was_never_made_keeps_no_server_from_starting(
    tmp_path: Path,
) -> None:
    disk = Disk(SavedFolders(tmp_path))
    async with serving(tmp_path, disk) as server:
        service = server.service
        session = await service.registry.create_session(None)
        nowhere = f"tinker://{session}:train:7/weights/none"
        body = requests.LoadWeights(
            session_id=session, model_seq_id=0, path=nowhere, optimizer=False
        )
        model, made = service.training.load_weights(body)
        answer = await service.answer(made, TIMEOUT_S)
        assert answer is not None
        assert answer.state == "failed"
        wrong = json.dumps({"model_id": model, "seq_id": 5, "no_such_field": 1}).encode()
        service.use_up_number(wrong, UsageError("no_such_field is not a field"))
        assert service.futures.waiting == 1, "for those before it"
        await service.registry.create_session(None)  # written down behind it
    async with serving(tmp_path, disk) as server:
        await wait_until_async(lambda: server.service.futures.waiting == 0)


async def test_another_base_model_can_be_used_once_clients_of_the_present_one_are_silent(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, Disk(SavedFolders(tmp_path))) as server:
        registry, other = server.service.registry, "smollm2-135m-instruct"
        loop = Loop(await registry.create_session(None))
        await loop.go(server.service, last=1)
        await loop.answers(server.service)
        wanted = created(await registry.create_session(None)).model_copy(
            update={"base_model": other}
        )
        with pytest.raises(NoRoom, match=f"tiny is in memory.*{loop.model}: heard of 0 seconds"):
            await server.service.training.admit(wanted)
        registry.session(loop.session).seen -= ROOM_SILENCE + 1
        await server.service.training.admit(wanted)
        with pytest.raises(NotFound):
            registry.session(loop.session)


async def test_bases_have_the_names_by_which_clients_know_their_tokenizers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tmp_path / "models" / "org" / "name"
    model.mkdir(parents=True)
    (model / "config.json").write_text('{"max_position_embeddings": 48}')
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_text("weights")
    hub_id = "HuggingFaceTB/SmolLM2-135M-Instruct"
    async with serving(tmp_path, Disk(SavedFolders(tmp_path))) as server:
        listed = {each["model_name"]: each for each in server.service.capabilities()}
        assert set(listed) == {"tiny", "smollm2-135m-instruct", hub_id, "org/name"}
        assert listed["org/name"]["max_context_length"] == 48
        base = await server.host.base("org/name")
        assert (base.name, base.tokenizer) == ("org/name", "org/name"), "no folder of the server's"
        with zipfile.ZipFile(
            io.BytesIO(await server.service.zipped_tokenizer("org/name"))
        ) as archive:
            assert archive.namelist() == ["config.json", "tokenizer.json"]
        assert (await server.host.base(hub_id)).name == hub_id
        assert (await server.host.base("smollm2-135m-instruct")).longest == 64
        with pytest.raises(UsageError, match="from the hub"):
            await server.service.zipped_tokenizer(hub_id)
        with pytest.raises(UsageError, match="not served here"):
            await server.service.zipped_tokenizer("org/../org/name")
