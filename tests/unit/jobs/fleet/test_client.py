"""The API and its Python client, through a real socket: every operation, every refusal, bytes in both directions."""

import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from groupwise.api.http.strict_json import MAX_KEYS
from groupwise.api.schemas.fleet import (
    ENDED_HEADER,
    EPOCH_HEADER,
    MAX_LINES,
    OFFSET_HEADER,
    LogPart,
)
from groupwise.api.schemas.problems import Refusal
from groupwise.cli.fleet.local_files import (
    _store_files as store_files,  # pyright: ignore[reportPrivateUsage]
)
from groupwise.core.errors import UsageError
from groupwise.jobs.fleet import client
from groupwise.jobs.fleet.client import FleetClient
from groupwise.jobs.fleet.download import DownloadError
from groupwise.jobs.fleet.files.logs import append, make
from groupwise.jobs.fleet.settings import FleetPlace
from groupwise.jobs.fleet.store import schema, triggers
from groupwise.jobs.fleet.store.database import Database
from groupwise.jobs.fleet.store.tables import ApiKey, Checkpoint
from groupwise.jobs.fleet.store.triggers import Rule
from groupwise.jobs.hosts.files import BlobStore
from tests.fleet_api import api, place_in
from tests.meanwhile import right_after

PLAIN = "environment-key-0123456789"
COMMAND = {"arguments": ["true"], "resources": {"gpus": 0}}


@pytest.fixture
def place(tmp_path: Path) -> FleetPlace:
    return place_in(tmp_path / "fleet")


@pytest.fixture
def url(database: Database, place: FleetPlace) -> Iterator[str]:
    with api(database, place, {"GROUPWISE_API_KEY": PLAIN}) as address:
        yield address


@pytest.fixture
def fleet(url: str) -> Iterator[FleetClient]:
    with FleetClient(url, PLAIN, sleep=lambda _: None) as client:
        yield client


def refused(code: str) -> Any:
    return pytest.raises(Refusal, check=lambda refusal: refusal.code == code)


# Bytes


def test_files_travel_once_and_only_what_is_missing(
    fleet: FleetClient, place: FleetPlace, tmp_path: Path
) -> None:
    folder = tmp_path / "code"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "a.py").write_text("print(1)\n")
    (folder / "b.bin").write_bytes(bytes(range(256)) * 300)
    job = fleet.submit(COMMAND, files=[folder])
    sent = fleet.show(job["job_id"])["request"]["files"]
    assert sorted(sent) == ["code/b.bin", "code/sub/a.py"]
    stored = place.blobs / sent["code/b.bin"][0][:2] / sent["code/b.bin"][0]
    assert stored.read_bytes() == (folder / "b.bin").read_bytes()
    assert fleet.upload({"again": folder / "b.bin"})["again"][0] == sent["code/b.bin"][0]


def test_a_file_that_changes_while_it_is_sent_is_sent_as_it_is_then(
    fleet: FleetClient, tmp_path: Path
) -> None:
    file = tmp_path / "f"
    file.write_text("before")
    texts = iter(("AFTERW", "a"))

    def writes(_: int, __: int, label: str) -> None:
        if label.startswith("looking at") and (text := next(texts, None)) is not None:
            file.write_text(text)

    assert fleet.upload([file], on_progress=writes)["f"][0] == hashlib.sha256(b"a").hexdigest()
    file.write_text("again")
    texts = iter(f"{n}" for n in range(9))
    with pytest.raises(UsageError, match="was changed while it was sent"):
        fleet.upload([file], on_progress=writes)


def test_a_file_that_is_removed_before_it_is_sent_is_named(
    fleet: FleetClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "f"
    for dry_run in (False, True):
        file.write_text("of a run that goes on")
        right_after(monkeypatch, client, "named_files", file.unlink)
        found = client.named_files([file]) if dry_run else {}
        with pytest.raises(UsageError, match="f cannot be read, and is to be sent"):
            store_files(fleet, [found], True) if dry_run else fleet.upload([file])


def test_an_upload_that_was_cut_off_continues(
    url: str, fleet: FleetClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = b"x" * 5000
    sha256 = hashlib.sha256(data).hexdigest()
    headers = {"Authorization": f"Bearer {PLAIN}"}
    with httpx2.Client(base_url=url, headers=headers) as http:
        first = http.put(f"/blobs/{sha256}?size=5000", content=data[:2000]).json()
        assert first == {"received": 2000, "stored": False}
        wrong = http.put(f"/blobs/{sha256}?size=5000&offset=0", content=data[:10]).json()
        assert wrong == {"received": 2000, "stored": False}
        last = http.put(f"/blobs/{sha256}?size=5000&offset=2000", content=data[2000:]).json()
        assert last == {"received": 5000, "stored": True}
        torn = http.put(f"/blobs/{'0' * 64}?size=3", content=b"abc")
        assert torn.status_code == 422
        assert torn.json()["code"] == "invalid_request"
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=1000, free=52))
        full = http.put(f"/blobs/{'1' * 64}?size=5", content=b"abcde")
        assert (full.status_code, full.json()["code"]) == (503, "disk_full")


