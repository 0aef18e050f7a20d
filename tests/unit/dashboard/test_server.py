"""The page of a training server, alone and mounted on the server itself, where the same keys open it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import httpx2
import pytest

from groupwise.api.client import TrainingClient
from groupwise.api.schemas.activity import (
    ActivityAnswer,
    KnownClient,
    LivingGroup,
    LoopElsewhere,
    PlannedStep,
    Session,
    SessionModel,
    WaitingRequest,
)
from groupwise.api.schemas.keys import Keyring, Role
from groupwise.api.schemas.training import Counters, EventData, StatusAnswer
from groupwise.dashboard.access import AccessControl
from groupwise.dashboard.app import make_app
from groupwise.dashboard.context import DashboardContext
from groupwise.dashboard.mounted import mount_dashboard
from groupwise.dashboard.sources.runs import RunsIndex
from groupwise.dashboard.sources.server import REFRESH_SECONDS, WatchedServer
from groupwise.server.run.service import Service
from groupwise.server.serve import Services
from groupwise.server.settings import ServerConfig
from tests.unit.server.fake_service import RUN, FakeService
from tests.unit.server.http_client import keyring
from tests.web_runs import HOSTILE, write_run

TIMEOUT_S = 30.0
HERE = "http://127.0.0.1:8000"
TEXT = HOSTILE.replace("\ud83d", "")


class Told:
    """A training server whose words are given."""

    def __init__(self, status: StatusAnswer, activity: ActivityAnswer) -> None:
        self.said = (status, activity)
        self.asked = 0

    def status(self) -> StatusAnswer:
        self.asked += 1
        return self.said[0]

    def activity(self) -> ActivityAnswer:
        return self.said[1]


def everything() -> Told:
    group: dict[str, Any] = {"draw": 3, "members": 4, "sampled_step": 7, "opened_at": 1e9}
    groups = [
        LivingGroup(group_id="g-1", name="scenario", rewarded=1, state="open", key_id="ada", prompt=TEXT, lease_seconds=90.0, **group),
        LivingGroup(group_id="g-2", state="held", key_id="bob", prompt="b", mean_reward=0.25, **group),
    ]  # fmt: skip
    waiting = [
        WaitingRequest(key_id="bob", groups=2, draws=[5, 6], seconds=12.0),
        WaitingRequest(key_id="bob", groups=1, seconds=0.2),
    ]
    ada = {
        "requests": 41, "refused": 3, "last_request": "POST /rewards", "last_problem": "too_busy",
    }  # fmt: skip
    silent: dict[str, Any] = {"silent_seconds": 4.0, "let_go_seconds": 596.0}
    model = SessionModel(id="s-1:train:0", base=TEXT, rank=8, steps=3, waiting=2)
    status = StatusAnswer(
        phase="running", run_id="first", step=8, max_steps=20, training_settings={"model_id": TEXT}, queue_depth=1, last_error=TEXT,
        counters=Counters(served=40, open=1, rewarded=1, trained=32, refused={"too_busy": 3}),
    )  # fmt: skip
    activity = ActivityAnswer(
        at=1e9,
        run_id="first",
        capacity=8,
        groups=groups,
        waiting=waiting,
        planned=[PlannedStep(step=8, group_ids=["g-3"], engines_lost=1)],
        clients=[KnownClient(key_id="ada", role="train", idle_seconds=2.0, **ada)],
        sessions=[
            Session(id="s-1", models=[model], samplers=1, **silent),
            Session(id="s-2", **silent),
        ],
        loop_elsewhere=LoopElsewhere(id="p", owner=TEXT, silent_seconds=1.0, calls=1),
        events=[EventData(id=9, kind="engine_lost", at=1e9, run_id="first", message=TEXT)],
    )
    return Told(status, activity)


def client_of(server: Any, runs: Path) -> httpx2.AsyncClient:
    place = DashboardContext(
        RunsIndex(runs), AccessControl(None), server=server and WatchedServer(server)
    )
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(make_app(place)), base_url=HERE)


async def test_everything_is_shown_and_nothing_of_it_becomes_markup(tmp_path: Path) -> None:
    write_run(tmp_path / "first", 2)
    async with client_of(everything(), tmp_path) as client:
        page = await client.get("/server")
        data = (await client.get("/server?format=json")).json()
    assert page.status_code == 200, page.text
    for words in ("g-1", "g-2", "scenario", "1 of 4", "1 min 30 s", "12 s",
                  "less than 1 s", "5, 6", "learns from 1 group;", "over it once", "s-1:train:0", "no model", "ada",
                  "too_busy", "engine lost", 'href="/runs/first"'):  # fmt: skip
        assert words in page.text, words
    for wrong in ("<script>", "<img src=x", "\x1b", "\u202e"):
        assert wrong not in page.text.replace('<script src="', ""), wrong
    assert data["activity"]["groups"][1]["mean_reward"] == 0.25
    assert data["status"]["counters"]["refused"] == {"too_busy": 3}


async def test_a_server_that_does_not_answer_is_reported_as_such(tmp_path: Path) -> None:
    def refuse(request: httpx2.Request) -> httpx2.Response:
        raise httpx2.ConnectError("refused", request=request)

    with TrainingClient(HERE, retry_timeout=0.0, transport=httpx2.MockTransport(refuse)) as away:
        async with client_of(away, tmp_path) as client:
            page = await client.get("/server")
        watched = WatchedServer(away)
        stamp = watched.stamp(TIMEOUT_S)
    assert page.status_code == 409
    assert "Traceback" not in page.text
    assert HERE in page.text
    assert stamp


def test_pages_receive_events_only_about_changes() -> None:
    now, told = [1000.0], everything()
    watched = WatchedServer(told, lambda: now[0])
    status, activity = told.said

    def seen(after: float, **news: Any) -> str | None:
        now[0] += after
        told.said = status, told.said[1].model_copy(update=news)
        return watched.stamp(TIMEOUT_S)

    before = seen(0)
    assert seen(0) == before
    assert told.asked == 1  # what many pages ask within a second is asked once
    passing = [each.model_copy(update={"lease_seconds": 80.0}) for each in activity.groups]
    changed = seen(2, at=2e9, groups=passing, clients=[], sessions=[])
    assert changed != before
    assert seen(2, at=3e9, groups=activity.groups) == changed
    assert seen(REFRESH_SECONDS) != changed  # leases have become shorter


# Mounted on the server


def mounted(folder: Path, keys: Keyring | None, **settings: Any) -> Any:
    config = ServerConfig(output_dir=str(folder), **settings)
    serving, answers = Services(cast("Service", FakeService())).application(config, keys)
    return mount_dashboard(config, keys)(answers, serving)


@pytest.fixture
async def below(tmp_path: Path) -> AsyncIterator[httpx2.AsyncClient]:
    write_run(tmp_path / "runs" / RUN, 3)
    transport = httpx2.ASGITransport(mounted(tmp_path, None))
    async with httpx2.AsyncClient(transport=transport, base_url=HERE) as client:
        yield client


async def test_every_address_of_its_pages_is_below_its_path_and_the_server_answers_as_before(
    below: httpx2.AsyncClient,
) -> None:
    assert (await below.get("/status")).json()["run_id"] == RUN
    for beside in ("/dashboards", "/runs"):
        assert (await below.get(beside)).json()["code"] == "not_found"
    for path, to in (("", "server"), ("/", "runs")):
        answer = await below.get(f"/dashboard{path}")
        assert (answer.status_code, answer.headers["location"]) == (303, f"/dashboard/{to}")
    for path in ("/server", "/runs", f"/runs/{RUN}", f"/runs/{RUN}/rollouts", f"/runs/{RUN}/rollouts/1", f"/runs/{RUN}/groups/1",
                 f"/runs/{RUN}/evaluations", f"/compare?run={RUN}", "/none", "/static/none"):  # fmt: skip
        page = await below.get(f"/dashboard{path}")
        assert page.headers["content-security-policy"]
        found = re.findall(r'(?:href|src|action|data-live)="(/[^"]*)"', page.text)
        assert found, path
        assert [each for each in found if not each.startswith("/dashboard/")] == [], path
        for each in {each.replace("&amp;", "&") for each in found if "/live" not in each}:
            assert (await below.get(each)).status_code in (200, 303, 400, 405), each
    assert f'href="/dashboard/runs/{RUN}"' in (await below.get("/dashboard/server")).text


async def test_a_key_has_one_rate_for_pages_and_routes(tmp_path: Path) -> None:
    ring, keys = keyring()
    app = mounted(tmp_path, ring, requests_per_second=0.001, burst=4)
    reader, admin = ({"Authorization": f"Bearer {keys[role]}"} for role in (Role.READ, Role.ADMIN))
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url=HERE) as client:
        for path in ("/dashboard/server", "/status", "/dashboard/runs"):
            assert (await client.get(path, headers=reader)).status_code == 200
        entered = await client.post("/dashboard/sign-in", data={"key": keys[Role.READ]})
        assert entered.status_code == 303
        assert (await client.get("/dashboard/runs")).status_code == 200  # by the cookie
        for path in ("/dashboard/server?format=json", "/dashboard/runs", "/status"):
            answer = await client.get(path, headers=reader)
            assert (answer.status_code, "Retry-After" in answer.headers) == (429, True), path
        assert (await client.get("/dashboard/runs", headers=admin)).status_code == 200
        assert (await client.get("/dashboard/static/page.css")).status_code == 200


async def test_the_servers_own_keys_open_it(tmp_path: Path) -> None:
    ring, keys = keyring()
    transport = httpx2.ASGITransport(mounted(tmp_path, ring))
    page, enter = "/dashboard/server", "/dashboard/sign-in"
    async with httpx2.AsyncClient(transport=transport, base_url=HERE) as client:
        first = await client.get(page)
        assert first.headers["location"] == f"{enter}?next=%2Fdashboard%2Fserver"
        for there, leads in (("/start", "/dashboard/"), (page, page)):
            entered = await client.post(enter, data={"key": keys[Role.READ], "next": there})
            assert entered.headers["location"] == leads
        cookie = entered.headers["set-cookie"].lower()
        assert ("path=/dashboard;" in cookie, "httponly" in cookie) == (True, True)
        assert (await client.get(page)).status_code == 200
        assert (await client.get("/status")).status_code == 401  # the cookie is not a key
        nobody = await client.get(page, headers={"Authorization": "Bearer gw-no"})
        assert nobody.status_code == 401
        left = await client.post("/dashboard/sign-out")
        assert left.headers["location"] == enter
        assert (await client.get(page)).status_code == 303
