"""Both clients against servers that misbehave, with a clock that only sleeping moves.

1. What may pass is sent again, with the same idempotency key; what may not is not.
2. `Retry-After` holds; patience ends.
3. The error for a response that is not an answer says what came. The key never shows.
4. Streams go on after a cut; a model is there whole or not at all.
"""

from __future__ import annotations

import asyncio
import io
import json
import ssl
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import httpx2
import pytest

from groupwise.api.client import connection
from groupwise.api.client.async_training_client import AsyncTrainingClient
from groupwise.api.client.connection import NO_SERVER_TIMEOUT
from groupwise.api.client.errors import (
    BY_CODE,
    AlreadyRewarded,
    ClientError,
    GroupGone,
    InvalidRequest,
    NoAnswer,
    NoServer,
    NotAuthorised,
    NotStarted,
    StrangeAnswer,
    TooBusy,
    Unavailable,
)
from groupwise.api.client.request_bodies import rewards_for
from groupwise.api.client.training_client import TrainingClient
from groupwise.api.schemas.problems import KINDS, Refusal
from groupwise.api.schemas.training import GroupAnswer
from groupwise.core.errors import UsageError
from groupwise.core.retry import Timing
from tests.processes import wait_until

KEY = "gw-abc-0123456789secret"
GROUP: dict[str, Any] = {
    "group_id": "g-1", "prompt": "p", "completions": ["a", "b"], "completion_tokens": [[1], [2, 3]], "draw": 0,
    "finish_reasons": ["stop", "length"], "model_version": ["run", 0], "fingerprint": "f", "expires_at": 1.5,
}  # fmt: skip
REWARDED = {"group_id": "g-1", "model_version": ["run", 0], "status": "accepted"}

Reply = httpx2.Response | Exception


def refusal(code: str, **more: Any) -> httpx2.Response:
    refused = Refusal(code, **more)
    return httpx2.Response(
        refused.status, headers=refused.headers, content=refused.problem().model_dump_json()
    )


class Server:
    """Gives the replies in their order, the last one for ever."""

    def __init__(self, *replies: Reply | dict[str, Any]) -> None:
        self.replies = list(replies)
        self.requests: list[httpx2.Request] = []
        self.slept: list[float] = []
        self.now = 0.0
        self.retry_timeout = 100.0

    def answer(self, request: httpx2.Request) -> httpx2.Response:
        self.requests.append(request)
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, Exception):
            raise reply
        return httpx2.Response(200, json=reply) if isinstance(reply, dict) else reply

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    async def sleep_async(self, seconds: float) -> None:
        self.sleep(seconds)

    @property
    def options(self) -> dict[str, Any]:
        timing = Timing(
            clock=lambda: self.now,
            today=lambda: 0.0,
            sleep_blocking=self.sleep,
            sleep=self.sleep_async,
            jitter=lambda: 1.0,
        )
        transport = httpx2.MockTransport(self.answer)
        return {
            "timing": timing,
            "transport": transport,
            "retry_timeout": self.retry_timeout,
            "api_key": KEY,
        }


Ask = Callable[..., Any]


@pytest.fixture(params=["sync", "async"])
def ask(request: pytest.FixtureRequest) -> Ask:
    """`ask(server, "status")` by either client; of an iterator the first `take` events."""

    def by_sync(server: Server, call: str, *args: Any, take: int = 0, **more: Any) -> Any:
        with TrainingClient("http://server", **server.options) as client:
            got = getattr(client, call)(*args, **more)
            return list(islice(got, take)) if take else got

    async def asked(server: Server, call: str, *args: Any, take: int = 0, **more: Any) -> Any:
        async with AsyncTrainingClient("http://server", **server.options) as client:
            got = getattr(client, call)(*args, **more)
            if not take:
                return await got
            events: list[Any] = []
            async for event in got:
                events.append(event)
                if len(events) == take:
                    break
            await got.aclose()
            return events

    def by_async(*args: Any, **more: Any) -> Any:
        return asyncio.run(asked(*args, **more))

    return by_sync if request.param == "sync" else by_async


def lost() -> Exception:
    return httpx2.ReadError("the connection is gone")


