import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from groupwise.jobs.hosts import driver
from groupwise.jobs.hosts.driver import Launch, Runner
from groupwise.jobs.hosts.files import BlobStore
from groupwise.jobs.hosts.framing import BadAnswer
from groupwise.jobs.hosts.host import Request, RunnerRefused, RunnerResponse
from groupwise.jobs.hosts.runner.requests import LONG, SIGN_EVERY
from groupwise.jobs.hosts.runner_text import runner_text
from groupwise.jobs.hosts.spec import FileEntry, JobSpec, Manifest

Reply = Callable[[Request], RunnerResponse]


class Scripted:
    """A host that answers each verb by a function, and remembers what it was asked."""

    def __init__(self, **replies: Reply | dict[str, Any]) -> None:
        self.replies = replies
        self.asked: list[Request] = []

    async def call(self, request: Request, *, timeout: float) -> RunnerResponse:
        assert timeout > 0
        self.asked.append(request)
        reply = self.replies[request.verb]
        return RunnerResponse(reply) if isinstance(reply, dict) else reply(request)

    async def close(self) -> None: ...

    @property
    def verbs(self) -> list[str]:
        return [request.verb for request in self.asked]


SMALL = {"a": b"one", "b": b"two", "c": b"", "d": b"three"}
STATE = {"job": "j", "epoch": 3, "state": "running"}


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def test_a_machine_without_the_runner_is_asked_again_with_it() -> None:
    def reply(request: Request) -> RunnerResponse:
        return RunnerResponse(STATE if "source" in request.body else {"need": "runner"})

    host = Scripted(launch=reply)
    await Runner(host).launch(Launch("j", 3, JobSpec(("true",)), secrets={"TOKEN": "canary-51f0"}))
    first, second = host.asked
    assert "source" not in first.body
    assert second.body["source"] == runner_text().source
    assert first.secrets == second.secrets == {"TOKEN": "canary-51f0"}
    assert "canary-51f0" not in repr(host.asked)
    with pytest.raises(RunnerRefused, match="again and again"):
        await Runner(Scripted(void={"need": "runner"})).void("j", 3)


def shelf(tmp_path: Path, *contents: bytes) -> tuple[BlobStore, Manifest]:
    store = BlobStore(tmp_path)
    manifest = {
        f"f{n}": FileEntry(store.put(data), 0o644, len(data)) for n, data in enumerate(contents)
    }
    return store, manifest


class Machine(Scripted):
    """Keeps blobs as a runner does."""

    def __init__(self) -> None:
        super().__init__(missing=self.missing, put=self.put, join=self.join)
        self.blobs: dict[str, bytes] = {}

    def missing(self, request: Request) -> RunnerResponse:
        return RunnerResponse(
            {"missing": [sha for sha in request.body["sha256"] if sha not in self.blobs]}
        )

    def put(self, request: Request) -> RunnerResponse:
        at = 0
        for sha, size in request.body["blobs"]:
            self.keep(sha, request.payload[at : at + size])
            at += size
        assert at == len(request.payload)
        return RunnerResponse({"stored": []})

    def join(self, request: Request) -> RunnerResponse:
        sha, size = request.body["blob"]
        parts = [part for part, _ in request.body["parts"]]
        data = b"".join(self.blobs[part] for part in parts)
        assert len(data) == size
        for part in set(parts):
            del self.blobs[part]
        self.keep(sha, data)
        return RunnerResponse({"stored": [sha]})

    def keep(self, sha: str, data: bytes) -> None:
        assert hashlib.sha256(data).hexdigest() == sha
        self.blobs[sha] = data


async def test_only_missing_blobs_travel_each_once_and_small_ones_together(tmp_path: Path) -> None:
    store, manifest = shelf(tmp_path, b"one", b"two", b"one", b"")
    machine = Machine()
    machine.keep(manifest["f1"].sha256, b"two")
    assert await Runner(machine).provide(store, manifest) == 3
    assert machine.verbs == ["missing", "put"]
    assert set(machine.blobs.values()) == {b"one", b"two", b""}
    assert await Runner(machine).provide(store, manifest) == 0
    assert machine.verbs == ["missing", "put", "missing"]


async def test_a_large_blob_travels_in_batches_and_continues_with_the_parts_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "BATCH", 10)
    data = bytes(range(95))
    store, manifest = shelf(tmp_path, data, b"a" * 4, b"b" * 4, b"c" * 4, b"d" * 10)
    machine = Machine()
    for part in (data[0:10], data[30:40], data[90:95]):
        machine.keep(sha(part), part)
    await Runner(machine).provide(store, manifest)
    sizes = [len(request.payload) for request in machine.asked]
    assert (sum(sizes), max(sizes)) == (95 - 25 + 22, 10)
    assert set(machine.blobs) == {entry.sha256 for entry in manifest.values()}


@pytest.mark.parametrize(("whole", "payload"), [
    ([True, False, True, True], b"onethre"), ([True, False, True, True], b"onethree!"), ([True, False, True], b"one"),
    ([True, False, True, True, True], b"onethree"), ([1, False, True, True], b"onethree"), ("TFTT", b"onethree"), (None, b""),
])  # fmt: skip
async def test_answers_that_do_not_match_the_request_are_rejected(
    whole: Any, payload: bytes
) -> None:
    files = {name: FileEntry(sha(data), 0o644, len(data)) for name, data in SMALL.items()}
    more = RunnerResponse({"size": 100}, b"x" * 11)
    host = Scripted(
        gather=lambda _: RunnerResponse({"whole": whole}, payload),
        log=lambda _: more,
        read=lambda _: more,
    )
    with pytest.raises(BadAnswer):
        await Runner(host).gather("j", 3, files)
    with pytest.raises(BadAnswer):
        await Runner(host).log("j", 3, 0, limit=10)
    with pytest.raises(BadAnswer):
        await Runner(host).read("j", 3, "x", limit=10)


async def test_a_runner_may_take_long_while_it_reports_progress() -> None:
    """For verbs with which it does say so, and for no other."""
    told = {"gather": {"whole": []}, "status": STATE, "release": {"clean": True}}
    host = Scripted(manifest={}, forget={}, sweep={}, **told)
    asked = Runner(host)
    for call in (asked.manifest, asked.forget, asked.status, asked.release):
        await call("j", 3)
    await asked.gather("j", 3, {})
    await asked.sweep()
    given = {(request.verb, request.longest) for request in host.asked}
    assert given == {(v, driver.LONGEST_CALL if v in LONG else None) for v in host.replies}
    assert 10 * SIGN_EVERY < driver.DISK_TIMEOUT < driver.LONGEST_CALL
