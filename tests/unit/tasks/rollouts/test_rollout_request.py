"""Awaiting many things at once: all, in their order, or none."""

import asyncio

import pytest

from groupwise.core.interruption import gather_all


async def test_gathering_keeps_the_order():
    async def after(turns, value):
        for _ in range(turns):
            await asyncio.sleep(0)
        return value

    assert await gather_all(after(5 - index, index) for index in range(5)) == [0, 1, 2, 3, 4]
    assert await gather_all([]) == []


async def test_if_one_fails_the_others_are_cancelled_and_awaited():
    cleaned = []

    async def wait():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)

    async def fail():
        await asyncio.sleep(0)
        raise KeyError("x")

    with pytest.raises(KeyError):
        await gather_all([wait(), fail(), wait()])
    assert cleaned == [True, True], "nothing goes on in the background"