def test_a_start_that_takes_long_is_reported(
    ask: Ask, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Loading(Server):
        def answer(self, request: httpx2.Request) -> httpx2.Response:
            wait_until(lambda: "http://server to load huge" in caplog.text)
            return super().answer(request)

    monkeypatch.setattr(connection, "LOADING_REPORTED", 0.0)
    with pytest.raises(NotAuthorised):
        ask(Loading(refusal("unauthorised")), "start", model_id="huge")


def test_a_silent_server_is_reported_once_and_given_up_after_the_retry_time(
    ask: Ask, caplog: pytest.LogCaptureFixture
) -> None:
    ask(Server(refusal("too_busy"), GROUP), "completions", "p")
    assert not caplog.records
    server = Server(lost(), lost(), refusal("shutting_down"), refusal("too_busy"), GROUP)
    ask(server, "completions", "p")
    first, then = [record.getMessage() for record in caplog.records]
    assert ("http://server does not" in first, "100 seconds" in first) == (True, True)
    assert then == "http://server answers again."
    server = Server(refusal("too_busy", retry_after=30))
    with pytest.raises(TooBusy) as caught:
        ask(server, "completions", "p")
    assert (caught.value.retry_after, caught.value.status) == (30, 429)
    assert sum(server.slept) <= 100 < sum(server.slept) + 34
    with pytest.raises(NoAnswer, match="http://server"):
        ask(Server(lost()), "status")


def test_where_nothing_listens_a_call_ends_sooner(
    ask: Ask, caplog: pytest.LogCaptureFixture
) -> None:
    refused = httpx2.ConnectError("connection refused")
    refused.__cause__ = ConnectionRefusedError()
    for first in ([], [lost()] * 6):  # counted from the first refusal
        server = Server(*first, refused)
        server.retry_timeout = 900.0
        with pytest.raises(NoServer, match="Nothing listens at http://server"):
            ask(server, "stop")
        since = sum(server.slept[len(first) :])
        assert since <= NO_SERVER_TIMEOUT < since + 30
        assert "Trying again for up to 120 seconds" in caplog.records[-1].getMessage()
        caplog.clear()
    patient = Server(refused)
    patient.retry_timeout = 3600.0
    with pytest.raises(NoServer, match="within 3600 seconds"):
        ask(patient, "stop")
    assert sum(patient.slept) > 3500
    assert ask(Server(*[refused] * 5, {"status": "stopped"}), "stop").status == "stopped"


def test_mistakes_are_reported_before_anything_is_sent_and_garbage_is_no_answer(ask: Ask) -> None:
    server = Server({})
    with pytest.raises(InvalidRequest) as caught:
        ask(server, "rewards", "g-1", [1, float("nan"), "x"])
    assert [error.field for error in caught.value.errors] == ["rewards.1"]
    with pytest.raises(InvalidRequest, match="1 entries for 2"):
        ask(server, "rewards", GroupAnswer.model_validate_json(json.dumps(GROUP)), [1])
    with pytest.raises(InvalidRequest, match="max_stepz"):
        ask(server, "start", max_stepz=3)
    assert server.requests == []
    for status, text in ((200, "<html>"), (404, "nothing here")):
        with pytest.raises(StrangeAnswer, match=text):
            ask(Server(httpx2.Response(status, text=text)), "status")
    server = Server(httpx2.Response(502, text="bad gateway"), {"phase": "idle", "of_later": 1})
    assert ask(server, "status").phase == "idle"


def event(number: int) -> bytes:
    return f'id: {number}\r\ndata: {{"id": {number}, "kind": "step", "at": 1}}\r\n\r\n'.encode()


class Cut(httpx2.SyncByteStream, httpx2.AsyncByteStream):
    """Some bytes, one by one, and then the end of the connection."""

    def __init__(self, *chunks: bytes) -> None:
        self.chunks = chunks

    def __iter__(self) -> Iterator[bytes]:
        yield from self.chunks
        raise httpx2.RemoteProtocolError("cut off")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self:
            yield chunk


def test_events_continue_where_they_were_cut_off_each_once(ask: Ask) -> None:
    first = event(4) + b": still here\n\n" + event(5)[:9]
    pieces = [first[i : i + 1] for i in range(len(first))]
    server = Server(
        httpx2.Response(200, stream=Cut(*pieces)),
        httpx2.Response(200, content=event(4) + event(5)),
        httpx2.Response(200, content=event(6)),
    )
    events = ask(server, "events", 3, take=3)
    assert [found.id for found in events] == [4, 5, 6]
    asked = [request.headers["Last-Event-ID"] for request in server.requests]
    assert asked == ["3", "4", "5"]


def test_a_model_that_was_cut_off_comes_again_or_leaves_nothing(ask: Ask, tmp_path: Path) -> None:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as files:
        files.writestr("adapter/config.json", "{}" * 500)
    packed = made.getvalue()
    whole, torn = (httpx2.Response(200, content=content) for content in (packed, packed[:-30]))
    for unpack in (False, True):
        to = tmp_path / f"new-{unpack}" / "model"
        server = Server(httpx2.Response(200, stream=Cut(packed[:99])), torn, whole)
        assert ask(server, "model", "run@3", to=to, unpack=unpack) == to
        assert server.requests[0].url.params["version"] == "run@3"
        assert list(to.parent.iterdir()) == [to]
        assert (to / "adapter/config.json").exists() if unpack else zipfile.is_zipfile(to)
    never = tmp_path / "never"
    never.mkdir()
    with pytest.raises(StrangeAnswer, match="did not arrive whole"):
        ask(Server(httpx2.Response(200, content=b"x")), "model", to=never / "m.zip")
    assert list(never.iterdir()) == []
    with pytest.raises(FileExistsError):
        ask(Server({}), "model", to=tmp_path, unpack=True)


def test_the_key_never_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUPWISE_API_KEY", KEY)
    monkeypatch.setenv("GROUPWISE_URL", "http://there:1/")
    client = TrainingClient()
    assert client.connection.key == KEY
    assert client.connection.url == "http://there:1"
    assert KEY not in repr(client) + repr(client.connection) + repr(client.asynchronous())
    wrong: list[dict[str, Any]] = [{"url": f"http://me:{KEY}@x"}, {"api_key": f"{KEY}\nx"}]
    for bad in wrong:
        with pytest.raises(UsageError) as caught:
            TrainingClient(**bad)
        assert KEY not in str(caught.value)


def test_the_synchronous_client_is_the_one_that_the_asynchronous_makes() -> None:
    command = [sys.executable, "scripts/generate_sync_client.py", "--check"]
    assert subprocess.run(command, check=False).returncode == 0, "run it without --check"


def test_a_post_that_was_lost_is_sent_again_with_its_key(ask: Ask) -> None:
    server = Server(lost(), httpx2.ReadTimeout("slow"), refusal("in_progress"), REWARDED)
    answer = ask(server, "rewards", "g-1", [1, None])
    assert (answer.status, answer.model_version) == ("accepted", ("run", 0))
    keys = {request.headers["Idempotency-Key"] for request in server.requests}
    assert (len(server.requests), len(keys)) == (4, 1)
    assert json.loads(server.requests[0].content)["rewards"] == [1, None]
    assert server.slept == [0.5, 1.0, 2.0]
    ask(server, "rewards", "g-1", [1, None])
    assert server.requests[-1].headers["Idempotency-Key"] not in keys, "another call"
    for code in ("too_busy", "engine_recovering", "disk_full"):
        server = Server(refusal(code, retry_after=7), GROUP)
        assert ask(server, "completions", "p").group_id == "g-1"
        assert server.slept == [7.5]


def test_permanent_errors_are_raised_without_a_retry(ask: Ask) -> None:
    kinds: dict[str, type[ClientError]] = {
        "not_started": NotStarted, "already_rewarded": AlreadyRewarded, "lease_expired": GroupGone, "unauthorised": NotAuthorised,
        "engine_failed": Unavailable, "model_not_allowed": InvalidRequest,
    }  # fmt: skip
    assert {*BY_CODE} <= {*KINDS}
    for code, kind in kinds.items():
        server = Server(refusal(code, detail="because of this"))
        with pytest.raises(kind, match="because of this") as caught:
            ask(server, "start")
        assert (caught.value.code, server.slept, len(server.requests)) == (code, [], 1)
    refused = ssl.SSLCertVerificationError(1, "certificate verify failed")
    refused.verify_message = "self-signed certificate"
    error = httpx2.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED]")
    error.__cause__ = refused
    server = Server(error)
    with pytest.raises(NoAnswer, match=r"self-signed certificate.*SSL_CERT_FILE"):
        ask(server, "status")
    assert (server.slept, len(server.requests)) == ([], 1)


