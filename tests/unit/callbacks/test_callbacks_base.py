"""How callbacks are called: order, copies, threads, failures, state."""

import asyncio
import json
import logging
import threading
from typing import Any

import pytest

from groupwise.callbacks.base import Callback, Callbacks, RunEnd, Stop
from groupwise.errors import CallbackError
from groupwise.runs.records import EvaluationRecord
from groupwise.types import Example, Group, Rollout
from tests.unit.callbacks.observed import Observed

BEFORE = EvaluationRecord(0, "before", "toy@0", {"reward": 0.5}, [{"reward": 0.5}])


@pytest.fixture
async def begun(tmp_path):
    """Makes callbacks that are told of a run, and ends their thread."""
    made = []

    async def make(*callbacks: Callback, run: Observed | None = None) -> Callbacks:
        one = Callbacks([(type(callback).__name__, callback) for callback in callbacks])
        made.append(one)
        await one.begin(run or Observed(tmp_path))
        return one

    yield make
    for each in made:
        each.close()


def group(draw: int) -> Group:
    rollout = Rollout(draw, 0, 0, (1,), (), "x", notes={"kept": [1]})
    return Group(draw, Example(0, [{"role": "user", "content": "?"}], {"column": [1]}), (rollout,))


def warnings(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


# --- calling


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


async def test_what_they_are_given_are_copies_of_their_own(begun):
    class Meddling(Callback):
        seen: list[Any]

        def on_groups(self, run, groups, rejected):
            one: Any = groups[0]
            self.seen = [one.example.columns, one.rollouts[0].notes, list(one.example.prompt)]
            one.example.columns["column"].append(2)
            one.rollouts[0].notes["kept"].append(2)
            one.example.prompt[0]["content"] = "!"
            one.metrics["mine"] = 1.0
            assert rejected == (group(8),)

        def on_evaluate(self, run, evaluation: Any):
            evaluation.rows[0].clear()

        def on_step_end(self, run, metrics):
            metrics["mine"] = 1.0

    first, second = Meddling(), Meddling()
    callbacks = await begun(first, second)
    original, metrics = group(7), {"reward": 1.0}
    await callbacks.groups_scored([original], [group(8)])
    await callbacks.evaluated(BEFORE)
    await callbacks.step_committed(metrics)
    assert original == group(7)
    assert BEFORE.rows == [{"reward": 0.5}]
    assert metrics == {"reward": 1.0}
    assert first.seen == second.seen


async def test_once_one_leaves_work_the_others_are_told_of_an_interruption(begun, tmp_path):
    told = []

    class Told(Callback):
        def on_run_end(self, run, end):
            told.append((run.interrupted, end.state))

    class Leaving(Callback):
        def on_run_end(self, run, end):
            run.leave("the rest")

    run = Observed(tmp_path)
    callbacks = await begun(Told(), Leaving(), Told(), run=run)
    assert callbacks.left == []
    run.interruption.asked = 2
    await callbacks.end(RunEnd("finished", {}))
    assert callbacks.left == ["the rest"]
    assert told == [(True, "finished"), (True, "interrupted")]


# --- failing


class _Odd(BaseException):
    pass


@pytest.mark.parametrize(
    "error",
    [ValueError("no"), SystemExit(3), StopIteration(), KeyboardInterrupt(), _Odd("odd")],
    ids=lambda error: type(error).__name__,
)
async def test_whatever_a_plain_one_raises_is_reported(begun, caplog, error):
    class Bad(Callback):
        def on_step_begin(self, run):
            raise error

    heard = []

    class Good(Callback):
        def on_step_begin(self, run):
            heard.append(run.step)

    callbacks = await begun(Bad(), Good())
    await callbacks.step_begins()
    await callbacks.step_begins()
    assert heard == [0, 0]
    (warned,) = warnings(caplog)
    assert "callback Bad failed in on_step_begin; the run goes on:" in warned
    assert "raise error" in warned
    assert type(error).__name__ in warned
    assert "callbacks/base.py" not in warned


async def test_a_failure_is_reported_whole_once_and_counted_at_the_end(begun, caplog):
    class Bad(Callback):
        def on_step_begin(self, run):
            raise ValueError("no")

        def on_step_end(self, run, metrics):
            raise ValueError("neither")

    callbacks = await begun(Bad())
    for _ in range(3):
        await callbacks.step_begins()
    await callbacks.step_committed({})
    assert [text.splitlines()[-1].strip() for text in warnings(caplog)] == [
        "ValueError: no",
        "ValueError: neither",
    ]
    await callbacks.end(RunEnd("finished", {}))
    assert "Bad failed: 3 × on_step_begin, 1 × on_step_end; see log.txt" in warnings(caplog)[-1]


async def test_a_critical_one_ends_the_run(begun):
    class Bad(Callback):
        critical = True

        def on_step_begin(self, run):
            raise ArithmeticError("one over nothing")

    callbacks = await begun(Bad())
    with pytest.raises(CallbackError, match=r"Bad failed in on_step_begin(.|\n)*one over nothing"):
        await callbacks.step_begins()


async def test_a_critical_one_does_not_hide_why_a_run_failed(begun, caplog):
    class Bad(Callback):
        critical = True

        def on_run_end(self, run, end):
            raise ArithmeticError("one over nothing")

    callbacks = await begun(Bad())
    await callbacks.end(RunEnd("failed", {}, "the disk is full"))
    assert "ArithmeticError" in warnings(caplog)[0]
    with pytest.raises(CallbackError):
        await callbacks.end(RunEnd("finished", {}))


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


# --- what is told once


async def test_evaluations_are_told_once_and_only_of_the_policy_as_it_is(begun, tmp_path):
    told = []

    class Witness(Callback):
        def on_evaluate(self, run, evaluation):
            told.append((evaluation.name, evaluation.step))

    run = Observed(tmp_path)
    callbacks = await begun(Witness(), run=run)
    await callbacks.evaluated(BEFORE)
    await callbacks.evaluated(BEFORE)
    run.step = 1
    await callbacks.step_committed({})
    await callbacks.evaluated(BEFORE)
    await callbacks.evaluated(EvaluationRecord(1, "step-1", "toy@1", {}))
    assert told == [("before", 0), ("step-1", 1)]


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


async def test_state_comes_back_as_it_was_between_two_steps(begun, tmp_path):
    run = Observed(tmp_path)
    callbacks = await begun(Counting(), Counting(), run=run)
    await callbacks.step_begins()
    run.step = 1
    await callbacks.step_committed({})
    await callbacks.step_begins()
    in_the_step = json.loads(json.dumps(callbacks.state()))
    first, second = Counting(), Counting()
    again = Callbacks([("Counting", first), ("Counting", second)])
    again.load_state(in_the_step)
    assert (first.kept, second.kept) == ({"begun": 1}, {"begun": 1})
    assert again.state() == in_the_step


async def test_requests_are_part_of_the_state(begun):
    class Asking(Callback):
        def on_step_end(self, run, metrics):
            run.evaluate()
            run.stop("enough")

    callbacks = await begun(Asking())
    await callbacks.step_committed({})
    kept = callbacks.state()
    there, gone = Callbacks([("Asking", Asking())]), Callbacks()
    there.load_state(kept)
    gone.load_state(kept)
    assert there.evaluation_was_asked
    assert there.stop == Stop("Asking", "enough")
    assert gone.stop is None, "who asked is not there any more"


@pytest.mark.parametrize(
    "state",
    [{"x": float("nan")}, {"x": (1, 2)}, {1: "x"}, {"x": {1}}, [object()]],
    ids=["nan", "tuple", "number as key", "set", "object"],
)
async def test_a_state_that_would_come_back_as_another_is_no_state(begun, caplog, state):
    callbacks = await begun(Counting(state))
    assert callbacks.state()["states"] == {}
    assert "its state cannot be kept" in warnings(caplog)[0]
