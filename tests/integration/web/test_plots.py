"""Plots in a real Chromium.

1. A legend says what each line is, not what is drawn: in a stack its own part, beside others of the same step.
2. What stands out is shown, in a spread and among many runs too, and a chosen range is asked for in finer columns.
3. What is new comes into the plot that is there: its range, its hidden lines and the cursor stay.
4. Lines can be told apart, read without seeing them, and hidden by keyboard.
5. Nothing moves under whoever points at a plot; while nobody does, its legend says the last values.
6. An axis has room for its labels, digits that tell them apart, and begins at 0 for what is always the same.
7. Smoothing and a logarithmic axis are chosen once, for all plots of all pages, and stay while a run goes on and a range is looked at.
8. Over time each step stands where it was done, also those of several runs, of a range, and of a clock that was set back.
9. What is drawn is what is chosen, whatever answers come when, and in a browser that keeps nothing.
10. What held-out prompts say over the training is a curve, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, Route, expect

from groupwise.runs.records import EvaluationRecord, StepRecord
from groupwise.runs.store import Store
from tests.integration.web.test_browser import (
    DESK,
    PHONE,
    SOON,
    Visitor,
    browser,
    pytestmark,
    shown,
    visit,
)
from tests.integration.web.test_live import going_on, is_live
from tests.web_runs import write_run

__all__ = ["browser", "pytestmark", "visit"]


BEGAN = 1.7e9
"""When all runs here were made."""


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


@contextmanager
def looking(visit: Callable[..., Visitor], runs: Path) -> Iterator[Visitor]:
    """Somebody in front of a dashboard, in whose browser nothing goes wrong."""
    with shown(runs) as address:
        visitor = visit(address)
        yield visitor
        assert visitor.wrong == []


def chart(page: Page, title: str) -> Locator:
    found = page.locator("figure.chart").filter(has=page.locator("b", has_text=title))
    found.scroll_into_view_if_needed()
    expect(found.locator("canvas")).to_be_visible(timeout=SOON)
    return found


def point(plot: Locator, share: float) -> None:
    """To this place of its width."""
    over = plot.locator(".u-over")
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    assert box is not None
    plot.page.mouse.move(box["x"] + share * (box["width"] - 1), box["y"] + box["height"] / 2)


def drag(plot: Locator, begin: float, end: float) -> None:
    point(plot, begin)
    plot.page.mouse.down()
    point(plot, (begin + end) / 2)
    point(plot, end)
    plot.page.mouse.up()


def legend(plot: Locator) -> dict[str, str]:
    rows = plot.locator(".u-legend .u-series").all()
    return {
        (row.locator("th").text_content() or ""): row.locator("td").text_content() or ""
        for row in rows
    }


def legend_at(plot: Locator, share: float) -> dict[str, str]:
    point(plot, share)
    return legend(plot)


# --- 1: what a legend says -------------------------------------------------------------------------


def test_a_part_of_a_stack_says_its_own_value(
    visit: Callable[..., Visitor], tmp_path: Path
) -> None:
    path = write_run(tmp_path / "odd", 0)
    times = [
        {"rollouts/failed": 2.0, "rollouts/timed_out": 0.0, "time/sampling": 10.0 + step}
        | ({"time/publishing": 100.0 + step} if step > 1 else {})
        for step in range(4)
    ]
    add_metrics(path, times)
    with looking(visit, tmp_path) as visitor:
        page = visitor.page
        visitor.goes("/runs/odd")
        failed = chart(page, "Rollouts without a score")
        point(failed, 1.0)
        assert legend(failed) == {"step": "3", "failed": "2", "timed out": "0"}
        tops = failed.locator(".u-cursor-pt").evaluate_all(
            "points => points.map(each => each.getBoundingClientRect()).map(each => each.top + each.height / 2)"
        )
        over = failed.locator(".u-over").bounding_box()
        assert over is not None
        assert all(0.75 < 1 - (top - over["y"]) / over["height"] < 0.98 for top in tops), (
            "the axis begins at 0"
        )
        time = chart(page, "Where the time went")
        point(time, 1.0)
        assert legend(time) == {"step": "3", "sampling": "13", "publishing": "103"}
        point(time, 0.0)
        assert legend(time) == {"step": "0", "sampling": "10", "publishing": "–"}


def test_a_spread_belongs_to_its_own_step(visit: Callable[..., Visitor], tmp_path: Path) -> None:
    path = write_run(tmp_path / "odd", 0)
    add_metrics(
        path,
        [{"reward": 1.0} | ({"reward_std": step / 10} if step > 1 else {}) for step in range(4)],
    )
    with shown(tmp_path) as address:
        visitor = visit(address)
        visitor.goes("/runs/odd")
        reward = chart(visitor.page, "Reward")
        point(reward, 1.0)
        assert legend(reward) == {"step": "3", "reward": "1", "+ spread": "1.3", "− spread": "0.7"}
        point(reward, 0.0)
        assert legend(reward) == {"step": "0", "reward": "1", "+ spread": "–", "− spread": "–"}


# --- 2: what stands out ----------------------------------------------------------------------------


def long_run(path: Path, steps: int = 2100) -> list[dict[str, float]]:
    """One step of it earns far more, and none near it."""
    metrics = [{"reward": 0.5, "reward_std": 0.01} for _ in range(steps)]
    metrics[1000]["reward"] = 9.0
    add_metrics(path, metrics)
    return metrics


def test_what_stands_out_of_a_spread_is_shown_and_looked_at_closely(
    visit: Callable[..., Visitor], tmp_path: Path
) -> None:
    long_run(write_run(tmp_path / "long", 0))
    with looking(visit, tmp_path) as visitor:
        page = visitor.page
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        visitor.goes("/runs/long")
        reward = chart(page, "Reward")
        told = [
            at_place for share in range(470, 484) if (at_place := legend_at(reward, share / 1000))
        ]
        highest = next(each for each in told if each["highest"] == "9")
        assert highest["lowest"] == "0.5"
        assert float(highest["reward"]) < 4
        assert not any("from=" in url for url in asked)
        for begin, end in ((0.4, 0.6), (0.3, 0.5)):
            with page.expect_response(lambda answer: "from=" in answer.url):
                drag(reward, begin, end)
        near = [url for url in asked if "from=" in url]
        assert re.search(r"from=8\d\d&to=1[23]\d\d", near[0])
        assert re.search(r"from=9\d\d&to=10\d\d", near[-1])
        seen = {legend_at(reward, share / 100)["reward"] for share in range(101)}
        assert "9" in seen, "the very step"
        reward.locator(".u-over").dblclick()
        point(reward, 1.0)
        assert int(float(legend(reward)["step"])) > 2000


def test_many_runs_show_what_stands_out_and_can_be_told_apart(
    visit: Callable[..., Visitor], tmp_path: Path
) -> None:
    names = [f"run-{number:02}" for number in range(12)]
    for name in names:
        path = write_run(tmp_path / name, 0)
        add_metrics(path, [{"reward": float(step == 700)} for step in range(1450)])
    with looking(visit, tmp_path) as visitor:
        page = visitor.page
        visitor.goes("/compare?" + "&".join(f"run={name}" for name in names))
        plot = chart(page, "reward")
        point(plot, 700 / 1449)
        told = plot.locator(".u-legend .u-series")
        expect(told.locator("visible=true").locator("th")).to_have_count(13)
        assert plot.locator(".u-series.edge-of-many").count() == 24
        assert set(plot.locator(".u-series.edge-of-many td").all_text_contents()) == {"0", "1"}
        marks = "rows => rows.map(row => getComputedStyle(row.querySelector('.u-marker')).border)"
        lines = plot.locator(".u-series:not(.edge-of-many)").evaluate_all(
            marks.replace("rows.map", "rows.slice(1).map")
        )
        assert len(set(lines)) == 12
        swatches = page.locator("#runs .swatch line").evaluate_all(
            "lines => lines.map(getComputedStyle).map(each => each.stroke + each.strokeDasharray)"
        )
        assert len(set(swatches)) == 12
        box = plot.locator(".u-legend").bounding_box()
        table = page.locator("#runs").bounding_box()
        assert box is not None
        assert table is not None
        assert box["y"] + box["height"] <= table["y"], "the legend has room"


# --- 3: what is new --------------------------------------------------------------------------------


def test_range_cursor_and_hidden_lines_stay_while_a_run_goes_on(
    visit: Callable[..., Visitor], tmp_path: Path
) -> None:
    with going_on(tmp_path, 0) as path:
        parts = {"completions/mean_length": 4.0, "completions/min_length": 1.0}
        add_metrics(path, [{**parts, "completions/max_length": float(n)} for n in range(40)])
        with looking(visit, tmp_path) as visitor:
            page = visitor.page
            visitor.goes("/runs/live")
            is_live(page)
            plot = chart(page, "Completion length")
            plot.locator("canvas").evaluate("canvas => { canvas.mine = true; }")
            plot.get_by_role("button", name="shortest").click()
            drag(plot, 10 / 39, 30 / 39)
            point(plot, 0.0)
            before = legend(plot)
            assert before["step"] == "10"
            add_metrics(path, [{**parts, "completions/max_length": 100.0}])
            expect(page.locator("body")).to_have_attribute("data-refreshed", "1", timeout=SOON)
            last = plot.locator("canvas")
            expect(last).to_have_attribute("aria-label", containing("longest: first 0, last 100"))
            assert legend(plot) == before
            assert last.evaluate("canvas => canvas.mine"), "it is the same plot"
            expect(plot.locator(".u-series.u-off")).to_have_count(1)
            point(plot, 1.0)
            assert legend(plot)["step"] in ("29", "30"), "as near as a pixel is"
            plot.locator(".u-over").dblclick()
            point(plot, 1.0)
            assert legend(plot)["longest"] == "100"


def containing(text: str) -> re.Pattern[str]:
    return re.compile(f".*{re.escape(text)}.*")


# --- 4: without a mouse, without eyes --------------------------------------------------------------


def test_a_plot_is_told_and_its_lines_are_hidden_by_keyboard(
    visit: Callable[..., Visitor], tmp_path: Path
) -> None:
    path = write_run(tmp_path / "one", 0)
    add_metrics(path, [{"reward": n / 4, "reward_std": 0.1} for n in (1, 4, 0, 2)])
    with looking(visit, tmp_path) as visitor:
        page = visitor.page
        visitor.goes("/runs/one")
        plot = chart(page, "Reward")
        picture = plot.get_by_role("img", name="Reward over the steps")
        expect(picture).to_have_attribute(
            "aria-label", containing("reward: first 0.25, last 0.5, lowest 0, highest 1.")
        )
        button = plot.get_by_role("button", name="reward")
        expect(button).to_have_attribute("aria-pressed", "true")
        button.focus()
        page.keyboard.press("Enter")
        expect(button).to_have_attribute("aria-pressed", "false")
        expect(plot.locator(".u-series.u-off")).to_have_count(3)
        page.keyboard.press("Space")
        expect(button).to_have_attribute("aria-pressed", "true")
        expect(plot.locator(".u-series.u-off")).to_have_count(0)


def test_pass_at_k_has_its_interval_beside_it(
    visit: Callable[..., Visitor], tmp_path: Path
) -> None:
    run = write_run(tmp_path / "often", 0)
    row = {"prompt": "p", "completion": "", "outcome": "scored", "parts": {}, "tokens": 1}
    rows = [
        {**row, "example": n, "key": str(n), "sample": k, "reward": 1.0, "success": k < n % 5}
        for n in range(40)
        for k in range(4)
    ]
    metrics = {"pass@1": 0.5, "pass@2": 0.7, "pass@4": 0.8}
    with Store.open(run / "run.db") as store:
        store.add_evaluation(EvaluationRecord(2, "several", "often@2", metrics, rows))
    with looking(visit, tmp_path) as visitor:
        visitor.goes("/runs/often/evaluations")
        said = legend_at(chart(visitor.page, "pass@k"), 0.0)
        assert list(said) == ["k", "several after 2 steps", "95 % from", "95 % to"]
        value, low, high = (float(said[each]) for each in list(said)[1:])
        assert value == 0.5
        assert 0.3 < low < 0.5 < high < 0.7


# --- 5: what stays where it is ---------------------------------------------------------------------


def height(plot: Locator) -> float:
    box = plot.bounding_box()
    assert box is not None
    return box["height"]


def leave(page: Page) -> None:
    page.mouse.move(2, 2)


def test_a_card_is_as_high_with_the_cursor_as_without(
    visit: Callable[..., Visitor], tmp_path: Path
) -> None:
    rewards = (0.0, 0.1234567, -0.0001234, 1e7, 0.5)
    times = {"time/sampling": 1.0, "time/scoring": 12.25, "time/learning": 100.5}
    add_metrics(
        write_run(tmp_path / "odd", 0),
        [{"reward": each, "reward_std": each / 3} | times for each in rewards],
    )
    with shown(tmp_path) as address:
        for viewport in (DESK, PHONE):
            visitor = visit(address, viewport=viewport)
            visitor.goes("/runs/odd")
            for title in ("Reward", "Where the time went"):
                plot = chart(visitor.page, title)
                heights, tops = {height(plot)}, set[float]()
                for share in (0.0, 0.25, 0.5, 0.75, 1.0):
                    point(plot, share)
                    heights.add(height(plot))
                    over = plot.locator(".u-legend .u-series").last.bounding_box()
                    assert over is not None
                    tops.add(over["x"])
                assert (len(heights), len(tops)) == (1, 1), title
            assert visitor.wrong == []


def test_at_rest_a_legend_says_the_last_values(
    visit: Callable[..., Visitor], tmp_path: Path
) -> None:
    with going_on(tmp_path, 0) as path:
        add_metrics(path, [{"reward": n / 4, "reward_std": 0.5} for n in range(4)])
        add_metrics(write_run(tmp_path / "short", 0), [{"reward": 0.25}, {"reward": 0.5}])
        with looking(visit, tmp_path) as visitor:
            page = visitor.page
            visitor.goes("/runs/live")
            is_live(page)
            plot = chart(page, "Reward")
            last = ["step3", "reward0.75", "− spread0.25", "+ spread1.25"]
            assert [*map("".join, legend(plot).items())] == last
            assert legend_at(plot, 0.0)["reward"] == "0"
            leave(page)
            assert [*map("".join, legend(plot).items())] == last
            add_metrics(path, [{"reward": 2.0, "reward_std": 1.0}])
            expect(plot.locator(".u-legend")).to_contain_text("reward2", timeout=SOON)
            assert legend(plot)["step"] == "4"
            visitor.goes("/compare?run=live&run=short")
            assert legend(chart(page, "reward")) == {"step": "last", "live": "2", "short": "0.5"}


# --- 6: axes ---------------------------------------------------------------------------------------

SPY = """
const { fillText, clearRect } = CanvasRenderingContext2D.prototype;
const { arc } = Path2D.prototype;
window.circles = 0;
CanvasRenderingContext2D.prototype.clearRect = function (...where) {
  this.canvas.said = [];
  return clearRect.apply(this, where);
};
CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
  if (this.textAlign === "right") this.canvas.said.push([text, x - this.measureText(text).width]);
  return fillText.call(this, text, x, y);
};
Path2D.prototype.arc = function (...where) {
  window.circles += 1;
  return arc.apply(this, where);
};
"""
"""What is written beside the y axis, from above, and where it begins; and how many circles were drawn."""


def beside_axis(plot: Locator) -> list[str]:
    plot.scroll_into_view_if_needed()
    said = plot.locator("canvas").evaluate("canvas => canvas.said")
    assert all(left >= 0 for _, left in said), "the labels fit"
    return [text for text, _ in said]


def test_an_axis_has_room_digits_and_zero(visit: Callable[..., Visitor], tmp_path: Path) -> None:
    steps = [
        {
            "learning_rate": 3e-4 - n * 1e-6,
            "own/tiny": 8e-6 + n * 1e-8,
            "own/large": 2e6 + n * 1e5,
            "own/deep": -12345.678 - n * 1e-3,
            "sampling/ratio_mean": 1 + n * 1e-5,
            "frac_reward_zero_std": 0.0,
            "completions/clipped_ratio": 0.25,
            "own/below": -3.0,
        }
        for n in range(20)
    ]
    add_metrics(write_run(tmp_path / "odd", 0), steps)
    with looking(visit, tmp_path) as visitor:
        page = visitor.page
        page.add_init_script(SPY)
        visitor.goes("/runs/odd")
        names = ("Learning rate", "own/tiny", "own/large", "own/deep", "sampling/ratio_mean")
        for name in names:
            labels = beside_axis(chart(page, name))
            assert len(labels) == len(set(labels)) > 1, name
        ratios = [float(each) for each in beside_axis(chart(page, "sampling/ratio_mean"))]
        assert all(1 <= each <= 1.001 for each in ratios)
        assert legend(chart(page, "sampling/ratio_mean"))["ratio_mean"] == "1.00019"
        zero = beside_axis(chart(page, "Groups without signal"))
        assert (float(zero[0]), float(zero[-1])) == (0, 1)
        share = [float(each) for each in beside_axis(chart(page, "Truncated"))]
        assert share[0] == 0
        assert share[-1] >= 0.2
        below = [float(each) for each in beside_axis(chart(page, "own/below"))]
        assert below[0] <= -2
        assert below[-1] == 0


def test_a_value_alone_is_a_circle_until_there_are_more(
    visit: Callable[..., Visitor], tmp_path: Path
) -> None:
    with going_on(tmp_path, 0) as path:
        add_metrics(path, [{"reward": 0.5}])
        with looking(visit, tmp_path) as visitor:
            page = visitor.page
            page.add_init_script(SPY)
            visitor.goes("/runs/live")
            is_live(page)
            plot = chart(page, "Reward")
            assert page.evaluate("circles") > 0
            page.evaluate("circles = 0")
            add_metrics(path, [{"reward": 0.75}, {"reward": 0.25}])
            expect(plot.locator(".u-legend")).to_contain_text("step2", timeout=SOON)
            assert page.evaluate("circles") == 0


# --- 7: smoothing and a logarithmic axis -----------------------------------------------------------


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """By the formula; the state stays where there is no value."""
    mean, count, found = 0.0, 0, list[float]()
    for value in values:
        if not math.isnan(value):
            mean = mean * weight + (1 - weight) * value
            count += 1
        found.append(mean / (1 - weight**count) if not math.isnan(value) else math.nan)
    return found


def read(text: str) -> float:
    return math.nan if text == "–" else float(text)


def same(seen: Sequence[float], expected: Sequence[float]) -> bool:
    return all(
        (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-9)
        for a, b in zip(seen, expected, strict=True)
    )


def seen(plot: Locator, name: str, count: int) -> list[float]:
    """In each of so many steps."""
    found = []
    for step in range(count):
        point(plot, step / (count - 1))
        expect(plot.locator(".u-legend .u-value").first).to_have_text(str(step))
        found.append(read(legend(plot)[name]))
    return found


def test_smoothing_is_the_debiased_average_and_stays(
    visit: Callable[..., Visitor], tmp_path: Path
) -> None:
    rewards = [0.5, 1.0, math.nan, 0.25, 0.75, 4.0, 0.5, 0.125, 0.5]
    with going_on(tmp_path, 0) as path:
        times = {"time/sampling": 1.0, "time/learning": 2.0}
        add_metrics(
            path,
            [
                {"reward": reward, "reward_std": 0.25, "time/scoring": float(n % 2)} | times
                for n, reward in enumerate(rewards)
            ],
        )
        add_metrics(write_run(tmp_path / "other", 0), [{"reward": r} for r in rewards[3:]])
        with looking(visit, tmp_path) as visitor:
            page = visitor.page
            visitor.goes("/runs/live")
            is_live(page)
            plot = chart(page, "Reward")
            slider = page.get_by_role("slider", name="Smoothing")
            slider.fill("0.6")
            expect(plot.locator(".u-series", has_text="raw")).to_be_visible()
            assert same(seen(plot, "reward", 9), smoothed(rewards, 0.6))
            assert same(seen(plot, "raw", 9), rewards)
            assert same(seen(plot, "+ spread", 9), [each + 0.25 for each in rewards])
            time = chart(page, "Where the time went")
            assert seen(time, "scoring", 9) == [0, 1, 0, 1, 0, 1, 0, 1, 0]
            drag(plot, 0.22, 0.78)
            rewards.append(0.625)
            add_metrics(path, [{"reward": 0.625, "reward_std": 0.25}])
            drawn = containing("first 0.5, last 0.625")
            expect(plot.locator("canvas")).to_have_attribute("aria-label", drawn, timeout=SOON)
            point(plot, 1.0)
            assert legend(plot)["step"] == "6", "the range stays"
            assert same([read(legend(plot)["reward"])], smoothed(rewards, 0.6)[6:7])
            slider.focus()
            page.keyboard.press("End")
            expect(page.locator(".looks output")).to_have_text("0.99")
            point(plot, 1.0)
            assert legend(plot)["step"] == "6"
            plot.locator(".u-over").dblclick()
            assert same(seen(plot, "reward", 10), smoothed(rewards, 0.99))
            page.reload()
            expect(slider).to_have_value("0.99")
            assert same(seen(chart(page, "Reward"), "reward", 10), smoothed(rewards, 0.99))
            visitor.goes("/compare?run=live&run=other")
            both = chart(page, "reward")
            assert same(seen(both, "live", 10), smoothed(rewards, 0.99))
            assert same(seen(both, "other", 10)[:6], smoothed(rewards[3:9], 0.99))
            page.get_by_role("slider", name="Smoothing").fill("0")
            expect(both.locator(".edge-of-many")).to_have_count(0)
            assert same(seen(both, "live", 10), rewards)


def top(plot: Locator, share: float) -> float:
    """Of the first line's point, in pixels."""
    point(plot, share)
    box = plot.locator(".u-cursor-pt").first.bounding_box()
    assert box is not None
    return box["y"] + box["height"] / 2


