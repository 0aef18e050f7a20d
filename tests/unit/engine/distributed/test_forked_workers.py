"""Processes that host something, for real: each is started, killed and looked for.

1. Each rank answers its own calls, several at once; errors arrive as they were raised.
2. What fails in the factory fails in the main process in the same words.
3. Before it is told what to make, the zygote answers questions.
4. Whatever ends one process ends all, and fails every call with the reason; nothing hangs.
5. So does what cannot be read.
6. The end of the main process is the end of all, whatever they are doing; a zygote that still imports says nothing.
7. Nothing is left after `close`.
8. What is made sees no GPU; a zygote that may be asked about GPUs sees those that the main process does.
"""

import asyncio
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from groupwise.core.errors import ConfigError, NonFiniteError, RunError
from groupwise.engine.distributed.forked_workers import ForkedWorkers
from tests.forked_zygote import fork_zygotes
from tests.processes import all_gone
from tests.unit.engine.distributed.toys import FACTORY, HANGS


def started(count=2, **given) -> ForkedWorkers:
    ranks = ForkedWorkers()
    ranks.start()
    ranks.make_now(FACTORY, given, count)
    return ranks


@pytest.fixture(scope="module")
def shared():
    ranks = started(word="hello")
    yield ranks
    ranks.close()


@pytest.fixture
def own(monkeypatch):
    fork_zygotes(monkeypatch)
    ranks = started()
    yield ranks
    ranks.close()


async def test_each_rank_answers_for_itself(shared):
    assert await shared.call_all("who") == [*enumerate(shared.processes)]
    assert shared.call_all_now("who") == [*enumerate(shared.processes)]
    assert await shared.call_all("word") == ["hello", "hello"]
    assert await shared.call_each([(1, "add", (1, 2)), (0, "add", (3,))]) == [3, 3]


def test_the_zygote_becomes_a_supervisor_without_its_memory(shared):
    program = Path(f"/proc/{shared.zygote}/cmdline")
    while b"rank_supervisor" not in program.read_bytes():
        time.sleep(0.01)
    assert shared.call_all_now("word") == ["hello", "hello"]


def test_a_file_of_the_working_directory_hides_no_module(tmp_path, monkeypatch):
    (tmp_path / "random.py").write_text("raise RuntimeError('not the one that is meant')")
    monkeypatch.chdir(tmp_path)
    ranks = started(count=1)
    ranks.close()
    assert all_gone(ranks.processes)


async def test_several_calls_are_under_way_and_can_be_given_up(shared):
    waiting = [asyncio.create_task(shared.call(0, "wait", droppable=True)) for _ in range(2)]
    kept = asyncio.create_task(shared.call(0, "wait"))
    await asyncio.sleep(0)  # all have been sent before the next one
    assert await shared.call(0, "add", 1) == 1
    for task in (*waiting, kept):
        task.cancel()
    await asyncio.gather(*waiting, kept, return_exceptions=True)
    assert await shared.call(0, "given_up") == 2, "one was not to be given up"


async def test_errors_arrive_as_they_were_raised(shared):
    for error in (NonFiniteError("too fast"), ConfigError("a key"), OSError(28, "full", "a.txt")):
        with pytest.raises(type(error)) as raised:
            await shared.call(1, "fail", error)
        assert (raised.value.args, str(raised.value)) == (error.args, str(error))
    with pytest.raises(ZeroDivisionError) as raised:
        shared.call_all_now("fail", ZeroDivisionError("by zero"))
    assert "in fail" in raised.value.__notes__[0], "where it was raised"
    with pytest.raises(RunError, match="class of its own"):
        await shared.call(0, "lone_error")
    with pytest.raises(AttributeError, match="pickle"):
        await shared.call(0, "unsendable")
    with pytest.raises((AttributeError, pickle.PicklingError), match="pickle"):
        await shared.call(0, "add", lambda: 0)
    assert await shared.call(0, "add", 5) == 5


async def test_ctrl_c_is_for_the_main_process(shared):
    for process in (shared.zygote, *shared.processes):
        os.kill(process, signal.SIGINT)
    assert await shared.call_all("add", 2) == [2, 2]
    assert os.getpgid(shared.zygote) != os.getpgid(0)


async def test_an_unreadable_answer_ends_all_workers(own):
    waiting = asyncio.create_task(own.call(0, "wait"))
    await own.call(0, "add", 1)
    unread = r"cannot be read(.|\n)*No module named 'known_here_alone'(.|\n)*--resume"
    with pytest.raises(RunError, match=unread):
        await own.call(1, "unreadable_error")
    for call in (waiting, own.call(0, "add", 1)):
        with pytest.raises(RunError, match=unread):
            await call
    assert all_gone((own.zygote, *own.processes))
    with pytest.raises(ProcessLookupError):
        os.kill(own.zygote, 0)  # it was reaped, too


@pytest.mark.parametrize(("there", "sees_gpus"), [("0,1", True), ("0,1", False), ("", True)])
def test_forked_workers_see_no_gpu(monkeypatch, there, sees_gpus):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", there)
    ranks = ForkedWorkers(sees_gpus=sees_gpus)
    ranks.start()
    assert ranks.ask("os:getenv", "CUDA_VISIBLE_DEVICES") == (there if sees_gpus else "")
    ranks.make_now(FACTORY, {}, 1)
    assert ranks.call_all_now("environment", "CUDA_VISIBLE_DEVICES") == [""]
    ranks.close()


