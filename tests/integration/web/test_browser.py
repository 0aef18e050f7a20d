"""The dashboard in a real Chromium: every page is visited, by mouse and by keyboard, on a phone, and with hostile texts.

Chromium is Debian's; on a machine without one these tests say so and are skipped.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from html import escape
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, ViewportSize, expect

from groupwise.api.client import TrainingClient
from groupwise.api.schemas.keys import Keyring, Role, new_key, read_key_file
from groupwise.dashboard.runs.one_file import write_one_file
from groupwise.jobs.fleet.files.logs import append, make
from groupwise.jobs.fleet.local import LocalFleet
from scripts import site_hooks
from tests.integration.server.server_process import FAKE, running
from tests.integration.web.visiting import (
    DESK,
    LONG_NAME,
    PHONE,
    TABLET,
    TIMEOUT_MS,
    Visitor,
    is_live,
    needs_chromium,
    serious_in,
    shown,
    too_wide,
)
from tests.unit.jobs.fleet.operations.conftest import SmallFleet
from tests.web_runs import HOSTILE, write_run

pytestmark = needs_chromium
SMALL: dict[str, Any] = {
    "model_id": "tiny", "num_completions_per_prompt": 2, "max_completion_length": 8, "groups_per_step": 1,
}  # fmt: skip
"""A run of a training server."""
Visit = Callable[..., Visitor]


def test_from_the_list_to_a_token_and_back(visit: Visit, site: str) -> None:
    visitor = visit(site)
    page = visitor.goes("/")
    expect(page.locator(".spark")).to_have_count(4)
    page.get_by_label("Search").fill("sec")
    page.get_by_role("button", name="Show").click()
    expect(page.locator("#runs tbody tr")).to_have_count(1)
    visitor.goes("/runs")
    page.get_by_role("link", name="first").click()
    expect(page.get_by_text("groups all rollouts earn the same")).to_be_visible()
    drawn = page.locator(".plot canvas")
    expect(drawn.first).to_be_visible()
    assert drawn.count() < page.locator(".plot").count(), "as they come into sight"
    page.locator(".plot").last.scroll_into_view_if_needed()
    expect(page.locator(".plot").last.locator("canvas")).to_be_visible(timeout=TIMEOUT_MS)
    page.get_by_role("link", name="Rollouts").click()
    page.get_by_label("Text").fill('"answer 2 of step 9"')
    page.get_by_role("button", name="Show").click()
    expect(page.locator(".rollout")).to_have_count(2)
    button = page.get_by_text("Filters")
    place = button.bounding_box()
    button.click()
    assert button.bounding_box() == place
    page.get_by_label("Outcome").select_option("failed")
    page.get_by_role("button", name="Show").click()
    expect(page.get_by_text("No rollout is like that")).to_be_visible()
    page.get_by_label("Without the filter failed").click()
    expect(page.locator(".rollout")).to_have_count(2)
    page.locator(".rollout header a").first.click()
    tokens = page.locator(".tokens")
    expect(page.locator(".token")).to_have_count(12)
    tokens.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    second = page.locator(".token").nth(1)
    expect(page.locator("#token-facts")).to_contain_text(second.get_attribute("title") or "?")
    page.locator(".token").nth(4).click()
    expect(page.locator(".token.chosen")).to_have_count(1)
    expect(page.locator("#token-facts")).to_contain_text("nats")
    page.get_by_label("advantage").check()
    expect(tokens).to_have_class(re.compile("by-advantage"))
    page.get_by_label("ratio").check()
    expect(page.get_by_text("learner ÷ sampler")).to_be_visible()
    less, more = (
        page.locator(f'.token[class*="{kind}"]').evaluate_all(
            "tokens => tokens.map(each => getComputedStyle(each).backgroundColor)"
        )
        for kind in ("less", "more")
    )
    assert (bool(less), bool(more), {*less} & {*more}) == (True, True, set())
    page.get_by_role("link", name=re.compile(r"^group \d")).first.click()
    expect(page.locator(".members .rollout")).to_have_count(4)
    page.get_by_role("link", name=re.compile(r"^example \d")).first.click()
    expect(page.locator(".members").nth(1)).to_be_visible()
    page.get_by_role("link", name="Evaluation", exact=True).click()
    expect(page.locator(".plot canvas")).to_be_visible()
    page.get_by_role("button", name="Compare A and B").click()
    expect(page.get_by_role("row", name="reward").first).to_contain_text("+0.400")
    page.go_back()
    page.get_by_role("link", name="Overview").click()
    page.get_by_role("link", name="2 steps", exact=True).click()
    whole_name = re.compile("all of it|archive|ZIP", re.IGNORECASE)
    with page.expect_download() as whole:
        page.get_by_role("link", name=whole_name).first.click()
    assert whole.value.suggested_filename == "first-step-2.zip"
    page.get_by_role("link", name="Settings").click()
    rows = page.locator(".settings tbody tr:visible")
    page.get_by_label("Search").fill("LEARNING 0.01")
    expect(rows).to_have_count(1)
    expect(rows.first).to_contain_text("training.learning_rate")


def test_hostile_texts_are_shown_and_do_nothing(visit: Visit, site: str) -> None:
    visitor = visit(site)
    page = visitor.page
    for path in ("/runs", "/runs/hostile", "/runs/hostile/rollouts", "/runs/hostile/rollouts/1",
                 "/runs/hostile/groups/1", "/runs/hostile/examples/0", "/runs/hostile/rollouts?text=<script>",
                 "/runs/hostile/evaluations", "/evaluations", "/evaluations/answers?of=hostile@2",
                 "/evaluations/compare?a=hostile@1&b=hostile@2", "/rollouts/compare?a=hostile&b=hostile",
                 "/runs/hostile/config", "/compare?run=hostile&run=first", "/runs/hostile/weights/step-2"):  # fmt: skip
        visitor.goes(path)
        assert page.evaluate("document.body.dataset.owned") is None, path
        assert page.evaluate("document.title") != "owned"
        assert page.locator("main script, main img, main iframe").count() == 0, path
    visitor.goes("/runs/hostile/rollouts")
    expect(page.locator(".rollout").first).to_be_visible()


SOAK = pytest.mark.soak(suite="web")


@pytest.mark.parametrize(("viewport", "scheme"), [
    pytest.param(DESK, "light", id="desk-light"), pytest.param(PHONE, "dark", id="phone-dark"),
    pytest.param(TABLET, "light", id="tablet-light"),
    pytest.param(DESK, "dark", id="desk-dark", marks=SOAK), pytest.param(PHONE, "light", id="phone-light", marks=SOAK),
])  # fmt: skip
def test_every_page_is_accessible_and_fits(
    visit: Visit, site: str, scheme: str, viewport: ViewportSize
) -> None:
    visitor = visit(site, color_scheme=scheme, viewport=viewport)
    for path in ("/runs", "/runs/first", "/runs/first/rollouts", "/runs/first/rollouts/2", "/runs/first/groups/1",
                 "/runs/first/examples/1", "/runs/first/evaluations", "/evaluations", "/evaluations/compare?a=first@0&b=first@30",
                 "/evaluations/answers?of=first@30",
                 "/compare?run=first&run=second", "/rollouts/compare?a=first&b=second",
                 f"/compare?run=first&run={LONG_NAME}", f"/rollouts/compare?a=first&b={LONG_NAME}",
                 "/runs/first/config", "/runs/first/weights/step-2", "/runs/none"):  # fmt: skip
        page = visitor.goes(path)
        assert serious_in(page) == [], path
        assert not too_wide(page), path


def test_rollout_pages_work_by_keyboard(visit: Visit, site: str) -> None:
    page = visit(site).goes("/runs/first/rollouts")
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("next and previous rollout")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
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


def test_a_run_as_one_file_needs_no_server(visit: Visit, tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "sent", 4, write=lambda *_: HOSTILE)
    file = write_one_file(str(run), tmp_path / "sent.html")
    visitor = visit(file.as_uri(), viewport=PHONE)
    asked: list[str] = []
    visitor.page.on("request", lambda request: asked.append(request.url))
    page = visitor.goes("")
    page.locator(".plot").first.scroll_into_view_if_needed()
    expect(page.locator(".plot canvas").first).to_be_visible()
    page.locator("[name=over]").select_option("time")
    expect(page.locator(".u-legend").first).to_contain_text("seconds")
    expect(page.locator(".rollout")).to_have_count(10)
    assert (page.evaluate("document.body.dataset.owned"), asked) == (None, [file.as_uri()])
    assert (serious_in(page), too_wide(page)) == ([], False)
    plots, drawn = page.locator(".plot"), page.locator(".plot canvas")
    assert drawn.count() < plots.count()
    page.pdf()
    assert drawn.count() == plots.count(), "all of them are printed"


def test_a_run_as_one_file_shows_the_reward_without_a_script(visit: Visit, tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "sent", 4)
    file = write_one_file(str(run), tmp_path / "sent.html")
    page = visit(file.as_uri(), java_script_enabled=False).goes("")
    expect(page.get_by_role("img", name="Curve of the reward")).to_be_visible()
    expect(page.locator(".looks")).to_be_hidden()


def test_a_key_is_typed_once(visit: Visit, tmp_path: Path) -> None:
    write_run(tmp_path / "first", 4)
    key = new_key(Role.READ)
    with shown(tmp_path, Keyring(read_key_file(key.line, "keys"))) as address:
        visitor = visit(address)
        page = visitor.goes("/runs/first/rollouts?step=3")
        assert serious_in(page) == []
        page.get_by_label("Key").fill("gw-wrong")
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("alert")).to_contain_text("not known")
        page.get_by_label("Key").fill(key.key)
        page.get_by_role("button", name="Sign in").click()
        page.wait_for_url("**/runs/first/rollouts?step=3")
        assert page.evaluate("document.cookie") == ""
        visitor.goes("/runs/first")
        expect(page.locator(".plot canvas").first).to_be_visible()
        is_live(page)
        page.get_by_role("button", name="Sign out").click()
        page.wait_for_url("**/sign-in")
        visitor.goes("/runs/first")
        expect(page.get_by_label("Key")).to_be_visible()


def test_a_fleet_is_shown_changed_and_followed(
    visit: Visit, local: LocalFleet, small: SmallFleet, tmp_path: Path
) -> None:
    small.job("failed", name="a long name of a job", failure_reason="its memory was too small " * 9)
    with shown(tmp_path / "runs", fleet=local) as address:
        visitor = visit(address)
        page = visitor.goes("/fleet")
        expect(page.locator(".gpus li.held")).to_have_count(1)
        heights = "boxes => boxes.map(each => each.getBoundingClientRect().height)"
        assert min(page.locator(".gpus li").evaluate_all(heights)) > 30, "their words lie in them"
        expect(page.get_by_text("no part of the control plane is running")).to_be_visible()
        page.get_by_role("link", name="waiting-1").click()
        expect(page.get_by_text("It waits: no dispatcher")).to_be_visible()
        is_live(page)
        page.get_by_role("button", name="Hold").click()
        expect(page.locator(".title .state")).to_have_text("held")
        expect(page.get_by_role("button", name="Release")).to_be_visible()
        elsewhere = threading.Thread(target=local.release, args=["waiting-1"])
        elsewhere.start()  # in this thread the browser's driver has its loop
        elsewhere.join()
        expect(page.locator(".title .state")).to_have_text("queued", timeout=TIMEOUT_MS)
        for path in ("/fleet", "/fleet/jobs", "/fleet/machines/box-1", "/fleet/jobs/running-1"):
            visitor.goes(path)
            for viewport in (DESK, TABLET, PHONE):
                page.set_viewport_size(viewport)
                assert serious_in(page) == [], path
                assert not too_wide(page), path
        expect(page.locator(".log")).to_contain_text("<script>x</script>")
        expect(page.locator(".timeline rect").first).to_be_visible()
        expect(page.locator(".axis span")).to_have_count(3)
        expect(page.locator(".axis span").first).to_have_text(re.compile(r"\d{4}-\d\d-\d\d \d\d:"))
        room = """() => ["button", "summary"].map(each => document.querySelector(".sure " + each)).map(
            each => document.querySelector(".pairs").getBoundingClientRect().y - each.getBoundingClientRect().bottom)"""
        page.get_by_text("Cancel", exact=True).click()
        assert min(page.evaluate(room)) >= 8


def test_a_training_server_is_followed_while_clients_use_it(visit: Visit, tmp_path: Path) -> None:
    with running(tmp_path / "out", command=FAKE) as server, Driver(server.url) as driver:
        page = visit(f"{server.url}/dashboard").goes("")
        expect(page.get_by_text("Nothing was started yet")).to_be_visible()
        is_live(page)
        driver.does(lambda client: client.start(run_name="words", max_steps=3, **SMALL))
        expect(page.locator(".progress")).to_contain_text("0 of 3 steps", timeout=TIMEOUT_MS)
        group = driver.does(lambda client: client.completions("<b>abc</b>"))
        expect(page.get_by_role("row", name=group.group_id)).to_contain_text(
            "open", timeout=TIMEOUT_MS
        )
        expect(page.get_by_role("row", name=group.group_id)).to_contain_text("<b>abc</b>")
        driver.does(lambda client: client.rewards(group, [1.0, 0.0], wait=True))
        expect(page.locator(".progress")).to_contain_text("1 of 3 steps", timeout=TIMEOUT_MS)
        expect(page.get_by_role("row", name="POST /rewards")).to_contain_text("local")
        for viewport in (PHONE, TABLET, DESK):
            page.set_viewport_size(viewport)
            assert serious_in(page) == []
            assert not too_wide(page)


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
    visit: Visit, local: LocalFleet, tmp_path: Path
) -> None:
    kept = make(local.place.logs, "running-1", 1)
    written = kept.stat().st_size

    def write(text: str) -> None:
        nonlocal written
        append(kept, written, text.encode())
        written += len(text.encode())

    write("".join(f"line {number}\n" for number in range(100)))
    with shown(tmp_path / "runs", fleet=local) as address:
        visitor = visit(address)
        page = visitor.goes("/fleet/jobs/running-1")
        log = page.locator(".log")
        at_end = "element => element.scrollHeight - element.scrollTop - element.clientHeight < 5"
        for new, seen in (("", "line 99"), ("and <b>more</b> \x1b[2J\n", "and <b>more</b> ␛[2J")):
            write(new)
            expect(log).to_contain_text(seen)
            assert log.evaluate(at_end), "it begins at the end, and stays there"
        assert page.locator(".log b").count() == 0
        log.evaluate("element => { element.scrollTop = 100; element.firstChild.mine = true; }")
        write("the last one\n")
        expect(log).to_contain_text("the last one")
        stays = log.evaluate("element => [element.scrollTop, element.firstChild.mine]")
        assert stays == [100, True], "nothing was loaded again"
        log.evaluate("element => { element.scrollTop = 300; }")
        write("x" * 1_200_000)
        write("the end\n")
        expect(log).to_contain_text("the end")
        size = log.evaluate("element => element.textContent.length")
        assert size < 2_300_000, "what is long gone is not kept"


def test_the_search_of_the_documentation_takes_options_as_they_are_written(
    browser: Browser,
) -> None:
    page = browser.new_page()
    page.evaluate(
        "() => { window.Worker = class { postMessage({ data }) { window.query = data; } } }"
    )
    page.add_script_tag(content=site_hooks.WORKER)
    send = "(data) => { new Worker().postMessage({ data }); return window.query; }"
    queries = ["--dry-run", 'a "--resume"', "rewards.py:right", "max_steps=3 group-relative"]
    understood = [page.evaluate(send, query).split() for query in queries]
    page.close()
    assert understood == [
        ["dry-run"],
        ["a", '"', 'resume"'],
        ["rewards.py", "right"],
        ["max_steps=3", "group-relative"],
    ]


def test_drawings_of_the_documentation_fit_a_phone(visit: Visit, tmp_path: Path) -> None:
    text = (site_hooks.ROOT / "docs" / "concepts.md").read_text()
    blocks = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    pre = '<div class="language-text highlight"><pre><span></span><code>{}</code></pre></div>'
    drawings = site_hooks.on_page_content("".join(pre.format(escape(block)) for block in blocks))
    of_theme = "html { font-size: 20px } body, pre { margin: 0 } code { display: block; padding: 0 1.18em; overflow: auto }"
    file = tmp_path / "drawings.html"
    file.write_text(
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><style>{of_theme}{site_hooks.STYLE}</style>'
        f'<div class="md-typeset">{drawings}</div>'
    )
    page = visit(file.as_uri(), viewport=PHONE).goes("")
    code = page.locator("code")
    cut = "blocks => blocks.filter(each => each.scrollWidth > each.clientWidth).length"
    size = "blocks => Math.min(...blocks.map(each => parseFloat(getComputedStyle(each).fontSize)))"
    assert code.count() == len(blocks) > 5
    assert code.evaluate_all(cut) == 0
    assert code.evaluate_all(size) >= 6