def test_a_logarithmic_axis_leaves_out_what_is_not_above_zero(
    visit: Callable[..., Visitor], tmp_path: Path
) -> None:
    steps = [
        {"kl": kl, "loss": -1.0, "frac_reward_zero_std": 0.0, "own/near": 2.0 + kl}
        for kl in (1e-4, 1e-3, 0.0, 1e-2, 1e-1)
    ]
    add_metrics(write_run(tmp_path / "odd", 0), steps)
    with looking(visit, tmp_path) as visitor:
        page = visitor.page
        page.add_init_script(SPY)
        visitor.goes("/runs/odd")
        plot = chart(page, "KL from the reference")
        page.get_by_role("checkbox", name="Logarithmic axis").check()
        expect(plot.locator("canvas")).to_be_visible()
        page.wait_for_function(
            "() => [...document.querySelectorAll('canvas')].some(each => each.said.some(([text]) => text === '1e-4'))"
        )
        assert beside_axis(plot) == ["1e-4", "0.001", "0.01", "0.1"]
        tops = [top(plot, step / 4) for step in (0, 1, 3, 4)]
        gaps = [before - after for before, after in pairwise(tops)]
        assert min(gaps) > 20
        assert max(gaps) - min(gaps) < 2.5, "a factor is a distance"
        point(plot, 0.5)
        assert legend(plot)["kl from the reference"] == "0"
        expect(plot.locator(".u-cursor-pt").first).to_be_hidden()
        near = [float(each) for each in beside_axis(chart(page, "own/near"))]
        assert len(set(near)) == len(near) > 1
        assert all(1.9 < each < 2.2 for each in near)
        assert beside_axis(chart(page, "Groups without signal"))[0] == "0.0"
        assert min(map(float, beside_axis(chart(page, "Loss")))) < 0, "nothing is above 0"
        page.reload()
        expect(page.get_by_role("checkbox", name="Logarithmic axis")).to_be_checked()
        assert beside_axis(chart(page, "KL from the reference"))[0] == "1e-4"


