"""A real engine process: it is started, called, broken and killed, and must be gone afterwards.

1. Calls are answered in any order, each by its own answer or error; what cannot cross the socket fails its call alone.
2. A call that changes nothing ends when nobody waits for it, and at its deadline; the engine is well afterwards.
3. Whatever ends the engine fails every call with `EngineLost` and the reason, once nothing of it is left, its descendants included.
4. So does the end of this process. Ctrl-C and SIGTERM are for this process alone.
5. Nothing is left after `close`, which may be repeated: no process, no descriptor, no thread.
"""

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import asynccontextmanager

import pytest

from groupwise.core.errors import ConfigError, NonFiniteError, RunError
from groupwise.server.engine.engine_process import EngineProcess
from groupwise.server.engine.engine_protocol import EngineLost
from groupwise.server.engine.messages import CallTimedOutError
from tests.processes import all_gone
from tests.unit.server.engine.toy_engine import FACTORY


@asynccontextmanager
async def served(factory=FACTORY, **options):
    engine = await EngineProcess(factory, **options).start()
    try:
        yield engine
    finally:
        await engine.close()
        assert all_gone([engine.process])
        with pytest.raises(ProcessLookupError):
            os.kill(engine.process, 0)  # it was reaped, too


async def until(condition):
    while not await condition():  # noqa: ASYNC110 — of another process, whose events are not ours
        await asyncio.sleep(0.005)


async def lost(call) -> str:
    with pytest.raises(EngineLost) as raised:
        await call
    return str(raised.value)


async def test_each_call_has_its_own_answer_or_error_and_what_it_says_is_logged(caplog, capfd):
    with caplog.at_level(logging.INFO, "groupwise"):
        async with served(environment={"TOY_WORD": "hello"}) as engine:
            waiting = asyncio.create_task(engine.call("wait"))
            assert await engine.call("echo", {"a": (1, None)}) == {"a": (1, None)}
            many = await asyncio.gather(*(engine.call("echo", each) for each in range(50)))
            assert many == [*range(50)]
            large = os.urandom(20 << 20)
            assert await engine.call("echo", large) == large
            for name, value in (("TOY_WORD", "hello"), ("PATH", os.environ["PATH"])):
                assert await engine.call("environment", name) == value
            heavy = {"torch", "transformers", "peft", "fastapi", "groupwise.training.config"}
            assert not heavy & {*await engine.call("modules")}
            await engine.call("say", "hello")
            await engine.call("show", "printed")
            for error in (NonFiniteError("too fast"), ConfigError("a key"), EngineLost("gone")):
                with pytest.raises(type(error), match=str(error)):
                    await engine.call("fail", error)
            for verb, arguments, kind, message in (
                ("divide", [0], RunError, r"in divide\n.*1 / by\n.*ZeroDivisionError"),
                ("fail", [MemoryError()], RunError, "no memory left"),
                ("echo", [lambda: 0], (AttributeError, TypeError), "pickle"),
                ("unsendable", [], RunError, "pickle"),
                ("fail_here", [], RunError, r"cannot be read here(.|\n)*No module named"),
                ("no_such_verb", [], RunError, "no_such_verb"),
            ):
                with pytest.raises(kind, match=message):
                    await engine.call(verb, *arguments)
            assert not waiting.done()
            await engine.call("let_go")
            assert await waiting is None
            assert engine.reason is None
    records = [(each.levelname, each.getMessage()) for each in caplog.records]
    expected = {("WARNING", "made"), ("INFO", "said hello"), ("INFO", "engine: printed")}
    assert expected <= {*records}
    bugs = [message for _, message in records if "Traceback" in message]
    assert any("`divide` failed" in each for each in bugs)
    assert not any("a key" in each for each in bugs), "what is raised on purpose is not a bug"
    assert capfd.readouterr() == ("", "")


async def test_calls_without_a_waiter_and_calls_past_their_deadline_end():
    async with served(silence_limit=1.0) as engine:
        waiting = [asyncio.create_task(engine.call("sample")) for _ in range(3)]
        kept = asyncio.create_task(engine.call("wait"))
        await asyncio.sleep(0)  # sent before what follows, and so begun before it is answered
        await engine.call("echo", 0)
        for task in (*waiting[:2], kept):
            task.cancel()
        await asyncio.gather(*waiting[:2], kept, return_exceptions=True)

        async def given_up():
            return await engine.call("times_given_up") == 2

        await until(given_up)
        assert not waiting[2].done()
        await engine.call("let_go")
        first, seen = engine.beat, []

        async def often():  # a loop that turns is not silent
            seen.append(engine.beat)  # so that no number of an object is used twice
            return len({*map(id, seen)}) > 6

        await until(often)
        assert (engine.beat.busy, engine.beat.progress > first.progress) == (1, True)
        waiting[2].cancel()
    async with served(limits={"sample": 0.05}) as engine:
        with pytest.raises(CallTimedOutError):
            await engine.call("sample")
        assert await engine.call("times_given_up") == 1


@pytest.mark.parametrize("verb", ["wait", "probe"])
async def test_a_call_that_outlasts_its_deadline_costs_the_engine(verb):
    limits = {verb: 0.05}
    async with served(limits=limits, grace=0.1, silence_limit=20.0) as engine:
        other = asyncio.create_task(engine.call("sample"))
        await engine.call("echo", 0)
        why = f"The engine was killed: `{verb}` was not done 0.1 s after its limit of 0.05 s."
        assert (await lost(engine.call(verb))).startswith(why)
        assert (await lost(other)).startswith(why)
        assert (await lost(engine.call("echo", 0))).startswith(why)
        assert (await engine.ended()).startswith(why)


