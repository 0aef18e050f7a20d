"""What a session keeps, over a network that loses things:

1. Every call is done once, in its order, and its answer arrives to the bit.
2. Files arrive whole, in pieces, in both directions.
3. Cancelling frees what was asked for; the next call of the learner comes after it.
4. The server hears a word again and again, whatever the loop does.
5. What was raised there is raised here, as it was.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from groupwise.api.client.errors import Refused
from groupwise.api.schemas.parts import Discard, FileFacts, FolderAnswer, Update
from groupwise.core.errors import PolicyMismatchError, RunError, UsageError
from groupwise.core.retry import Timing
from groupwise.core.types import GroupRequest, LossSpec, OptimiserParams, Row, SamplingParams
from groupwise.engine.backends.remote import session as module
from groupwise.engine.backends.remote.parts import (
    RemoteLearner,
    RemotePartsSpec,
    RemoteSampler,
    model_files,
    owner_of,
    sections,
    weight_files,
)
from groupwise.engine.backends.remote.session import Session
from groupwise.server.parts.files import Files
from tests.fake_parts import SUMS, TRAINED, FakeCore, FakeParts
from tests.parts_server import HERE, PartsServer
from tests.processes import wait_until, wait_until_async

STEP = OptimiserParams(0.1)
ROW = Row((1,), (2,), (1,), (-0.1 - 0.2,), float("nan"), 1.0)
REQUEST = GroupRequest(0, (1,), (2**63, 5), SamplingParams(4))


class Lossy(httpx2.AsyncBaseTransport):
    """Loses requests on their way, and answers on theirs."""

    def __init__(self, through: httpx2.AsyncBaseTransport, share: float, seed: int = 0) -> None:
        self.through = through
        self.share = share
        self.lost = 0
        self.paths: list[str] = []
        self._rng = random.Random(seed)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self.paths.append(f"{request.method} {request.url.path}")
        if self._rng.random() < self.share:
            self.lost += 1
            raise httpx2.ConnectError("lost on its way", request=request)
        response = await self.through.handle_async_request(request)
        if self._rng.random() < self.share:
            await response.aread()
            self.lost += 1
            raise httpx2.ReadError("lost on its way back", request=request)
        return response


async def at_once(seconds: float) -> None:
    await asyncio.sleep(0)


class Pair:
    """A session and the server that it asks."""

    def __init__(self, folder: Path, share: float = 0.0, **more: Any) -> None:
        self.server = PartsServer(folder / "server", make_core=FakeCore, **more)
        self.network = Lossy(self.server.transport, share)
        self.session = Session(HERE, transport=self.network, timing=Timing(sleep=at_once))
        asyncio.run(self.session.open("test"))

    @property
    def parts(self) -> FakeParts:
        return self.server.engines[-1].core.parts


@pytest.fixture
def pair_of(tmp_path: Path) -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(**more: Any) -> Pair:
        made.append(Pair(tmp_path, **more))
        return made[-1]

    yield make
    for each in made:
        each.session.close()


async def test_over_a_bad_network_every_call_is_done_once(
    pair_of: Callable[..., Pair], tmp_path: Path
) -> None:
    pair = await asyncio.to_thread(pair_of, share=0.3)
    learner = RemoteLearner(pair.session, tmp_path / "published", {})
    sampler = RemoteSampler(pair.session, "f0", {})
    for _ in range(10):
        assert await learner.forward_backward([ROW], LossSpec("x"), {"policy": 1.0}) == SUMS
        assert await learner.trained_logprobs() == TRAINED
        result = await learner.update(STEP)
        assert (str(result.grad_norm), result.applied) == ("nan", False)
        completions = await sampler.generate(REQUEST)
        assert [each.seed for each in completions] == [2**63, 5]
        learner.discard()
    verbs = ["forward_backward", "trained_logprobs", "update", "generate", "discard"]
    assert pair.parts.done == verbs * 10
    assert pair.network.lost > 20


async def test_files_go_to_and_fro_whole_and_nowhere_else(
    pair_of: Callable[..., Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE", 1000)
    monkeypatch.setattr("groupwise.server.parts.files.PIECE", 1000)
    pair = await asyncio.to_thread(pair_of, share=0.2)
    session = pair.session
    sent, got = tmp_path / "sent", tmp_path / "got"
    sent.mkdir()
    got.mkdir()
    content = {"a.safetensors": bytes(range(256)) * 20, "b.json": b"{}", "c.json": b"x" * 2000}
    for name, value in {**content, "run.db": b"private", "d.txt": b"private"}.items():
        (sent / name).write_bytes(value)
    files = weight_files(sent)
    assert {path.name for path in model_files(sent)} == {*content, "run.db", "d.txt"}
    await session.run(session.upload(files, "there"))
    await session.run(session.download("there", got))
    assert {path.name: path.read_bytes() for path in got.iterdir()} == content
    await session.run(session.forget("there"))
    with pytest.raises(Refused, match="unknown_file"):
        await session.run(session.download("there", got))
    told = FolderAnswer(files=[FileFacts(path="../../x", size=1)])
    monkeypatch.setattr(Files, "list", lambda *_: told)
    with pytest.raises(RunError, match="none of a folder"):
        await session.run(session.download("there", tmp_path))


async def test_a_cancelled_call_is_given_up_before_the_next_one_is_sent(
    pair_of: Callable[..., Pair],
) -> None:
    pair = await asyncio.to_thread(pair_of)
    held = pair.parts.held["forward_backward"]
    _ = pair.parts.held["generate"]
    learner = RemoteLearner(pair.session, Path("unused"), {})
    sampler = RemoteSampler(pair.session, "f0", {})
    learning = asyncio.create_task(learner.forward_backward([ROW], LossSpec("x"), {"policy": 1.0}))
    drawing = asyncio.create_task(sampler.generate(REQUEST))
    await wait_until_async(lambda: len(pair.parts.begun) == 2)
    for task in (learning, drawing):
        task.cancel()
    await asyncio.gather(learning, drawing, return_exceptions=True)
    await wait_until_async(lambda: pair.parts.cancelled == ["generate"])
    discarding = asyncio.create_task(asyncio.to_thread(learner.discard))
    await wait_until_async(lambda: any("calls/3" in path for path in pair.network.paths))
    assert pair.parts.done == []
    pair.session.start(_set(held))
    await discarding
    assert pair.parts.done == ["forward_backward", "discard"]


async def _set(event: asyncio.Event) -> None:
    event.set()


async def test_the_server_hears_of_a_loop_that_computes(pair_of: Callable[..., Pair]) -> None:
    pair = await asyncio.to_thread(pair_of, silence=0.1)
    beat = f"GET /parts/{pair.session.id}"
    wait_until(
        lambda: pair.network.paths.count(beat) >= 3
    )  # this event loop stands still meanwhile
    assert (await pair.session.call(Discard())) is None


def test_only_the_needed_sections_of_a_config_are_sent() -> None:
    told: dict[str, Any] = {"model": {"name": "tiny"}, "lora": None, "training": {"seed": 1}}
    run = {"threads": 2, "processes": None}
    private = {"data": {"secret": 1}, "task": {"secret": 1}}
    config = {**told, **private, "run": {"dir": "/", "wandb_project": "secret", **run}}
    assert sections("supervised", config) == {**told, "run": run}


def test_the_owner_of_parts_is_derived_from_the_run(tmp_path: Path) -> None:
    def owner(folder: Path, run: str = "r", kind: Any = "training") -> str:
        return owner_of(
            RemotePartsSpec(kind, {"run": {"dir": str(folder)}}, run, tmp_path, None, "base")
        )

    here = owner(tmp_path)
    assert here == owner(tmp_path / "x" / "..")
    serving = [owner(tmp_path, kind="serving") for _ in range(2)]
    assert len({here, owner(tmp_path, "s"), owner(tmp_path / "x"), *serving}) == 5


async def test_a_call_that_is_refused_holds_up_none_after_it(
    pair_of: Callable[..., Pair], tmp_path: Path
) -> None:
    pair = await asyncio.to_thread(pair_of, most_bytes=1 << 16)
    learner = RemoteLearner(pair.session, Path("unused"), {})
    with pytest.raises(Refused, match="max_body_bytes"):
        await learner.forward_backward([ROW] * 2000, LossSpec("x"), {"policy": 1.0})
    await asyncio.to_thread(learner.discard)
    assert pair.parts.done == ["discard"]
    (tmp_path / "sent").mkdir()
    (tmp_path / "sent" / "a.safetensors").write_bytes(bytes(300_000))
    await pair.session.run(pair.session.upload(weight_files(tmp_path / "sent"), "there"))
    found = pair.server.service.files(pair.session.id).list("there")
    assert [each.size for each in found.files] == [300_000], "in pieces that the server takes"


async def test_errors_of_the_server_are_raised_in_the_client(pair_of: Callable[..., Pair]) -> None:
    pair = await asyncio.to_thread(pair_of)
    errors = (PolicyMismatchError("other weights"), UsageError("not so"), RunError("on its way"))
    for error in errors:
        pair.parts.fails["update"] = error
        with pytest.raises(type(error), match=error.message) as raised:
            await pair.session.call(Update(params=STEP), ordered=True)
        assert type(raised.value) is type(error)
    del pair.parts.fails["update"]
    await pair.session.call(Update(params=STEP), ordered=True)
    other = Session(HERE, transport=pair.server.transport)
    with pytest.raises(UsageError, match=r"run\.server: .*run_active"):
        await asyncio.to_thread(lambda: asyncio.run(other.open("somebody else")))
    other.close()
    other.close()
    pair.server.engines[0].lost = "it was killed"
    with pytest.raises(Refused, match=r"parts_gone.* was killed"):
        await pair.session.call(Discard())