def test_without_scripts_nothing_is_there_to_choose(
    visit: Callable[..., Visitor], tmp_path: Path
) -> None:
    write_run(tmp_path / "one", 2)
    write_run(tmp_path / "none", 0)
    with shown(tmp_path) as address:
        still = visit(address, java_script_enabled=False)
        still.goes("/runs/one")
        expect(still.page.locator(".looks")).to_be_hidden()
        visitor = visit(address)
        visitor.goes("/runs/none")
        expect(visitor.page.locator(".looks")).to_be_hidden()
        visitor.goes("/runs/one")
        expect(visitor.page.locator(".looks")).to_be_visible()


# --- 8: over time ----------------------------------------------------------------------------------


def over(page: Page, what: str) -> None:
    page.get_by_role("combobox", name="Over").select_option(what)


def test_over_time_steps_stand_where_they_were_done(
    visit: Callable[..., Visitor], tmp_path: Path
) -> None:
    slow = write_run(tmp_path / "slow", 0)
    rewards = [
        {"reward": step / 10, "time/sampling": 1.0, "time/scoring": 2.0} for step in range(5)
    ]
    add_metrics(slow, rewards, lambda step: BEGAN + 600 * (step + 1))
    fast = write_run(tmp_path / "fast", 0)
    add_metrics(fast, [{"reward": step / 2} for step in range(4)], lambda n: BEGAN + 240 * (n + 1))
    back = write_run(tmp_path / "back", 0)
    hours = (2.5, 5, 0.1, 7.5)
    add_metrics(back, [{"reward": float(n)} for n in range(4)], lambda n: BEGAN + 3600 * hours[n])
    with looking(visit, tmp_path) as visitor:
        page = visitor.page
        visitor.goes("/runs/slow")
        plot = chart(page, "Reward")
        point(plot, 1.0)
        assert legend(plot)["step"] == "4"
        over(page, "time")
        expect(plot.locator(".u-label").first).to_have_text("minutes")
        assert legend_at(plot, 0.0)["minutes"] == "10 (step 0)"
        assert legend_at(plot, 1.0) == {"minutes": "50 (step 4)", "reward": "0.4"}
        expect(plot.get_by_role("img", name="Reward over time in minutes")).to_be_visible()
        stack = chart(page, "Where the time went")
        assert legend_at(stack, 0.5) == {"minutes": "30 (step 2)", "sampling": "1", "scoring": "2"}
        visitor.goes("/compare?run=slow&run=fast")
        both = chart(page, "reward")
        expect(page.get_by_role("combobox", name="Over")).to_have_value("time")
        told = [legend_at(both, share / 46) for share in (0, 6, 12, 46)]  # from 4 to 50 minutes
        assert [each["minutes"] for each in told] == ["4", "10", "16", "50"]
        assert [(each["slow"], each["fast"]) for each in told] == [
            ("–", "0"),
            ("0", "0.5"),  # what it was by then
            ("0", "1.5"),
            ("0.4", "–"),  # it has ended before
        ]
        visitor.goes("/runs/back")
        plot = chart(page, "Reward")
        assert legend_at(plot, 1.0) == {"hours": "7.5 (step 3)", "reward": "3"}
        assert {legend_at(plot, share / 50)["reward"] for share in range(51)} >= {"0", "1", "3"}
        over(page, "steps")
        expect(plot.locator(".u-label").first).to_have_text("step")
        assert legend_at(plot, 1.0) == {"step": "3", "reward": "3"}


