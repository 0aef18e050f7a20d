"""What many pages ask for is found once, in the background, and nobody waits for whatever is slow."""

from __future__ import annotations

import threading
import time

from groupwise.web.ticking import EVERY, Ticking


def test_a_value_is_found_once_for_all_who_ask_within_a_second() -> None:
    now, found = [0.0], []

    def find() -> int:
        found.append(1)
        return len(found)

    value = Ticking(find, lambda: now[0])
    assert [value.now() for _ in range(5)] == [1] * 5
    now[0] += EVERY
    assert value.now() == 2
    value.forget()
    assert value.now() == 3


def test_nobody_waits_for_what_hangs_and_it_is_asked_once() -> None:
    now, begun, answer = [0.0], [], threading.Event()

    def find() -> str:
        begun.append(1)
        answer.wait(60)
        return "late"

    value = Ticking(find, lambda: now[0])
    before = time.monotonic()
    assert [value.now(moment=0.01) for _ in range(20)] == [None] * 20
    assert time.monotonic() - before < 10
    assert len(begun) == 1
    answer.set()
    assert value.now(moment=10) == "late"
    now[0] += EVERY
    answer.clear()
    assert value.now(moment=0.01) == "late", "what was known stays until there is news"
    answer.set()
    value.end()
    now[0] += EVERY
    asked = len(begun)
    assert value.now() == "late"
    assert len(begun) == asked, "nothing is asked after the end"
