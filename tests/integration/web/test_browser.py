"""The dashboard in a real Chromium: every page is walked, by mouse and by keyboard, while a run writes, on a phone, and with hostile texts.

Chromium is Debian's; on a machine without one these tests say so and are skipped.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, ViewportSize, expect, sync_playwright

from groupwise.client import TrainingClient
from groupwise.fleet.direct import DirectFleet
from groupwise.fleet.files.logs import append, make
from groupwise.runs import checkpoints
from groupwise.runs.lock import RunLock
from groupwise.runs.records import EvaluationRecord
from groupwise.runs.store import Store
from groupwise.web.access import Door
from groupwise.web.app import make_app
from groupwise.web.fleet.watched import WatchedFleet
from groupwise.web.index import RunsIndex
from groupwise.web.place import Place
from groupwise.web.ticking import ending
from groupwise.wire.keys import Keyring, Role, new_key, read_key_file
from tests.integration.server.running import running
from tests.serving import listening
from tests.unit.fleet.verbs.conftest import SmallFleet
from tests.unit.web.test_fleet import direct, ends, migrated_file, small
from tests.web_runs import HOSTILE, add_step, write_run

__all__ = ["direct", "migrated_file", "small"]
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
SOON = 15_000
"""Milliseconds."""
PHONE: ViewportSize = {"width": 390, "height": 844}
DESK: ViewportSize = {"width": 1280, "height": 900}
SMALL: dict[str, Any] = {
    "model_id": "tiny",
    "num_completions_per_prompt": 2,
    "max_completion_length": 8,
    "groups_per_step": 1,
}
"""A run of a training server."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as player:
        started = player.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@contextmanager
def shown(
    runs: Path, keys: Keyring | None = None, fleet: DirectFleet | None = None
) -> Iterator[str]:
    watched = None if fleet is None else WatchedFleet(fleet)
    place = Place(RunsIndex(runs), Door(keys, acts=True), watched)
    with (
        nullcontext() if watched is None else ending(watched),
        listening(make_app(place)) as address,
    ):
        yield address
        place.ending.set()


class Visitor:
    """A page, and what went wrong in it."""

    def __init__(self, page: Page, address: str) -> None:
        self.page, self.address = page, address
        self.wrong: list[str] = []
        page.set_default_timeout(SOON)
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("console", self._heard)

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.wrong.append(message.text)

    def goes(self, path: str) -> None:
        self.page.goto(self.address + path)

    def drawn(self) -> int:
        """Plots that have a picture."""
        return self.page.locator(".plot canvas").count()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Visitor]]:
    opened: list[Any] = []

    def begin(address: str, **how: Any) -> Visitor:
        context = browser.new_context(viewport=how.pop("viewport", DESK), **how)
        opened.append(context)
        return Visitor(context.new_page(), address)

    yield begin
    for each in opened:
        each.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name, steps in (("first", 30), ("second", 20)):
        write_run(folder / name, steps)
    hostile = write_run(
        folder / "hostile", 3, write=lambda *_: HOSTILE, facts={"task": HOSTILE[:80]}
    )
    (hostile / "config.json").write_text(json.dumps({"task": {HOSTILE: HOSTILE}}))
    (hostile / "log.txt").write_text(HOSTILE.encode("utf-8", "replace").decode())
    with Store.open(hostile / "run.db") as store:
        rows = ({"prompt": HOSTILE, "completions": [HOSTILE], "rewards": [1.0]},)
        for step in (1, 2):
            store.add_evaluation(
                EvaluationRecord(step, HOSTILE[:60], HOSTILE, {"reward": 1.0}, rows)
            )
    for name in ("first", "hostile"):
        checkpoints.save(folder / name / "checkpoints", 2, _fill)
    return folder


def _fill(checkpoint: Path) -> None:
    (checkpoint / "adapter.safetensors").write_bytes(b"weights")
    (checkpoint / "<img src=x onerror=document.title='owned'>").write_bytes(b"x")


