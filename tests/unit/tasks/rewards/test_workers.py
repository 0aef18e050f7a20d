"""The contract of reward workers, with real processes that really hang, crash, fork and spam.

1. A worker scores what the rubric scores, whatever the number of workers, in the order of the calls.
2. A hanging call is timed out and a dying one failed, with a reason; the next call is served.
3. Nothing that a reward started outlives its worker, and no worker outlives its parent.
4. Nothing that a reward prints or writes reaches the protocol.
5. What cannot start says why, and does not try for ever.
"""

import asyncio
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from groupwise.core.errors import RewardWorkerError
from groupwise.core.reward_call.request import GroupScore, ScoreRequest
from groupwise.tasks.rewards.pool import START_ATTEMPTS
from groupwise.tasks.rewards.workers import RewardWorkers
from tests.processes import all_gone, is_gone

MODULE = Path(__file__).with_name("worker_rewards.py")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="found through /proc")
FINE = (4.0, 5.0)


def workers_for(factory: str = "make", time_limit: float = 20.0, **more: Any) -> RewardWorkers:
    arguments = more.pop("arguments", {})
    return RewardWorkers(f"{MODULE}:{factory}", arguments, time_limit=time_limit, **more)


def request(
    *functions: str, draw: int = 0, completions: tuple[str, ...] = ("four", "fiver"), **columns
):
    """What these functions of `worker_rewards` are to score."""
    count = len(completions)
    given = {"functions": functions or ("fine",), **columns}
    repeated = {name: [value] * count for name, value in given.items()}
    return ScoreRequest(draw, ["p"] * count, list(completions), [[1]] * count, repeated, 0, 10)


def rewards(score: GroupScore):
    return tuple(member.reward for member in score.members)


def outcome_and_reason(score: GroupScore) -> tuple[str, str]:
    """How all members ended, and why."""
    (found,) = {(member.outcome, member.reason or "") for member in score.members}
    return found


def noted(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir()]


@pytest.fixture(scope="module")
def shared() -> Iterator[RewardWorkers]:
    """One worker for many tests; it outlives their event loops."""
    workers = workers_for()
    yield workers
    asyncio.run(workers.close())


@pytest.fixture(scope="module")
def hasty() -> Iterator[RewardWorkers]:
    """One that gives a function half a second."""
    workers = workers_for(time_limit=0.5)
    asyncio.run(workers.start())
    yield workers
    asyncio.run(workers.close())


@pytest.fixture
async def closing():
    made: list[RewardWorkers] = []

    def keep(workers: RewardWorkers) -> RewardWorkers:
        made.append(workers)
        return workers

    yield keep
    for workers in made:
        await workers.close()


# 1. the ordinary case


async def test_several_workers_score_as_one_does_and_hang_together(closing, shared, tmp_path):
    several = closing(workers_for(workers=2, time_limit=1.0))
    for workers in (shared, several):
        calls = [workers.score(request(draw=i, completions=("a" * i, "b"))) for i in range(12)]
        found = await asyncio.gather(*calls)
        assert [rewards(score) for score in found] == [(float(i), 1.0) for i in range(12)]
    asked = request("hangs", folder=str(tmp_path))
    calls = [asyncio.ensure_future(several.score(asked)) for _ in range(2)]
    while len(noted(tmp_path)) < 2:  # noqa: ASYNC110 — the event is in another process
        await asyncio.sleep(0.005)
    assert not any(call.done() for call in calls), "one after the other"
    assert {outcome_and_reason(score)[0] for score in await asyncio.gather(*calls)} == {"timed_out"}


async def test_one_worker_takes_calls_in_their_order(shared, tmp_path):
    file = tmp_path / "order"
    calls = [
        shared.score(request("keeps_order", completions=(str(i),), file=str(file)))
        for i in range(20)
    ]
    await asyncio.gather(*calls)
    assert file.read_text().split() == [str(i) for i in range(20)]


async def test_large_columns_and_any_picklable_value_get_through(shared):
    big = {"text": "x" * 5_000_000, "set": {1, 2}, "path": Path("a"), "bytes": b"\0\xff"}
    assert rewards(await shared.score(request(**big))) == FINE