def test_a_job_is_no_data_and_only_files_may_be_large(url: str) -> None:
    with httpx2.Client(base_url=url, headers={"Authorization": f"Bearer {PLAIN}"}) as http:
        large = http.post("/jobs/plan", json={"hyperparams": {"x": [1] * 600_000}})
        assert (large.status_code, "Put data into a file" in large.text) == (422, True)
        json_type = {"Content-Type": "application/json"}
        larger = http.post("/jobs/plan", content=b" " * (17 << 20), headers=json_type)
        assert (larger.status_code, larger.json()["code"]) == (413, "too_large")
        sha256 = hashlib.sha256(b"x").hexdigest()
        http.put(f"/blobs/{sha256}?size=1", content=b"x")
        files = {f"{n}": [sha256, 0o644, 1] for n in range(MAX_KEYS + 1)}
        planned = http.post("/jobs/plan", json={"arguments": ["true"], "files": files})
        assert planned.status_code == 200, planned.text[:300]


# The same file, sent by several at once


def test_many_send_the_same_file_at_once(
    url: str, place: FleetPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "UPLOAD_PIECE", 1 << 16)
    data = bytes(range(256)) * (1 << 11)
    (tmp_path / "f").write_bytes(data)
    together = threading.Barrier(4)

    def sent(_: int) -> Any:
        with FleetClient(url, PLAIN, sleep=lambda _: None) as fleet:
            together.wait(20)
            return fleet.upload([tmp_path / "f"])

    with ThreadPoolExecutor(4) as pool:
        first, *others = pool.map(sent, range(4))
    assert others == [first] * 3
    assert BlobStore(place.blobs).read(first["f"][0]) == data


# Rights


@pytest.mark.parametrize(("role", "projects", "is_allowed"), [
    ("act", None, False), ("admin", ["red"], False), ("admin", None, True),
])  # fmt: skip
def test_only_an_operator_may_use_a_full_machine(
    url: str, fleet: FleetClient, role: str, projects: list[str] | None, is_allowed: bool
) -> None:
    command = {**COMMAND, "resources": {"gpus": 0, "vm": "vm-1", "oversubscribe": True}}
    operators_job = fleet.submit(command, project="red")["job_id"]
    fleet.cancel(operators_job)
    with FleetClient(url, fleet.make_key(role, projects=projects)["key"]) as client:
        client.submit(COMMAND)
        with nullcontext() if is_allowed else refused("forbidden"):
            client.submit_all([COMMAND, command])
        with nullcontext() if is_allowed else refused("forbidden"):
            client.retry(operators_job)


# Files of other projects


@pytest.fixture
def red_and_blue(url: str, fleet: FleetClient) -> Iterator[tuple[FleetClient, FleetClient]]:
    """Each with a key that is bound to its project."""
    red, blue = (fleet.make_key("act", projects=[name])["key"] for name in ("red", "blue"))
    with FleetClient(url, red) as first, FleetClient(url, blue) as second:
        yield first, second


def _asked(of: FleetClient, verb: str, path: str, **more: Any) -> Any:
    return of._request_json(verb, path, **more)  # what none of its words asks


def test_a_hash_alone_gives_no_file_of_another_project(
    red_and_blue: tuple[FleetClient, FleetClient], fleet: FleetClient, tmp_path: Path
) -> None:
    red, blue = red_and_blue
    (tmp_path / "f").write_bytes(b"of red alone")
    manifest = red.upload([tmp_path / "f"])
    sha256 = manifest["f"][0]
    assert red.submit({**COMMAND, "files": manifest})["project"] == "red"
    for name in ("submit", "plan"):
        with refused("invalid_request") as caught:
            getattr(blue, name)({**COMMAND, "files": manifest})
        assert f"file 'f': {sha256} was not sent for a project of yours" in caught.value.detail
    with refused("invalid_request") as caught:
        blue.submit_all([COMMAND, {**COMMAND, "files": manifest}])
    assert caught.value.detail.startswith("job 2 of 2: file 'f': ")
    assert blue.jobs() == []
    for who, missing, received in ((red, [], 12), (blue, [sha256], 0), (fleet, [], 12)):
        body = {"sha256": [sha256, sha256]}
        assert _asked(who, "POST", "/blobs/missing", body=body) == {"missing": missing}
        answer = _asked(who, "GET", f"/blobs/{sha256}", query={"size": 12})
        assert answer == {"received": received}


