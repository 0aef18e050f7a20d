"""The pages of a fleet, over one in a real database; and what its buttons change, for whom."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest

from groupwise.api.schemas.keys import Keyring, Role, new_key, read_key_file
from groupwise.api.schemas.problems import Refusal
from groupwise.dashboard.access import AccessControl
from groupwise.dashboard.app import make_app
from groupwise.dashboard.context import DashboardContext
from groupwise.dashboard.fleet.jobs import MAX_REASON_CHARACTERS
from groupwise.dashboard.sources.cached_values import ending
from groupwise.dashboard.sources.fleet import WatchedFleet, without_volatile
from groupwise.dashboard.sources.runs import RunsIndex
from groupwise.jobs.fleet.client import FleetClient
from groupwise.jobs.fleet.files.logs import append, make
from groupwise.jobs.fleet.local import LocalFleet
from groupwise.jobs.fleet.store.database import Database
from groupwise.jobs.fleet.store.database import connect as connect_to
from tests.fleet_api import api, place_in
from tests.fleet_databases import copied, migrated_file
from tests.unit.jobs.fleet.operations.conftest import ADA, SmallFleet
from tests.web_runs import HOSTILE

__all__ = ["migrated_file"]
TIMEOUT_S = 30.0
HERE = "http://127.0.0.1:8080"


@pytest.fixture
def small(migrated_file: Path, tmp_path: Path) -> Any:
    database: Database = connect_to(copied(migrated_file, tmp_path))
    yield SmallFleet(database)
    database.close()


@pytest.fixture
def local(small: SmallFleet, tmp_path: Path) -> Iterator[LocalFleet]:
    small.machine("box-1", gpus=2, last_polled=datetime.now(UTC))
    small.machine("box-2", gpus=0, problem=HOSTILE.replace("\x00", "").replace("\ud83d", ""))
    job = small.job("running", job_id="running-1", name="<b>sums</b>")
    epoch = small.attempt(job, "box-1", gpu=0)
    small.job("queued", job_id="waiting-1")
    small.job("failed", job_id="failed-1", failure_reason="it ran out of memory")
    with LocalFleet(place_in(tmp_path / "fleet"), ADA.name, database=small.database) as found:
        append(make(found.place.logs, job, epoch), 0, b"step 1\n\x1b[2J<script>x</script>\n")
        yield found


def client_of(
    fleet: Any, runs: Path, keys: Keyring | None = None, *, acts: bool = True
) -> httpx2.AsyncClient:
    place = DashboardContext(
        RunsIndex(runs),
        AccessControl(keys, allow_actions=acts),
        None if fleet is None else WatchedFleet(fleet),
    )
    transport = httpx2.ASGITransport(make_app(place))
    return httpx2.AsyncClient(transport=transport, base_url=HERE)


@pytest.fixture
async def client(local: LocalFleet, tmp_path: Path) -> AsyncIterator[httpx2.AsyncClient]:
    async with client_of(local, tmp_path) as found:
        yield found


PAGES = (
    "/fleet", "/fleet/jobs", "/fleet/jobs?status=failed", "/fleet/jobs/running-1", "/fleet/jobs/failed-1", "/fleet/machines/box-1",
    "/fleet/machines/box-2",
)  # fmt: skip


async def test_each_page_is_shown_as_html_and_as_json(client: httpx2.AsyncClient) -> None:
    for path in PAGES:
        page = await client.get(path, headers={"accept": "text/html"})
        assert page.status_code == 200, page.text
        for wrong in ("<script>x", "<b>sums", "<img src=x", "\x1b"):
            assert wrong not in page.text, (path, wrong)
        assert isinstance((await client.get(json_at(path))).json(), dict)


async def test_a_fleet_is_the_first_page_while_there_are_no_runs(
    local: LocalFleet, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    for fleet, first_page in ((None, "/runs"), (local, "/fleet")):
        async with client_of(fleet, runs) as client:
            assert (await client.get("/")).headers["location"] == first_page
    (runs / "first").mkdir(parents=True)
    async with client_of(local, runs) as client:
        assert (await client.get("/")).headers["location"] == "/runs"


def json_at(path: str) -> str:
    return path + ("&" if "?" in path else "?") + "format=json"


async def test_fleet_pages_as_json(client: httpx2.AsyncClient) -> None:
    async def said(path: str) -> Any:
        return (await client.get(json_at(f"/fleet{path}"))).json()

    whole = await said("")
    assert whole["status"]["jobs"]["running"] == 1
    [busy, idle] = whole["machines"][0]["gpus"]
    held_by = busy["held_by"][0]["job_id"]
    assert (busy["shown"], held_by, idle["shown"]) == ("held", "running-1", "free")
    remedies = {each["kind"]: each["remedy"] for each in whole["status"]["alarms"]}
    assert "`groupwise fleet run dispatcher`" in remedies["role_missing"]
    page = (await client.get("/fleet")).text
    assert "<code>groupwise fleet run dispatcher</code>" in page
    assert "as seen" in page
    job = await said("/jobs/running-1")
    assert (job["log"][:7], list(job["actions"])) == ("step 1\n", ["cancel"])
    assert [bar["name"] for bar in job["timeline"]] == ["1"], "as in `fleet show`"
    waiting = await said("/jobs/waiting-1")
    assert "no dispatcher is running" in " ".join(waiting["job"]["waiting"])
    failed = await said("/jobs?status=failed")
    assert [each["job_id"] for each in failed["jobs"]] == ["failed-1"]
    for path, status in (
        ("jobs/none", 404),
        ("machines/none", 404),
        ("jobs?status=odd", 422),
        ("jobs/running-1?epoch=0", 400),
        ("jobs/running-1/log?offset=1" + "0" * 30, 400),
        ("jobs/running-1/log?offset=-1", 400),
        ("jobs/running-1?epoch=99", 404),
        ("jobs/running-1/log?epoch=99", 404),
        ("jobs/waiting-1?epoch=1", 404),
    ):
        problem = await client.get(f"/fleet/{path}", headers={"accept": "application/json"})
        assert problem.status_code == status, path


async def test_a_log_continues_where_the_page_ends(
    client: httpx2.AsyncClient, local: LocalFleet
) -> None:
    page = "/fleet/jobs/running-1"
    shown = (await client.get(f"{page}?format=json")).json()
    assert shown["follows"]
    epoch, offset = shown["epoch"], shown["offset"]

    async def log(of: Any) -> Any:
        at = f"{page}/log?epoch={of['epoch']}&offset={of['offset']}"
        return (await client.get(at)).json()

    nothing = {"text": "", "epoch": epoch, "attempt": None, "offset": offset, "ended": False}
    assert await log(shown) == nothing
    kept, letter = make(local.place.logs, "running-1", epoch), "é€😀".encode()
    append(kept, offset, b"\x1b[2J" + letter[:-1])
    first = await log(shown)
    assert first["text"] == "␛[2Jé€", "half a letter waits for its end"
    append(kept, offset + 4 + len(letter) - 1, letter[-1:] + b"\n")
    assert (await log(first))["text"] == "😀\n"
    whole = await shown_of(client, page)
    assert f'data-log="{page}/log" data-epoch="{epoch}" data-offset="' in whole
    assert "data-log" not in await shown_of(client, "/fleet/jobs/failed-1")
    earlier = (await client.get(f"{page}?epoch={epoch}&format=json")).json()
    assert not earlier["follows"], "whoever chose an attempt reads that one"


async def test_a_fleet_elsewhere_is_shown_and_changed_over_its_api(
    local: LocalFleet, small: SmallFleet, tmp_path: Path
) -> None:
    key = "environment-key-0123456789"
    with (
        api(small.database, local.place, {"GROUPWISE_API_KEY": key}) as address,
        FleetClient(address, key) as remote,
    ):
        async with client_of(remote, tmp_path) as elsewhere, client_of(local, tmp_path) as here:
            for path in PAGES:
                assert "<script>x" not in await shown_of(elsewhere, path)
                found, expected = [
                    (await each.get(json_at(path))).json() for each in (elsewhere, here)
                ]
                for each in (found, expected):
                    for ends_now in ("timeline", "axis", "ran"):  # which is another now
                        each.pop(ends_now, None)
                assert without_volatile(found) == without_volatile(expected), path
            log = (await elsewhere.get("/fleet/jobs/running-1/log?epoch=1")).json()
            assert log["text"].startswith("step 1\n")
            for path, action in (("jobs/waiting-1", "hold"), ("machines/box-1", "drain")):
                assert (await press(elsewhere, f"/fleet/{path}", action)).status_code == 303
            assert local.show("waiting-1")["status"] == "held"
            assert local.machine("box-1")["state"] == "draining"
            missing = await elsewhere.get("/fleet/jobs/none", headers={"accept": "text/html"})
            assert missing.status_code == 404
            with ending(WatchedFleet(remote)) as watched:
                before = watched.stamp(TIMEOUT_S)
                await asyncio.to_thread(local.release, "waiting-1")
                watched.forget()
                assert watched.stamp(TIMEOUT_S) != before
    with FleetClient(address, key, retry_timeout=0.1, sleep=lambda _: None) as gone:
        async with client_of(gone, tmp_path) as client:
            away = await client.get("/fleet", headers={"accept": "application/json"})
        assert (away.status_code, away.json()["code"]) == (409, "fleet_away")
        with ending(WatchedFleet(gone)) as watched:
            assert watched.stamp(TIMEOUT_S) == "fleet_away"


async def token_of(client: httpx2.AsyncClient, path: str) -> str:
    page = await shown_of(client, path)
    return page.partition('name="token" value="')[2].partition('"')[0]


async def shown_of(client: httpx2.AsyncClient, path: str) -> str:
    page = await client.get(path, headers={"accept": "text/html"})
    assert page.status_code == 200, page.text
    return page.text


async def press(client: httpx2.AsyncClient, path: str, action: str, **more: str) -> httpx2.Response:
    form = {"token": await token_of(client, path), "action": action, **more}
    return await client.post(path, data=form, headers={"origin": HERE})


async def test_a_button_changes_what_it_says_with_a_reason_where_one_is_given(
    client: httpx2.AsyncClient, local: LocalFleet
) -> None:
    path, box = "/fleet/jobs/waiting-1", "/fleet/machines/box-1"
    long = await press(client, path, "cancel", reason="x" * (MAX_REASON_CHARACTERS + 1))
    assert (long.status_code, local.show("waiting-1")["status"]) == (400, "queued")
    for action, status in (("hold", "held"), ("release", "queued"), ("cancel", "cancelled")):
        answer = await press(client, path, action, reason=" by mistake ")
        assert (answer.status_code, answer.headers["location"]) == (303, path), answer.text
        assert local.show("waiting-1")["status"] == status
    assert {"reason": "by mistake"} in [e["detail"] for e in local.show("waiting-1")["events"]]
    for action, state in (("drain", "draining"), ("undrain", "ok")):
        assert list((await client.get(json_at(box))).json()["actions"]) == [action]
        await press(client, box, action)
        assert local.machine("box-1")["state"] == state
    assert (await press(client, path, "destroy")).status_code == 404
    await press(client, "/fleet/jobs/running-1", "cancel", reason="")
    told = [each["detail"] or {} for each in local.show("running-1")["events"]]
    assert not any("reason" in each for each in told)


async def test_no_other_site_changes_anything(
    client: httpx2.AsyncClient, local: LocalFleet
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
    assert local.show("waiting-1")["status"] == "queued"


async def test_actions_need_a_role_and_events_name_the_actor(
    local: LocalFleet, tmp_path: Path
) -> None:
    keys = {role: new_key(role) for role in (Role.READ, Role.ACT, Role.ADMIN)}
    ring = Keyring(read_key_file("\n".join(each.line for each in keys.values()), "keys"))
    job, box = "/fleet/jobs/waiting-1", "/fleet/machines/box-1"
    for acts, role, path, action, status in (
        (True, Role.READ, job, "hold", 403),
        (False, Role.ACT, job, "hold", 403),
        (True, Role.ACT, box, "drain", 403),
        (True, Role.ACT, job, "hold", 303),
        (True, Role.ADMIN, job, "release", 303),
        (True, Role.ADMIN, box, "drain", 303),
    ):
        async with client_of(local, tmp_path, ring, acts=acts) as client:
            await client.post("/sign-in", data={"key": keys[role].key})
            page = await shown_of(client, path)
            assert (f'value="{action}"' in page) is (status == 303)
            assert (await press(client, path, action)).status_code == status
    assert local.machine("box-1")["state"] == "draining"
    events = local.show("waiting-1")["events"]
    actors = {each["actor"] for each in events if str(each.get("actor")).startswith("web:")}
    assert actors == {f"web:{keys[role].id}" for role in (Role.ACT, Role.ADMIN)}
    async with client_of(local, tmp_path, ring) as client:
        program = {"authorization": f"Bearer {keys[Role.ACT].key}", "accept": "application/json"}
        for path, action, status in (("failed-1", "retry", 200), ("waiting-1", "hold", 200)):
            form = {"action": action}
            answer = await client.post(f"/fleet/jobs/{path}", data=form, headers=program)
            assert answer.status_code == status
        assert local.show("failed-1")["status"] != "failed"
        assert (await client.post(job, data={"action": "release"})).status_code == 401


def test_a_fleet_that_hangs_holds_up_no_stream_and_pages_for_seconds(
    local: LocalFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = threading.Event()
    monkeypatch.setattr(local, "status", lambda: answer.wait(60) and {})
    monkeypatch.setattr("groupwise.dashboard.sources.fleet.LOCK_TIMEOUT", 0.05)
    with ending(WatchedFleet(local)) as watched:
        assert [watched.stamp(0.01) for _ in range(2)] == [None, None]
        with pytest.raises(Refusal, match="slow to answer"):
            watched.ask(lambda fleet: fleet.show("waiting-1"))
        answer.set()


def test_pages_learn_of_a_change_and_of_nothing_else(local: LocalFleet) -> None:
    now = [0.0]
    watched = WatchedFleet(local, lambda: now[0])
    before = watched.stamp(TIMEOUT_S)
    now[0] += 10
    assert watched.stamp(TIMEOUT_S) == before
    local.hold("waiting-1")
    now[0] += 10
    assert watched.stamp(TIMEOUT_S) != before


async def test_the_page_of_a_machine_has_its_slots_gpus_and_jobs(
    client: httpx2.AsyncClient, small: SmallFleet
) -> None:
    box = "/fleet/machines/box-2"
    assert "<b>CPU slot</b><span>free</span>" in await shown_of(client, box)
    for status in ("running", "pending", "failed"):
        small.job(status, job_id=f"{status}-there", assigned_vm="box-2")
    small.attempt("running-there", "box-2")
    held = await shown_of(client, box)
    assert '<b>CPU slot</b><span>held</span><a href="/fleet/jobs/running-there">' in held
    assert "<span>free</span>" not in held
    jobs = held.partition("last placed there")
    assert ["failed-there" in each for each in (jobs[0], jobs[2])] == [False, True]
    small.machine("box-3", cpu_slots=3)
    assert "<b>3 CPU slots</b><span>free</span>" in await shown_of(client, "/fleet/machines/box-3")
    whole = (await client.get("/fleet?format=json")).json()
    assert (whole["slots_free"], whole["slots"]) == (4, 5), "one beside the GPUs of box-1"
    page = await shown_of(client, "/fleet/machines/box-1")
    table = page.partition('aria-label="GPUs as they were seen"')[2].partition("</table>")[0]
    assert table.count("<tr data-key=") == 2
