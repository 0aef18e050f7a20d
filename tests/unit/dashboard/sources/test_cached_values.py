"""A value that many pages need is computed once, in the background, and nobody waits for a slow one."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from groupwise.api.schemas.problems import Refusal
from groupwise.dashboard.sources.cached_values import VALID_SECONDS, BackgroundValue, CachedCall


def test_a_value_is_found_once_for_all_who_ask_within_a_second() -> None:
    now, found = [0.0], []

    def find() -> int:
        found.append(1)
        return len(found)

    value = BackgroundValue(find, lambda: now[0])
    assert [value.latest() for _ in range(5)] == [1] * 5
    now[0] += VALID_SECONDS
    assert value.latest() == 2
    value.forget()
    assert value.latest() == 3


def test_readers_do_not_wait_for_a_hanging_query_which_runs_once() -> None:
    now, begun, answer = [0.0], [], threading.Event()

    def find() -> str:
        begun.append(1)
        answer.wait(60)
        return "late"

    value = BackgroundValue(find, lambda: now[0])
    before = time.monotonic()
    assert [value.latest(timeout=0.01) for _ in range(20)] == [None] * 20
    assert time.monotonic() - before < 10
    assert len(begun) == 1
    answer.set()
    assert value.latest(timeout=10) == "late"
    now[0] += VALID_SECONDS
    answer.clear()
    assert value.latest(timeout=0.01) == "late", "what was known stays until there is news"
    answer.set()
    value.end()
    now[0] += VALID_SECONDS
    asked = len(begun)
    assert value.latest() == "late"
    assert len(begun) == asked, "nothing is asked after the end"


class Slow:
    """Answers `before` when it is told to go on, and `after` from then on."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.values = iter(("before", "after"))

    def __call__(self) -> str:
        value = next(self.values)
        if value == "before":
            self.begun.set()
            self.go_on.wait(60)
        return value


def test_an_answer_requested_before_a_change_is_not_served_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An answer that is on its way while somebody changes what it is about; others do not wait for it for ever."""
    monkeypatch.setattr("groupwise.dashboard.sources.cached_values.QUERY_TIMEOUT", 0.01)
    slow = Slow()
    kept = CachedCall(slow, "Somebody", lambda: 1.0)
    with ThreadPoolExecutor(1) as elsewhere:
        first = elsewhere.submit(kept.get)
        slow.begun.wait(60)
        with pytest.raises(Refusal, match="slow to answer others"):
            kept.get()
        kept.forget()
        slow.go_on.set()
        assert first.result() == "before"
    assert kept.get() == "after"


def test_a_value_computed_before_a_change_is_dropped() -> None:
    slow = Slow()
    ticking = BackgroundValue(slow, lambda: 1.0)
    assert ticking.latest(0.01) is None
    slow.begun.wait(60)
    ticking.forget()
    slow.go_on.set()
    assert ticking.latest(60) == "after"
    ticking.end()