def test_from_the_list_to_a_token_and_back(visit: Callable[..., Visitor], runs: Path) -> None:
    with shown(runs) as address:
        visitor = visit(address)
        page = visitor.page
        visitor.goes("/")
        expect(page.get_by_role("heading", name="Runs")).to_be_visible()
        expect(page.locator(".spark")).to_have_count(3)
        page.get_by_label("Search").fill("sec")
        page.get_by_role("button", name="Show").click()
        expect(page.locator("#runs tbody tr")).to_have_count(1)
        visitor.goes("/runs")
        page.get_by_role("link", name="first").click()
        expect(page.get_by_role("heading", name="first")).to_be_visible()
        expect(page.get_by_text("groups all members earn the same")).to_be_visible()
        expect(page.locator(".plot canvas").first).to_be_visible()
        page.get_by_role("link", name="Rollouts").click()
        page.get_by_label("Text").fill("answer 2 of step 9")
        page.get_by_role("button", name="Show").click()
        expect(page.locator(".rollout")).to_have_count(2)
        page.locator(".rollout header a").first.click()
        tokens = page.locator(".tokens")
        expect(tokens).to_be_visible()
        assert page.locator(".token").count() == 12
        tokens.focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        second = page.locator(".token").nth(1)
        expect(page.locator("#token-facts")).to_contain_text(second.get_attribute("title") or "?")
        page.locator(".token").nth(4).click()
        expect(page.locator(".token.chosen")).to_have_count(1)
        expect(page.locator("#token-facts")).to_contain_text("nats")
        page.get_by_label("advantage").check()
        expect(page.get_by_text("for each token: made")).to_be_visible()
        assert "by-advantage" in (tokens.get_attribute("class") or "")
        page.get_by_label("ratio").check()
        expect(page.get_by_text("learner ÷ sampler")).to_be_visible()
        expect(page.get_by_text("improbable")).to_be_hidden()
        assert "by-ratio" in (tokens.get_attribute("class") or "")
        shown_as = "element => getComputedStyle(element).backgroundColor"
        paints = {
            kind: {
                each.evaluate(shown_as) for each in page.locator(f'.token[class*="{kind}"]').all()
            }
            for kind in ("less", "more")
        }
        assert paints["less"]
        assert paints["more"]
        assert not paints["less"] & paints["more"]
        page.get_by_role("link", name=re.compile(r"^group \d")).first.click()
        expect(page.locator(".members .rollout")).to_have_count(4)
        page.get_by_role("link", name=re.compile(r"^example \d")).first.click()
        assert page.locator(".members").count() > 1
        page.get_by_role("link", name="Evaluation", exact=True).click()
        expect(page.locator(".plot canvas")).to_be_visible()
        page.get_by_role("button", name="Compare A and B").click()
        expect(page.get_by_role("row", name="reward").first).to_contain_text("+0.400")
        page.go_back()
        page.get_by_role("link", name="Overview").click()
        page.get_by_role("link", name="2 steps", exact=True).click()
        with page.expect_download() as whole:
            page.get_by_role(
                "link", name=re.compile("all of it|archive|ZIP", re.IGNORECASE)
            ).first.click()
        assert whole.value.suggested_filename == "first-step-2.zip"
        page.get_by_role("link", name="Settings").click()
        expect(page.get_by_text("training.learning_rate")).to_be_visible()
        assert visitor.wrong == []


def test_several_runs_are_in_one_plot(visit: Callable[..., Visitor], runs: Path) -> None:
    with shown(runs) as address:
        visitor = visit(address)
        page = visitor.page
        visitor.goes("/runs")
        for name in ("first", "second"):
            page.get_by_label(f"Compare {name}").check()
        page.get_by_role("button", name="Compare those chosen").click()
        expect(page.locator(".plot canvas").first).to_be_visible()
        expect(page.locator(".u-legend").first).to_contain_text("second")
        assert page.locator(".chart").count() > 3
        expect(page.get_by_text("training.max_steps")).to_be_visible()
        page.get_by_label("Metric").select_option("entropy")
        page.get_by_role("button", name="Show").click()
        expect(page.locator(".chart")).to_have_count(1)
        expect(page.locator("figcaption")).to_contain_text("entropy")
        assert visitor.wrong == []


def test_what_two_steps_and_two_runs_have_answered(
    visit: Callable[..., Visitor], runs: Path
) -> None:
    with shown(runs) as address:
        visitor = visit(address)
        page = visitor.page
        visitor.goes("/runs/first/examples/3")
        page.get_by_role("button", name="Compare their answers").click()
        expect(page.locator(".pair")).to_have_count(1)
        expect(page.locator(".pair .answer")).to_have_count(8)
        expect(page.locator(".pair details")).to_have_count(1)
        visitor.goes("/compare?run=first&run=second")
        page.get_by_role("link", name="what they answered").click()
        expect(page.locator(".pair")).to_have_count(7)
        page.locator(".pair section details").first.locator("summary").click()
        expect(page.locator(".pair section details").first.locator(".answer")).to_have_count(3)
        assert visitor.wrong == []