def test_a_range_of_time_is_looked_at_closely(
    visit: Callable[..., Visitor], tmp_path: Path
) -> None:
    steps = [{"reward": 9.0 if step == 1000 else 0.5} for step in range(2100)]
    path = write_run(tmp_path / "long", 0, state="running")
    add_metrics(path, steps, lambda step: BEGAN + 7.2 * step)  # 4.2 hours
    with looking(visit, tmp_path) as visitor:
        page = visitor.page
        visitor.goes("/runs/long")
        plot = chart(page, "Reward")
        over(page, "time")
        expect(plot.locator(".u-label").first).to_have_text("hours")
        with page.expect_response(lambda answer: "from=" in answer.url) as near:
            drag(plot, 0.45, 0.5)
        [begin, end] = map(int, re.findall(r"(?:from|to)=(\d+)", near.value.url))
        assert 930 <= begin <= 950
        assert 1040 <= end <= 1060
        told = [legend_at(plot, share / 100) for share in range(101)]
        assert "9" in {each["reward"] for each in told}, "the very step"
        hours = [float(each["hours"].split()[0]) for each in told]
        assert {each["hours"].split("step ")[1] for each in told} >= {"1000)"}
        assert (min(hours), max(hours)) == pytest.approx((1.88, 2.09), abs=0.02)
        over(page, "steps")
        expect(plot.locator(".u-label").first).to_have_text("step")
        assert float(legend_at(plot, 1.0)["step"]) > 2000, "all of it: a range is one of its axis"


