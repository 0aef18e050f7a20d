"""Ranks sample, to the bit, what one process does; see also the contract of samplers.

1. The same completions, whatever ranks there are and however the groups are divided among them.
2. Members are divided evenly; what is under way elsewhere counts.
3. A call that is given up is given up in the ranks.
4. All ranks serve what was loaded.
"""

import asyncio
import os
import signal

import pytest

from groupwise.core.types import GroupRequest, SamplingParams


def requests(groups=3, members=6):
    return [
        GroupRequest(
            draw,
            tuple(range(10, 20 + draw)),
            tuple(range(100 * draw, 100 * draw + members)),
            SamplingParams(12),
        )
        for draw in range(groups)
    ]


def halted(parts, number):
    """Stop the ranks, or have them go on."""
    for process in parts.ranks.processes:
        os.kill(process, number)


async def sampled(parts, asked):
    await parts.sampler.load(await parts.learner.publish(0))
    return await asyncio.gather(*map(parts.sampler.generate, asked))


@pytest.mark.parametrize("members", [1, 6, 20])
async def test_the_same_completions_as_in_one_process(alone, two, members):
    asked = requests(members=members)
    assert await sampled(two, asked) == await sampled(alone, asked)


async def test_three_ranks_draw_what_two_do(two, parts_of):
    asked = requests(groups=2, members=7)
    assert await sampled(parts_of(3), asked) == await sampled(two, asked)


async def test_ranks_rest_only_while_nothing_is_sampled(two, monkeypatch):
    asked = requests()
    wanted = await sampled(two, asked)
    called, call_all = [], two.ranks.call_all

    def noted(name, *arguments):
        called.append(name)
        return call_all(name, *arguments)

    monkeypatch.setattr(two.ranks, "call_all", noted)
    under_way = asyncio.gather(*map(two.sampler.generate, asked))
    await asyncio.sleep(0)
    await two.sampler.release_memory()
    assert called == []
    assert await under_way == wanted
    await two.sampler.release_memory()
    assert called == ["sampler.release_memory"]
    assert await sampled(two, asked) == wanted


async def test_a_cancelled_request_is_cancelled_in_the_ranks(two):
    (asked,) = requests(groups=1)
    before = await sampled(two, [asked])
    for waits in (0, 1, 20):
        halted(two, signal.SIGSTOP)  # or they might be faster than we are
        given_up = asyncio.create_task(two.sampler.generate(asked))
        for _ in range(waits):
            await asyncio.sleep(0)
        given_up.cancel()
        halted(two, signal.SIGCONT)
        with pytest.raises(asyncio.CancelledError):
            await given_up
        assert two.sampler._loads == [0, 0]
        assert two.sampler._waiting == []
        assert await sampled(two, [asked]) == before, "loading is refused while one samples"