def test_a_page_follows_a_run_that_goes_on(visit: Callable[..., Visitor], tmp_path: Path) -> None:
    path = write_run(tmp_path / "live", 1, state="running", facts={"max_steps": 50})
    lock = RunLock.acquire(path)
    over = threading.Event()

    def train() -> None:
        with Store.open(path / "run.db") as store:
            step = 1
            while not over.wait(0.2):
                add_step(store, step)
                step += 1

    training = threading.Thread(target=train)
    try:
        with shown(tmp_path) as address:
            visitor = visit(address)
            page = visitor.page
            visitor.goes("/runs/live")
            expect(page.locator(".title .state")).to_have_text("running")
            expect(page.locator("#live.on")).to_be_visible()
            expect(page.locator(".progress")).to_contain_text("1 of 50 steps")
            training.start()
            expect(page.locator(".progress")).not_to_contain_text("1 of 50 steps", timeout=SOON)
            expect(page.locator("body")).to_have_attribute(
                "data-refreshed", re.compile(r"[2-9]|\d\d")
            )
            over.set()
            training.join()
            lock.release()
            visitor.goes("/runs/live")
            expect(page.locator(".title .state")).to_have_text("crashed")
            assert visitor.wrong == []
    finally:
        over.set()
        lock.release()


def test_hostile_texts_are_shown_and_do_nothing(visit: Callable[..., Visitor], runs: Path) -> None:
    with shown(runs) as address:
        visitor = visit(address)
        for path in ("/runs", "/runs/hostile", "/runs/hostile/rollouts", "/runs/hostile/rollouts/1",
                     "/runs/hostile/groups/0", "/runs/hostile/examples/0", "/runs/hostile/rollouts?text=<script>",
                     "/runs/hostile/evaluations", "/evaluations", "/evaluations/answers?of=hostile@2",
                     "/evaluations/compare?a=hostile@1&b=hostile@2", "/rollouts/compare?a=hostile&b=hostile",
                     "/runs/hostile/config", "/compare?run=hostile&run=first", "/runs/hostile/weights/step-2"):  # fmt: skip
            visitor.goes(path)
            page = visitor.page
            assert page.evaluate("document.body.dataset.owned") is None, path
            assert page.evaluate("document.title") != "owned"
            assert page.locator("main script, main img, main iframe").count() == 0, path
        visitor.goes("/runs/hostile/rollouts")
        expect(visitor.page.locator(".rollout").first).to_be_visible()
        assert visitor.wrong == []