def test_each_run_is_looked_at_closely_where_its_own_steps_are(
    visit: Callable[..., Visitor], tmp_path: Path
) -> None:
    """A peak stands in the last column before the edge of the range."""
    for name, every in (("quick", 1.0), ("slow", 10.0), ("short", 0.5)):
        steps = 400 if name == "short" else 3600
        path = write_run(tmp_path / name, 0)
        metrics = [{"reward": 9.0 if step == 2879 else 0.5} for step in range(steps)]
        add_metrics(path, metrics, lambda step, every=every: BEGAN + every * (step + 1))
    with looking(visit, tmp_path) as visitor:
        page = visitor.page
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        visitor.goes("/compare?run=quick&run=slow&run=short&metric=reward")
        plot = chart(page, "reward")
        over(page, "time")
        expect(plot.locator(".u-label").first).to_have_text("hours")
        with page.expect_response(
            lambda answer: "run=slow" in answer.url and "from=" in answer.url
        ):
            drag(plot, 0.8, 0.9)
        near = {}
        for url in asked:
            if "from=" in url:
                [name] = re.findall(r"run=(\w+)", url)
                near[name] = [int(each) for each in re.findall(r"(?:from|to)=(\d+)", url)]
        assert 2860 < near["slow"][0] < 2885
        assert 3230 < near["slow"][1] < 3260
        assert near["quick"][0] > 3580, "it has ended before: its last column"
        assert near["short"][0] > 390
        told = [legend_at(plot, share / 400)["slow"] for share in range(400)]
        assert "9" in told


