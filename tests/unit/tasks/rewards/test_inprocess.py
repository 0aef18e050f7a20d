"""Scoring in a thread: for closures and functions that keep state. One that hangs costs its group; several end the run with a clear
message."""

import asyncio
import subprocess
import sys
import threading
from typing import Any

import pytest

from groupwise.core.errors import RewardWorkerError, TaskError
from groupwise.core.reward_call.request import ScoreRequest
from groupwise.tasks.rewards.inprocess import MAX_HANGING, InProcessScorer
from groupwise.tasks.rewards.rubric import Rubric


def request(draw=0):
    return ScoreRequest(draw, ["p"], ["c"], [[1]], {"draw": [draw]}, 0, 1)


def no_metrics(prompts, completions, rows):
    return {}


async def test_closures_keep_their_state_and_their_order():
    seen = []

    async def remembers(completions, draw, **kwargs):
        seen.append(draw[0])
        await asyncio.sleep(0)
        return [float(len(seen))]

    scorer = InProcessScorer(Rubric([remembers]), no_metrics)
    found = await asyncio.gather(*(scorer.score(request(draw)) for draw in range(5)))
    await scorer.close()
    assert seen == list(range(5))
    assert [score.members[0].reward for score in found] == [1.0, 2.0, 3.0, 4.0, 5.0]


class Hanging:
    """Draws that hang until they are released; the others are scored by their number."""

    def __init__(self, *draws):
        self.released = threading.Event()
        self.draws = draws
        self.began = []
        self.threads = []

    def __call__(self, completions, draw, **kwargs):
        self.began.append(draw[0])
        self.threads.append(threading.current_thread())
        if draw[0] in self.draws:
            self.released.wait(60)
        return [float(draw[0])]


async def test_hanging_call_costs_its_group_and_no_other():
    hanging = Hanging(1, 3)
    metrics = []
    scorer = InProcessScorer(
        Rubric([hanging]), lambda *given: metrics.append(given) or {"n": 1}, time_limit=0.3
    )
    calls = [scorer.score(request(draw)) for draw in range(5)]
    every: list[Any] = await asyncio.gather(*calls, scorer.compute_metrics([], [], []))
    *found, measured = every
    members = [score.members[0] for score in found]
    assert [each.reward for each in members] == [0.0, None, 2.0, None, 4.0]
    assert {each.outcome for each in members[1::2]} == {"timed_out"}
    assert "0.3 s; `Hanging`" in str(members[1].reason)
    assert sorted(hanging.began) == list(range(5)), "none is called twice"
    assert (measured, len(metrics)) == ({"n": 1}, 1)
    await scorer.close()
    hanging.released.set()


async def test_too_many_calls_that_hang_raise_for_all_that_follow():
    hanging = Hanging(*range(MAX_HANGING + 3))
    scorer = InProcessScorer(Rubric([hanging]), no_metrics, time_limit=0.05)
    calls = [scorer.score(request(draw)) for draw in range(MAX_HANGING + 3)]
    found: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
    assert [each.members[0].outcome for each in found[:MAX_HANGING]] == ["timed_out"] * MAX_HANGING
    assert [type(error) for error in found[MAX_HANGING:]] == [RewardWorkerError] * 3
    assert "than 0.05 s, and 3 calls" in str(found[-1])
    with pytest.raises(RewardWorkerError):
        await scorer.score(request())
    assert len(hanging.began) == MAX_HANGING + 1
    await scorer.close()
    hanging.released.set()


async def test_an_abandoned_call_runs_no_further_reward_function():
    hanging, after = Hanging(0), Hanging()
    scorer = InProcessScorer(Rubric([hanging, after]), no_metrics, time_limit=0.05)
    assert (await scorer.score(request(0))).members[0].outcome == "timed_out"
    hanging.released.set()
    await asyncio.to_thread(hanging.threads[0].join, 10)
    assert not after.began
    assert (await scorer.score(request(1))).members[0].reward == 2.0
    await scorer.close()


HANGING = """
import asyncio, threading
from groupwise.tasks.rewards.inprocess import InProcessScorer
from groupwise.tasks.rewards.rubric import Rubric
from groupwise.core.reward_call.request import ScoreRequest

running = threading.Event()

def hangs(completions):
    running.set()
    threading.Event().wait(600)

async def main():
    scorer = InProcessScorer(Rubric([hangs]), lambda *_: {})
    call = asyncio.ensure_future(scorer.score(ScoreRequest(0, ["p"], ["c"], [[1]], {}, 0, 1)))
    await asyncio.to_thread(running.wait)
    try:
        raise KeyboardInterrupt
    finally:
        await scorer.close()

asyncio.run(main())
"""


def test_hanging_call_does_not_keep_the_program_from_ending():
    ended = subprocess.run(
        [sys.executable, "-c", HANGING], capture_output=True, text=True, check=False, timeout=25
    )
    assert ended.stderr.rstrip().endswith("KeyboardInterrupt")


async def test_scoring_that_raises_fails_its_group_only():
    def logs_beyond_floats(completions, log_metric):
        for _ in range(2):
            log_metric("huge", 1.7e308)
        return [1.0]

    def raises(completions):
        raise ValueError("half: \ud83d")

    for function, said in ((logs_beyond_floats, "OverflowError"), (raises, "half: \\ud83d")):
        scorer = InProcessScorer(Rubric([function]), no_metrics)
        for _ in range(2):
            (member,) = (await scorer.score(request())).members
            assert member.outcome == "failed"
            assert said in (member.reason or "")
        await scorer.close()


async def test_metrics_and_their_failures():
    def metrics(prompts, completions, rows):
        if rows:
            raise TaskError("told plainly") if rows[0] else KeyError("lost")
        return {"n": asyncio.run(asyncio.sleep(0, len(prompts))), "pair": (1, 2)}

    scorer = InProcessScorer(Rubric([lambda completions: [1]]), metrics)
    assert await scorer.compute_metrics(["p"], ["c"], []) == {"n": 1, "pair": [1, 2]}
    with pytest.raises(RewardWorkerError, match=r"^told plainly$"):
        await scorer.compute_metrics([], [], [{"x": 1}])
    with pytest.raises(RewardWorkerError, match="KeyError: 'lost'"):
        await scorer.compute_metrics([], [], [{}])
    await scorer.close()


async def test_limit_counts_from_the_turn_of_a_function_not_from_its_queueing():
    def naps(completions, **kwargs):
        threading.Event().wait(0.06)
        return [1.0]

    async def naps_again(completions, **kwargs):
        return naps(completions)

    scorer = InProcessScorer(Rubric([*[naps] * 9, naps_again]), no_metrics, time_limit=1.0)
    found = await asyncio.gather(*(scorer.score(request(draw)) for draw in range(2)))
    assert {score.members[0].outcome for score in found} == {"scored"}
    await scorer.close()
