"""The pages of a fleet, over one in a real database; and what its buttons change, for whom."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from groupwise.fleet.direct import DirectFleet
from groupwise.fleet.files.logs import append, make
from groupwise.fleet.store.database import Database
from groupwise.fleet.store.database import connect as connect_to
from groupwise.web.access import Door
from groupwise.web.app import make_app
from groupwise.web.fleet.jobs import timeline
from groupwise.web.fleet.watched import WatchedFleet
from groupwise.web.index import RunsIndex
from groupwise.web.place import Place
from groupwise.wire.keys import Keyring, Role, new_key, read_key_file
from tests.fleet_api import place_in
from tests.fleet_databases import copied, migrated_file
from tests.unit.fleet.verbs.conftest import ADA, SmallFleet
from tests.web_runs import HOSTILE

__all__ = ["migrated_file"]
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


@pytest.mark.parametrize(
    "path",
    ["/fleet", "/fleet/jobs", "/fleet/jobs?status=failed", "/fleet/jobs/running-1", "/fleet/jobs/failed-1", "/fleet/machines/box-1",
     "/fleet/machines/box-2"],
)  # fmt: skip
async def test_each_page_is_shown_and_told(client: httpx2.AsyncClient, path: str) -> None:
    page = await client.get(path, headers={"accept": "text/html"})
    assert page.status_code == 200, page.text
    assert "<script>x" not in page.text
    assert "<b>sums" not in page.text
    assert "<img src=x" not in page.text
    assert "\x1b" not in page.text
    assert isinstance(
        (await client.get(path + ("&" if "?" in path else "?") + "format=json")).json(), dict
    )


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
    ):
        problem = await client.get(path, headers={"accept": "application/json"})
        assert problem.status_code == status, path


async def test_lists_go_on_with_older_jobs(small: SmallFleet, tmp_path: Path) -> None:
    ids = [small.job("queued", job_id=f"job-{number:03}") for number in range(60)]
    fleet = DirectFleet(place_in(tmp_path / "fleet"), small.database, ADA)
    async with client_of(fleet, tmp_path) as client:
        first = (await client.get("/fleet/jobs?format=json")).json()
        then = (await client.get(f"/fleet/jobs?format=json&older_than={first['more']}")).json()
    assert sorted(each["job_id"] for each in first["jobs"] + then["jobs"]) == ids
    assert then["more"] is None


async def token_of(client: httpx2.AsyncClient, path: str) -> str:
    page = (await client.get(path, headers={"accept": "text/html"})).text
    return page.partition('name="token" value="')[2].partition('"')[0]


async def test_a_button_changes_what_it_says(
    client: httpx2.AsyncClient, direct: DirectFleet
) -> None:
    path = "/fleet/jobs/waiting-1"
    for action, status in (("hold", "held"), ("release", "queued"), ("cancel", "cancelled")):
        form = {"token": await token_of(client, path), "action": action}
        answer = await client.post(path, data=form, headers={"origin": HERE})
        assert (answer.status_code, answer.headers["location"]) == (303, path), answer.text
        assert direct.show("waiting-1")["status"] == status
    for action, state in (("drain", "draining"), ("undrain", "ok")):
        form = {"token": await token_of(client, "/fleet/machines/box-1"), "action": action}
        await client.post("/fleet/machines/box-1", data=form, headers={"origin": HERE})
        assert direct.machine("box-1")["state"] == state
    form = {"token": await token_of(client, path), "action": "destroy"}
    assert (await client.post(path, data=form, headers={"origin": HERE})).status_code == 404


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
            assert ("Cancel</button>" in page) is (status == 303)
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
            assert answer.status_code == 404
            assert "--fleet" in answer.json()["detail"]
        assert ">Fleet<" not in (await client.get("/runs")).text


def test_pages_learn_of_a_change_and_of_nothing_else(
    small: SmallFleet, direct: DirectFleet
) -> None:
    class Clock:
        now = 0.0

        def __call__(self) -> float:
            return self.now

    clock = Clock()
    watched = WatchedFleet(direct, clock)
    before = watched.stamp()
    clock.now += 10
    assert watched.stamp() == before
    direct.hold("waiting-1")
    assert watched.stamp() == before, "asked a moment ago"
    clock.now += 10
    assert watched.stamp() != before


def test_attempts_lie_on_one_line_of_time() -> None:
    def attempt(epoch: int, *times: float | None) -> dict[str, Any]:
        created, running, ended = times
        known = {"created_at": created, "running_at": running, "ended_at": ended}
        return {"epoch": epoch, "outcome": None, "state": "running", **known}

    first, second = timeline([attempt(1, 100, 110, 150), attempt(2, 160, 180, None)], now=200.0)
    assert (first["x"], first["waits"], first["runs_at"], first["runs"]) == (0, 100, 100, 400)
    assert (second["x"], second["runs_at"], second["runs"]) == (600, 800, 200)
    assert timeline([], 1.0) == []