def test_a_range_of_time_stays_when_the_unit_changes(
    visit: Callable[..., Visitor], tmp_path: Path
) -> None:
    with going_on(tmp_path, 0) as path:
        add_metrics(path, [{"reward": float(n)} for n in range(8)], lambda n: BEGAN + 900.0 * n)
        with looking(visit, tmp_path) as visitor:
            page = visitor.page
            visitor.goes("/runs/live")
            is_live(page)
            plot = chart(page, "Reward")
            over(page, "time")
            expect(plot.locator(".u-label").first).to_have_text("minutes")
            drag(plot, 2 / 7 - 0.01, 5 / 7 + 0.01)
            assert legend_at(plot, 0.0)["minutes"].startswith("30")
            add_metrics(path, [{"reward": 8.0}], lambda n: BEGAN + 900.0 * n)
            expect(plot.locator(".u-label").first).to_have_text("hours", timeout=SOON)
            assert legend_at(plot, 0.0) == {"hours": "0.5 (step 2)", "reward": "2"}
            assert legend_at(plot, 1.0)["hours"].startswith("1.25")


# --- 9: what is chosen -----------------------------------------------------------------------------


def test_what_is_drawn_is_what_is_chosen_whatever_comes_when(
    visit: Callable[..., Visitor], tmp_path: Path
) -> None:
    add_metrics(write_run(tmp_path / "one", 0), [{"reward": float(n)} for n in range(4)])
    held: list[Route] = []
    with looking(visit, tmp_path) as visitor:
        page = visitor.page
        visitor.goes("/runs/one")
        plot = chart(page, "Reward")
        page.route("**/curves?*times=yes*", lambda route: held.append(route))  # noqa: PLW0108
        over(page, "time")
        page.wait_for_timeout(50)
        page.get_by_role("slider", name="Smoothing").fill("0.5")
        page.get_by_role("slider", name="Smoothing").fill("0.6")
        page.wait_for_timeout(50)
        assert len(held) == 1, "it is asked once"
        over(page, "steps")
        expect(plot.locator(".u-series", has_text="raw")).to_be_visible()
        with page.expect_response(lambda answer: "times" not in answer.url):
            held[0].continue_()
        page.wait_for_timeout(50)
        assert legend_at(plot, 1.0)["step"] == "3"
        page.unroute("**/curves?*times=yes*")
        over(page, "time")
        expect(plot.locator(".u-label").first).to_have_text("seconds")