def test_every_call_goes_where_it_belongs(ask: Ask) -> None:
    step = {"status": "trained", "step": 0, "group_ids": ["g-1"]}
    checkpoint = {"run_id": "r", "step": 1, "address": "a"}
    given_up = {"status": "given_up", "group_id": "g-1"}
    closed = {"closed": ["g-1"], "given_up": []}
    entry = rewards_for(GroupAnswer.model_validate_json(json.dumps(GROUP)), [1, 2])
    for reply, where, call, args in (
        ({"status": "stopped"}, "POST /stop", "stop", ()),
        ({"groups": [GROUP]}, "POST /completions", "completions_batch", (["p"],)),
        ({"groups": [REWARDED]}, "POST /rewards", "rewards_batch", ([entry],)),
        (given_up, "DELETE /completions/g-1", "give_up", ("g-1",)),
        (REWARDED, "POST /rewards", "reward_trajectory", ("t-1", 1.0)),
        (REWARDED, "POST /rewards", "reward_trajectory", (["g-1-0-0", "g-1-0-1"], None)),
        (closed, "POST /trajectories/close", "close_group", ("s",)),
        (step, "POST /step", "step", (["g-1"],)),
        ({"checkpoints": [checkpoint]}, "GET /checkpoints", "checkpoints", ()),
        (checkpoint, "POST /checkpoints", "save_checkpoint", ("a",)),
        ({"hash": "h", "tokenizer_json": "{}"}, "GET /tokenizer", "tokenizer", ()),
    ):
        server = Server(reply)
        ask(server, call, *args)
        (request,) = server.requests
        assert f"{request.method} {request.url.path}" == where
        assert request.headers["Authorization"] == f"Bearer {KEY}"