def test_a_file_of_another_project_must_be_uploaded_in_full(
    red_and_blue: tuple[FleetClient, FleetClient], fleet: FleetClient, tmp_path: Path
) -> None:
    red, blue = red_and_blue
    (tmp_path / "f").write_bytes(b"the same in both")
    manifest = red.upload([tmp_path / "f"])
    sha256 = manifest["f"][0]
    put = {"query": {"size": 16, "offset": 0}}
    answer = _asked(blue, "PUT", f"/blobs/{sha256}", content=b"the same", **put)
    assert answer == {"received": 8, "stored": False}
    with refused("invalid_request"):
        blue.submit({**COMMAND, "files": manifest})
    rest = {"query": {"size": 16, "offset": 8}}
    with refused("invalid_request") as caught:
        _asked(blue, "PUT", f"/blobs/{sha256}", content=b" in none", **rest)
    assert "has the sha256" in caught.value.detail
    assert blue.upload([tmp_path / "f"]) == manifest
    assert blue.submit({**COMMAND, "files": manifest})["project"] == "blue"


@pytest.mark.parametrize("first", ["bound", "unbound"])
def test_the_last_part_of_a_file_does_not_complete_the_upload_of_another_project(
    red_and_blue: tuple[FleetClient, FleetClient], fleet: FleetClient, first: str
) -> None:
    red, blue = red_and_blue
    sha256 = hashlib.sha256(b"secret, known end").hexdigest()
    begun = red if first == "bound" else fleet
    query = {"size": 17, "offset": 0}
    _asked(begun, "PUT", f"/blobs/{sha256}", query=query, content=b"secret, ")
    assert _asked(blue, "GET", f"/blobs/{sha256}", query={"size": 17}) == {"received": 0}
    end = {"size": 17, "offset": 8}
    answer = _asked(blue, "PUT", f"/blobs/{sha256}", query=end, content=b"known end")
    assert answer == {"received": 0, "stored": False}
    answer = _asked(begun, "PUT", f"/blobs/{sha256}", query=end, content=b"known end")
    assert answer == {"received": 17, "stored": True}


def test_a_job_gives_its_project_the_files_that_it_names(
    url: str, red_and_blue: tuple[FleetClient, FleetClient], fleet: FleetClient, tmp_path: Path
) -> None:
    (tmp_path / "f").write_bytes(b"of somebody who may name all")
    red, blue = red_and_blue
    manifest = fleet.upload([tmp_path / "f"])
    with refused("invalid_request"):
        red.submit({**COMMAND, "files": manifest})
    fleet.submit_all([{**COMMAND, "files": manifest}, COMMAND], project="red")
    job = red.submit({**COMMAND, "files": manifest})["job_id"]
    red.cancel(job)
    assert red.retry(job)["status"] == "queued"
    with refused("invalid_request"):
        blue.submit({**COMMAND, "files": manifest})
    both = fleet.make_key("act", projects=["red", "blue"])["key"]
    with FleetClient(url, both) as of_two:
        of_two.submit({**COMMAND, "files": manifest}, project="blue")
    blue.submit({**COMMAND, "files": manifest})


def test_a_log_is_followed_across_attempts_to_its_end(
    fleet: FleetClient, place: FleetPlace, database: Database
) -> None:
    job = fleet.submit(COMMAND)["job_id"]
    for epoch, text in ((3, b"first\n"), (7, b"second\n")):
        append(make(place.logs, job, epoch), 0, text)
    fleet.cancel(job)
    assert b"".join(fleet.follow(job, epoch=3)) == b"first\nsecond\n"
    assert b"".join(fleet.follow(job)) == b"second\n"
    assert b"".join(fleet.follow(job, epoch=7, offset=3)) == b"ond\n"
    assert fleet.log(job, tail=1) == LogPart(b"second\n", 7, 7, False)
    assert fleet.log(job, tail=0) == LogPart(b"", 7, 7, True)
    assert fleet.log(job, tail=99, epoch=3).data == b"first\n"
    with refused("invalid_request"):
        fleet.log(job, tail=MAX_LINES + 1)


