"""The view of a notebook: one output that is redrawn, with numbers, curves and completions."""

from __future__ import annotations

import base64
import contextvars
import re
import threading
from types import SimpleNamespace

from groupwise.display.board import Board
from groupwise.display.page import Page
from groupwise.display.progress import Progress

METRICS = {
    "reward": 0.5,
    "reward_std": 0.2,
    "rewards/format/mean": 0.8,
    "kl": 0.0012,
    "completions/mean_length": 34.1,
    "loss": -0.0031,
    "learning_rate": 1e-5,
}

CELL: contextvars.ContextVar[str] = contextvars.ContextVar("cell")


class Kernel:
    """Stands for `IPython.display`; remembers from which cell something was shown."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.cells: list[str | None] = []
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
        self.cells.append(CELL.get(None))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def page():
    clock, kernel = Clock(), Kernel()
    board = Board("a run", 20, 0, clock)
    return SimpleNamespace(page=Page(kernel, board, clock), board=board, kernel=kernel, clock=clock)


def rollout(completion, reward: float | None = 1.0, **parts):
    given = tuple(SimpleNamespace(name=name, value=value) for name, value in parts.items())
    return SimpleNamespace(completion=completion, reward=reward, parts=given)


def step(at, number, metrics, groups=()):
    at.board.step(number, metrics)
    at.page.step(number, metrics, groups)


def pictures(html):
    return [base64.b64decode(found).decode() for found in re.findall(r"base64,([^\"]+)\"", html)]


def test_it_is_one_output_with_numbers_and_curves():
    at = page()
    for number in range(3):
        step(at, number, METRICS)
    [html] = at.kernel.shown
    assert at.kernel.drawn == 3
    for part in ("a run", "step 3/20", "reward <b>0.500 ±0.200</b>", "34.1 tokens", "width: 15.0%"):
        assert part in html
    titles = [re.search("<title>(.*?)</title>", each)[1] for each in pictures(html)]
    assert titles == ["reward", "parts", "KL to the reference", "length in tokens"]


def test_a_loss_is_drawn_where_nothing_is_rewarded():
    at = page()
    step(at, 0, {"loss": 1.5})
    [html] = at.kernel.shown
    assert "loss <b>1.5000</b>" in html
    assert len(pictures(html)) == 1


def test_completions_stand_below_with_their_rewards_and_no_markup_of_theirs():
    at = page()
    groups = [
        SimpleNamespace(
            rollouts=[rollout("<script>x</script>" * 40, 0.25, a=1.0, b=None), rollout("y", None)]
        )
    ]
    step(at, 0, METRICS, groups)
    step(at, 1, METRICS)  # of which nothing is known
    [html] = at.kernel.shown
    assert "&lt;script&gt;" in html
    assert "<script>" not in html
    assert "a 1.00\nb –" in html
    assert ">0.25<" in html
    assert len(html.split("&lt;script&gt;")) < 20


def test_notes_stay_above_and_phases_are_drawn_now_and_then():
    at = page()
    at.page.note("<warning>")
    at.board.phase("sampling", 1, 8)
    at.page.tick()
    assert "sampling" not in at.kernel.shown[0]
    at.clock.now += 2
    at.page.tick()
    assert "sampling 1/8" in at.kernel.shown[0]
    assert "&lt;warning&gt;" in at.kernel.shown[0]


def test_it_appears_below_the_cell_that_made_it_also_from_another_thread():
    def cell(name):
        CELL.set(name)
        at = page()
        thread = threading.Thread(target=step, args=(at, 0, METRICS))
        thread.start()
        thread.join()
        return at.kernel.cells

    assert contextvars.copy_context().run(cell, "third") == ["third"]


def test_progress_takes_it_in_a_kernel_and_ends_with_no_phase(monkeypatch, capsys):
    kernel = Kernel()
    monkeypatch.setattr("groupwise.display.progress.kernel_display", lambda: kernel)
    with Progress("a run", 2) as progress:
        assert not progress.live
        progress.phase("sampling", 1, 2)
        progress.step(0, METRICS)
        progress.note("look")
        progress.phase("learning")
    [html] = kernel.shown
    assert "step 1/2" in html
    assert "look" in html
    assert "learning</div>" not in html
    assert "learning …" not in html
    assert capsys.readouterr() == ("", "")