async def test_files_of_the_working_directory_are_found_after_pythons(
    closing, tmp_path, monkeypatch
):
    for name in ("random", "re", "code", "queue"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not the one that is meant')")
    (tmp_path / "groupwise_test_beside.py").write_text("BESIDE = 7.0")
    monkeypatch.chdir(tmp_path)
    found = await closing(workers_for()).score(request("imports_what_is_beside"))
    assert rewards(found) == (7.0, 7.0)


async def test_metrics_fail_alone_and_have_a_limit_of_their_own(closing, shared):
    found = await shared.compute_metrics(["p"], ["c"], [{}, {}])
    assert found == {"n": 2, "bad": None, "shown": [1, 2]}
    for prompt, said in (("boom", "boom"), ("half", r"half: \\ud83d")):
        with pytest.raises(RewardWorkerError, match=said):
            await shared.compute_metrics([prompt], [], [])
    assert rewards(await shared.score(request())) == FINE
    with pytest.raises(RewardWorkerError, match=r"0\.5 s"):
        await closing(workers_for(time_limit=0.05)).compute_metrics(["hang"], [], [])


async def test_cancelled_call_that_waits_is_left_out(hasty, tmp_path):
    first = asyncio.ensure_future(hasty.score(request("hangs", folder=str(tmp_path))))
    second = asyncio.ensure_future(hasty.score(request("hangs", folder=str(tmp_path))))
    await asyncio.sleep(0)
    second.cancel()
    assert outcome_and_reason(await first)[0] == "timed_out"
    assert rewards(await hasty.score(request())) == FINE
    assert len(noted(tmp_path)) == 1


# 2. hanging and dying


@pytest.mark.parametrize(
    "function", ["ignores_signals", "blocks_the_loop", "holds_the_interpreter"]
)
@LINUX
async def test_hanging_call_is_timed_out_and_the_next_one_served(hasty, tmp_path, function):
    found = await hasty.score(request("fine", function, folder=str(tmp_path)))
    why = f"the call took longer than 0.5 s; `{function}` was running"
    assert outcome_and_reason(found) == ("timed_out", why)
    (process,) = noted(tmp_path)
    with pytest.raises(ProcessLookupError):  # killed and reaped, no zombie
        os.kill(process, 0)
    assert await hasty.compute_metrics(["p"], ["c"], []) != {}


async def test_limit_holds_for_each_function_not_for_all_together(hasty):
    asked = request("naps_once", "naps_once", "naps_a_third_time", nap=0.2)
    assert outcome_and_reason(await hasty.score(asked))[0] == "scored"


@pytest.mark.parametrize(("function", "how"), [
    ("exits", "exit code 7"), ("is_killed", "SIGKILL, perhaps because"),
    ("scribbles_on_the_line", "no readable answer"), ("closes_the_line", "closed its connection"),
    ("runs_out_of_memory", "MemoryError"), ("interrupts", "KeyboardInterrupt"),
    ("raises_half_a_character", "\\ud83d"), ("returns_half_a_character", "\\ud83d"),
    ("miscounts", "1 verdicts for 2"), ("gives_what_cannot_be_written", "scoring raised"),
])  # fmt: skip
async def test_a_worker_that_breaks_fails_only_its_own_call(shared, function, how):
    outcome, why = outcome_and_reason(await shared.score(request(function)))
    assert outcome == "failed"
    assert how in why
    assert function in why or "the scorer" in why or "scoring raised" in why
    why.encode()
    assert rewards(await shared.score(request())) == FINE


async def test_text_that_cannot_be_written_is_escaped_in_what_is_logged(shared):
    found = await shared.score(request("notes_half_a_character"))
    assert rewards(found) == (1.0, 1.0)
    assert found.metrics == {"half \\ud83d": 1.0}
    long = hex(10**5000)
    assert found.members[0].notes == {"\\ud83d": {"\\ud83d": ["\\ud83d"], "long": long}}


# 3. nothing stays behind


@pytest.mark.parametrize("function", ["leaves_family_and_hangs", "leaves_family_and_exits"])
@LINUX
async def test_family_ends_with_its_worker(hasty, tmp_path, function):
    found = await hasty.score(request(function, folder=str(tmp_path)))
    assert outcome_and_reason(found)[0] in {"timed_out", "failed"}
    family = noted(tmp_path)
    assert len(family) >= 3
    assert all_gone(family)


def own_children() -> set[int]:
    """Processes of which this one is the parent, those that ended and were not reaped among them."""
    threads = Path("/proc/self/task").iterdir()
    return {int(child) for thread in threads for child in (thread / "children").read_text().split()}


@LINUX
async def test_every_worker_is_reaped_however_it_ended(tmp_path):
    before = own_children()
    workers = workers_for(time_limit=0.5)
    assert rewards(await workers.score(request())) == FINE
    assert own_children() > before
    (tmp_path / "hung").mkdir()
    hung = await workers.score(request("hangs", folder=str(tmp_path / "hung")))
    assert [
        outcome_and_reason(hung)[0],
        outcome_and_reason(await workers.score(request("crashes")))[0],
    ] == [
        "timed_out",
        "failed",
    ]
    (tmp_path / "left").mkdir()
    left = await workers.score(request("leaves_family_and_answers", folder=str(tmp_path / "left")))
    assert outcome_and_reason(left)[0] == "scored"
    family = noted(tmp_path / "left")
    assert not any(map(is_gone, family))
    await workers.close()
    assert own_children() <= before
    assert all_gone(family)


@LINUX
async def test_close_does_not_wait_for_a_call(tmp_path, caplog):
    others = {t for t in threading.enumerate() if t.name.startswith("reward-worker")}
    workers = workers_for(time_limit=600)
    call = asyncio.ensure_future(workers.score(request("hangs", folder=str(tmp_path))))
    while not noted(tmp_path):  # noqa: ASYNC110 — the event is in another process
        await asyncio.sleep(0.005)
    await workers.close()
    assert outcome_and_reason(await call) == (
        "failed",
        "the reward workers were closed during the call",
    )
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert all_gone(noted(tmp_path))
    assert {t for t in threading.enumerate() if t.name.startswith("reward-worker")} <= others
    await workers.close()
    with pytest.raises(RewardWorkerError, match="closed"):
        await workers.score(request())


PARENT = """
import asyncio, os, signal, sys
from pathlib import Path
from groupwise.core.reward_call.request import ScoreRequest
from groupwise.tasks.rewards.workers import RewardWorkers

async def main(module, folder, *functions):
    workers = RewardWorkers(f"{module}:make", {}, workers=len(functions), time_limit=600)
    calls = []
    for name in functions:
        columns = {"folder": [folder], "functions": [[name]]}
        asked = ScoreRequest(0, ["p"], ["c"], [[1]], columns, 0, 1)
        calls.append(asyncio.ensure_future(workers.score(asked)))
    while len(list(Path(folder).iterdir())) < 5:
        await asyncio.sleep(0.005)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main(*sys.argv[1:]))
"""


@LINUX
def test_all_end_when_the_parent_is_killed(tmp_path):
    """Four of one worker, with the three that it started, and one that does not let go of the interpreter."""
    functions = ("leaves_family_and_hangs", "holds_the_interpreter")
    arguments = [str(MODULE), str(tmp_path), *functions]
    subprocess.run([sys.executable, "-c", PARENT, *arguments], check=False, timeout=30)
    assert len(noted(tmp_path)) == 5
    assert all_gone(noted(tmp_path))


# 4. the protocol


async def test_output_is_logged_and_neither_stalls_nor_floods(closing, caplog):
    caplog.set_level(logging.INFO, "groupwise.core.processes.output")
    workers = closing(workers_for())
    for function in ("talks", "spams"):
        assert outcome_and_reason(await workers.score(request(function)))[0] == "scored"
    await workers.close()
    assert "reward worker 0: said to stdout" in caplog.messages
    assert "reward worker 0: said to stderr" in caplog.messages
    assert len(caplog.messages) < 250
    assert sum("left out" in message for message in caplog.messages) == 1
    assert max(map(len, caplog.messages)) < 2100


@pytest.mark.parametrize("function", ["comes_back_twice", "presses_ctrl_c"])
async def test_forked_copies_and_interrupts_do_not_disturb(shared, function):
    for _ in range(3):
        assert rewards(await shared.score(request(function))) == (1.0, 1.0)


# 5. starting


async def test_a_reward_that_cannot_be_built_says_why_at_start_and_at_every_call(closing, tmp_path):
    workers = closing(workers_for("make_badly"))
    for call in (workers.start, workers.start, lambda: workers.score(request())):
        with pytest.raises(RewardWorkerError, match="cannot be made"):
            await call()
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_package\n")
    with pytest.raises(RewardWorkerError, match="install no_such_package"):
        await closing(RewardWorkers(f"{broken}:make", {})).score(request())


async def test_crash_at_start_is_repeated_a_bounded_number_of_times(closing, tmp_path):
    log = tmp_path / "log"
    workers = closing(workers_for("crash_at_start", arguments={"log": str(log)}))
    for _ in range(2):
        with pytest.raises(RewardWorkerError, match=r"(?s)exit code 9.*last words"):
            await workers.score(request())
    assert len(log.read_text().split()) == START_ATTEMPTS


async def test_start_has_a_limit_of_its_own(closing):
    with pytest.raises(RewardWorkerError, match=r"0\.5 s, at a load .* raise rewards\.start_limit"):
        await closing(workers_for("hang_at_start", start_limit=0.5)).start()


async def test_environment_of_a_worker(shared):
    names = ["OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "TOKENIZERS_PARALLELISM"]
    notes = (await shared.score(request("tells_environment", names=names))).members[0].notes
    assert list(notes["found"].values()) == ["1", "", "false"]
    assert (notes["torch"], notes["collects"]) == (False, True)
    assert notes["ends_first"], "where memory runs out"
