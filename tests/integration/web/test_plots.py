"""Plots in a real Chromium: most of them drawn by the functions of plots.js in one page, some in the pages of a dashboard.

What stands out is shown, what is new comes into the plot that is there, nothing moves under whoever points at a plot, and what is chosen
holds for all pages.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

import groupwise.dashboard
from groupwise.dashboard.runs.curves import names_of, plots_of
from groupwise.runs.records import StepRecord
from groupwise.runs.store import Store
from tests.integration.web.visiting import (
    DESK,
    TIMEOUT_MS,
    Visitor,
    going_on,
    is_live,
    needs_chromium,
    shown,
)
from tests.web_runs import write_run

pytestmark = needs_chromium

STATIC = Path(groupwise.dashboard.__file__).parent / "static"
BEGAN = 1.7e9
"""When all runs here were made."""
COLUMNS = 70
"""Of a plot here: a tenth of what pages have, so that runs of a few hundred steps are thinned."""
IN_PAGE = """
window.asked = [];
const askServer = window.fetch.bind(window);
window.fetch = (address, how) => { asked.push(address); return askServer(address, how); };
const soon = () => new Promise((resolve) => setTimeout(resolve));
let [element, state] = [null, null];

async function settled() { // a range that was chosen is asked for by itself
  await soon();
  while (state.coming != null) await soon();
  await soon();
}
async function plant(runs, plot) {
  const figure = document.createElement("figure");
  figure.className = "chart";
  element = document.createElement("div");
  element.className = "plot";
  for (const [name, value] of Object.entries({ runs, labels: runs, plot })) element.dataset[name] = JSON.stringify(value);
  element.setAttribute("aria-label", plot.title);
  figure.append(element);
  document.querySelector(".charts").replaceChildren(figure);
  for (const each of [...drawn.keys()]) none(each, "");
  asked = [];
  await again_();
}
async function again_() {
  await draw(element);
  state = drawn.get(element);
  await settled();
}
const spoken = (made) => Object.fromEntries(rows(made).map((row) => ["th", "td"].map((cell) => row.querySelector(cell).textContent)));
const over = () => state.made.over.getBoundingClientRect();
function point(share) {
  if (share == null) state.made.setCursor({ left: -10, top: -10 });
  else state.made.setCursor({ left: share * (over().width - 1), top: over().height / 2 });
}
async function look(begin, end) {
  const [min, max] = [begin, end].map((share) => state.made.posToVal(share * over().width, "x"));
  state.made.setScale("x", { min, max });
  await settled();
}
const { fillText, clearRect } = CanvasRenderingContext2D.prototype;
CanvasRenderingContext2D.prototype.clearRect = function (...where) {
  this.canvas.said = [];
  return clearRect.apply(this, where);
};
CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
  if (this.textAlign === "right") this.canvas.said.push([text, x - this.measureText(text).width]);
  return fillText.call(this, text, x, y);
};
"""
"""What tests ask of the page; of a picture it keeps what is written beside the y axis, from above."""


def add_metrics(
    path: Path,
    steps: Sequence[Mapping[str, float]],
    done: Callable[[int], float] = lambda _: BEGAN,
) -> None:
    """One step each, without rollouts; `done` says when."""
    with Store.open(path / "run.db") as store:
        last = store.last_step()
        for step, metrics in enumerate(steps, 0 if last is None else last + 1):
            store.commit_step(
                StepRecord(step, step, step + 1, f"w{step}", (), 0.01, done(step)), [], metrics
            )


class Plots:
    """A page with one plot, drawn by the very scripts, of the curves that a real dashboard answers."""

    def __init__(self, page: Page, runs: Path) -> None:
        self.page, self.runs = page, runs
        self.figure = page.locator("figure.chart")

    def run(
        self,
        name: str,
        steps: Sequence[Mapping[str, float]],
        done: Callable[[int], float] = lambda _: BEGAN,
    ) -> Path:
        path = write_run(self.runs / name, 0)
        add_metrics(path, steps, done)
        return path

    def draw(
        self,
        title: str,
        run: str,
        *others: str,
        ranges: Mapping[str, tuple[float, float]] | None = None,
        **choice: str,
    ) -> None:
        """The plot of this title of a run, or this metric of several."""
        self.choose(**choice)
        if others:
            line = {"metric": title, "label": "", "spread": ""}
            plot: dict[str, Any] = {"title": title, "lines": [line], "stacked": False}
        else:
            with Store.open(self.runs / run / "run.db", readonly=True) as store:
                found = [
                    each for some in plots_of(names_of(store), ranges).values() for each in some
                ]
            [plot] = [asdict(each) for each in found if each.title == title]
        self.page.evaluate("([runs, plot]) => plant(runs, plot)", [[run, *others], plot])

    def choose(self, **choice: str) -> None:
        """How plots are drawn from now on."""
        self.page.evaluate(
            "choice => Object.entries(choice).forEach(([name, value]) => keep(name, value))", choice
        )

    def again(self, **choice: str) -> None:
        """As where there is something new, or another choice."""
        self.choose(**choice)
        self.does("again_()")

    def does(self, script: str) -> Any:
        return self.page.evaluate(script)

    def look(self, begin: float, end: float) -> list[tuple[str, int, int]]:
        """At this range; the runs and steps that are asked for."""
        self.does(f"asked = []; look({begin}, {end})")
        near = [url for url in self.does("asked") if "from=" in url]
        return [
            (run, *sorted(map(int, re.findall(r"(?:from|to)=(\d+)", url))))  # pyright: ignore[reportReturnType]
            for url in near
            for run in re.findall(r"run=(\w+)", url)
        ]

    def at(self, *shares: float | None) -> list[dict[str, str]]:
        """The legend while somebody points at these places of the width, or nowhere."""
        return self.page.evaluate(
            "shares => shares.map((share) => { point(share); return spoken(state.made); })", shares
        )

    def one(self, share: float | None) -> dict[str, str]:
        return self.at(share)[0]

    def everywhere(self, places: int = 401) -> list[dict[str, str]]:
        return self.at(*(n / (places - 1) for n in range(places)))

    def words(self) -> str:
        """Screen readers get the description of a plot."""
        return self.does("state.made.ctx.canvas.getAttribute('aria-label')")

    def beside_axis(self) -> list[str]:
        said = self.does("state.made.ctx.canvas.said")
        assert all(left >= 0 for _, left in said), "the labels fit"
        return [text for text, _ in said]


@pytest.fixture(scope="module")
def bench(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plots]:
    script = (STATIC / "plots.js").read_text()
    assert script.count("const WIDTH = 700;") == 1
    script = script.replace("const WIDTH = 700;", f"const WIDTH = {COLUMNS};")
    styles = [(STATIC / name).read_text() for name in ("vendor/uPlot.min.css", "page.css")]
    scripts = [(STATIC / "vendor/uPlot.iife.min.js").read_text(), script, IN_PAGE]
    page_text = "".join(
        [
            "<!doctype html><meta charset=utf-8><meta name=viewport content='width=device-width'>",
            *(f"<style>{each}</style>" for each in styles),
            "<body data-at=''><main id=main><div class='charts one'></div></main>",
            *(f"<script>{each}</script>" for each in scripts),
        ]
    )
    runs = tmp_path_factory.mktemp("plots")
    with shown(runs) as address:
        page = browser.new_page(viewport=DESK)
        page.route(
            "**/bench", lambda route: route.fulfill(body=page_text, content_type="text/html")
        )
        visitor = Visitor(page, address)
        visitor.goes("/bench")
        yield Plots(page, runs)
        assert visitor.wrong == []
        page.close()


@pytest.fixture
def plots(bench: Plots) -> Plots:
    bench.page.set_viewport_size(DESK)
    bench.choose(smoothing="0", logarithmic="no", over="steps")
    return bench


def test_a_part_of_a_stack_says_its_own_value_and_a_spread_is_of_its_own_step(plots: Plots) -> None:
    steps = [
        {
            "rollouts/failed": 2.0, "rollouts/timed_out": 0.0, "time/sampling": 10.0 + n, "reward": 1.0,
        }
        | ({"time/publishing": 100.0 + n, "reward_std": n / 10} if n > 1 else {})
        for n in range(4)
    ]  # fmt: skip
    plots.run("parts", steps)
    plots.draw("Rollouts without a score", "parts")
    assert plots.one(1.0) == {"step": "4", "failed": "2", "timed out": "0"}
    tops = plots.does(
        "[...state.made.root.querySelectorAll('.u-cursor-pt')].map((each) => each.getBoundingClientRect())"
        ".map((each) => (over().bottom - each.top - each.height / 2) / over().height)"
    )
    assert all(0.75 < top < 0.98 for top in tops), "the axis begins at 0"
    plots.draw("Where the time went", "parts")
    assert plots.at(1.0, 0.0) == [
        {"step": "4", "sampling": "13", "publishing": "103"},
        {"step": "1", "sampling": "10", "publishing": "–"},
    ]
    plots.draw("Reward", "parts")
    assert plots.at(1.0, 0.0) == [
        {"step": "4", "reward": "1", "+ spread": "1.3", "− spread": "0.7"},
        {"step": "1", "reward": "1", "+ spread": "–", "− spread": "–"},
    ]
    plots.draw("Reward", "parts", ranges={"reward": (0.0, 1.0)})
    cut = {"step": "4", "reward": "1", "+ spread": "1", "− spread": "0.7"}
    assert plots.one(1.0) == cut, "no reward is above 1"
    steps = [{"rollouts/failed": 100.0 * (n == 350), "rollouts/timed_out": 0.0} for n in range(700)]
    plots.run("peak", steps)
    plots.draw("Rollouts without a score", "peak")
    assert "100" in {each["highest of all"] for each in plots.everywhere()}, "not averaged away"


def test_an_outlier_is_visible_and_can_be_zoomed_to(plots: Plots) -> None:
    """One step earns far more, and none near it."""
    steps = [{"reward": 9.0 if n == 100 else 0.5, "reward_std": 0.01} for n in range(210)]
    plots.run("long", steps)
    plots.draw("Reward", "long")
    highest = next(each for each in plots.everywhere() if each["highest"] == "9")
    assert (highest["lowest"], float(highest["reward"]) < 4) == ("0.5", True)
    assert not any("from=" in url for url in plots.does("asked"))
    for share, (begins, ends) in ((0.4, (80, 120)), (0.3, (90, 100))):
        [(_, begin, end)] = plots.look(share, share + 0.2)
        assert (begins <= begin < begins + 10, ends <= end < ends + 10) == (True, True)
    assert "9" in {each["reward"] for each in plots.everywhere()}, "the very step"
    plots.figure.locator(".u-over").dblclick()
    plots.does("settled()")
    assert float(plots.one(1.0)["step"]) > 200


def test_range_cursor_and_hidden_lines_stay_while_a_run_continues(plots: Plots) -> None:
    parts = {"completions/mean_length": 4.0, "completions/min_length": 1.0}
    path = plots.run("grows", [{**parts, "completions/max_length": float(n)} for n in range(40)])
    plots.draw("Completion length", "grows")
    plots.figure.get_by_role("button", name="shortest").click()
    plots.look(10 / 39, 30 / 39)
    before = plots.one(0.0)
    assert before["step"] == "11"
    plots.does("state.made.mine = true")
    add_metrics(path, [{**parts, "completions/max_length": 100.0}])
    plots.again()
    assert "longest: first 0, last 100" in plots.words()
    assert plots.does("[spoken(state.made), state.made.mine]") == [before, True], "the same plot"
    expect(plots.figure.locator(".u-series.u-off")).to_have_count(1)
    plots.figure.locator(".u-over").dblclick()
    assert plots.one(1.0)["longest"] == "100"


def test_a_plot_is_told_and_its_lines_are_hidden_by_keyboard(plots: Plots) -> None:
    plots.run("told", [{"reward": n / 4, "reward_std": 0.1} for n in (1, 4, 0, 2)])
    plots.draw("Reward", "told")
    expect(plots.figure.get_by_role("img", name="Reward over the steps")).to_be_visible()
    assert "reward: first 0.25, last 0.5, lowest 0, highest 1." in plots.words()
    button = plots.figure.get_by_role("button", name="reward")
    button.focus()
    for key, pressed, hidden in (("Enter", "false", 3), ("Space", "true", 0)):
        plots.page.keyboard.press(key)
        expect(button).to_have_attribute("aria-pressed", pressed)
        expect(plots.figure.locator(".u-series.u-off")).to_have_count(hidden)


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """By the formula; the state stays where there is no value."""
    mean, count, found = 0.0, 0, list[float]()
    for value in values:
        if not math.isnan(value):
            mean = mean * weight + (1 - weight) * value
            count += 1
        found.append(mean / (1 - weight**count) if not math.isnan(value) else math.nan)
    return found


def seen(plots: Plots, count: int, name: str) -> Any:
    """The values of a line in each of so many steps."""
    said = plots.at(*(step / (count - 1) for step in range(count)))
    assert [each["step"] for each in said] == [str(step + 1) for step in range(count)]
    return [math.nan if each[name] == "–" else float(each[name]) for each in said]


def like(values: Sequence[float]) -> Any:
    return pytest.approx(list(values), rel=1e-3, abs=1e-9, nan_ok=True)


def test_smoothing_is_the_debiased_average_and_stays(plots: Plots) -> None:
    rewards = [0.5, 1.0, math.nan, 0.25, 0.75, 4.0, 0.5, 0.125, 0.5]
    times = {"time/sampling": 1.0, "time/learning": 2.0}
    path = plots.run(
        "smooth",
        [
            {"reward": reward, "reward_std": 0.25, "time/scoring": float(n % 2)} | times
            for n, reward in enumerate(rewards)
        ],
    )
    plots.run("other", [{"reward": each} for each in rewards[3:]])
    plots.draw("Where the time went", "smooth", smoothing="0.6")
    assert seen(plots, 9, "scoring") == [0, 1, 0, 1, 0, 1, 0, 1, 0]
    plots.draw("Reward", "smooth")
    assert seen(plots, 9, "reward") == like(smoothed(rewards, 0.6))
    assert seen(plots, 9, "raw") == like(rewards)
    assert seen(plots, 9, "+ spread") == like([each + 0.25 for each in rewards])
    plots.look(0.22, 0.78)
    rewards.append(0.625)
    add_metrics(path, [{"reward": 0.625, "reward_std": 0.25}])
    plots.again()
    assert "first 0.5, last 0.625" in plots.words()
    said = plots.one(1.0)
    assert said["step"] == "7", "the range stays"
    assert float(said["reward"]) == pytest.approx(smoothed(rewards, 0.6)[6], rel=1e-3)
    plots.again(smoothing="0.99")
    assert plots.one(1.0)["step"] == "7"
    plots.figure.locator(".u-over").dblclick()
    assert seen(plots, 10, "reward") == like(smoothed(rewards, 0.99))
    plots.draw("reward", "smooth", "other")
    assert seen(plots, 10, "smooth") == like(smoothed(rewards, 0.99))
    assert seen(plots, 10, "other")[:6] == like(smoothed(rewards[3:9], 0.99))
    plots.again(smoothing="0")
    expect(plots.figure.locator(".edge-of-many")).to_have_count(0)
    assert seen(plots, 10, "smooth") == like(rewards)


def test_a_logarithmic_axis_leaves_out_what_is_not_above_zero(plots: Plots) -> None:
    steps = [
        {"kl": kl, "loss": -1.0, "frac_reward_zero_std": 0.0, "own/near": 2.0 + kl}
        for kl in (1e-4, 1e-3, 0.0, 1e-2, 1e-1)
    ]
    plots.run("powers", steps)
    plots.draw("KL from the reference", "powers", logarithmic="yes")
    assert plots.beside_axis() == ["1e-4", "0.001", "0.01", "0.1"]
    tops = plots.does(
        "[0, 0.25, 0.75, 1].map((share) => { point(share);"
        " return state.made.root.querySelector('.u-cursor-pt').getBoundingClientRect().y; })"
    )
    gaps = [before - after for before, after in pairwise(tops)]
    assert min(gaps) > 20
    assert max(gaps) - min(gaps) < 2.5, "a factor is a distance"
    assert plots.one(0.5)["kl from the reference"] == "0"
    expect(plots.figure.locator(".u-cursor-pt").first).to_be_hidden()
    plots.draw("own/near", "powers")
    near = [float(each) for each in plots.beside_axis()]
    assert len(set(near)) == len(near) > 1
    assert all(1.9 < each < 2.2 for each in near)
    plots.draw("Groups without signal", "powers")
    assert plots.beside_axis()[0] == "0.0"
    plots.draw("Loss", "powers")
    assert min(map(float, plots.beside_axis())) < 0, "nothing is above 0"


def test_over_time_steps_stand_where_they_were_done(plots: Plots) -> None:
    hours = (2.5, 5, 0.1, 7.5)
    rewards = [{"reward": n / 10, "time/sampling": 1.0, "time/scoring": 2.0} for n in range(5)]
    plots.run("slow", rewards, lambda n: BEGAN + 600 * (n + 1))
    plots.run("fast", [{"reward": n / 2} for n in range(4)], lambda n: BEGAN + 240 * (n + 1))
    plots.run("back", [{"reward": float(n)} for n in range(4)], lambda n: BEGAN + 3600 * hours[n])
    plots.draw("Reward", "slow")
    assert plots.one(1.0)["step"] == "5"
    plots.again(over="time")
    assert plots.at(0.0, 1.0) == [
        {"minutes": "10 (step 1)", "reward": "0"},
        {"minutes": "50 (step 5)", "reward": "0.4"},
    ]
    assert plots.words().startswith("Reward over time in minutes")
    plots.draw("Where the time went", "slow")
    assert plots.one(0.5) == {"minutes": "30 (step 3)", "sampling": "1", "scoring": "2"}
    plots.draw("reward", "slow", "fast")
    told = plots.at(*(share / 46 for share in (0, 6, 12, 46)))  # from 4 to 50 minutes
    assert [(each["minutes"], each["slow"], each["fast"]) for each in told] == [
        ("4", "–", "0"),
        ("10", "0", "0.5"),  # what it was by then
        ("16", "0", "1.5"),
        ("50", "0.4", "–"),  # it has ended before
    ]
    plots.draw("Reward", "back")
    assert plots.one(1.0) == {"hours": "7.5 (step 4)", "reward": "3"}
    assert {each["reward"] for each in plots.everywhere(51)} >= {"0", "1", "3"}
    plots.again(over="steps")
    assert plots.one(1.0) == {"step": "4", "reward": "3"}


def test_nan_and_infinity_are_marked_gaps(plots: Plots) -> None:
    values = [1.0] * 300
    values[100:140] = [math.nan] * 40
    values[150:152] = [math.inf, 7.0]
    plots.run("lost", [{"grad_norm": value} for value in values])
    plots.draw("Gradient norm", "lost")
    expect(plots.figure.locator(".lost")).to_have_text(
        re.compile("41 values are not finite numbers")
    )
    assert "41 steps without a finite number" in plots.words()
    assert "highest 7" in plots.words()
    gap, there = plots.at(0.4, 0.6)
    assert (gap["gradient norm"], there["gradient norm"]) == ("–", "1")


def chart(page: Page, title: str) -> Locator:
    found = page.locator("figure.chart").filter(has=page.locator("b", has_text=title))
    found.scroll_into_view_if_needed()
    expect(found.locator("canvas")).to_be_visible(timeout=TIMEOUT_MS)
    return found


def point(plot: Locator, share: float) -> None:
    """Move the pointer to this share of the plot's width. One call finds and measures the plot: a live page may redraw it between two."""
    expect(plot.locator(".u-over")).to_be_visible()
    x, y, width, height = plot.evaluate(
        """figure => {
            const over = figure.querySelector(".u-over");
            over.scrollIntoView({ block: "nearest" });
            const { x, y, width, height } = over.getBoundingClientRect();
            return [x, y, width, height];
        }"""
    )
    plot.page.mouse.move(x + share * (width - 1), y + height / 2)


