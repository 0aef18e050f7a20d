"""The pages of a fleet, over one in a real database; and what its buttons change, for whom."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2
import pytest
from sqlalchemy.orm import Session

from groupwise.fleet.client import FleetAway, FleetClient
from groupwise.fleet.direct import DirectFleet
from groupwise.fleet.files.logs import append, make
from groupwise.fleet.store.database import Database, seconds
from groupwise.fleet.store.database import connect as connect_to
from groupwise.fleet.store.tables import Attempt, Checkpoint, Job
from groupwise.web.access import Door
from groupwise.web.app import make_app
from groupwise.web.fleet.attempts import axis, facts, moments, names, span, timeline
from groupwise.web.fleet.jobs import MOST_OF_REASON, whole_letters
from groupwise.web.fleet.watched import WatchedFleet, lasting
from groupwise.web.index import RunsIndex
from groupwise.web.place import Place
from groupwise.web.templates import moment
from groupwise.web.ticking import ending
from groupwise.wire.keys import Keyring, Role, new_key, read_key_file
from groupwise.wire.problems import Refusal
from tests.fleet_api import api, place_in
from tests.fleet_databases import copied, migrated_file
from tests.unit.fleet.verbs.conftest import ADA, SmallFleet
from tests.web_runs import HOSTILE

__all__ = ["migrated_file"]
PATIENT = 30.0
"""Seconds."""
HERE = "http://127.0.0.1:8080"


@pytest.fixture
def small(migrated_file: Path, tmp_path: Path) -> Any:
    database: Database = connect_to(copied(migrated_file, tmp_path))
    yield SmallFleet(database)
    database.close()


@pytest.fixture
def direct(small: SmallFleet, tmp_path: Path) -> DirectFleet:
    small.machine("box-1", gpus=2)
    small.machine("box-2", gpus=0, problem=HOSTILE.replace("\x00", "").replace("\ud83d", ""))
    job = small.job("running", job_id="running-1", name="<b>sums</b>")
    epoch = small.attempt(job, "box-1", gpu=0)
    small.job("queued", job_id="waiting-1")
    small.job("failed", job_id="failed-1", failure_reason="it ran out of memory")
    found = DirectFleet(place_in(tmp_path / "fleet"), small.database, ADA)
    append(make(found.place.logs, job, epoch), 0, b"step 1\n\x1b[2J<script>x</script>\n")
    return found


def client_of(
    fleet: Any, runs: Path, keys: Keyring | None = None, *, acts: bool = True
) -> httpx2.AsyncClient:
    place = Place(
        RunsIndex(runs), Door(keys, acts=acts), None if fleet is None else WatchedFleet(fleet)
    )
    transport = httpx2.ASGITransport(make_app(place))
    return httpx2.AsyncClient(transport=transport, base_url=HERE)


@pytest.fixture
async def client(direct: DirectFleet, tmp_path: Path) -> AsyncIterator[httpx2.AsyncClient]:
    async with client_of(direct, tmp_path) as found:
        yield found


PAGES = (
    "/fleet", "/fleet/jobs", "/fleet/jobs?status=failed", "/fleet/jobs/running-1", "/fleet/jobs/failed-1", "/fleet/machines/box-1",
    "/fleet/machines/box-2",
)  # fmt: skip


async def test_each_page_is_shown_and_told(client: httpx2.AsyncClient) -> None:
    for path in PAGES:
        page = await client.get(path, headers={"accept": "text/html"})
        assert page.status_code == 200, page.text
        for wrong in ("<script>x", "<b>sums", "<img src=x", "\x1b"):
            assert wrong not in page.text, (path, wrong)
        assert isinstance((await client.get(json_at(path))).json(), dict)


def json_at(path: str) -> str:
    return path + ("&" if "?" in path else "?") + "format=json"


async def test_what_they_say(client: httpx2.AsyncClient) -> None:
    whole = (await client.get("/fleet?format=json")).json()
    assert whole["status"]["jobs"]["running"] == 1
    [busy, idle] = whole["machines"][0]["gpus"]
    assert (busy["shown"], busy["held_by"][0]["job_id"]) == ("held", "running-1")
    assert idle["shown"] == "free"
    assert "role_missing" in [each["kind"] for each in whole["status"]["alarms"]]
    job = (await client.get("/fleet/jobs/running-1?format=json")).json()
    assert job["log"].startswith("step 1\n")
    assert list(job["actions"]) == ["cancel"]
    waiting = (await client.get("/fleet/jobs/waiting-1?format=json")).json()
    assert "no dispatcher is running" in " ".join(waiting["job"]["waiting"])
    failed = (await client.get("/fleet/jobs?status=failed&format=json")).json()
    assert [each["job_id"] for each in failed["jobs"]] == ["failed-1"]
    for path, status in (
        ("/fleet/jobs/none", 404),
        ("/fleet/machines/none", 404),
        ("/fleet/jobs?status=odd", 422),
        ("/fleet/jobs/running-1?epoch=0", 400),
        ("/fleet/jobs/running-1/log?offset=1" + "0" * 30, 400),
        ("/fleet/jobs/running-1?epoch=99", 404),
        ("/fleet/jobs/running-1/log?epoch=99", 404),
        ("/fleet/jobs/waiting-1?epoch=1", 404),
    ):
        problem = await client.get(path, headers={"accept": "application/json"})
        assert problem.status_code == status, path


async def test_a_log_goes_on_where_the_page_ends(
    client: httpx2.AsyncClient, direct: DirectFleet
) -> None:
    page = "/fleet/jobs/running-1"
    shown = (await client.get(f"{page}?format=json")).json()
    assert shown["follows"]
    epoch, offset = shown["epoch"], shown["offset"]
    where = f"{page}/log?epoch={epoch}&offset={offset}"
    nothing = {"text": "", "epoch": epoch, "attempt": None, "offset": offset, "ended": False}
    assert (await client.get(where)).json() == nothing
    kept, letter = make(direct.place.logs, "running-1", epoch), "é€😀".encode()
    append(kept, offset, b"\x1b[2J" + letter[:-1])
    first = (await client.get(where)).json()
    assert first["text"] == "␛[2Jé€", "half a letter waits for its end"
    append(kept, offset + 4 + len(letter) - 1, letter[-1:] + b"\n")
    then = (await client.get(f"{page}/log?epoch={first['epoch']}&offset={first['offset']}")).json()
    assert then["text"] == "😀\n"
    whole = await shown_of(client, page)
    assert f'data-log="{page}/log" data-epoch="{epoch}" data-offset="' in whole
    assert "data-log" not in await shown_of(client, "/fleet/jobs/failed-1")
    earlier = (await client.get(f"{page}?epoch={epoch}&format=json")).json()
    assert not earlier["follows"], "whoever chose an attempt reads that one"
    asked = await client.get(f"{page}/log?offset=-1", headers={"accept": "application/json"})
    assert asked.status_code == 400


def test_half_a_letter_is_left_for_later() -> None:
    for data in (f"x{letter}".encode() for letter in "aé€😀"):
        assert {whole_letters(data[:end]) for end in range(1, len(data))} == {b"x"}
        assert whole_letters(data) == data
    for no_text in (b"\x80\x80\x80\x80\x80", b""):
        assert whole_letters(no_text) == no_text


async def test_a_fleet_elsewhere_is_shown_and_changed_over_its_api(
    direct: DirectFleet, small: SmallFleet, tmp_path: Path
) -> None:
    key = "environment-key-0123456789"
    with (
        api(small.database, direct.place, {"GROUPWISE_API_KEY": key}) as address,
        FleetClient(address, key) as remote,
    ):
        async with client_of(remote, tmp_path) as elsewhere, client_of(direct, tmp_path) as here:
            for path in PAGES:
                assert "<script>x" not in await shown_of(elsewhere, path)
                found = (await elsewhere.get(json_at(path))).json()
                expected = (await here.get(json_at(path))).json()
                for each in (found, expected):
                    for ends_now in ("timeline", "axis", "ran"):  # which is another now
                        each.pop(ends_now, None)
                assert lasting(found) == lasting(expected), path
            log = (await elsewhere.get("/fleet/jobs/running-1/log?epoch=1")).json()
            assert log["text"].startswith("step 1\n")
            for path, action in (
                ("/fleet/jobs/waiting-1", "hold"),
                ("/fleet/machines/box-1", "drain"),
            ):
                form = {"token": await token_of(elsewhere, path), "action": action}
                answer = await elsewhere.post(path, data=form, headers={"origin": HERE})
                assert answer.status_code == 303, answer.text
            assert direct.show("waiting-1")["status"] == "held"
            assert direct.machine("box-1")["state"] == "draining"
            missing = await elsewhere.get("/fleet/jobs/none", headers={"accept": "text/html"})
            assert missing.status_code == 404
            with ending(WatchedFleet(remote)) as watched:
                before = watched.stamp(PATIENT)
                await asyncio.to_thread(direct.release, "waiting-1")
                watched.forget()
                assert watched.stamp(PATIENT) != before
    with FleetClient(address, key, patience=0.1, sleep=lambda _: None) as gone:
        async with client_of(gone, tmp_path) as client:
            away = await client.get("/fleet", headers={"accept": "application/json"})
        assert (away.status_code, away.json()["code"]) == (409, "fleet_away")
        with ending(WatchedFleet(gone)) as watched:
            assert watched.stamp(PATIENT) == "fleet_away"


async def test_lists_go_on_with_older_jobs(small: SmallFleet, tmp_path: Path) -> None:
    ids = [small.job("queued", job_id=f"job-{number:03}") for number in range(60)]
    fleet = DirectFleet(place_in(tmp_path / "fleet"), small.database, ADA)
    async with client_of(fleet, tmp_path) as client:
        first = (await client.get("/fleet/jobs?format=json")).json()
        then = (await client.get(f"/fleet/jobs?format=json&older_than={first['more']}")).json()
    assert sorted(each["job_id"] for each in first["jobs"] + then["jobs"]) == ids
    assert then["more"] is None


async def token_of(client: httpx2.AsyncClient, path: str) -> str:
    page = await shown_of(client, path)
    return page.partition('name="token" value="')[2].partition('"')[0]


async def shown_of(client: httpx2.AsyncClient, path: str) -> str:
    page = await client.get(path, headers={"accept": "text/html"})
    assert page.status_code == 200, page.text
    return page.text


async def test_a_button_changes_what_it_says(
    client: httpx2.AsyncClient, direct: DirectFleet
) -> None:
    async def press(path: str, action: str) -> httpx2.Response:
        form = {"token": await token_of(client, path), "action": action}
        return await client.post(path, data=form, headers={"origin": HERE})

    path, box = "/fleet/jobs/waiting-1", "/fleet/machines/box-1"
    for action, status in (("hold", "held"), ("release", "queued"), ("cancel", "cancelled")):
        answer = await press(path, action)
        assert (answer.status_code, answer.headers["location"]) == (303, path), answer.text
        assert direct.show("waiting-1")["status"] == status
    for action, state in (("drain", "draining"), ("undrain", "ok")):
        assert list((await client.get(json_at(box))).json()["actions"]) == [action]
        await press(box, action)
        assert direct.machine("box-1")["state"] == state
    assert (await press(path, "destroy")).status_code == 404


async def test_no_other_site_changes_anything(
    client: httpx2.AsyncClient, direct: DirectFleet
) -> None:
    path = "/fleet/jobs/waiting-1"
    token = await token_of(client, path)
    assert len(token) == 64
    for form, headers in (
        ({"action": "cancel"}, {"origin": HERE}),
        ({"action": "cancel", "token": "0" * 64}, {"origin": HERE}),
        ({"action": "cancel", "token": token}, {"origin": "http://evil.example"}),
        ({"action": "cancel", "token": token}, {}),
        ({"action": "cancel", "token": token}, {"origin": "null"}),
    ):
        assert (await client.post(path, data=form, headers=headers)).status_code == 403
    assert (await client.get(f"{path}?action=cancel")).status_code == 200
    assert direct.show("waiting-1")["status"] == "queued"


async def test_only_those_may_act_who_were_allowed_to(direct: DirectFleet, tmp_path: Path) -> None:
    path, keys = "/fleet/jobs/waiting-1", {role: new_key(role) for role in (Role.READ, Role.ACT)}
    ring = Keyring(read_key_file("\n".join(each.line for each in keys.values()), "keys"))
    for acts, role, status in (
        (True, Role.READ, 403),
        (False, Role.ACT, 403),
        (True, Role.ACT, 303),
    ):
        async with client_of(direct, tmp_path, ring, acts=acts) as client:
            await client.post("/sign-in", data={"key": keys[role].key})
            page = (await client.get(path, headers={"accept": "text/html"})).text
            assert ("Yes, cancel</button>" in page) is (status == 303)
            form = {"token": await token_of(client, path), "action": "cancel"}
            answer = await client.post(path, data=form, headers={"origin": HERE})
            assert answer.status_code == status
            assert (direct.show("waiting-1")["status"] == "cancelled") is (status == 303)
    async with client_of(direct, tmp_path, ring) as client:
        program = {"authorization": f"Bearer {keys[Role.ACT].key}", "accept": "application/json"}
        answer = await client.post(
            "/fleet/jobs/failed-1", data={"action": "retry"}, headers=program
        )
        assert answer.status_code == 200
        assert direct.show("failed-1")["status"] != "failed"
        assert (await client.post(path, data={"action": "hold"})).status_code == 401


async def test_a_dashboard_without_a_fleet_says_so(tmp_path: Path) -> None:
    async with client_of(None, tmp_path) as client:
        for path in ("/fleet", "/fleet/jobs", "/fleet/jobs/x", "/fleet/machines/x"):
            answer = await client.get(path, headers={"accept": "application/json"})
            assert (answer.status_code, "--fleet" in answer.json()["detail"]) == (404, True)
        assert ">Fleet<" not in (await client.get("/runs")).text


def test_pages_learn_of_a_change_and_of_nothing_else(direct: DirectFleet) -> None:
    now = [0.0]
    watched = WatchedFleet(direct, lambda: now[0])
    before = watched.stamp(PATIENT)
    now[0] += 10
    assert watched.stamp(PATIENT) == before
    direct.hold("waiting-1")
    assert watched.stamp(PATIENT) == before, "asked a moment ago"
    now[0] += 10
    assert watched.stamp(PATIENT) != before


def test_a_fleet_that_is_away_is_asked_once_for_all_that_wait(direct: DirectFleet) -> None:
    class Away:
        asked = 0

        def status(self) -> Any:
            self.asked += 1
            time.sleep(0.05)
            raise FleetAway("nobody answers")

    away: Any = Away()
    watched = WatchedFleet(away, clock=lambda: 0.0)
    with ThreadPoolExecutor(8) as pages:
        assert {
            each.result() for each in [pages.submit(watched.stamp, PATIENT) for _ in range(8)]
        } == {"fleet_away"}
    assert away.asked == 1
    watched.forget()
    assert watched.stamp(PATIENT) == "fleet_away"
    assert away.asked == 2


def test_attempts_lie_on_one_line_of_time() -> None:
    def attempt(epoch: int, *times: float | None) -> dict[str, Any]:
        created, running, ended = times
        known = {"created_at": created, "running_at": running, "ended_at": ended}
        called = {"epoch": epoch, "generation": 0, "number": epoch - 1}
        return {**called, "outcome": None, "state": "running", **known}

    first, second = timeline([attempt(1, 100, 110, 150), attempt(2, 160, 180, None)], now=200.0)
    assert (first["x"], first["waits"], first["runs_at"], first["runs"]) == (0, 100, 100, 400)
    assert (second["x"], second["runs_at"], second["runs"]) == (600, 800, 200)
    assert [first["name"], second["name"]] == ["0", "1"]
    assert axis([], 1.0) == []
    assert len(axis([attempt(1, 100, 110, 150)], now=200.0)) == 3
    assert timeline([], 1.0) == []
    assert span([attempt(1, 100, 110, 150), attempt(2, 160, 180, None)], now=200.0) == [100, 200]
    assert span([attempt(1, 100, 110, 150)], now=200.0) == [100, 150]
    assert span([], 1.0) == []


async def test_machines_are_an_admins_and_events_say_who_it_was(
    direct: DirectFleet, tmp_path: Path
) -> None:
    keys = {role: new_key(role) for role in (Role.ACT, Role.ADMIN)}
    ring = Keyring(read_key_file("\n".join(each.line for each in keys.values()), "keys"))
    for role, status in ((Role.ACT, 403), (Role.ADMIN, 303)):
        async with client_of(direct, tmp_path, ring) as client:
            client.headers["authorization"] = f"Bearer {keys[role].key}"
            page = await client.get("/fleet/machines/box-1", headers={"accept": "text/html"})
            assert ("start no new jobs there" in page.text) is (role is Role.ADMIN)
            answer = await client.post("/fleet/machines/box-1", data={"action": "drain"})
            assert answer.status_code == status
            answer = await client.post("/fleet/jobs/waiting-1", data={"action": "hold"})
            assert answer.status_code == 303
            await client.post("/fleet/jobs/waiting-1", data={"action": "release"})
    actors = {each["actor"] for each in direct.show("waiting-1")["events"] if each.get("actor")}
    assert {f"web:{key.id}" for key in keys.values()} <= actors


async def test_a_fleet_that_hangs_holds_up_no_stream_and_pages_for_seconds(
    direct: DirectFleet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answer = threading.Event()
    monkeypatch.setattr(direct, "status", lambda: answer.wait(60) and {})
    monkeypatch.setattr("groupwise.web.fleet.watched.PATIENCE", 0.05)
    watched = WatchedFleet(direct)
    try:
        assert [watched.stamp() for _ in range(2)] == [None, None]
        with pytest.raises(Refusal, match="slow to answer"):
            watched.ask(lambda fleet: fleet.show("waiting-1"))
    finally:
        answer.set()


# What a job's page says


def ends(small: SmallFleet, job: str, number: int, evidence: dict[str, Any]) -> int:
    """An attempt of this number that has failed, with a checkpoint of its own. Its epoch."""

    def write(session: Session) -> int:
        now = seconds(session)
        attempt = Attempt(job_id=job, generation=0, number=number, created_at=now - 60, owner="d")
        session.add(attempt)
        session.flush()
        for state in ("launching", "running", "collecting", "ended"):
            if state == "ended":
                attempt.outcome, attempt.evidence, attempt.ended_at = "failed", evidence, now
            attempt.state = state
            session.flush()
        attempt.cleanup = "clean"
        left = {"path": f"out/{number}", "step": 10, "manifest": {}, "mirrored_at": now}
        session.add(Checkpoint(job_id=job, generation=0, epoch=attempt.epoch, **left))
        return attempt.epoch

    return small.database.run(write)


async def test_an_attempt_has_one_name_wherever_it_is_spoken_of(
    client: httpx2.AsyncClient, direct: DirectFleet, small: SmallFleet
) -> None:
    job = small.job("running", job_id="tried", spec={"arguments": ["sh", "-c", "echo 'a b' $X"]})
    first, second = (ends(small, job, number, {}) for number in range(2))
    assert (first, second) == (2, 3)
    append(make(direct.place.logs, job, second), 0, b"the second\n")
    page = await shown_of(client, "/fleet/jobs/tried")
    assert "Log of attempt 1</h2>" in page
    assert "<b>attempt 1</b>" in page
    assert "<title>attempt 1: failed" in page
    assert '<td>1</td><td dir="auto">out/1</td>' in page
    assert "attempt 2" not in page
    assert "<span>epoch 3</span>" in page, "by which `groupwise fleet logs --epoch` knows it"
    earlier = (await client.get(f"/fleet/jobs/tried?epoch={first}&format=json")).json()
    assert (earlier["attempt"], earlier["log"]) == ("0", ""), "not what the next one wrote"
    assert earlier["command"] == "sh -c 'echo '\"'\"'a b'\"'\"' $X'", "as a shell takes it"
    missing = await client.get("/fleet/jobs/tried?epoch=99", headers={"accept": "text/html"})
    assert missing.status_code == 404
    assert "There are: 2, 3." in missing.text


def test_attempts_with_the_same_number_are_told_apart() -> None:
    def attempt(epoch: int, generation: int, number: int) -> dict[str, Any]:
        return {"epoch": epoch, "generation": generation, "number": number}

    assert names([attempt(7, 0, 0), attempt(9, 1, 0)]) == {7: "0", 9: "0 of generation 1"}
    void = names([attempt(7, 0, 0), attempt(8, 0, 0), attempt(9, 0, 1)])
    assert void == {7: "0 (epoch 7)", 8: "0 (epoch 8)", 9: "1"}


async def test_a_log_without_an_epoch_is_that_of_the_newest_attempt(
    client: httpx2.AsyncClient, direct: DirectFleet, small: SmallFleet
) -> None:
    job = small.job("failed", job_id="over")
    first, epoch = (ends(small, job, number, {}) for number in range(2))
    append(make(direct.place.logs, job, first), 0, b"attempt 0\n")
    append(make(direct.place.logs, job, epoch), 0, b"attempt 1\n")
    log = "/fleet/jobs/over/log"
    begins = (await client.get(f"{log}?offset=8")).json()
    assert begins == {"text": "1\n", "epoch": epoch, "attempt": "1", "offset": 10, "ended": False}
    beyond = (await client.get(f"{log}?offset=100000")).json()
    assert (beyond["text"], beyond["offset"], beyond["ended"]) == ("", 100000, True)
    assert {**beyond, "attempt": None} == (
        await client.get(f"{log}?offset=100000&epoch={epoch}")
    ).json()
    none = (await client.get("/fleet/jobs/waiting-1/log?offset=5")).json()
    assert (none["text"], none["epoch"], none["ended"]) == ("", None, False)


async def test_evidence_and_events_are_told_in_words(
    client: httpx2.AsyncClient, direct: DirectFleet, small: SmallFleet
) -> None:
    hostile = HOSTILE.replace("\x00", "").replace("\ud83d", "")
    ended = {"code": 137, "signal": None, "oom_kill": True, "tail": f"step 1\n{hostile}"}
    evidence = {"because": "exit code 137", hostile: 1, "members": [{"rank": 0, "exit": ended}]}
    ends(small, small.job("running", job_id="tried"), 0, evidence)
    await asyncio.to_thread(direct.cancel, "waiting-1", "<b>no need</b>")
    page = await shown_of(client, "/fleet/jobs/tried")
    for name, value in (("because", "exit code 137"), ("members exit code", "137"), ("members exit oom kill", "yes")):  # fmt: skip
        assert f'<dt dir="auto">{name}</dt><dd class="value" dir="auto">{value}</dd>' in page
    assert "step 1\n&lt;script&gt;" in page
    for wrong in ("<script>doc", "<img src=x", "\x1b", "{&#34;", "members exit signal"):
        assert wrong not in page, wrong
    events = await shown_of(client, "/fleet/jobs/waiting-1")
    assert "status: queued → cancelled" in events
    assert "reason: &lt;b&gt;no need&lt;/b&gt;" in events


def test_plain_data_becomes_names_and_values() -> None:
    found = facts(
        {"a": {"b_c": 1, "d": None}, "e": [1, "x"], "f": False, "m": [{"r": 0}, {"r": 1}]}
    )
    assert found == [("a b c", "1"), ("e", '[1, "x"]'), ("f", "no"), ("m 0 r", "0"), ("m 1 r", "1")]
    deep: Any = "x"
    for _ in range(20):
        deep = {"n": deep}
    [(name, value)] = facts(deep)
    assert name == "n n n n n"
    assert value.startswith('{"n": ')


def test_a_day_is_said_once() -> None:
    noon = time.mktime((2026, 3, 4, 12, 0, 0, 0, 0, -1))
    assert moments(noon, noon + 61.0) == [moment(noon), "12:01:01"]
    assert moments(noon, None) == [moment(noon)]
    assert moments(noon, noon + 86400 * 2) == [moment(noon), moment(noon + 86400 * 2)]
    assert moment(noon).startswith("2026-03-04 12:00:00")


async def test_a_job_says_when_it_ran_and_for_how_long(
    client: httpx2.AsyncClient, small: SmallFleet
) -> None:
    begun = datetime(2026, 3, 4, 12, tzinfo=UTC)
    job = small.job("completed", job_id="done")

    def write(session: Session) -> None:
        row = session.get_one(Job, job)
        row.start_time, row.end_time = begun, begun + timedelta(seconds=200)

    small.database.run(write)
    page = await shown_of(client, "/fleet/jobs/done")
    assert "<dt>took</dt><dd>3 min 20 s</dd>" in page
    assert "<dt>started</dt>" in page
    assert "<dt>ended</dt>" in page
    waiting = await shown_of(client, "/fleet/jobs/waiting-1")
    assert "<dt>started</dt>" not in waiting
    assert "running for" not in waiting


async def test_a_reason_goes_with_what_is_cancelled(
    client: httpx2.AsyncClient, direct: DirectFleet
) -> None:
    path = "/fleet/jobs/waiting-1"
    form = {"token": await token_of(client, path), "action": "cancel"}
    long = {**form, "reason": "x" * (MOST_OF_REASON + 1)}
    refused = await client.post(path, data=long, headers={"origin": HERE})
    assert refused.status_code == 400
    assert direct.show("waiting-1")["status"] == "queued"
    await client.post(path, data={**form, "reason": " by mistake "}, headers={"origin": HERE})
    details = [each["detail"] for each in direct.show("waiting-1")["events"]]
    assert {"reason": "by mistake"} in details
    running = "/fleet/jobs/running-1"
    assert 'name="reason"' in await shown_of(client, running)
    await client.post(running, data={**form, "reason": ""}, headers={"origin": HERE})
    told = [each["detail"] or {} for each in direct.show("running-1")["events"]]
    assert not any("reason" in each for each in told)


# What machines say


async def test_a_place_for_a_job_without_gpus_is_free_or_held(
    client: httpx2.AsyncClient, small: SmallFleet
) -> None:
    box = "/fleet/machines/box-2"
    assert "<b>CPU slot</b><span>free</span>" in await shown_of(client, box)
    small.attempt(small.job("running", job_id="counts", assigned_vm="box-2"), "box-2")
    held = await shown_of(client, box)
    assert '<b>CPU slot</b><span>held</span><a href="/fleet/jobs/counts">counts</a>' in held
    assert "<span>free</span>" not in held
    small.machine("box-3", cpu_slots=3)
    assert "<b>3 CPU slots</b><span>free</span>" in await shown_of(client, "/fleet/machines/box-3")
    small.machine("box-4", cpu_slots=0)
    assert "no GPU and no CPU slot" in await shown_of(client, "/fleet/machines/box-4")
    whole = (await client.get("/fleet?format=json")).json()
    assert (whole["slots_free"], whole["slots"]) == (3, 4), "none beside the GPUs of box-1"


async def test_jobs_that_run_on_a_machine_stand_before_others(
    client: httpx2.AsyncClient, small: SmallFleet
) -> None:
    for status in ("running", "pending", "failed"):
        small.job(status, job_id=f"{status}-there", assigned_vm="box-2")
    page = await shown_of(client, "/fleet/machines/box-2")
    places = [page.index(each) for each in ("running-there", "last placed there", "failed-there")]
    assert places == sorted(places)
    assert page.index("pending-there") > places[1]


async def test_what_was_seen_of_gpus_stands_on_their_machine(client: httpx2.AsyncClient) -> None:
    document = (await client.get("/fleet/machines/box-1?format=json")).json()["machine"]
    page = await shown_of(client, "/fleet/machines/box-1")
    table = page.partition('aria-label="GPUs as they were seen"')[2].partition("</table>")[0]
    assert table.count("<tr data-key=") == 2
    for gpu in document["gpus"]:
        assert f"<code>{gpu['uuid']}</code>" in table
        assert f"of {gpu['memory_mb']} MB" in table or gpu["memory_used_mb"] is None
    without = await shown_of(client, "/fleet/machines/box-2")
    assert "GPUs as they were seen" not in without