def test_a_factory_fails_in_its_own_words():
    with pytest.raises(ConfigError) as raised:
        started(error="run.processes is odd")
    assert str(raised.value) == "run.processes is odd"
    with pytest.raises(RunError, match=r"exit code 3(.|\n)*is full"):
        started(last_words="memory is full")


@pytest.mark.parametrize("victim", [0, 1, "zygote"])
async def test_the_end_of_one_is_the_end_of_all(own, victim):
    calls = [asyncio.create_task(own.call(rank, "wait")) for rank in range(2)]
    await own.call_all("add", 1)
    processes = (own.zygote, *own.processes)
    os.kill(own.zygote if victim == "zygote" else own.processes[victim], signal.SIGKILL)
    who = "process that holds the model" if victim == "zygote" else f"worker {victim + 1} of 2"
    for call in calls:
        with pytest.raises(
            RunError, match=rf"{who} ended: SIGKILL.*sampler\.max_num_seqs(.|\n)*--resume"
        ):
            await call
    with pytest.raises(RunError, match=who):
        await own.call(0, "add", 1)
    with pytest.raises(RunError, match=who):
        own.call_all_now("add", 1)
    assert all_gone(processes)


async def test_a_rank_that_computes_is_noticed_and_ended(own):
    stuck = asyncio.create_task(own.call(0, "stuck"))
    await own.call(1, "add")
    os.kill(own.processes[1], signal.SIGKILL)
    with pytest.raises(RunError, match=r"2 of 2 ended: SIGKILL(.|\n)*goes on"):
        await stuck
    assert all_gone(own.processes)


async def test_close_ends_all_processes_and_fails_waiting_calls():
    ranks = started()
    stuck = asyncio.create_task(ranks.call(0, "stuck"))
    await ranks.call(1, "add")
    processes = (ranks.zygote, *ranks.processes)
    ranks.close()
    assert all_gone(processes)
    with pytest.raises(RunError, match="closed"):
        await stuck
    with pytest.raises(RunError, match="closed"):
        await ranks.call(0, "add")
    ranks.close()


def test_a_zygote_answers_before_it_knows_what_to_make():
    ranks = ForkedWorkers("groupwise.core.types")
    ranks.start()
    assert ranks.ask("os:getpid") == ranks.zygote
    with pytest.raises(ConfigError, match="a key"):
        ranks.ask(FACTORY, "a key")
    with pytest.raises(AttributeError, match="pickle"):
        ranks.ask("os:getpid", lambda: 0)
    with pytest.raises(TypeError, match="pickle"):
        ranks.ask("threading:Lock")
    ranks.make_now(FACTORY, {"word": "made"}, 2)
    assert ranks.call_all_now("word") == ["made", "made"]
    ranks.close()
    lost = ForkedWorkers()
    lost.start()
    with pytest.raises(RunError, match="ended: exit code 3"):
        lost.ask("os:_exit", 3)
    lost.close()


async def test_a_wait_for_ranks_can_be_given_up():
    ranks = ForkedWorkers()
    ranks.start()
    making = asyncio.create_task(ranks.make(HANGS, {}, 2))
    assert ranks.ask("os:getpid"), "it was not told yet"
    await asyncio.sleep(0)
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    assert all_gone([ranks.zygote])
    with pytest.raises(RunError, match="closed"):
        await ranks.call(0, "add", 1)


MAIN = f"""
from groupwise.engine.distributed.forked_workers import ForkedWorkers
ranks = ForkedWorkers()
ranks.start()
ranks.make_now({FACTORY!r}, {{}}, 2)
print([ranks.zygote, *ranks.processes], flush=True)
ranks.call_all_now("stuck")
"""


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.soak(suite="engine"))]
)
def test_the_end_of_the_main_process_is_the_end_of_all(number):
    main = subprocess.Popen([sys.executable, "-c", MAIN], stdout=subprocess.PIPE, text=True)
    assert main.stdout is not None
    processes = json.loads(main.stdout.readline())
    main.send_signal(number)
    main.communicate()
    assert all_gone(processes)


IMPORTING = """
import os, sys, time
from groupwise.engine.distributed.forked_workers import ForkedWorkers
ranks = ForkedWorkers("torch")
ranks.start()
while ranks._process is None:
    time.sleep(0.001)
print(ranks.zygote, flush=True)
time.sleep(0.4)
"""


@pytest.mark.parametrize("ending", ["sys.exit(2)", "ranks.close()", "os.kill(os.getpid(), 9)"])
def test_a_zygote_that_still_imports_ends_silently_with_its_command(ending):
    command = [sys.executable, "-c", IMPORTING + ending]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    assert shown.stderr == ""
    assert all_gone([int(shown.stdout)])


async def test_the_first_error_in_the_order_of_ranks_is_raised(shared):
    calls = [(1, "add", (1,)), (0, "fail", (OSError("a"),)), (1, "fail", (OSError("b"),))]
    with pytest.raises(OSError, match="a"):
        await shared.call_each(calls)
    with pytest.raises(OSError, match="a"):
        shared.call_each_now(calls)
