from __future__ import annotations

from io import StringIO

import pytest

from groupwise.display.ticker import REDRAW, Ticker


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_lines_come_now_and_then_where_nothing_can_be_redrawn() -> None:
    out, clock = StringIO(), Clock()
    with Ticker(out, every=10.0, clock=clock) as ticker:
        for clock.now in range(25):
            ticker.show(f"{clock.now} done")
        ticker.note("look\x1b[2J")
        ticker.show("the end")
    assert out.getvalue() == "0 done\n10 done\n20 done\nlook␛[2J\nthe end\n"


def test_a_terminal_has_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "10")
    out, clock = Terminal(), Clock()
    with Ticker(out, clock=clock) as ticker:
        ticker.show("one")
        ticker.show("too soon")
        clock.now += REDRAW
        ticker.show("much too long")
        ticker.note("look")
    line = "\r\x1b[Kmuch too…"
    assert out.getvalue() == f"\r\x1b[Kone{line}\r\x1b[Klook\n{line}\n"
