import asyncio

import pytest

from groupwise.core import waiting


async def test_a_task_that_missed_its_cancellation_is_cancelled_again(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(waiting, "AGAIN", 0.0)
    missed = 0

    async def deaf() -> None:
        nonlocal missed
        while missed < 2:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                missed += 1
        await asyncio.Event().wait()

    async def fails() -> None:
        raise RuntimeError("its own business")

    begun = asyncio.create_task(deaf()), asyncio.create_task(fails())
    await asyncio.sleep(0)
    await waiting.cancel_and_wait(None, *begun)
    assert begun[0].cancelled()
    assert missed == 2


async def test_the_first_of_several_ends_the_wait_and_cancels_the_others() -> None:
    was_cancelled = asyncio.Event()

    async def late() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            was_cancelled.set()

    async def soon(error: Exception | None) -> str:
        await asyncio.sleep(0)
        if error is not None:
            raise error
        return "here"

    assert await waiting.wait_for_first(late(), soon(None)) == ["here"]
    assert was_cancelled.is_set()
    with pytest.raises(ConnectionError):
        await waiting.wait_for_first(late(), soon(ConnectionError()))


async def test_an_event_that_was_set_is_found_even_without_time_left() -> None:
    event = asyncio.Event()
    assert await waiting.wait_at_most(0.0, event) is False
    event.set()
    assert await waiting.wait_at_most(-1.0, event) is True