def serious_in(page: Page) -> list[tuple[str, str]]:
    """What axe finds that keeps somebody out: the rule, and where."""
    return [
        (each["id"], each["nodes"][0]["html"][:200])
        for each in Axe().run(page).response["violations"]
        if each["impact"] in ("serious", "critical")
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
def test_every_page_is_accessible_and_fits(
    visit: Callable[..., Visitor], runs: Path, scheme: str, viewport: ViewportSize
) -> None:
    with shown(runs) as address:
        visitor = visit(address, color_scheme=scheme, viewport=viewport)
        for path in ("/runs", "/runs/first", "/runs/first/rollouts", "/runs/first/rollouts/2", "/runs/first/groups/1",
                     "/runs/first/examples/1", "/runs/first/evaluations", "/evaluations", "/evaluations/compare?a=first@0&b=first@30",
                     "/evaluations/answers?of=first@30",
                     "/compare?run=first&run=second", "/rollouts/compare?a=first&b=second",
                     "/runs/first/config", "/runs/first/weights/step-2", "/runs/none"):  # fmt: skip
            visitor.goes(path)
            assert serious_in(visitor.page) == [], path
            wide = visitor.page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert wide <= 0, f"{path} is {wide} pixels too wide"


def test_what_was_long_ago_grows_older_while_a_page_is_open(
    visit: Callable[..., Visitor], runs: Path
) -> None:
    with shown(runs) as address:
        page = visit(address).page
        page.clock.install()
        page.goto(f"{address}/runs/first")
        said = page.locator(".pairs time")
        before = said.inner_text()
        page.clock.run_for(3 * 3_600_000)
        expect(said).not_to_have_text(before)
        assert said.inner_text().endswith(" h ago")


def test_settings_are_searched(visit: Callable[..., Visitor], runs: Path) -> None:
    with shown(runs) as address:
        visitor = visit(address)
        visitor.goes("/runs/first/config")
        rows = visitor.page.locator(".settings tbody tr:visible")
        everything = rows.count()
        visitor.page.get_by_label("Search").fill("LEARNING 0.01")
        expect(rows).to_have_count(1)
        expect(rows.first).to_contain_text("training.learning_rate")
        visitor.page.get_by_label("Search").fill("")
        expect(rows).to_have_count(everything)


def test_colours_can_be_chosen_and_left_to_the_system_again(
    visit: Callable[..., Visitor], runs: Path
) -> None:
    with shown(runs) as address:
        visitor = visit(address, color_scheme="dark")
        visitor.goes("/runs")
        chosen = "document.documentElement.dataset.theme ?? 'of the system'"
        for expected in ("light", "of the system", "light"):
            visitor.page.get_by_label("Dark or light").click()
            assert visitor.page.evaluate(chosen) == expected
        visitor.goes("/runs")
        assert visitor.page.evaluate(chosen) == "light"


def test_by_keyboard(visit: Callable[..., Visitor], runs: Path) -> None:
    with shown(runs) as address:
        visitor = visit(address)
        page = visitor.page
        visitor.goes("/runs/first/rollouts")
        page.keyboard.press("Tab")
        expect(page.locator(".skip")).to_be_focused()
        page.keyboard.press("/")
        expect(page.get_by_label("Text")).to_be_focused()
        page.keyboard.type("step 4")
        page.keyboard.press("Enter")
        page.wait_for_url("**text=step**")
        page.locator("h1").click()
        page.keyboard.press("j")
        page.keyboard.press("j")
        expect(page.locator(".rollout header a:first-child").nth(1)).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.locator(".tokens")).to_be_visible()


def test_a_key_is_typed_once(visit: Callable[..., Visitor], runs: Path) -> None:
    key = new_key(Role.READ)
    with shown(runs, Keyring(read_key_file(key.line, "keys"))) as address:
        visitor = visit(address)
        page = visitor.page
        visitor.goes("/runs/first/rollouts?step=3")
        assert serious_in(page) == []
        page.get_by_label("Key").fill("gw-wrong")
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("alert")).to_contain_text("This key is not known here")
        page.get_by_label("Key").fill(key.key)
        page.get_by_role("button", name="Sign in").click()
        page.wait_for_url("**/runs/first/rollouts?step=3")
        assert page.evaluate("document.cookie") == ""
        visitor.goes("/runs/first")
        expect(page.locator(".plot canvas").first).to_be_visible()
        expect(page.locator("#live.on")).to_be_visible()
        page.get_by_role("button", name="Sign out").click()
        page.wait_for_url("**/sign-in")
        visitor.goes("/runs/first")
        expect(page.get_by_label("Key")).to_be_visible()
        assert visitor.wrong == []


def test_the_colours_that_somebody_chose_stay(visit: Callable[..., Visitor], runs: Path) -> None:
    with shown(runs) as address:
        visitor = visit(address, color_scheme="light")
        page = visitor.page
        visitor.goes("/runs")
        before = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.get_by_label("Dark or light").click()
        after = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert before != after
        visitor.goes("/runs/first")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == after


def test_plots_of_a_long_run_are_drawn_as_they_come_into_sight(
    visit: Callable[..., Visitor], tmp_path: Path
) -> None:
    write_run(tmp_path / "long", 120, groups=1, members=2)
    with shown(tmp_path) as address:
        visitor = visit(address)
        visitor.goes("/runs/long")
        page = visitor.page
        expect(page.locator(".plot canvas").first).to_be_visible()
        early = visitor.drawn()
        page.mouse.wheel(0, 6000)
        until = time.monotonic() + SOON / 1000
        while visitor.drawn() <= early and time.monotonic() < until:
            page.wait_for_timeout(50)
        assert visitor.drawn() > early
        assert visitor.wrong == []