def test_a_curve_that_did_not_come_is_asked_for_once_more(
    visit: Callable[..., Visitor], tmp_path: Path
) -> None:
    add_metrics(write_run(tmp_path / "one", 0), [{"reward": float(n)} for n in range(4)])
    with looking(visit, tmp_path) as visitor:
        page = visitor.page
        page.clock.install()
        visitor.goes("/runs/one")
        plot = chart(page, "Reward")
        page.route("**/curves?*times=yes*", lambda route: route.fulfill(status=503), times=1)
        with page.expect_response(lambda answer: answer.status == 503):
            over(page, "time")
        assert legend_at(plot, 1.0)["step"] == "3", "what is there stays"
        page.clock.fast_forward(11_000)
        expect(plot.locator(".u-label").first).to_have_text("seconds")


def test_a_browser_that_keeps_nothing_has_plots(
    visit: Callable[..., Visitor], tmp_path: Path
) -> None:
    add_metrics(write_run(tmp_path / "one", 0), [{"reward": float(n)} for n in range(4)])
    denied = "Object.defineProperty(window, 'localStorage', { get() { throw new DOMException('denied', 'SecurityError'); } })"
    with looking(visit, tmp_path) as visitor:
        page = visitor.page
        page.add_init_script(denied)
        visitor.goes("/runs/one")
        plot = chart(page, "Reward")
        page.get_by_role("slider", name="Smoothing").fill("0.5")
        expect(plot.locator(".u-series", has_text="raw")).to_be_visible()
        before = page.locator("html").get_attribute("data-theme")
        page.locator("#theme").click()
        assert page.locator("html").get_attribute("data-theme") != before


