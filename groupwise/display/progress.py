"""The progress of long work: a live view in a terminal, plain lines everywhere else.

The loop tells it what happens (`phase`, `step`, `note`, `result`); it decides how that looks. In a terminal it redraws one
block in place and lets go of the screen however the work ends. In a file, a pipe or a dumb terminal it writes one line for each
`logging_steps` steps, without control characters. It writes to standard error, so that standard output belongs to results.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from groupwise.display.plot import sparkline
from groupwise.display.text import clean, one_line, shorten

NARROW = 64
"""Columns below which the live view puts one number beside another no more."""

RECENT = 10
"""Steps whose times are averaged to say how long the rest will take."""

Metrics = Mapping[str, float]


class Progress:
    """Shows the progress of `total_steps` steps, of which `start_step` were done before. Use it as a context manager."""

    def __init__(
        self,
        title: str,
        total_steps: int,
        start_step: int = 0,
        stream: TextIO | None = None,
        *,
        logging_steps: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._logging_steps = logging_steps
        self._board = _Board(one_line(title), total_steps, start_step, clock)
        self._console = Console(file=self._stream, highlight=False, markup=False, emoji=False)
        self._live: Live | None = None

    @property
    def live(self) -> bool:
        """Whether the view is redrawn in place: only in a terminal that can move its cursor."""
        return _is_terminal(self._stream) and not self._console.is_dumb_terminal

    def __enter__(self) -> Progress:
        self._board.start()
        if self.live:
            self._live = Live(
                get_renderable=lambda: self._board.view(self._console.width),
                console=self._console,
                refresh_per_second=2,
                redirect_stdout=_is_terminal(sys.stdout),
                redirect_stderr=self._stream is sys.stderr,
                vertical_overflow="crop",
            )
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the last view on the screen and give the cursor back; a second call does nothing."""
        live, self._live = self._live, None
        if live is not None:
            self._board.phase("", None, None)
            live.stop()

    def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """What is going on within the step, as `sampling`, and how much of it is done. Only the live view shows it."""
        self._board.phase(one_line(name), done, total)

    def step(self, step: int, metrics: Metrics) -> None:
        """Step `step` (an index from 0) is done, and gave these metrics."""
        self._board.step(step, metrics)
        if self._live is not None:
            self._live.refresh()
        elif self._board.done % self._logging_steps == 0 or self._board.done == self._board.total:
            self._line(self._board.line())

    def note(self, text: str) -> None:
        """Something that the reader should know; stays above the view."""
        self._line(clean(text))

    def _line(self, text: str) -> None:
        if self._live is not None:
            self._console.print(Text(text), soft_wrap=True)
            return
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
        self._stream.flush()


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