async def test_a_silent_loop_is_ended_with_its_last_output_and_blocks_no_caller():
    async with served(silence_limit=1.0) as engine:
        await engine.call("show", "something odd")
        children = await engine.call("start_children")
        waiting = [asyncio.create_task(engine.call("sample")) for _ in range(2)]
        blocked = asyncio.create_task(engine.call("block"))
        await asyncio.sleep(0)
        large = asyncio.create_task(engine.call("echo", bytes(8 << 20)))
        for _ in range(3):
            await asyncio.sleep(0)  # the loop turns
        why = await lost(blocked)
        assert "1 s, with 1 × block, 1 × echo" in why
        assert "something odd" in why
        for task in (*waiting, large):
            assert await lost(task) == why
        assert all_gone(children)


@pytest.mark.parametrize("how", ["hangs", "fails"])
async def test_close_ends_all_processes_and_fails_waiting_calls(how):
    why = "The engine was closed."
    engine = await EngineProcess(
        FACTORY, environment={"TOY_CLOSE": how}, limits={"close": 0.1}
    ).start()
    children = await engine.call("start_children")
    waiting = asyncio.create_task(engine.call("wait"))
    await engine.call("echo", 0)
    losing = asyncio.create_task(engine.lost())
    given_up = asyncio.create_task(engine.close())
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.gather(engine.close(), engine.close())
    assert engine.reason == why, "it is gone when `close` returns, not some time later"
    assert all_gone([engine.process, *children])
    assert [await lost(each) for each in (waiting, engine.call("echo", 0))] == [why] * 2
    await engine.close()
    assert await engine.ended() == why
    assert not losing.done(), "it was asked to"
    losing.cancel()


PARENT = f"""
import asyncio
from groupwise.server.engine.engine_process import EngineProcess

async def main():
    engine = await EngineProcess({FACTORY!r}).start()
    print([engine.process, *await engine.call("start_children")], flush=True)
    await engine.call("BUSY")

asyncio.run(main())
"""


@pytest.mark.parametrize("busy", ["wait", "block"])
def test_the_end_of_the_parent_is_the_end_of_all(busy):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.replace("BUSY", busy)], stdout=subprocess.PIPE, text=True
    )
    processes = json.loads(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    assert all_gone(processes)


def test_the_end_of_the_socket_is_the_end_of_the_engine():
    """Where the kernel does not tell: the connection alone ends it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "groupwise.server.engine.child_process"),
                *(str(theirs.fileno()), FACTORY, str(os.getpid()), "30", "0.5"),
            ],
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            env={**os.environ, "GROUPWISE_REWARD_WORKER": "of-a-test"},
        )
        theirs.close()
        assert ours.recv(1), "it is there"
        ours.close()
        assert process.wait(20) == -signal.SIGKILL


def descriptors():
    names = os.listdir("/proc/self/fd")
    return sorted(name for name in names if os.path.exists(f"/proc/self/fd/{name}"))


async def test_a_start_that_fails_takes_too_long_or_is_given_up_leaves_nothing(monkeypatch):
    before = threading.active_count(), descriptors()
    hangs = {"TOY_HANGS": "1"}
    with pytest.raises(EngineLost, match=r"not ready after 0\.5 s"):
        await EngineProcess(FACTORY, environment=hangs, start_limit=0.5).start()
    starting = asyncio.create_task(EngineProcess(FACTORY, environment=hangs).start())
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    with pytest.raises(ConfigError, match="a key is odd"):
        await EngineProcess(FACTORY, environment={"TOY_FAILS": "a key is odd"}).start()
    with pytest.raises(Exception, match="no_such_module"):
        await EngineProcess("no_such_module:make").start()
    async with served() as engine:
        await engine.call("echo", 1)

    async def nothing_is_left():
        return threading.active_count() <= before[0] and descriptors() == before[1]

    await until(nothing_is_left)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(EngineLost, match="No such file"):
        await EngineProcess(FACTORY).start()


@pytest.mark.parametrize("how", ["killed", "crashes"])
async def test_an_engine_that_ends_fails_every_call_with_the_reason(how):
    async with served() as engine:
        for number in (signal.SIGINT, signal.SIGTERM):  # those of the terminal are not for it
            os.kill(engine.process, number)
        assert await engine.call("process") == engine.process
        assert os.getsid(engine.process) != os.getsid(0)
        waiting = [asyncio.create_task(engine.call(verb)) for verb in ("wait", "sample") * 2]
        watching = [asyncio.create_task(engine.ended()) for _ in range(2)]
        watching.pop().cancel()
        near, *children = await engine.call("start_children")
        if how == "killed":
            os.kill(near, signal.SIGTERM)
            assert all_gone([near]), "what it starts heeds them"
            os.kill(engine.process, signal.SIGKILL)
            ending = "ended: SIGKILL"
        else:
            children += [near, await engine.call("hold_the_socket")]
            ending = "ended: exit code 4."
            assert "disk is on fire" in await lost(engine.call("die", 4, "the disk is on fire"))
        for task in waiting:
            assert ending in await lost(task)
            assert all_gone(children), "before anybody hears of it"
        assert await watching[0] == engine.reason == str(await engine.lost())
        assert await lost(engine.call("echo", 0)) == engine.reason
        await engine.close()
        assert ending in str(engine.reason)