# --- 10: held-out prompts, and other steps than all -------------------------------------------------


def test_held_out_prompts_have_a_curve_at_their_own_steps(
    visit: Callable[..., Visitor], tmp_path: Path
) -> None:
    path = write_run(tmp_path / "long", 0)
    add_metrics(
        path,
        [{"reward": 0.5} | ({"rare": 1.0 * n} if n % 500 == 0 else {}) for n in range(2001)],
        lambda step: BEGAN + 60.0 * (step + 1) + 43_200.0 * (step >= 1000),  # it paused then
    )
    with Store.open(path / "run.db") as store:
        for step in (0, 500, 1000, 2001):
            metrics = {"reward": step / 10_000}
            name = f"step-{step}" if step else "before"
            store.add_evaluation(EvaluationRecord(step, name, f"long@{step}", metrics))
    with looking(visit, tmp_path) as visitor:
        page = visitor.page
        visitor.goes("/runs/long")
        plot = chart(page, "Held-out reward")
        assert legend_at(plot, 1.0) == {"step": "2001", "held-out reward": "0.2001"}
        assert legend_at(plot, 0.25) == {"step": "500", "held-out reward": "0.05"}
        rare = chart(page, "rare")
        told = {(each["step"], each["rare"]) for n in range(5) if (each := legend_at(rare, n / 4))}
        assert told == {(str(500 * n), str(500 * n)) for n in range(5)}, "where they are"
        over(page, "time")
        expect(plot.locator(".u-label").first).to_have_text("hours")
        assert legend_at(plot, 0.0)["hours"] == "0 (step 0)"
        assert legend_at(plot, 1000 / 60 / 45.35)["hours"] == "16.67 (step 1000)", (
            "before the pause"
        )
        assert legend_at(plot, 1.0)["hours"] == "45.35 (step 2001)"


def test_long_runs_of_different_lengths_are_read_at_every_step(
    visit: Callable[..., Visitor], tmp_path: Path
) -> None:
    for name, steps in (("long", 2100), ("shorter", 1500)):
        add_metrics(write_run(tmp_path / name, 0), [{"reward": 0.5} for _ in range(steps)])
    with looking(visit, tmp_path) as visitor:
        page = visitor.page
        visitor.goes("/compare?run=long&run=shorter&metric=reward")
        both = chart(page, "reward")
        told = [legend_at(both, share / 100) for share in range(2, 70)]
        assert {(each["long"], each["shorter"]) for each in told} == {("0.5", "0.5")}


# --- what is no number, and what stands out of a stack --------------------------------------------


def test_what_is_no_finite_number_is_a_gap_with_a_mark_and_hides_nothing(
    visit: Callable[..., Visitor], tmp_path: Path
) -> None:
    path = write_run(tmp_path / "lost", 0)
    nan, inf = float("nan"), float("inf")
    values = [nan if 1000 <= step < 1400 else inf if step == 1500 else 1.0 for step in range(3000)]
    values[1502] = 7.0
    add_metrics(path, [{"grad_norm": value} for value in values])
    with looking(visit, tmp_path) as visitor:
        visitor.goes("/runs/lost")
        plot = chart(visitor.page, "Gradient norm")
        plot.scroll_into_view_if_needed()
        expect(plot.locator(".lost")).to_have_text(re.compile("401 values are no finite number"))
        told = plot.locator("canvas").get_attribute("aria-label") or ""
        assert "401 steps without a finite number" in told
        assert "highest 7" in told
        point(plot, 0.4)
        assert legend(plot)["gradient norm"] == "–", "a gap"
        point(plot, 0.6)
        assert legend(plot)["gradient norm"].startswith("1")


def test_a_peak_of_a_stack_is_not_averaged_away(
    visit: Callable[..., Visitor], tmp_path: Path
) -> None:
    path = write_run(tmp_path / "peak", 0)
    steps = [
        {"rollouts/failed": 100.0 if step == 3505 else 0.0, "rollouts/timed_out": 0.0}
        for step in range(7000)
    ]
    add_metrics(path, steps)
    with looking(visit, tmp_path) as visitor:
        visitor.goes("/runs/peak")
        plot = chart(visitor.page, "Rollouts without a score")
        highest = max(
            float(legend_at(plot, 0.5 + shift / 1000).get("highest of all", "0").replace("–", "0"))
            for shift in range(-2, 5)
        )
        assert highest == 100.0