def test_artefacts_are_listed_and_fetched_whole(
    fleet: FleetClient, place: FleetPlace, tmp_path: Path
) -> None:
    job = fleet.submit(COMMAND)["job_id"]
    with refused("unknown_file"):
        fleet.artefacts(job)
    data = b"weights" * 1000
    _leave(place, job, {"outputs/model bin ü.dat": data})
    (place.artefacts / "secret").write_text("no")
    assert list(fleet.artefacts(job)["files"]) == ["outputs/model bin ü.dat"]
    found = fleet.fetch(job, tmp_path / "here")
    assert [each["path"] for each in found["files"]] == ["outputs/model bin ü.dat"]
    assert (tmp_path / "here/outputs/model bin ü.dat").read_bytes() == data
    assert fleet.fetch(job, tmp_path / "here")["files"][0]["kept"] is True
    for path in ("../secret", "../../secret", "outputs", "/etc/passwd", "9.json"):
        with refused("unknown_file"):
            fleet._request_json("GET", f"/jobs/{job}/artefacts/{path.replace('/', '%2F')}")


ODD_NAMES = (
    *("x\ny", "end\n", "\n", "\r", "\t", "\x01", "\x7f", "\x85", "\u2028", " ", "a  b ", "é", "🙂"),
    *("e\u0301", "q?x=1", "h#1", "p%2e", "%0A", "~", "..x", "...", ":", ";", "+&=", '"', "'", "*"),
    *("\\", "{path}", "[", "|"),
)


def test_an_artefact_has_any_name_that_a_disk_takes(
    fleet: FleetClient, place: FleetPlace, tmp_path: Path
) -> None:
    job = fleet.submit(COMMAND)["job_id"]
    left = {f"outputs/{name}": name.encode() for name in ODD_NAMES}
    left |= {f"{name}/inner": name.encode() for name in ODD_NAMES}
    _leave(place, job, left)
    fleet.fetch(job, tmp_path / "here")
    assert {path: (tmp_path / "here" / path).read_bytes() for path in left} == left


def _leave(place: FleetPlace, job: str, files: dict[str, bytes], name: str = "9") -> None:
    folder = place.artefacts / job / name
    named: dict[str, Any] = {}
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
        named[path] = [hashlib.sha256(data).hexdigest(), 0o644, len(data)]
    record = {"files": named, "left_out": [["outputs/link", "link"]]}
    (place.artefacts / job / f"{name}.json").write_text(json.dumps(record))
    if name.isdecimal():
        link = place.artefacts / job / "current"
        link.unlink(missing_ok=True)
        link.symlink_to(name)


@pytest.mark.parametrize("ranges", [True, False])
def test_an_artefact_that_was_cut_off_continues(ranges: bool, tmp_path: Path) -> None:
    """Some bytes at a time, from a server that ends each connection early; a proxy may know no ranges."""
    data = bytes(range(256)) * 40
    asked: list[str] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        if request.url.path.endswith("/artefacts"):
            entry = [hashlib.sha256(data).hexdigest(), 0o644, len(data)]
            listed = {"epoch": 3, "rank": 0, "files": {"a": entry}, "left_out": []}
            return httpx2.Response(200, json=listed)
        asked.append(request.headers["range"])
        start = int(asked[-1].removeprefix("bytes=").removesuffix("-"))
        begin, status = (start, 206) if ranges else (0, 200)
        return httpx2.Response(
            status, stream=Torn(data[begin : start + 4000], whole=len(data) - start <= 4000)
        )

    transport = httpx2.MockTransport(answer)
    with FleetClient("http://fleet", "k", transport=transport, sleep=lambda _: None) as fleet:
        fleet.fetch("job-1", tmp_path)
    assert (tmp_path / "a").read_bytes() == data
    assert asked == ["bytes=0-", "bytes=4000-", "bytes=8000-"]


class Torn(httpx2.SyncByteStream):
    """The body of an answer, whose connection breaks behind it."""

    def __init__(self, data: bytes, *, whole: bool) -> None:
        self._data, self._whole = data, whole

    def __iter__(self) -> Iterator[bytes]:
        yield self._data
        if not self._whole:
            raise httpx2.ReadError("the connection broke")


