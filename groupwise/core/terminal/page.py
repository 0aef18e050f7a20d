"""The progress of long work in a notebook: one output below the cell, redrawn in place.

A thread redraws it when nothing is reported, so the time passes while a model is loaded or kernels are compiled.

It shows the numbers of the board, curves of reward, its parts, KL and length, and the newest completions with their rewards. Plots are
separate images, whose styles cannot affect the rest of the notebook. The last state is saved with the notebook.
"""

from __future__ import annotations

import base64
import contextvars
import threading
from collections.abc import Callable, Sequence
from typing import Any

from groupwise.core.terminal.board import Board, Metrics, part_of
from groupwise.core.terminal.notebook import FONT, Table, as_html, output
from groupwise.core.terminal.plot import Point, Series, svg_curve, with_mean
from groupwise.core.terminal.text import ending, shorten
from groupwise.core.types import Group, Prompt

REDRAW = 1.0
"""Minimum number of seconds between two drawings. The last step is drawn at once. Until the first step, the thread waits as long."""
ONLY_TIME = 5.0
"""Number of seconds after which the thread redraws a page with plots if only the time has changed."""
GROUPS, OF_EACH = 3, 2
"""Number of groups of a step that are shown, and of completions of each."""
LONGEST = 240
"""Maximum number of characters shown of a completion."""
ASKED = 120
"""Maximum number of characters shown of a prompt: its last ones."""
WIDTH, HEIGHT = 375, 215
EACH = "each step"
"""Name of the raw points of a curve."""
_CURVES = {
    "kl": "KL to the reference",
    "completions/mean_length": "length in tokens",
    "loss": "loss",
}


class Page:
    """Draws a board with `IPython.display`. From any thread, the output appears below the cell that created the page."""

    def __init__(self, kernel: Any, board: Board, clock: Callable[[], float]) -> None:
        self._kernel = kernel
        self._board = board
        self._clock = clock
        self._cell = contextvars.copy_context()
        self._output = output()
        self._drawn_at = 0.0
        self._curves: dict[str, list[Point]] = {}
        self._notes: list[str] = []
        self._groups: Sequence[Group] = ()
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep_time, name="notebook page", daemon=True)

    def start(self) -> None:
        """Keep the time that is shown up to date, until `close`."""
        self._thread.start()

    def close(self) -> None:
        """Draw the page for the last time."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        self.draw()

    def _keep_time(self) -> None:
        while not self._closed.wait(REDRAW):
            self.tick(ONLY_TIME if self._curves else REDRAW)

    def step(self, step: int, metrics: Metrics, groups: Sequence[Group]) -> None:
        """Record a finished step and redraw."""
        with self._lock:
            for name, value in metrics.items():
                if name in ("reward", *_CURVES) or part_of(name) is not None:
                    self._curves.setdefault(name, []).append((step + 1, value))
            self._groups = groups or self._groups
        if self._board.done >= self._board.total:
            self.draw()
        else:
            self.tick()

    def note(self, text: str) -> None:
        """Add a line for the reader; it stays above the numbers."""
        with self._lock:
            self._notes.append(text)
        self.draw()

    def tick(self, pause: float = REDRAW) -> None:
        """Redraw, unless the last drawing is less than `pause` seconds old; a later call then draws the change."""
        if self._clock() - self._drawn_at >= pause:
            self.draw()

    def draw(self) -> None:
        """Draw the current state in place of the last one."""
        with self._lock:
            self._drawn_at = self._clock()
            self._cell.copy().run(self._output.draw, self._kernel, self.html())

    def html(self) -> str:
        """The page as HTML."""
        pictures = [
            picture(svg_curve(series, title=title, width=WIDTH, height=HEIGHT), title)
            for title, series in self._plots()
        ]
        facts = " ".join(
            f'<span style="margin-right: 1.4em; white-space: nowrap"><span style="opacity: .6">{name}</span> {as_html(value)}</span>'
            for name, value in self._board.facts()
        )
        board = self._board
        share = 100 * board.done / board.total if board.total else 100
        name, value = board.headline()
        phase = f" · {as_html(board.phase_text())}" if board.phase_text() else ""
        parts = [
            (
                f"<div><b>{as_html(board.title)}</b> · step {board.done}/{board.total} · {as_html(board.times())}{phase}</div>"
                '<div style="background: #8884; height: 6px; border-radius: 3px; margin: .4em 0; max-width: 900px">'
                f'<div style="background: #0969da; height: 6px; border-radius: 3px; width: {share:.1f}%"></div></div>'
                + (f"<div>{name} <b>{as_html(value)}</b></div>" if value else "")
            ),
            *(f'<div style="white-space: pre-wrap">{as_html(note)}</div>' for note in self._notes),
            f'<div style="max-width: 900px; line-height: 1.6">{facts}</div>',
            f'<div style="display: flex; flex-wrap: wrap; gap: 8px; margin: .5em 0">{"".join(pictures)}</div>',
            self._completions_html(),
        ]
        return f'<div style="font: {FONT}">{"".join(parts)}</div>'

    def _plots(self) -> list[tuple[str, list[Series]]]:
        plots: list[tuple[str, list[Series]]] = []
        if reward := self._curves.get("reward"):
            plots.append(("reward", with_mean(EACH, reward)))
        curves = [(part_of(name), points) for name, points in self._curves.items()]
        if parts := [Series(part, tuple(points)) for part, points in curves if part is not None]:
            plots.append(("parts", parts))
        for name, title in _CURVES.items():
            if name in self._curves and not (name == "loss" and "reward" in self._curves):
                plots.append((title, with_mean(EACH, self._curves[name])))
        return plots

    def _completions_html(self) -> str:
        rows: list[tuple[str, str, str, str]] = []
        for group in [group for group in self._groups if group.rollouts][:GROUPS]:
            for member, rollout in enumerate(group.rollouts[:OF_EACH]):
                prompt = prompt_end(group.example.prompt, ASKED) if member == 0 else ""
                parts = "\n".join(f"{part.name} {number(part.value)}" for part in rollout.parts)
                completion = shorten(rollout.completion, LONGEST)
                rows.append((prompt, number(rollout.reward), parts, completion))
        header = ("asked", "reward", "parts", "completion")
        return Table("", rows, header, unbroken=(2,)).as_html() if rows else ""


def prompt_end(prompt: Prompt, longest: int) -> str:
    """The end of a prompt, or of its last message: the question is usually there."""
    if isinstance(prompt, str):
        return ending(prompt, longest)
    content = prompt[-1].get("content") if prompt else ""
    return ending(content if isinstance(content, str) else str(content or ""), longest)


def picture(svg: str, title: str) -> str:
    """A self-contained image."""
    source = base64.b64encode(svg.encode()).decode()
    return f'<img alt="{as_html(title)}" style="max-width: 100%" src="data:image/svg+xml;base64,{source}">'


def number(value: float | None) -> str:
    """A reward as text, `–` for None."""
    return "–" if value is None else f"{value:.2f}"
