"""How callbacks are called: order, copies, threads, failures, state."""

import asyncio
import logging
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from groupwise.core.errors import CallbackError
from groupwise.training.callbacks.base import Callback, Callbacks, RunEnd
from tests.unit.training.callbacks.fake_run import ObservedRun


@pytest.fixture
async def begun(tmp_path):
    """Makes callbacks that are told of a run, and ends their thread."""
    made = []

    async def make(*callbacks: Callback, run: ObservedRun | None = None) -> Callbacks:
        one = Callbacks([(type(callback).__name__, callback) for callback in callbacks])
        made.append(one)
        await one.begin(run or ObservedRun(tmp_path))
        return one

    yield make
    for each in made:
        each.close()


def warnings(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


# --- calling


async def test_a_plain_callback_leaves_the_event_loop_free(begun):
    """It waits for something that only the loop can give: in the loop's own thread it would wait for ever."""
    given = threading.Event()
    threads = set()

    class Waiting(Callback):
        def on_step_begin(self, run):
            threads.add(threading.current_thread())
            asked.set()
            assert given.wait(30)

    asked = threading.Event()
    callbacks = await begun(Waiting(), Waiting())

    async def give() -> None:
        while not asked.is_set():  # noqa: ASYNC110 — set in the other thread
            await asyncio.sleep(0)
        given.set()

    await asyncio.gather(callbacks.step_begins(), give())
    assert len(threads) == 1, "all plain ones share one thread"
    assert threading.current_thread() not in threads


async def test_once_one_leaves_work_the_others_are_told_of_an_interruption(begun, tmp_path):
    told = []

    class Told(Callback):
        def on_run_end(self, run, end):
            told.append((run.interrupted, end.state))

    class Leaving(Callback):
        def on_run_end(self, run, end):
            run.leave("the rest")

    run = ObservedRun(tmp_path)
    callbacks = await begun(Told(), Leaving(), Told(), run=run)
    assert callbacks.unfinished_work == []
    run.interruption.received_signal = 2
    await callbacks.end(RunEnd("finished", {}))
    assert callbacks.unfinished_work == ["the rest"]
    assert told == [(True, "finished"), (True, "interrupted")]


# --- failing


class _Odd(BaseException):
    pass


@pytest.mark.parametrize(
    "error",
    [ValueError("no"), SystemExit(3), StopIteration(), KeyboardInterrupt(), _Odd("odd")],
    ids=lambda error: type(error).__name__,
)
async def test_errors_of_a_noncritical_callback_are_reported_once_and_counted(begun, caplog, error):
    class Bad(Callback):
        def on_step_begin(self, run):
            raise error

        def on_step_end(self, run, metrics):
            raise ValueError("neither")

    heard = []

    class Good(Callback):
        def on_step_begin(self, run):
            heard.append(run.step)

    callbacks = await begun(Bad(), Good())
    await callbacks.step_begins()
    await callbacks.step_begins()
    await callbacks.step_committed({})
    await callbacks.end(RunEnd("finished", {}))
    assert heard == [0, 0]
    first, second, last = warnings(caplog)
    assert all(words in first for words in ("Bad", "on_step_begin", "raise error"))
    assert type(error).__name__ in first
    assert "callbacks/base.py" not in first
    assert "ValueError: neither" in second
    assert "Bad failed: 2 × on_step_begin, 1 × on_step_end" in last


async def test_cancelling_the_run_cancels_an_async_one(begun):
    entered, left = asyncio.Event(), []

    class Hanging(Callback):
        async def on_step_begin(self, run):
            entered.set()
            try:
                await asyncio.Event().wait()
            finally:
                left.append(True)

    callbacks = await begun(Hanging())
    task = asyncio.create_task(callbacks.step_begins())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert left == [True]


# --- state


class Counting(Callback):
    def __init__(self, state: Any = None) -> None:
        self.kept = {"begun": 0} if state is None else state

    def on_step_begin(self, run):
        self.kept["begun"] += 1

    def state(self):
        return self.kept

    def load_state(self, state):
        self.kept = state


@pytest.mark.parametrize(
    "state",
    [{"x": float("nan")}, {"x": (1, 2)}, {1: "x"}, {"x": {1}}, [object()]],
    ids=["nan", "tuple", "number as key", "set", "object"],
)
async def test_a_state_that_would_come_back_as_another_is_no_state(begun, caplog, state):
    callbacks = await begun(Counting(state))
    assert callbacks.state()["states"] == {}
    assert "state cannot be kept" in warnings(caplog)[0]


async def test_the_run_has_what_its_page_names(begun):
    page = (Path(__file__).parents[4] / "docs/how-to/callbacks.md").read_text()
    attributes = page.split("attributes of `run`: ")[1].split(". It may call")[0]
    names = re.findall(r"`(\w+)(?:\(names\))?`(?! or| \(if|\))", attributes)
    names = [name for name in names if name not in ("rl", "sft", "on_run_end")]
    handles = []

    class Reader(Callback):
        def on_run_begin(self, run):
            handles.append(run)

    await begun(Reader())
    methods = re.findall(r"^- `run\.(\w+)\(", page, re.MULTILINE)
    assert len(names) == 12
    assert [name for name in [*names, *methods] if not hasattr(handles[0], name)] == []


async def test_one_after_the_other_in_order_plain_and_async(begun):
    told = []

    class Plain(Callback):
        def on_step_begin(self, run):
            told.append("plain")

    class Async(Callback):
        async def on_step_begin(self, run):
            await asyncio.sleep(0)
            told.append("async")

    class Promising(Callback):
        def on_step_begin(self, run):
            return Async().on_step_begin(run)

    callbacks = await begun(Plain(), Async(), Promising(), Plain())
    await callbacks.step_begins()
    assert told == ["plain", "async", "async", "plain"]


async def test_a_critical_one_ends_the_run_and_does_not_hide_why_it_failed(begun, caplog):
    class Bad(Callback):
        critical = True

        def on_step_begin(self, run):
            raise ArithmeticError("one over nothing")

        def on_run_end(self, run, end):
            raise ArithmeticError("one over nothing")

    callbacks = await begun(Bad())
    with pytest.raises(CallbackError, match=r"Bad .*on_step_begin(.|\n)*one over nothing"):
        await callbacks.step_begins()
    await callbacks.end(RunEnd("failed", {}, "the disk is full"))
    assert "ArithmeticError" in warnings(caplog)[0]
    with pytest.raises(CallbackError):
        await callbacks.end(RunEnd("finished", {}))