def test_checkpoints_are_listed_and_fetched_by_who_may_see_the_job(
    url: str, fleet: FleetClient, place: FleetPlace, database: Database, tmp_path: Path
) -> None:
    job, other = (fleet.submit(COMMAND, project=name)["job_id"] for name in ("red", "blue"))
    assert fleet.checkpoints(job) == []
    store = BlobStore(place.blobs)
    kept, gone = store.put(b"weights"), "0" * 64

    def mirror(session: Any) -> None:
        for step, sha256 in ((3, kept), (2, gone)):
            path = f"outputs/step-{step}"
            manifest = {f"{path}/w.bin": [sha256, 0o644, 7]}
            session.add(
                Checkpoint(
                    job_id=job,
                    generation=0,
                    epoch=5,
                    path=path,
                    step=step,
                    manifest=manifest,
                    mirrored_at=1.0,
                )
            )

    database.run(mirror)
    assert [each["step"] for each in fleet.checkpoints(job)] == [3, 2]
    fleet.fetch(job, tmp_path, paths=["outputs/step-3"], checkpoints=True)
    assert (tmp_path / "outputs/step-3/w.bin").read_bytes() == b"weights"
    with pytest.raises(DownloadError, match=r"step-2/w\.bin: .*fleet's disk"):
        fleet.fetch(job, tmp_path, checkpoints=True)
    with refused("unknown_file"):  # a blob that is there, but not of that job
        list(fleet.checkpoint_pieces(other, kept))
    blue = fleet.make_key("admin", projects=["blue"])["key"]
    with FleetClient(url, blue) as stranger:
        for look in (stranger.checkpoints, lambda j: list(stranger.checkpoint_pieces(j, kept))):
            with refused("unknown_job"):
                look(job)


# Who may


def test_each_role_has_its_permissions_and_a_missing_key_has_none(
    url: str, fleet: FleetClient
) -> None:
    read, act = (fleet.make_key(role)["key"] for role in ("read", "act"))
    with FleetClient(url, read) as reader, FleetClient(url, act) as actor:
        job = actor.submit(COMMAND)["job_id"]
        assert reader.show(job)["submitted_by"].startswith("key:")
        for forbidden in (lambda: reader.cancel(job), lambda: actor.drain("x"), actor.keys):
            with refused("forbidden") as caught:
                forbidden()
            assert "train" not in caught.value.detail  # as a training server calls `act`
    for wrong in ("gw-nobody-xxxx", PLAIN + "x"):
        with FleetClient(url, wrong) as nobody, refused("unauthorised") as caught:
            nobody.jobs()
        assert "that of GROUPWISE_API_KEY" in caught.value.detail
    with FleetClient(url, "") as nobody, refused("unauthorised") as caught:
        nobody.jobs()
    assert "put yours into GROUPWISE_API_KEY" in caught.value.detail


def test_a_key_of_a_project_sees_no_other(url: str, fleet: FleetClient) -> None:
    foreign = fleet.submit(COMMAND, project="blue")["job_id"]
    key = fleet.make_key("admin", projects=["red"])["key"]
    with FleetClient(url, key) as red:
        own = red.submit(COMMAND)
        assert own["project"] == "red"
        assert [each["job_id"] for each in red.jobs()] == [own["job_id"]]
        with refused("forbidden"):
            red.submit(COMMAND, project="blue")
        for verb in (
            *(red.show, red.progress, red.cancel, red.hold, red.retry, red.release),
            *(red.artefacts, red.checkpoints, red.log),
        ):
            with refused("unknown_job"):
                verb(foreign)
        with refused("unknown_job"):
            list(red.follow(foreign))
        for all_projects in (
            red.keys,
            red.events,
            lambda: red.make_key("read"),
            lambda: red.drain("x"),
            lambda: red.change_project("red", weight=9.0),
        ):
            with refused("forbidden"):
                all_projects()
        assert red.status()["jobs"]["queued"] == 1


def test_a_revoked_or_expired_key_is_refused(
    url: str, fleet: FleetClient, database: Database
) -> None:
    made = fleet.make_key("read", note="for a test")
    with FleetClient(url, made["key"]) as client:
        client.jobs()
        fleet.revoke_key(made["key_id"])
        with refused("unauthorised"):
            client.jobs()
    old = fleet.make_key("admin", seconds=3600.0)

    def age(session: Any) -> None:
        session.get(ApiKey, old["key_id"]).expires_at = 1.0

    database.run(age)
    with FleetClient(url, old["key"]) as client, refused("unauthorised"):
        client.jobs()
    with refused("unknown_key"):
        fleet.revoke_key("nobody")
    told = json.dumps(fleet.keys())
    assert made["key_id"] in told
    assert made["key"] not in told