class _Board:
    """What is known at the moment, and how it is laid out."""

    def __init__(self, title: str, total: int, start: int, clock: Callable[[], float]) -> None:
        self.title = title
        self.total = total
        self.done = start
        self._start = start
        self._clock = clock
        self._began = self._last = clock()
        self._seconds: deque[float] = deque(maxlen=RECENT)
        self._rewards: list[float] = []
        self._losses: list[float] = []
        self._metrics: Metrics = {}
        self._phase: tuple[str, int | None, int | None] = ("", None, None)

    def start(self) -> None:
        self._began = self._last = self._clock()

    def phase(self, name: str, done: int | None, total: int | None) -> None:
        self._phase = (name, done, total)

    def step(self, step: int, metrics: Metrics) -> None:
        now = self._clock()
        self._seconds.append(metrics.get("time/step", now - self._last))
        self._last = now
        self.done = step + 1
        self._metrics = dict(metrics)
        if "reward" in metrics:
            self._rewards.append(metrics["reward"])
        if "loss" in metrics:
            self._losses.append(metrics["loss"])

    def line(self) -> str:
        """The step as one plain line; what the step did not measure is left out."""
        facts = [
            ("reward", self._reward()),
            ("loss", self._number("loss", "{:z.4f}")),
            ("tokens right", self._number("mean_token_accuracy", "{:.1%}")),
            ("kl", self._number("kl", "{:.4f}")),
            ("entropy", self._number("entropy", "{:.2f}")),
            ("len", self._number("completions/mean_length", "{:.1f}")),
            ("cut", self._number("completions/clipped_ratio", "{:.0%}")),
            ("no-signal", self._number("frac_reward_zero_std", "{:.0%}")),
            ("failed", self._failures() or None),
            ("grad", self._number("grad_norm", "{:.3g}")),
            ("lr", self._number("learning_rate", "{:.2g}")),
            ("gap", self._number("sampling/logprob_gap", "{:.1e}")),
            ("epoch", self._number("epoch", "{:.2f}")),
            ("time", self._step_time()),
            ("eta", self._remaining()),
        ]
        digits = len(str(self.total))
        head = f"step {self.done:>{digits}}/{self.total}"
        return "  ".join([head, *(f"{name} {value}" for name, value in facts if value)])

    def view(self, width: int) -> RenderableType:
        """The block that the terminal shows."""
        return Group(*self._head(width), *self._numbers(width), Text(self._phase_text(), "dim"))

    def _head(self, width: int) -> list[RenderableType]:
        digits = len(str(self.total))
        count = f"{self.done:>{digits}}/{self.total}"
        times = f"{_duration(self._clock() - self._began)} gone"
        if left := self._remaining():
            times += f", {left} to go"
        bar = Table.grid(expand=True, padding=(0, 1))
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        bar.add_row(
            f"step {count}", ProgressBar(self.total, self.done, width=None), f"{self._share():.0%}"
        )
        title = Text(shorten(self.title, width), "bold")
        if len(self.title) + len(times) + 2 <= width:
            title.append(" " * (width - len(self.title) - len(times)) + times, "not bold dim")
            return [title, bar]
        return [title, Text(shorten(times, width), "dim"), bar]

    def _numbers(self, width: int) -> list[RenderableType]:
        if not self._metrics:
            return []
        lines: list[RenderableType] = [self._headline(width)]
        if parts := self._parts(width):
            lines.append(Text.assemble(("parts  ", "dim"), parts))
        return [*lines, self._table(columns=1 if width < NARROW else 3)]

    def _headline(self, width: int) -> Text:
        """The number that the run is about: its reward, or the loss where nothing is rewarded."""
        name, value, curve = "reward ", self._reward() or "none scored", self._rewards
        if not self._rewarded():
            name, value, curve = "loss ", self._number("loss", "{:z.4f}") or "", self._losses
        line = Text.assemble((name, "dim"), (value, "bold green"))
        room = width - line.cell_len - 2
        if room >= 10:
            line.append("  " + sparkline(curve, min(room, 40)), "green")
        return line

    def _rewarded(self) -> bool:
        return "reward" in self._metrics or "rollouts/scored" in self._metrics

    def _table(self, columns: int) -> Table:
        table = Table.grid(padding=(0, 1))
        for _ in range(columns):
            table.add_column(style="dim", no_wrap=True)
            table.add_column(justify="left", no_wrap=True, min_width=10)
        facts = [(name, value) for name, value in self._facts() if value]
        for start in range(0, len(facts), columns):
            cells: list[RenderableType] = []
            for name, value in facts[start : start + columns]:
                cells += [name, Text(value, "red" if name == "failed" else "")]
            table.add_row(*cells)
        return table

    def _facts(self) -> list[tuple[str, str | None]]:
        return [
            ("kl", self._number("kl", "{:.4f}")),
            ("entropy", self._number("entropy", "{:.3f}")),
            ("log-prob gap", self._number("sampling/logprob_gap", "{:.1e}")),
            ("length", self._number("completions/mean_length", "{:.1f} tokens")),
            ("truncated", self._number("completions/clipped_ratio", "{:.0%}")),
            ("groups without signal", self._number("frac_reward_zero_std", "{:.0%}")),
            ("grad norm", self._number("grad_norm", "{:.3g}")),
            ("learning rate", self._number("learning_rate", "{:.2e}")),
            ("loss", self._number("loss", "{:z.4f}") if self._rewarded() else None),
            ("tokens right", self._number("mean_token_accuracy", "{:.1%}")),
            ("epoch", self._number("epoch", "{:.2f}")),
            ("sampling", self._number("perf/sampling_tokens_per_second", "{:,.0f} tok/s")),
            ("learning", self._number("perf/learning_tokens_per_second", "{:,.0f} tok/s")),
            ("step time", self._step_time()),
            ("failed", self._failures()),
        ]

    def _reward(self) -> str | None:
        value = self._number("reward", "{:.3f}")
        spread = self._number("reward_std", " ±{:.3f}")
        return value and value + (spread or "")

    def _parts(self, width: int) -> str:
        parts = [
            f"{one_line(name.removeprefix('rewards/').removesuffix('/mean'))} {_format(value, '{:.3f}')}"
            for name, value in self._metrics.items()
            if name.startswith("rewards/") and name.endswith("/mean")
        ]
        return shorten("   ".join(parts), width - 7)

    def _failures(self) -> str | None:
        failed = self._metrics.get("rollouts/failed", 0)
        late = self._metrics.get("rollouts/timed_out", 0)
        scored = self._metrics.get("rollouts/scored", 0)
        if not failed and not late:
            return None
        slow = f" ({late:.0f} timed out)" if late else ""
        return f"{failed + late:.0f} of {failed + late + scored:.0f}{slow}"

    def _number(self, name: str, form: str) -> str | None:
        value = self._metrics.get(name)
        return None if value is None else _format(value, form)

    def _step_time(self) -> str | None:
        return f"{self._seconds[-1]:.1f} s" if self._seconds else None

    def _remaining(self) -> str | None:
        if not self._seconds or self.done >= self.total:
            return None
        return _duration(sum(self._seconds) / len(self._seconds) * (self.total - self.done))

    def _share(self) -> float:
        return self.done / self.total if self.total else 1.0

    def _phase_text(self) -> str:
        name, done, total = self._phase
        if not name:
            return ""
        return f"{name} …" if done is None else f"{name} {done}" + (f"/{total}" if total else "")


def _format(value: float, form: str) -> str:
    return form.format(value) if math.isfinite(value) else str(value)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
