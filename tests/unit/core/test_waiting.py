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
