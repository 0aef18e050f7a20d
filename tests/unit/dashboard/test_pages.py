"""All pages, asked as a browser and as a program does; what is wrong, and what is hostile."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import math
import re
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.requests import Request
from starlette.types import Message

from groupwise.api.schemas.keys import Keyring, Role, new_key, read_key_file
from groupwise.api.schemas.problems import Refusal
from groupwise.cli.main import WAYS_TO_BEGIN
from groupwise.dashboard import pages
from groupwise.dashboard.runs.overview import overview_of
from groupwise.dashboard.sources.runs import read_entry, stamp_of
from groupwise.dashboard.templates import STATIC
from groupwise.runs.folder import CLIENTS
from groupwise.runs.lock import RunLock
from groupwise.runs.records import EvaluationRecord, StepRecord
from groupwise.runs.store import Store
from tests.unit.dashboard.dashboard_client import asking, json_of
from tests.web_runs import HOSTILE, write_run

PAGES = (
    "/runs", "/runs?q=one&state=finished&sort=reward", "/compare?run=one&run=two&metric=entropy",
    "/runs/one", "/runs/one/config", "/runs/one/rollouts",
    "/runs/one/rollouts?step=1&order=best&part=correct&low=0.1&high=0.9",
    "/runs/one/rollouts?text=answer&outcome=scored&truncated=yes&shortest=1&longest=99&example=2",
    "/runs/one/rollouts/3", "/runs/one/groups/1", "/runs/one/examples/2", "/runs/one/evaluations",
    "/evaluations", "/evaluations/answers?of=one@4",
    "/evaluations/answers?of=one@4&show=never&page=2", "/evaluations?q=one&page=2",
    "/evaluations/compare?a=one@0&b=one@4", "/rollouts/compare?a=one&b=two",
    "/rollouts/compare?a=one&b=one&order=worse&task=sums",
    "/rollouts/compare?a=one@1&b=one@3&example=1&order=better",
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "one", 4)
    write_run(folder / "two", 3, state="running")
    write_run(folder / "new", 0)
    write_run(folder / "hostile <b>", 2, write=lambda *_: HOSTILE, facts={"task": HOSTILE[:60]})
    (folder / "broken").mkdir()
    (folder / "broken" / "run.db").write_bytes(b"no database at all, but long enough to look at")
    return folder


@pytest.fixture
async def client(runs: Path) -> AsyncIterator[httpx2.AsyncClient]:
    async with asking(runs) as found:
        yield found


@pytest.mark.parametrize("path", PAGES)
async def test_each_page_is_html_and_the_same_as_json(
    client: httpx2.AsyncClient, path: str
) -> None:
    page = await client.get(path, headers={"accept": "text/html"})
    assert page.status_code == 200, page.text
    assert page.text.startswith("<!doctype html>")
    policy = page.headers["content-security-policy"]
    for part in ("default-src 'none'", "script-src 'self'", "frame-ancestors 'none'"):
        assert part in policy
    assert page.headers["cache-control"] == "no-store"
    assert not re.search(r"<script(?![^>]*\ssrc=)|\son\w+=|\sstyle=", page.text)
    data = (await client.get(path, headers={"accept": "application/json"})).json()
    assert (await client.get(path + ("&" if "?" in path else "?") + "format=json")).json() == data


@pytest.mark.parametrize(
    ("facts", "command"),
    [({}, "groupwise rl --resume"), ({"task": CLIENTS, "task_file": ""}, "groupwise serve")],
)
async def test_a_crashed_run_is_continued_by_the_command_that_made_it(
    tmp_path: Path, facts: dict[str, Any], command: str
) -> None:
    write_run(tmp_path / "killed", 1, state="running", facts=facts)
    async with asking(tmp_path) as client:
        page = await client.get("/runs/killed", headers={"accept": "text/html"})
    assert f"<code>{command} " in page.text


async def test_a_supervised_run_whose_rollouts_earn_nothing_has_its_pages(tmp_path: Path) -> None:
    record = write_run(tmp_path / "given", 4, facts={"kind": "sft"}) / "run.db"
    with closing(sqlite3.connect(record)) as database, database:
        database.execute("UPDATE rollouts SET outcome = 'scored', reward = NULL")
        database.execute("UPDATE metrics SET name = 'loss' WHERE name = 'reward'")
        database.execute("UPDATE evaluation_rows SET data = json_set(data, '$.loss', 0.5)")
    async with asking(tmp_path) as client:
        compared = "/evaluations/compare?a=given@0&b=given@4"
        for page in ("/runs", "/runs/given", "/runs/given/rollouts?order=best", compared):
            answer = await client.get(page, headers={"accept": "text/html"})
            assert answer.status_code == 200, page
            assert "/evaluations/answers" not in answer.text, "there are none"
        assert (await client.get("/runs/given?format=json")).json()["change"] is None


async def test_only_advice_on_a_problem_has_the_colour_of_a_warning(tmp_path: Path) -> None:
    record = write_run(tmp_path / "learnt", 1) / "run.db"
    with closing(sqlite3.connect(record)) as database, database:
        database.execute(
            "UPDATE metrics SET name = 'rollouts/solved', value = 0.95 WHERE name = 'own/number'"
        )
    async with asking(tmp_path) as client:
        page = (await client.get("/runs/learnt", headers={"accept": "text/html"})).text
    notices = re.findall(r'<div class="notice( plain|)"><p>(.*?)</p>', page)
    assert [kind for kind, says in notices if "solved" in says] == [" plain"]
    assert [kind for kind, says in notices if "could not be scored" in says] == [""]


async def test_pages_of_runs_as_json(client: httpx2.AsyncClient) -> None:
    async def said(path: str) -> Any:
        return (await client.get(path, headers={"accept": "application/json"})).json()

    states = {each["name"]: each["state"] for each in (await said("/runs"))["runs"]}
    assert states["two"] == "crashed", "no process works on it"
    assert (states["one"], states["broken"]) == ("finished", "broken")
    one = await said("/runs/one")
    assert one["run"]["steps"] == 4
    advised = [each["metric"] for each in one["advice"]]
    assert advised == ["frac_reward_zero_std", "rollouts/unscored"]
    assert one["failures"][0]["count"] == 8, "their numbers differ"
    assert [plot["title"] for plot in one["plots"]["Reward"]][:2] == ["Reward", "Part: correct"]
    assert one["plots"]["More"][-1]["title"] == "own/number"
    assert one["problems"] == ["length", "groups without signal", "rollouts without a score"]
    change = one["change"]
    assert change["low"] < change["value"] < change["high"]
    assert change["value"] == pytest.approx(one["run"]["reward_last"] - one["run"]["reward_first"])
    filters = "text=answer&outcome=unscored&low=0.5&order=best"
    chips = (await said(f"/runs/one/rollouts?{filters}"))["chips"]
    assert dict(chips) == {
        "text": "answer", "outcome": "failed or timed out", "low": "reward ≥ 0.5"
    }  # fmt: skip
    found = (await said("/runs/one/rollouts?order=best"))["rollouts"]
    rewards = [each["reward"] for each in found]
    assert rewards == sorted(rewards, reverse=True)
    assert {each["outcome"] for each in found} == {"scored"}
    lines = [line for plot in one["plots"]["Reward"][:2] for line in plot["lines"]]
    assert [line["bounds"] for line in lines] == [[rewards[-1], rewards[0]]] * 2, "what was earned"
    failed = (await said("/runs/one/rollouts?outcome=failed"))["rollouts"]
    assert {each["rollout"] for each in failed} == {4}
    first = found[0]
    one_of = await said(f"/runs/one/rollouts/{first['id']}")
    assert one_of["rollout"]["completion"] == first["completion"]
    [segment] = one_of["segments"]
    assert len(segment["tokens"]) == 12
    assert all(0 <= each["shade"] <= 8 for each in segment["tokens"])
    assert segment["tokens"][0]["text"] == f"⟨{segment['tokens'][0]['id']}⟩", "nobody says"
    assert len((await said(f"/runs/one/groups/{first['group']}"))["members"]) == 4
    history = await said(f"/runs/one/examples/{first['example']}")
    assert first["group"] in [each["group"] for each in history["groups"]]
    compared = await said("/evaluations/compare?a=one@0&b=one@4")
    reward = next(each for each in compared["metrics"] if each["name"] == "reward")
    assert reward["change"]["value"] == pytest.approx(0.4)
    assert reward["change"]["low"] <= 0.4 <= reward["change"]["high"]
    assert reward["better"] == 4
    both = await said("/compare?run=one&run=two")
    assert both["differences"] == {"training.max_steps": ["4", "3"]}
    assert both["shown"][:2] == ["reward", "frac_reward_zero_std"]
    page = (await client.get("/compare?run=one&run=two")).text
    assert page.count('class="chart"') == len(both["shown"]) > 3


async def test_pages_of_a_search_follow_each_other(client: httpx2.AsyncClient) -> None:
    seen: list[int] = []
    page = 1
    while True:
        found = (await client.get(f"/runs/one/rollouts?format=json&page={page}")).json()
        seen += [each["id"] for each in found["rollouts"]]
        if not found["more"]:
            break
        page += 1
    assert seen == sorted(range(1, 33), reverse=True)
    lines = (await client.get("/runs/one/rollouts.jsonl?order=draw")).text.splitlines()
    assert [json.loads(line)["id"] for line in lines] == [*range(1, 33)]
    some = (await client.get("/runs/one/rollouts.jsonl?outcome=failed")).text.splitlines()
    assert len(some) == 8


async def test_rollouts_are_those_of_a_task(client: httpx2.AsyncClient) -> None:
    page = "/runs/one/rollouts?order=draw&format=json"
    everything = (await client.get(page)).json()
    assert everything["tasks"] == ["products", "proofs", "sums"]
    for task in everything["tasks"]:
        found = (await client.get(f"{page}&task={task}")).json()["rollouts"]
        on_page = [each for each in everything["rollouts"] if each["task"] == task]
        assert found[: len(on_page)] == on_page != []
        lines = (await client.get(f"/runs/one/rollouts.jsonl?task={task}")).text.splitlines()
        assert {json.loads(line)["task"] for line in lines} == {task}
    assert 'name="task"' not in (await client.get("/runs/new/rollouts")).text


async def test_curves_come_thinned_with_what_stands_out_and_of_a_range_in_columns_of_their_own(
    client: httpx2.AsyncClient, tmp_path: Path
) -> None:
    async def curves(query: str) -> Any:
        return (await client.get(f"/curves?{query}")).json()["runs"]

    query = "run=one&name=own/number&columns=2"
    found = await curves(f"run=two&{query}&name=none")
    assert found["one"]["own/number"] == {
        "at": [1.5, 3.5], "first": [1, 3], "last": [2, 4], "mean": [0.5, 2.5], "low": [0.0, 2.0], "high": [1.0, 3.0], "lost": [0, 0],
    }  # fmt: skip
    assert found["one"]["none"]["first"] == []
    assert len((await curves("run=one&name=reward"))["one"]["reward"]["first"]) == 4
    for within, first, last in (
        ("&from=2&to=3", [2, 3], [2, 3]),
        ("&from=2&to=99", [2, 4], [3, 4]),
        ("&from=50&to=99", [], []),
    ):
        columns = (await curves(query + within))["one"]["own/number"]
        assert (columns["first"], columns["last"]) == (first, last), within
    path = write_run(tmp_path / "runs" / "odd", 0)
    with Store.open(path / "run.db") as store:
        for step in range(12):
            record = StepRecord(step, step, step + 1, "w", (), 0.01, 1.7e9)
            late = {"late": float(step)} if step > 4 else {}
            store.commit_step(record, [], {"all": float(step), **late})
    told = await json_of(path.parent, "/curves?run=odd&name=all&name=late&columns=4")
    whole, late = (told["runs"]["odd"][name] for name in ("all", "late"))
    assert whole["at"] == [2.0, 5.0, 8.0, 11.0]
    assert (late["at"], late["mean"]) == ([5.0, 8.0, 11.0], [5.0, 7.0, 10.0])


async def test_curves_of_evaluations_stand_after_so_many_steps(tmp_path: Path) -> None:
    path = write_run(tmp_path / "runs" / "odd", 0)
    given = [
        ("before", 0, {"reward": 0.1, "pass@1": 0.2, "pass@4": 0.5}),
        ("step-2", 2, {"reward": 0.3, "pass@1": math.nan}),
        ("after", 4, {"reward": 0.4, "eval_loss": 1.5, "eval_tokens": 90.0}),
        ("gsm8k", 4, {"accuracy": 0.7, "odd": None, "odder": "much", "large": 10**400}),
    ]
    with Store.open(path / "run.db") as store:
        for step in range(4):
            done = 1.7e9 + 60 * (step + 1)
            store.commit_step(StepRecord(step, step, step + 1, "w", (), 0.01, done), [], {"a": 1.0})
        for name, step, metrics in given:
            store.add_evaluation(EvaluationRecord(step, name, f"odd@{step}", metrics))
    names = "&name=".join(("a", "eval/reward", "eval/pass@1", "eval/gsm8k/accuracy", "eval/none"))
    found = await json_of(path.parent, f"/curves?run=odd&name={names}&times=yes")
    odd, times = found["runs"]["odd"], found["times"]["odd"]["mean"]
    assert (odd["eval/reward"]["first"], odd["eval/reward"]["mean"]) == ([0, 2, 4], [0.1, 0.3, 0.4])
    assert (odd["eval/pass@1"]["mean"], odd["eval/pass@1"]["lost"]) == ([0.2, None], [0, 1])
    assert odd["eval/none"]["at"] == []
    assert [odd[name]["time"] for name in ("a", "eval/reward", "eval/gsm8k/accuracy")] == [
        times[:4],
        [0.0, 120.0, 240.0],
        [240.0],
    ]
    assert times == [60.0, 120.0, 180.0, 240.0]
    page = await json_of(path.parent, "/runs/odd")
    plots = {plot["title"]: plot["lines"] for plot in page["plots"]["Held out"]}
    assert list(plots) == ["Held-out reward", "Held-out loss", "Held-out pass@k", "gsm8k: accuracy", "gsm8k: large"]  # fmt: skip
    assert [each["label"] for each in plots["Held-out pass@k"]] == ["pass@1", "pass@4"]


@pytest.mark.parametrize(("path", "status", "says"), [
    ("/runs/none", 404, "There are: broken"), ("/runs/%2e%2e%2f%2e%2e%2fetc", 404, ""), ("/runs/broken", 409, "run.db"),
    ("/runs/one/rollouts/999999", 404, "no rollout 999999"), ("/runs/one/groups/99", 404, "no group 99"),
    ("/runs/one/examples/99", 404, "example 99"), ("/runs/one/rollouts?step=-1", 400, "step=-1"),
    ("/runs/one/rollouts?order=odd", 400, "order=odd"), ("/runs/one/weights/step-9/x", 404, "no weights"),
    ("/runs/one/weights/final", 404, "no weights"), ("/compare?run=one", 400, "at least two runs"),
    ("/compare?run=one&run=two&metric=rewrad", 400, "entropy"), ("/evaluations/compare?a=/etc/passwd&b=one@0", 404, "no run"),
    ("/evaluations/compare?a=one@0&b=one@3", 404, "one@3"), ("/rollouts/compare?a=one", 400, "?a=RUN&b=RUN"),
    ("/rollouts/compare?a=one&b=none@3", 404, "no run 'none'"), ("/curves?run=none&name=reward", 404, "no run"),
    ("/curves?run=one", 400, "name=METRIC"), ("/curves?run=one&name=own/number&from=-1", 400, "from=-1"),
    ("/curves?run=one&name=own/number&to=1" + "0" * 30, 400, "to=1"), ("/nothing/here", 404, "no page"),
])  # fmt: skip
async def test_a_page_that_cannot_be_shown_says_why(
    client: httpx2.AsyncClient, path: str, status: int, says: str
) -> None:
    page = await client.get(path, headers={"accept": "text/html"})
    assert (page.status_code, "Traceback" in page.text) == (status, False)
    assert page.headers["content-security-policy"]
    problem = await client.get(path, headers={"accept": "application/json"})
    assert problem.status_code == status
    assert problem.headers["content-type"] == "application/problem+json"
    assert says in problem.json()["detail"]


async def test_hostile_text_is_shown_and_does_nothing(client: httpx2.AsyncClient) -> None:
    run = "/runs/hostile%20%3Cb%3E"
    inside = ("", "/rollouts", "/rollouts/1", "/groups/1", "/examples/0", "/config")
    for path in (*(run + each for each in inside), "/rollouts/compare?a=hostile%20%3Cb%3E&b=one"):
        page = (await client.get(path, headers={"accept": "text/html"})).text
        assert "hostile &lt;b&gt;" in page, path
        for each in ("<script>document", "<img src=x", "\x1b", "\x00", "\u202e"):
            assert each not in page, path
        assert ("{{ 7*7 }}" in page) == ("owned␇" in page), (
            "what stands in braces is not a template"
        )


async def test_files_of_ours_are_kept_by_browsers_under_the_hash_of_their_content(
    client: httpx2.AsyncClient,
) -> None:
    page = (await client.get("/runs")).text
    for address in re.findall(r'(?:src|href)="(/static/[^"]+)"', page):
        answer = await client.get(address)
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
        digest = address.rpartition("v=")[2]
        assert hashlib.sha256(answer.content).hexdigest().startswith(digest)


def test_files_of_others_are_as_they_were_published() -> None:
    told = (STATIC / "vendor" / "VENDOR.md").read_text()
    rows = re.findall(r"\| `([^`]+)` \|.*`sha384-([^`]+)` \|", told)
    there = {path.name for path in (STATIC / "vendor").iterdir()} - {"VENDOR.md"}
    assert {name for name, _ in rows} == {n for n in there if not n.endswith("LICENSE")}
    for name, expected in rows:
        data = (STATIC / "vendor" / name).read_bytes()
        assert base64.b64encode(hashlib.sha384(data).digest()).decode() == expected, name


# --- with keys -------------------------------------------------------------------------------------


@pytest.fixture
def key() -> Any:
    return new_key(Role.READ)


@pytest.fixture
async def guarded(runs: Path, key: Any) -> AsyncIterator[httpx2.AsyncClient]:
    keys = Keyring(read_key_file(key.line, "keys"))
    async with asking(runs, keys, "http://box.lan:8080") as found:
        yield found


async def test_without_a_key_only_the_sign_in_page_is_shown(
    guarded: httpx2.AsyncClient,
) -> None:
    for path in (*PAGES, "/runs/one/rollouts.jsonl", "/curves?run=one&name=reward", "/live"):
        page = await guarded.get(path, headers={"accept": "text/html"})
        assert page.status_code in (303, 401), path
        assert "question" not in page.text
        program = await guarded.get(path, headers={"accept": "application/json"})
        assert program.status_code == 401, path
    form = await guarded.get("/sign-in")
    assert form.status_code == 200
    assert 'type="password"' in form.text


async def test_signed_in_by_a_key_and_out_again(guarded: httpx2.AsyncClient, key: Any) -> None:
    async def enter(there: str, **headers: str) -> httpx2.Response:
        form = {"key": key.key, "next": there}
        return await guarded.post("/sign-in", data=form, headers=headers)

    first = await guarded.get("/runs/one?x=1", headers={"accept": "text/html"})
    assert first.headers["location"] == "/sign-in?next=%2Fruns%2Fone%3Fx%3D1"
    for form, status in (({"key": "gw-x-y", "next": "/runs"}, 401), ({"key": "x" * 100_000}, 413)):
        assert (await guarded.post("/sign-in", data=form)).status_code == status
    other = await guarded.post("/sign-in", content=b"{}", headers={"content-type": "text/plain"})
    assert other.status_code == 415
    for there in ("https://evil.example/", "//evil.example", "/\\evil.example", "javascript:x"):
        assert (await enter(there)).headers["location"] == "/", there
    entered = await enter("/runs/one?x=1")
    assert (entered.status_code, entered.headers["location"]) == (303, "/runs/one?x=1")
    cookie = entered.headers["set-cookie"].lower()
    assert ("httponly" in cookie, "samesite=lax" in cookie) == (True, True)
    assert key.key.lower() not in cookie
    page = await guarded.get("/runs/one", headers={"accept": "text/html"})
    assert (page.status_code, key.key in page.text) == (200, False)
    for headers in (
        {"origin": "https://evil.example"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site", "origin": "http://127.0.0.1:9999"},
    ):
        assert (await enter("/runs", **headers)).status_code == 403
        assert (await guarded.post("/sign-out", headers=headers)).status_code == 403
    assert (await guarded.get("/runs")).status_code == 200
    [(name, kept)] = guarded.cookies.items()
    await guarded.post("/sign-out")
    assert (await guarded.get("/runs/one")).status_code == 303
    again = {"cookie": f"{name}={kept}", "accept": "text/html"}
    assert (await guarded.get("/runs/one", headers=again)).status_code == 303, "it is over"
    told = {"authorization": f"Bearer {key.key}", "accept": "application/json"}
    assert (await guarded.get("/runs/one", headers=told)).status_code == 200


async def test_a_form_that_does_not_come_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def never() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(pages, "BODY_SECONDS", 0.01)
    scope = {"type": "http", "method": "POST", "headers": [(b"content-type", pages.FORM.encode())]}
    with pytest.raises(Refusal) as refused:
        await pages.read_form(Request(scope, never))
    assert refused.value.code == "timed_out"


def test_time_left_is_counted_from_step_to_step(tmp_path: Path) -> None:
    path = write_run(tmp_path / "runs" / "now", 4, state="running", facts={"max_steps": 10})
    lock = RunLock.acquire(path)
    try:
        page = overview_of(path, read_entry(path, stamp_of(path)))
    finally:
        lock.release()
    assert page["left_seconds"] == 6.0, "a second each; what the step itself took is recorded as 3"


async def test_a_folder_without_runs_says_how_to_begin_as_the_command_does(tmp_path: Path) -> None:
    async with asking(tmp_path) as client:
        page = (await client.get("/runs")).text
    commands = re.search(r"<pre><code>(groupwise [^<]*)</code></pre>", page)
    assert commands
    for line in commands[1].splitlines():
        assert f"    {line}\n" in WAYS_TO_BEGIN
