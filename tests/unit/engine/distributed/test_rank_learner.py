"""Ranks learn what one process does, up to rounding, and stay equal to each other to the bit; see also the contract of learners.

1. The same sums, norm and log-probabilities as in one process; bit-equal when repeated.
2. All replicas have the same weights and moments after updates, also with a rank that had no rows.
3. Checkpoints go to and fro between ranks and one process.
4. Dropout differs between ranks; without it nothing is drawn.
5. Replicas that come apart stop the run.
6. All ranks get calls from several threads in the same order.
"""

import asyncio
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest

from groupwise.algorithms.registry import make
from groupwise.core.errors import RunError
from groupwise.core.types import OptimiserParams, Row
from groupwise.engine.distributed.rpc import WorkerCalls

LOSS = make("dr_grpo", {}).loss_spec()
STEP = OptimiserParams(learning_rate=0.01)


def rows(groups=3, members=4):
    return [
        Row(
            tuple(range(10, 20 + group)),
            tuple((7 * group + 3 * member + place) % 90 + 6 for place in range(5 + member)),
            (1,) * (5 + member),
            (-4.5,) * (5 + member),
            (-1.0) ** member * (group + 1),
            1.0,
        )
        for group in range(groups)
        for member in range(members)
    ]


async def learnt(parts, given, updates=2, calls=1):
    """What comes of some updates from the start: sums and norms, log-probabilities, and the fingerprint."""
    told = []
    for _ in range(updates):
        for start in range(calls):
            part = given[start::calls]
            sums = await parts.learner.forward_backward(part, LOSS, {"policy": 60.0})
            told += [*sums.values()]
        told.append((await parts.learner.update(STEP)).grad_norm)
    logprobs = [value for row in await parts.learner.logprobs(given) for value in row]
    return told, logprobs, (await parts.learner.publish(updates)).fingerprint


@pytest.fixture(scope="module")
def start(alone, tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    asyncio.run(alone.learner.save(str(folder)))
    return str(folder)


@pytest.fixture
def fresh(alone, two, start):
    """One process and two ranks, both with the weights of the start."""
    for parts in (alone, two):
        parts.learner.load(start)
    return alone, two


@pytest.mark.parametrize(("groups", "calls"), [(3, 1), (4, 1), (4, 2), (1, 1)])
async def test_the_same_is_learnt_as_in_one_process(fresh, start, groups, calls):
    given = rows(groups)
    (told, logprobs, _), (same_told, same_logprobs, mark) = [
        await learnt(parts, given, calls=calls) for parts in fresh
    ]
    assert same_told == pytest.approx(told, rel=1e-4, abs=1e-4)
    assert same_logprobs == pytest.approx(logprobs, abs=2e-4)
    fresh[1].learner.load(start)
    assert (await learnt(fresh[1], given, calls=calls))[2] == mark


async def test_a_rank_without_rows_makes_the_same_update(fresh):
    alone, two = fresh
    given = rows(groups=1, members=1)
    for _ in range(2):
        assert await learnt(two, given) == await learnt(alone, given), "nothing is added up"


async def test_replicas_stay_equal(fresh):
    _, two = fresh
    await learnt(two, rows())
    assert len(set(await two.ranks.call_all("learner.fingerprint"))) == 1
    await two.learner.forward_backward(rows(), LOSS, {"policy": 60.0})
    two.learner.discard()
    assert (await two.learner.update(STEP)).grad_norm == 0.0


async def test_checkpoints_go_to_and_fro(fresh, start, tmp_path):
    alone, two = fresh
    await learnt(two, rows())
    await two.learner.save(str(tmp_path))
    alone.learner.load(str(tmp_path))
    marks = [(await parts.learner.publish(1)).fingerprint for parts in (alone, two)]
    assert marks[0] == marks[1]
    straight = await learnt(two, rows())
    two.learner.load(start)
    two.learner.load(str(tmp_path))
    assert await learnt(two, rows()) == straight
    assert (await learnt(alone, rows()))[1] == pytest.approx(straight[1], abs=2e-4)


@pytest.fixture(scope="module")
def dropping(parts_of):
    return parts_of(2, dropout=0.5)


async def test_dropout_differs_between_ranks(fresh, dropping):
    """Twice the same row, once in each rank: with the same dropout its gradient would simply be doubled."""
    given = rows(groups=1, members=1) * 2
    norms = []
    for parts in (fresh[1], dropping):
        await parts.learner.forward_backward(given, LOSS, {"policy": 10.0})
        await parts.learner.update(STEP)  # the first one moves B from zero, where A has no gradient
        own = []
        for chosen in (given[:1], given):
            await parts.learner.forward_backward(chosen, LOSS, {"policy": 10.0})
            own.append((await parts.learner.update(replace(STEP, learning_rate=0.0))).grad_norm)
        norms.append(own[1] / own[0])
    assert norms[0] == pytest.approx(2.0, rel=1e-4)
    assert norms[1] != pytest.approx(2.0, rel=1e-2)


async def test_replicas_that_come_apart_are_noticed(dropping, tmp_path):
    parts = dropping
    await parts.ranks.call(1, "learner.forward_backward", rows(), LOSS, {"policy": 60.0})
    await parts.learner.save(str(tmp_path))
    (tmp_path / "learner.json").write_text('{"updates": 0, "seed": 0}')
    await learnt(parts, rows(), updates=1)
    await parts.ranks.call(1, "learner.load", str(tmp_path))
    with pytest.raises(RunError, match="the learners' weights"):
        await parts.learner.publish(1)
    with pytest.raises(RunError, match="the learners' weights"):
        await parts.learner.save(str(tmp_path))


async def test_slopes_and_memory_are_reported(fresh):
    alone, two = fresh
    assert await two.slopes(1e-3) == await alone.slopes(1e-3) != []
    assert two.peak_memory("cpu") > alone.peak_memory("cpu") > 0


class SlowToSend(WorkerCalls):
    """Notes the calls of each of two ranks."""

    def __init__(self):
        super().__init__()
        self.count = 2
        self.received = ([], [])

    def _start_call(self, rank, name, arguments):
        self.received[rank].append(name)
        time.sleep(0.001)
        answered = Future()
        answered.set_result(None)
        return 0, answered


def test_calls_from_several_threads_reach_all_ranks_in_the_same_order():
    ranks = SlowToSend()
    together = [(rank, "together", ()) for rank in range(2)]

    def work(mine):
        for number in range(20):
            if mine:
                asyncio.run(ranks.call_together(together))
            else:
                ranks.call_all_now(str(number))

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(work, (True, False)))
    first, second = ranks.received
    assert first == second
    assert len(first) == 40
