from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import subprocess
import sys
import textwrap
from pathlib import Path

from groupwise.core.terminal.progress import Progress

METRICS = {
    "reward": 0.5, "reward_std": 0.2, "rewards/format/mean": 0.8, "rewards/[/bold]\x1b[31m/mean": 0.25, "frac_reward_zero_std": 0.125,
    "kl": 0.0012, "entropy": 1.234, "completions/mean_length": 34.1, "completions/clipped_ratio": 0.03, "grad_norm": 0.221,
    "learning_rate": 1e-5, "loss": -0.0031, "sampling/logprob_gap": 3.2e-7, "rollouts/scored": 61.0, "rollouts/failed": 2.0,
    "rollouts/timed_out": 1.0, "perf/sampling_tokens_per_second": 412.3, "perf/learning_tokens_per_second": 1830.0, "time/step": 6.0,
}  # fmt: skip


class TestPlainLines:
    def test_say_everything_in_one_line_a_step(self) -> None:
        stream = io.StringIO()
        with Progress("a run", 20, stream=stream) as progress:
            progress.phase("sampling", 1, 8)
            progress.step(0, METRICS)
        assert stream.getvalue() == (
            "a run: steps 1 to 20\n"
            "step  1/20  reward 0.500 ±0.200  format 0.80  [/bold]␛[31m 0.25  loss -0.0031  kl 0.0012  entropy 1.23  "
            "len 34.1  cut 3%  no-signal 12%  failed 3 of 64 (1 timed out)  grad 0.221  lr 1e-05  gap 3.2e-07  time 6.0 s  eta 1:54\n"
        )

    def test_have_no_control_characters(self) -> None:
        stream = io.StringIO()
        with Progress("a\x1b[2J", 2, stream=stream) as progress:
            progress.note("model said \x1b[31m[/b]\nsecond line")
            progress.step(0, METRICS)
        assert all(letter == "\n" or letter.isprintable() for letter in stream.getvalue())
        assert "model said ␛[31m[/b]\nsecond line\n" in stream.getvalue()


RUN = """
    from groupwise.core.terminal.progress import Progress
    from tests_metrics import METRICS
    with Progress("sort [/bold] \\x1b[31m", 20) as progress:
        progress.note("before [b]")
        for step in range(3):
            progress.phase("sampling", step, 8)
            progress.step(step, METRICS)
        {end}
        progress.close()
        progress.note("Held-out")
"""


def in_terminal(tmp_path: Path, end: str = "", columns: int = 100, **environment: str) -> str:
    """What a child process writes to a terminal of its own."""
    (tmp_path / "tests_metrics.py").write_text(f"METRICS = {METRICS!r}")
    leader, follower = pty.openpty()
    own = {
        "PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "PYTHONIOENCODING": "utf-8",
        "TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "40", **environment,
    }  # fmt: skip
    command = [sys.executable, "-c", textwrap.dedent(RUN).format(end=end)]
    child = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=own)
    os.close(follower)
    written = b""
    with contextlib.suppress(OSError):  # the end of a terminal is an error on Linux
        while chunk := os.read(leader, 65536):
            written += chunk
    child.wait()
    os.close(leader)
    return written.decode()


def plain(written: str) -> str:
    """Without colours and cursor movements; each redrawing begins on a line of its own."""
    return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", written).replace("\r\n", "\n").replace("\r", "\n")


class TestTerminal:
    def test_shows_everything_and_lets_go_of_the_screen(self, tmp_path: Path) -> None:
        written = in_terminal(tmp_path)
        shown = plain(written)
        for expected in (
            "sort [/bold] ␛[31m",
            *("step  3/20", "15%", "reward 0.500 ±0.200", "format 0.800   [/bold]␛[31m 0.250"),
            *("3 of 64 (1 timed out)", "412 tok/s", "no signal 12%", "before [b]"),
        ):
            assert expected in shown
        assert shown.rstrip().endswith("Held-out")
        assert "\x1b[31m" not in written.replace("\x1b[1;31m", "").replace("\x1b[31m3 of", "")
        assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")

    def test_80_columns_are_enough(self, tmp_path: Path) -> None:
        shown = plain(in_terminal(tmp_path, columns=80))
        numbers = {
            "gap": "3.2e-07",
            "no signal": "12%",
            "loss": "-0.0031",
            "learning": "1,830 tok/s",
            "failed": "3 of 64 (1 timed out)",
        }
        for name, value in numbers.items():
            assert re.search(rf"{name} +{re.escape(value)}", shown), name

    def test_ctrl_c_gives_the_cursor_back(self, tmp_path: Path) -> None:
        written = in_terminal(tmp_path, end="raise KeyboardInterrupt")
        assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")
        assert "KeyboardInterrupt" in written
        assert "\x1b" not in in_terminal(tmp_path, TERM="dumb")
