"""The view of a notebook: one output that is redrawn, with numbers, curves and completions."""

from __future__ import annotations

import base64
import re
import threading
import time
from types import SimpleNamespace

import pytest

from groupwise.core.terminal import page as page_module
from groupwise.core.terminal.board import Board
from groupwise.core.terminal.page import REDRAW, Page
from groupwise.core.terminal.progress import Progress
from tests.meanwhile import right_after
from tests.processes import wait_until

METRICS = {
    "reward": 0.5, "reward_std": 0.2, "rewards/format/mean": 0.8, "kl": 0.0012, "completions/mean_length": 34.1, "loss": -0.0031,
    "learning_rate": 1e-5,
}  # fmt: skip


class Kernel:
    """Stands for `IPython.display`."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.drawn = 0

    def HTML(self, source: str) -> str:
        return source

    def display(self, source: str, *, display_id: bool) -> SimpleNamespace:
        assert display_id
        self.shown.append(source)
        self._drawn()
        return SimpleNamespace(update=self._update)

    def _update(self, source: str) -> None:
        self.shown[-1] = source
        self._drawn()

    def _drawn(self) -> None:
        self.drawn += 1


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def page(total=20):
    clock, kernel = Clock(), Kernel()
    board = Board("a run", total, 0, clock)
    return SimpleNamespace(page=Page(kernel, board, clock), board=board, kernel=kernel, clock=clock)


def rollout(completion, reward: float | None = 1.0, **parts):
    given = tuple(SimpleNamespace(name=name, value=value) for name, value in parts.items())
    return SimpleNamespace(completion=completion, reward=reward, parts=given)


def step(at, number, metrics, groups=()):
    at.board.step(number, metrics)
    at.page.step(number, metrics, groups)


def pictures(html):
    return [base64.b64decode(found).decode() for found in re.findall(r"base64,([^\"]+)\"", html)]


def test_completions_stand_below_with_their_rewards_and_no_markup_of_theirs():
    at = page()
    texts = ("<script>x</script>" * 40, "y", "never shown")
    second = [{"role": "user", "content": "x" * 500 + "second?"}]
    prompts = ["<b>first</b>?", second, "third?", "4?"]
    groups = [
        SimpleNamespace(
            example=SimpleNamespace(prompt=prompt),
            rollouts=[rollout(text, 0.25, a=1.0, b=None) for text in texts],
        )
        for prompt in prompts
    ]
    step(at, 0, METRICS, groups)
    at.clock.now += REDRAW
    step(at, 1, METRICS)  # of which nothing is known
    [html] = at.kernel.shown
    assert "&lt;script&gt;" in html
    assert "<script>" not in html
    assert "a 1.00\nb –" in html
    assert ">0.25<" in html
    assert len(html.split("&lt;script&gt;")) < 60
    assert "&lt;b&gt;first" in html
    assert re.search(r">…x{112}second\?<", html)
    assert ("third?" in html, "4?" in html, "never shown" in html) == (True, False, False)
    assert html.count(">y<") == 3


def test_quick_steps_are_drawn_together_and_the_last_one_in_any_case():
    at = page()
    for number in range(19):
        step(at, number, {**METRICS, "reward": number / 100})
        at.clock.now += REDRAW / 4
    assert at.kernel.drawn == 5
    assert "step 17/20" in at.kernel.shown[0]
    step(at, 19, METRICS)
    assert at.kernel.drawn == 6
    assert "step 20/20" in at.kernel.shown[0]
    assert pictures(at.kernel.shown[0])[0].count("<circle cx") == 20  # none is lost


def test_it_does_not_grow_with_the_training():
    def size(steps):
        at = page(total=steps)
        for number in range(steps):
            noisy = {name: value + number * 7 % 11 for name, value in METRICS.items()}
            step(at, number, noisy)
        return len(at.kernel.shown[0])

    assert size(3000) < 1.1 * size(1000) < 150_000


def test_the_time_passes_on_it_while_nothing_is_reported(monkeypatch):
    kernel, clock = Kernel(), Clock()
    monkeypatch.setattr("groupwise.core.terminal.progress.kernel_display", lambda: kernel)
    monkeypatch.setattr("groupwise.core.terminal.page.REDRAW", 0.01)
    with Progress("a run", 20, clock=clock) as progress:
        progress.phase("loading")
        progress.note("kernels are compiled")
        clock.now += 7
        wait_until(lambda: "0:07 elapsed · loading" in kernel.shown[0], "the time")
        assert "kernels are compiled" in kernel.shown[0]
    drawn = kernel.drawn
    clock.now += 7
    time.sleep(0.1)
    assert kernel.drawn == drawn


def test_an_interruption_leaves_the_newest_step_on_it(monkeypatch, capsys):
    kernel, clock = Kernel(), Clock()
    monkeypatch.setattr("groupwise.core.terminal.progress.kernel_display", lambda: kernel)

    def train():
        with Progress("a run", 20, clock=clock) as progress:
            for number in range(3):
                progress.step(number, METRICS)
            assert "step 1/20" in kernel.shown[0]
            progress.phase("learning")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    [html] = kernel.shown
    assert ("step 3/20" in html, "learning</div>" in html) == (True, False)
    assert capsys.readouterr() == ("", "")


def test_a_note_of_another_thread_is_drawn_while_a_step_adds_a_curve(monkeypatch):
    at = page()
    step(at, 0, {"reward": 0.5, "rewards/a/mean": 0.5})
    other = threading.Thread(target=lambda: step(at, 1, {"reward": 0.5, "kl": 0.1}))

    def step_elsewhere() -> None:
        other.start()
        other.join(0.1)  # it waits until the page is drawn

    right_after(monkeypatch, page_module, "part_of", step_elsewhere)
    at.page.note("uploaded")
    other.join()
    assert "uploaded" in at.kernel.shown[-1]
