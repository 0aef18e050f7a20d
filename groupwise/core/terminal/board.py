"""The current state of long work, and its layout as one line or as a terminal's block."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from groupwise.core.terminal.plot import sparkline
from groupwise.core.terminal.text import one_line, shorten

if TYPE_CHECKING:  # rich is imported once there is something to draw
    from rich.console import RenderableType

NARROW = 64
"""Width in columns below which the live view puts only one number per row."""

RECENT = 10
"""Steps whose times are averaged to estimate the remaining time."""

LINE_PARTS = 6
"""Maximum number of reward parts in a plain line; more would hide the rest."""

Metrics = Mapping[str, float]


class Board:
    """The last step's numbers, the phase of the next step, and times."""

    def __init__(self, title: str, total: int, start: int, clock: Callable[[], float]) -> None:
        self.title = title
        self.total = total
        self.done = start
        self._start = start
        self._clock = clock
        self._started_at = self._last_step_at = clock()
        self._seconds: deque[float] = deque(maxlen=RECENT)
        self._rewards: list[float] = []
        self._losses: list[float] = []
        self._metrics: Metrics = {}
        self._phase: tuple[str, int | None, int | None] = ("", None, None)

    def start(self) -> None:
        self._started_at = self._last_step_at = self._clock()

    def phase(self, name: str, done: int | None, total: int | None) -> None:
        self._phase = (name, done, total)

    def step(self, step: int, metrics: Metrics) -> None:
        now = self._clock()
        self._seconds.append(metrics.get("time/step", now - self._last_step_at))
        self._last_step_at = now
        self.done = step + 1
        self._metrics = dict(metrics)
        if "reward" in metrics:
            self._rewards.append(metrics["reward"])
        if "loss" in metrics:
            self._losses.append(metrics["loss"])

    def line(self) -> str:
        """The step as one plain line, without numbers that the step did not measure."""
        parts = self._part_means("{:z.2f}")
        facts = [
            ("reward", self._reward_text()),
            *(parts[:LINE_PARTS] if len(parts) > 1 else []),  # one part would repeat the reward
            ("loss", self._metric_text("loss", "{:z.4f}")),
            ("tokens right", self._metric_text("mean_token_accuracy", "{:.1%}")),
            ("kl", self._metric_text("kl", "{:.4f}")),
            ("kl to teacher", self._metric_text("distillation/kl", "{:.3f}")),
            ("entropy", self._metric_text("entropy", "{:.2f}")),
            ("len", self._metric_text("completions/mean_length", "{:.1f}")),
            ("cut", self._metric_text("completions/clipped_ratio", "{:.0%}")),
            ("no-signal", self._metric_text("frac_reward_zero_std", "{:.0%}")),
            ("failed", self._failure_text() or None),
            ("grad", self._metric_text("grad_norm", "{:.3g}")),
            ("lr", self._metric_text("learning_rate", "{:.2g}")),
            ("gap", self._metric_text("sampling/logprob_gap", "{:.1e}")),
            ("epoch", self._metric_text("epoch", "{:.2f}")),
            ("time", self._step_time_text()),
            ("eta", self._remaining_text()),
        ]
        digits = len(str(self.total))
        head = f"step {self.done:>{digits}}/{self.total}"
        return "  ".join([head, *(f"{name} {value}" for name, value in facts if value)])

    def view(self, width: int) -> RenderableType:
        """The block that the terminal shows."""
        from rich.console import Group
        from rich.text import Text

        return Group(
            *self._title_and_bar(width), *self._metric_rows(width), Text(self.phase_text(), "dim")
        )

    def times(self) -> str:
        """The elapsed and the estimated remaining time."""
        elapsed = f"{_duration(self._clock() - self._started_at)} elapsed"
        remaining = self._remaining_text()
        return f"{elapsed}, {remaining} left" if remaining else elapsed

    def _title_and_bar(self, width: int) -> list[RenderableType]:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        digits = len(str(self.total))
        count = f"{self.done:>{digits}}/{self.total}"
        share = self.done / self.total if self.total else 1.0
        times = self.times()
        bar = Table.grid(expand=True, padding=(0, 1))
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        bar.add_row(
            f"step {count}",
            ProgressBar(self.total, self.done, width=None),
            f"{share:.0%}",
        )
        title = Text(shorten(self.title, width), "bold")
        if len(self.title) + len(times) + 2 <= width:
            title.append(" " * (width - len(self.title) - len(times)) + times, "not bold dim")
            return [title, bar]
        return [title, Text(shorten(times, width), "dim"), bar]

    def _metric_rows(self, width: int) -> list[RenderableType]:
        from rich.table import Table
        from rich.text import Text

        if not self._metrics:
            return []
        name, value = self.headline()
        curve = self._rewards if self._has_rewards() else self._losses
        line = Text.assemble((f"{name} ", "dim"), (value, "bold green"))
        room = width - line.cell_len - 2
        if room >= 10:
            line.append("  " + sparkline(curve, min(room, 40)), "green")
        lines: list[RenderableType] = [line]
        if parts := [f"{name} {value}" for name, value in self._part_means("{:.3f}")]:
            part_text = shorten("   ".join(parts), width - 7)
            lines.append(Text.assemble(("parts  ", "dim"), part_text))
        table = Table.grid(padding=(0, 1))
        columns = 1 if width < NARROW else 3
        for _ in range(columns):
            table.add_column(style="dim", no_wrap=True)
            table.add_column(justify="left", no_wrap=True, min_width=10)
        facts = self.facts()
        for start in range(0, len(facts), columns):
            cells: list[RenderableType] = []
            for name, value in facts[start : start + columns]:
                cells += [name, Text(value, "red" if name == "failed" else "")]
            table.add_row(*cells)
        return [*lines, table]

    def headline(self) -> tuple[str, str]:
        """Name and value of the main number: the reward, or the loss if the run has no rewards."""
        if self._has_rewards():
            return "reward", self._reward_text() or "none scored"
        return "loss", self._metric_text("loss", "{:z.4f}") or ""

    def _has_rewards(self) -> bool:
        return "reward" in self._metrics or "rollouts/scored" in self._metrics

    def facts(self) -> list[tuple[str, str]]:
        """The last step's other numbers, with their names."""
        numbers = [
            ("kl", self._metric_text("kl", "{:.4f}")),
            ("entropy", self._metric_text("entropy", "{:.3f}")),
            ("gap", self._metric_text("sampling/logprob_gap", "{:.1e}")),
            ("length", self._metric_text("completions/mean_length", "{:.1f} tokens")),
            ("truncated", self._metric_text("completions/clipped_ratio", "{:.0%}")),
            ("no signal", self._metric_text("frac_reward_zero_std", "{:.0%}")),
            ("grad norm", self._metric_text("grad_norm", "{:.3g}")),
            ("learning rate", self._metric_text("learning_rate", "{:.2e}")),
            ("loss", self._metric_text("loss", "{:z.4f}") if self._has_rewards() else None),
            ("tokens right", self._metric_text("mean_token_accuracy", "{:.1%}")),
            ("epoch", self._metric_text("epoch", "{:.2f}")),
            ("sampling", self._metric_text("perf/sampling_tokens_per_second", "{:,.0f} tok/s")),
            ("learning", self._metric_text("perf/learning_tokens_per_second", "{:,.0f} tok/s")),
            ("step time", self._step_time_text()),
            ("failed", self._failure_text()),
        ]
        return [(name, value) for name, value in numbers if value]

    def _reward_text(self) -> str | None:
        value = self._metric_text("reward", "{:.3f}")
        spread = self._metric_text("reward_std", " ±{:.3f}")
        return value and value + (spread or "")

    def _part_means(self, form: str) -> list[tuple[str, str]]:
        return [
            (one_line(part), _format(value, form))
            for name, value in self._metrics.items()
            if (part := part_of(name)) is not None
        ]

    def _failure_text(self) -> str | None:
        failed = self._metrics.get("rollouts/failed", 0)
        timed_out = self._metrics.get("rollouts/timed_out", 0)
        scored = self._metrics.get("rollouts/scored", 0)
        if not failed and not timed_out:
            return None
        slow = f" ({timed_out:.0f} timed out)" if timed_out else ""
        return f"{failed + timed_out:.0f} of {failed + timed_out + scored:.0f}{slow}"

    def _metric_text(self, name: str, form: str) -> str | None:
        value = self._metrics.get(name)
        return None if value is None else _format(value, form)

    def _step_time_text(self) -> str | None:
        return f"{self._seconds[-1]:.1f} s" if self._seconds else None

    def _remaining_text(self) -> str | None:
        if not self._seconds or self.done >= self.total:
            return None
        return _duration(sum(self._seconds) / len(self._seconds) * (self.total - self.done))

    def phase_text(self) -> str:
        """The current phase, and how much of it is done."""
        name, done, total = self._phase
        if not name:
            return ""
        return f"{name} …" if done is None else f"{name} {done}" + (f"/{total}" if total else "")


def part_of(metric: str) -> str | None:
    """The reward part that a metric is the mean of; None for other metrics."""
    is_part = metric.startswith("rewards/") and metric.endswith("/mean")
    return metric.removeprefix("rewards/").removesuffix("/mean") if is_part else None


def _format(value: float, form: str) -> str:
    return form.format(value) if math.isfinite(value) else str(value)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