@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
def test_a_fleet_is_shown_changed_and_followed(
    visit: Callable[..., Visitor], direct: DirectFleet, tmp_path: Path, viewport: ViewportSize
) -> None:
    with shown(tmp_path / "runs", fleet=direct) as address:
        visitor = visit(address, viewport=viewport)
        page = visitor.page
        visitor.goes("/fleet")
        expect(page.locator(".gpus li.held")).to_have_count(1)
        boxes = [each.bounding_box() for each in page.locator(".gpus li").all()]
        assert all(box is not None and box["height"] > 30 for box in boxes), (
            "their words lie in them"
        )
        expect(page.get_by_text("no part of the control plane is running")).to_be_visible()
        page.get_by_role("link", name="waiting-1").click()
        expect(page.get_by_text("It waits: no dispatcher")).to_be_visible()
        expect(page.locator("#live.on")).to_be_visible()
        page.get_by_role("button", name="Hold").click()
        expect(page.locator(".title .state")).to_have_text("held")
        expect(page.get_by_role("button", name="Release")).to_be_visible()
        page.locator("h1").click()
        elsewhere = threading.Thread(target=direct.release, args=["waiting-1"])
        elsewhere.start()  # in this thread the browser's driver has its loop
        elsewhere.join()
        expect(page.locator(".title .state")).to_have_text("queued", timeout=SOON)
        for path in ("/fleet", "/fleet/jobs", "/fleet/jobs/running-1", "/fleet/machines/box-1"):
            visitor.goes(path)
            assert serious_in(page) == [], path
            assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, path
        visitor.goes("/fleet/jobs/running-1")
        expect(page.locator(".log")).to_contain_text("<script>x</script>")
        expect(page.locator(".timeline rect").first).to_be_visible()
        expect(page.locator(".axis span")).to_have_count(3)
        expect(page.locator(".axis span").first).to_have_text(re.compile(r"\d{4}-\d\d-\d\d \d\d:"))
        assert visitor.wrong == []


def test_a_training_server_is_followed_while_clients_use_it(
    visit: Callable[..., Visitor], tmp_path: Path
) -> None:
    with running(tmp_path / "out") as server, Driver(server.url) as driver:
        visitor = visit(f"{server.url}/dashboard")
        page = visitor.page
        visitor.goes("")
        expect(page.get_by_text("Nothing was started yet")).to_be_visible()
        expect(page.locator("#live.on")).to_be_visible()
        driver.does(lambda client: client.start(run_name="words", max_steps=3, **SMALL))
        expect(page.locator(".progress")).to_contain_text("0 of 3 steps", timeout=SOON)
        group = driver.does(lambda client: client.completions("<b>abc</b>"))
        expect(page.get_by_role("row", name=group.group_id)).to_contain_text("open", timeout=SOON)
        expect(page.get_by_role("row", name=group.group_id)).to_contain_text("<b>abc</b>")
        driver.does(lambda client: client.rewards(group, [1.0, 0.0], wait=True))
        expect(page.locator(".progress")).to_contain_text("1 of 3 steps", timeout=SOON)
        expect(page.get_by_role("row", name="POST /rewards")).to_contain_text("local")
        for viewport in (DESK, PHONE):
            page.set_viewport_size(viewport)
            assert serious_in(page) == []
            assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        page.set_viewport_size(DESK)
        page.get_by_role("link", name="words", exact=True).click()
        page.wait_for_url("**/dashboard/runs/words")
        expect(page.locator(".plot canvas").first).to_be_visible()
        page.get_by_role("link", name="Rollouts").click()
        expect(page.locator(".rollout")).to_have_count(2)
        assert visitor.wrong == []


class Driver:
    """Asks a training server from a thread of its own: in that of a test the browser's driver has its loop."""

    def __init__(self, url: str) -> None:
        self._client = TrainingClient(url)
        self._thread = ThreadPoolExecutor(1)

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()
        self._client.close()

    def does(self, work: Callable[[TrainingClient], Any]) -> Any:
        """What it answers."""
        return self._thread.submit(work, self._client).result(60)