# State


def test_readiness_checks_and_metrics_change_nothing(
    url: str, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be of another version than the others, and be asked every few seconds."""
    with httpx2.Client(base_url=url, headers={"Authorization": f"Bearer {PLAIN}"}) as http:
        assert http.get("/healthz").json() == http.get("/readyz").json() == {"status": "ok"}
        assert 'groupwise_fleet_jobs{status="queued"} 0' in http.get("/metrics").text
    never = Rule("job_never", "jobs", "UPDATE", "1 = 1", "never")
    with monkeypatch.context() as other_version:
        other_version.setattr(triggers, "rules", lambda: (never,))
        ready = httpx2.get(f"{url}/readyz")
    assert ready.status_code == 503
    assert "of another version" in ready.json()["detail"]
    assert database.at_rest(schema.is_current)


# Patience


class Away:
    """A server with one log that is not there for a while, in a time that passes only where somebody sleeps."""

    LOG = b"".join(b"line %d\n" % number for number in range(40))

    def __init__(self, seconds: float, how: httpx2.Response | None = None) -> None:
        """`seconds`: from the third request on. `how`: what a proxy or the API says meanwhile; None: nothing at all."""
        self._seconds, self._how = seconds, how
        self._until: float | None = None
        self.now = 0.0
        self.asked: list[httpx2.Request] = []
        self.told: list[str] = []

    def client(self) -> FleetClient:
        return FleetClient(
            "http://fleet",
            "k",
            transport=httpx2.MockTransport(self._answer),
            sleep=self._sleep,
            clock=lambda: self.now,
            warn=self.told.append,
        )

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def _answer(self, request: httpx2.Request) -> httpx2.Response:
        self.asked.append(request)
        if len(self.asked) == 3:
            self._until = self.now + self._seconds
        if self._until is not None and self.now < self._until:
            if self._how is None:
                raise httpx2.ConnectError("connection refused")
            return self._how
        return self._of_fleet(request)

    def _of_fleet(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "POST":
            return httpx2.Response(200, json={"job_id": "job-1"})
        if not request.url.path.endswith("/log"):
            return httpx2.Response(200, json={"status": "completed"})
        offset = int(request.url.params["offset"])
        data = self.LOG[offset : offset + 50]
        headers = {EPOCH_HEADER: "3", OFFSET_HEADER: str(offset + len(data))}
        ended = {} if data else {ENDED_HEADER: "true"}
        return httpx2.Response(200, content=data, headers={**headers, **ended})


def problem(code: str) -> httpx2.Response:
    return httpx2.Response(503, json=Refusal(code).problem().model_dump())


@pytest.mark.parametrize(
    "how",
    [
        None,
        problem("database_away"),
        problem("shutting_down"),
        httpx2.Response(502, text="nginx"),
        httpx2.Response(429, text="slowly"),
    ],
    ids=["gone", "database", "ending", "proxy", "limiter"],
)
def test_following_a_log_resumes_after_an_outage_without_loss(
    how: httpx2.Response | None,
) -> None:
    server = Away(300.0, how)
    with server.client() as fleet:
        assert b"".join(fleet.follow("job-1")) == Away.LOG
        assert fleet.wait("job-1") == {"status": "completed"}
    assert server.now >= 300.0
    away, back = server.told
    assert away.startswith("the fleet does not answer, and is asked on for 10 minutes: ")
    assert back == "the fleet answers again"


def test_a_submission_continues_under_its_name() -> None:
    server = Away(300.0)
    with server.client() as fleet:
        for _ in range(3):
            fleet.submit(COMMAND)
    assert len(server.told) == 2
    names = [request.headers["idempotency-key"] for request in server.asked]
    assert len(names) > 20
    assert len(set(names)) == 3


@pytest.mark.parametrize("seconds", [40, 10_000])
def test_the_client_waits_as_long_as_retry_after_says(seconds: int) -> None:
    slept: list[float] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        if slept:
            return httpx2.Response(200, json={})
        return httpx2.Response(
            503, json=problem("database_away").json(), headers={"Retry-After": str(seconds)}
        )

    transport = httpx2.MockTransport(answer)
    with FleetClient("http://fleet", "k", transport=transport, sleep=slept.append) as fleet:
        if seconds > fleet.retries.seconds:
            with pytest.raises(Refusal):
                fleet.status()
            assert slept == []
        else:
            assert fleet.status() == {}
            assert len(slept) == 1
            assert slept[0] >= seconds
