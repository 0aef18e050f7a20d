import asyncio
import threading

from groupwise.jobs.fleet.notify.pending_ids import Pile


async def test_ids_taken_before_the_wake_arrives_do_not_end_the_next_wait():
    pile = Pile()
    assert await pile.wait(0) == frozenset()
    thread = threading.Thread(target=pile.put, args=(["a"],))
    thread.start()
    thread.join()  # its call to wake us is queued in this loop, and has not run
    assert pile.take() == {"a"}
    waiting = asyncio.create_task(pile.wait(60))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    pile.put(["b"])
    assert await waiting == {"b"}