def legend_at(plot: Locator, share: float) -> dict[str, str]:
    """What the legend shows while the pointer is at this share of the plot's width."""
    point(plot, share)
    return plot.evaluate(
        """figure => Object.fromEntries([...figure.querySelectorAll(".u-legend .u-series")].map(
            row => ["th", "td"].map(cell => row.querySelector(cell).textContent)))"""
    )


def test_choices_and_a_range_by_mouse_stay_while_a_run_continues_and_on_the_next_page(
    visit: Callable[..., Visitor], tmp_path: Path
) -> None:
    with going_on(tmp_path, 0) as path, shown(tmp_path) as address:
        add_metrics(path, [{"reward": n / 8} for n in range(9)])
        add_metrics(write_run(tmp_path / "other", 0), [{"reward": 1.0}] * 4)
        visitor = visit(address)
        page = visitor.goes("/runs/live")
        is_live(page)
        plot = chart(page, "Reward")
        slider = page.get_by_role("slider", name="Smoothing")
        slider.focus()
        page.keyboard.press("End")
        expect(page.locator(".looks output")).to_have_text("0.99")
        page.get_by_role("checkbox", name="Logarithmic axis").check()
        expect(plot.locator(".u-series", has_text="raw")).to_be_visible()
        point(plot, 2 / 8 - 0.01)
        page.mouse.down()
        point(plot, 4 / 8)
        point(plot, 6 / 8 + 0.01)
        page.mouse.up()
        assert legend_at(plot, 0.0)["step"] == "3"
        add_metrics(path, [{"reward": 2.0}])
        canvas = plot.locator("canvas")
        expect(canvas).to_have_attribute("aria-label", re.compile("last 2,"), timeout=TIMEOUT_MS)
        assert [legend_at(plot, share)["step"] for share in (0.0, 1.0)] == ["3", "7"]
        plot.locator(".u-over").dblclick()
        assert legend_at(plot, 1.0)["raw"] == "2"
        visitor.goes("/compare?run=live&run=other")
        expect(page.get_by_role("checkbox", name="Logarithmic axis")).to_be_checked()
        expect(slider).to_have_value("0.99")
        expect(chart(page, "reward").locator(".edge-of-many").first).to_be_attached()


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("[0, 0.5, 1234.5678, 2e6, 3e-4, null, NaN].map((each) => short(each))",
         ["0", "0.5", "1235", "2.00e6", "3.00e-4", "–", "–"]),
        ("[extent(0, 0, {}), extent(0.25, 0.25, {})[0], extent(-3, -3, {})[1]]", [[0, 1], 0, 0]),
        ("[[0, 0], [1e-4, 0.1], [2, 2]].map(([low, high]) => extent(low, high, { log: true }).map((each) => short(each, 3)))",
         [["1", "10"], ["5.8e-5", "0.174"], ["1", "4"]]),
        ("forward([0, 5, 3, null, 9])", [0, 5, 5.001, 5.002, 9]),
        ("around({ mean: [10, 20, 30, 40], first: [0, 5, 10, 15], last: [4, 9, 14, 19] }, [21, 29])", [5, 14]),
        ("logarithmicTicks(1e-4, 0.1, 0)", [1e-4, 1e-3, 1e-2, 0.1]),
        ("logarithmicTicks(2, 30, 0)", [2, 5, 10, 20]),
        ("[[1, 1.00001], [1, 2], [5, 5]].map(digitsOf)", [9, 4, 4]),
        ("labels([0, 0.5, 1], 0.5)", ["0.0", "0.5", "1.0"]),
        ("labels([2e6, 2.5e6, 3e6], 5e5)", ["2.0e6", "2.5e6", "3.0e6"]),
        ("refined({ at: [1, 4, 7], first: [0, 3, 6], last: [2, 5, 8] }, { at: [3, 4], first: [3, 4], last: [3, 4] }, [3, 5]).at",
         [1, 3, 4, 7]),
    ],
)  # fmt: skip
def test_functions_of_plots(plots: Plots, call: str, expected: list[Any]) -> None:
    def flat(found: list[Any]) -> list[Any]:
        return [one for each in found for one in (each if isinstance(each, list) else [each])]

    found, wanted = flat(plots.does(call)), flat(expected)
    assert found == (wanted if isinstance(wanted[0], str) else pytest.approx(wanted))
