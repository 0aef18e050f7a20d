"""Ctrl-C and SIGTERM, sent for real to a process that is in the middle of something."""

import asyncio
import contextlib
import signal
import subprocess
import sys
import textwrap

import pytest

from groupwise.core.interruption import Interruption, run_to_end

PREAMBLE = """
import asyncio, signal
from groupwise.core import interruption as tuned
from groupwise.core.interruption import Interrupted, Interruption

tuned.SAME_SIGNAL_SECONDS = 0.0

def say(*words):
    print(*words, flush=True)

async def dropped_when_cancelled():
    try:
        say("ready")
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        say("dropped")
        raise

async def deaf():
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue
"""


@contextlib.contextmanager
def child(body: str):
    """A process that runs `main` as written, with the preamble before it."""
    code = PREAMBLE + textwrap.dedent(body) + "\nasyncio.run(main())\n"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def next_line(process) -> str:
    return process.stdout.readline().strip()


def rest(process) -> list[str]:
    output, errors = process.communicate(timeout=30)
    return [*output.split("\n"), *errors.split("\n")]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_asks_and_drops_what_may_be_dropped(number, code):
    body = """
    async def main():
        with Interruption() as interruption:
            try:
                await interruption.allow(dropped_when_cancelled())
            except Interrupted as asked:
                say("asked", asked.exit_code)
    """
    with child(body) as process:
        assert next_line(process) == "ready"
        process.send_signal(number)
        assert rest(process)[:2] == ["dropped", f"asked {code}"]
        assert process.returncode == 0


def test_an_undisturbed_section_finishes_and_the_next_droppable_work_never_starts():
    body = """
    async def main():
        with Interruption() as interruption:
            seen = interruption._event.is_set
            say("ready")
            while not seen():
                await asyncio.sleep(0)
            for _ in range(50):
                await asyncio.sleep(0)
            say("whole")
            try:
                await interruption.allow(dropped_when_cancelled())
            except Interrupted as asked:
                say("asked", asked)
    """
    with child(body) as process:
        assert next_line(process) == "ready"
        process.send_signal(signal.SIGINT)
        assert rest(process)[:2] == ["whole", "asked SIGINT"]


@pytest.mark.parametrize(("together", "again"), [(60.0, signal.SIGINT), (0.0, signal.SIGTERM)])
def test_repeated_signals_from_launchers_do_not_force_an_exit(together, again):
    """A queue tells all processes of a job, and torchrun or srun pass on what they hear."""
    body = f"""
    async def main():
        tuned.SAME_SIGNAL_SECONDS = {together}
        with Interruption() as interruption:
            heard = []
            receive = signal.getsignal(signal.SIGTERM)
            def told(number, frame):
                heard.append(number)
                receive(number, frame)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, told)
            say("ready")
            while len(heard) < 1:
                await asyncio.sleep(0)
            say("first")
            while len(heard) < 2:
                await asyncio.sleep(0)
            say("saved")
    """
    with child(body) as process:
        assert next_line(process) == "ready"
        process.send_signal(signal.SIGTERM)
        assert next_line(process) == "first"
        process.send_signal(again)
        assert rest(process)[0] == "saved"
        assert process.returncode == 0


BUSY = """
say("first")
while True:
    await asyncio.sleep(0)
"""
LOST = """
ear = asyncio.ensure_future(deaf())
try:
    say("first")
    time.sleep(30)
except KeyboardInterrupt:
    pass
await asyncio.Event().wait()
"""
"""As in a finaliser, out of which no exception comes."""
DEAF = """
ear = asyncio.ensure_future(deaf())
say("first")
await asyncio.Event().wait()
"""
"""As where the next step of a task was lost, because the signal came between two steps of the loop."""


@pytest.mark.parametrize("work", [BUSY, LOST, DEAF], ids=["busy", "lost", "deaf"])
@pytest.mark.parametrize("again", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_at_once_whatever_is_under_way(work, again):
    body = f"""
    import time

    async def main():
        tuned.CLEANUP_TIMEOUT = 0.01
        with Interruption() as interruption:
            say("ready")
            while not interruption._event.is_set():
                await asyncio.sleep(0)
{textwrap.indent(work, " " * 12)}
    """
    with child(body) as process:
        assert next_line(process) == "ready"
        process.send_signal(signal.SIGINT)
        assert next_line(process) == "first"
        process.send_signal(again)
        assert any("KeyboardInterrupt" in line for line in rest(process))
        assert process.returncode != 0


async def test_cancelling_the_waiter_cancels_the_work():
    ended = []

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    with Interruption() as interruption:
        waiting = asyncio.ensure_future(interruption.allow(work()))
        for _ in range(3):
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert ended == [True]


def test_outside_the_main_thread_it_leaves_signals_alone():
    async def inside():
        before = signal.getsignal(signal.SIGINT)
        with Interruption() as interruption:
            assert signal.getsignal(signal.SIGINT) is before
            return await interruption.allow(asyncio.sleep(0, "done"))

    async def main():
        return await asyncio.to_thread(lambda: asyncio.run(inside()))

    assert asyncio.run(main()) == "done"


# Code that is not async


def test_plain_code_awaits_to_the_end_with_or_without_a_running_loop():
    async def answer():
        await asyncio.sleep(0)
        return 7

    async def notebook():
        return run_to_end(answer())

    assert run_to_end(answer()) == 7
    assert asyncio.run(notebook()) == 7


def test_a_signal_that_another_thread_gets_is_heeded_at_once():
    """The system may hand it to any thread, and the main one may be waiting for an event that never comes."""
    body = """
    import threading
    from groupwise.core.interruption import run_to_end

    async def waits():
        say("ready")
        await asyncio.Event().wait()

    async def main():
        pass

    threading.Thread(target=threading.Event().wait, daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    run_to_end(waits())
    """
    with child(body) as process:
        assert next_line(process) == "ready"
        process.send_signal(signal.SIGINT)
        assert any("KeyboardInterrupt" in line for line in rest(process))