def test_a_log_grows_where_somebody_reads_it(
    visit: Callable[..., Visitor], direct: DirectFleet, tmp_path: Path
) -> None:
    kept, written = make(direct.place.logs, "running-1", 1), 0

    def write(text: str) -> None:
        nonlocal written
        append(kept, written, text.encode())
        written += len(text.encode())

    written = kept.stat().st_size
    write("".join(f"line {number}\n" for number in range(100)))
    with shown(tmp_path / "runs", fleet=direct) as address:
        visitor = visit(address)
        page = visitor.page
        visitor.goes("/fleet/jobs/running-1")
        log = page.locator(".log")
        expect(log).to_contain_text("line 99")
        at_end = "element => element.scrollHeight - element.scrollTop - element.clientHeight < 5"
        assert log.evaluate(at_end), "it begins at the end"
        write("and <b>more</b> \x1b[2J\n")
        expect(log).to_contain_text("and <b>more</b> ␛[2J")
        assert log.evaluate(at_end)
        assert page.locator(".log b").count() == 0
        log.evaluate("element => { element.scrollTop = 100; element.firstChild.mine = true; }")
        write("the last one\n")
        expect(log).to_contain_text("the last one")
        assert log.evaluate("element => element.scrollTop") == 100
        assert log.evaluate("element => element.firstChild.mine"), "nothing was loaded again"
        log.evaluate("element => { element.scrollTop = 300; }")
        write("x" * 1_200_000)
        write("the end\n")
        expect(log).to_contain_text("the end")
        size = log.evaluate("element => element.textContent.length")
        assert size < 2_300_000, "what is long gone is not kept"
        assert "line 0\n" not in (log.text_content() or "")
        assert visitor.wrong == []


def test_rows_of_jobs_stay_low_and_nothing_touches_what_stands_below_it(
    visit: Callable[..., Visitor], direct: DirectFleet, small: SmallFleet, tmp_path: Path
) -> None:
    small.job("failed", name="a long name of a job", failure_reason="its memory was too small " * 9)

    def room(visitor: Visitor, upper: str, lower: str) -> float:
        boxes = [visitor.page.locator(each).first.bounding_box() for each in (upper, lower)]
        assert boxes[0] is not None
        assert boxes[1] is not None
        return boxes[1]["y"] - boxes[0]["y"] - boxes[0]["height"]

    with shown(tmp_path / "runs", fleet=direct) as address:
        visitor = visit(address, viewport=PHONE)
        visitor.goes("/fleet")
        rows = [each.bounding_box() for each in visitor.page.locator("#jobs tbody tr").all()]
        assert all(row is not None and row["height"] < 100 for row in rows)
        assert room(visitor, "h1", ".tiles") >= 8
        visitor.goes("/fleet/jobs/running-1")
        assert room(visitor, ".sure summary", ".pairs") >= 8
        visitor.page.get_by_text("Cancel", exact=True).click()
        assert room(visitor, ".sure button", ".pairs") >= 8


def test_a_log_says_where_the_next_attempt_begins(
    visit: Callable[..., Visitor], direct: DirectFleet, small: SmallFleet, tmp_path: Path
) -> None:
    job = small.job("running", job_id="tried")
    epochs = [ends(small, job, number, {}) for number in range(2)]
    append(make(direct.place.logs, job, epochs[0]), 0, b"the first\n")
    with shown(tmp_path / "runs", fleet=direct) as address:
        visitor = visit(address)
        visitor.goes("/fleet/jobs/tried")
        expect(visitor.page.locator("#log")).to_have_text("Log of attempt 0")
        append(make(direct.place.logs, job, epochs[1]), 0, b"the second\n")
        log = visitor.page.locator(".log")
        expect(log).to_have_text("the first\n\n— attempt 1 —\nthe second\n", use_inner_text=True)
        assert visitor.wrong == []


def test_a_phone_shows_rewards_and_rollouts_first(
    visit: Callable[..., Visitor], runs: Path
) -> None:
    with shown(runs) as address:
        visitor = visit(address, viewport=PHONE)
        page = visitor.page
        visitor.goes("/runs")
        for row in page.locator("#runs tbody tr").all():
            for column in (
                row.locator(".phone .state"),
                row.locator(".spark"),
                row.locator("td.num").first,
            ):
                box = column.bounding_box()
                assert box is not None
                assert box["x"] + box["width"] <= PHONE["width"]
        visitor.goes("/runs/first/rollouts?outcome=scored&page=1")
        expect(page.locator(".rollout").first).to_be_in_viewport(ratio=0.3)
        expect(page.get_by_label("Text")).to_be_hidden()
        page.get_by_text("Filter (1 in use)").click()
        page.get_by_label("Text").fill("step 4")
        page.get_by_role("button", name="Show").click()
        page.wait_for_url("**text=step**")
        expect(page.get_by_text("Filter (2 in use)")).to_be_visible()
        page.set_viewport_size(DESK)
        expect(page.get_by_label("Text")).to_be_visible()
        expect(page.get_by_text(re.compile("Filter .* in use"))).to_be_hidden()
        assert visitor.wrong == []
