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
import time
from pathlib import Path

import pytest

from groupwise.errors import RewardWorkerError
from groupwise.rewards.pool import START_ATTEMPTS
from groupwise.rewards.scoring import GroupScore, ScoreRequest
from groupwise.rewards.workers import RewardWorkers

MODULE = Path(__file__).with_name("worker_rewards.py")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="found through /proc")
FINE = (4.0, 5.0)


def workers_for(*functions: str, time_limit: float = 20.0, workers: int = 1) -> RewardWorkers:
    arguments = {"functions": list(functions)}
    return RewardWorkers(f"{MODULE}:make", arguments, workers=workers, time_limit=time_limit)


def request(draw: int = 0, completions: tuple[str, ...] = ("four", "fiver"), **columns):
    count = len(completions)
    repeated = {name: [value] * count for name, value in columns.items()}
    return ScoreRequest(draw, ["p"] * count, list(completions), [[1]] * count, repeated, 0, 10)


def rewards(score: GroupScore):
    return tuple(member.reward for member in score.members)


def outcomes(score: GroupScore):
    return {member.outcome for member in score.members}


def reason(score: GroupScore) -> str:
    (found,) = {member.reason for member in score.members}
    return found or ""


def alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def gone(processes: list[int]) -> bool:
    deadline = time.monotonic() + 10
    while any(alive(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(alive(process) for process in processes)


def noted(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir()]


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


@pytest.mark.parametrize("count", [1, 3])
async def test_scores_do_not_depend_on_the_number_of_workers(closing, count):
    workers = closing(workers_for("fine", workers=count))
    calls = [workers.score(request(i, ("a" * i, "b"))) for i in range(12)]
    found = await asyncio.gather(*calls)
    assert [rewards(score) for score in found] == [(float(i), 1.0) for i in range(12)]


async def test_one_worker_takes_calls_in_their_order(closing, tmp_path):
    workers = closing(workers_for("keeps_order"))
    file = tmp_path / "order"
    calls = [workers.score(request(i, (str(i),), file=str(file))) for i in range(20)]
    await asyncio.gather(*calls)
    assert file.read_text().split() == [str(i) for i in range(20)]


def test_workers_outlive_an_event_loop():
    workers = workers_for("fine")
    first = asyncio.run(workers.score(request()))
    second = asyncio.run(workers.score(request()))
    asyncio.run(workers.close())
    assert rewards(first) == rewards(second) == FINE


async def test_large_columns_and_any_picklable_value_get_through(closing):
    workers = closing(workers_for("fine"))
    big = {"text": "x" * 5_000_000, "set": {1, 2}, "path": Path("a"), "bytes": b"\0\xff"}
    assert rewards(await workers.score(request(**big))) == FINE


async def test_environment_of_a_worker(closing):
    workers = closing(workers_for("tells_environment"))
    names = ["OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "TOKENIZERS_PARALLELISM"]
    notes = (await workers.score(request(names=names))).members[0].notes
    assert list(notes["found"].values()) == ["1", "", "false"]
    assert notes["torch"] is False


async def test_files_of_the_working_directory_are_found_after_pythons(
    closing, tmp_path, monkeypatch
):
    for name in ("random", "re", "code", "queue"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not the one that is meant')")
    (tmp_path / "groupwise_test_beside.py").write_text("BESIDE = 7.0")
    monkeypatch.chdir(tmp_path)
    workers = closing(workers_for("imports_what_is_beside"))
    assert rewards(await workers.score(request())) == (7.0, 7.0)


async def test_metrics(closing):
    workers = closing(workers_for("fine"))
    assert await workers.compute_metrics(["p"], ["c"], [{}, {}]) == {
        "n": 2,
        "bad": None,
        "shown": [1, 2],
    }
    with pytest.raises(RewardWorkerError, match="boom"):
        await workers.compute_metrics(["boom"], [], [])
    assert rewards(await workers.score(request())) == FINE


async def test_metrics_have_a_limit_of_their_own(closing):
    workers = closing(workers_for("fine", time_limit=0.05))
    await workers.start()
    with pytest.raises(RewardWorkerError, match=r"longer than 0\.5 s"):
        await workers.compute_metrics(["hang"], [], [])


async def test_cancelled_call_that_waits_is_left_out(closing, tmp_path):
    workers = closing(workers_for("hangs", time_limit=0.5))
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = asyncio.ensure_future(workers.score(request(folder=str(tmp_path / "a"))))
    second = asyncio.ensure_future(workers.score(request(folder=str(tmp_path / "b"))))
    await asyncio.sleep(0)
    second.cancel()
    assert outcomes(await first) == {"timed_out"}
    await workers.close()
    assert noted(tmp_path / "b") == []


# 2. hanging and dying


@pytest.mark.parametrize(
    "function", ["hangs", "ignores_signals", "blocks_the_loop", "holds_the_interpreter"]
)
@LINUX
async def test_hanging_call_is_timed_out_and_the_next_one_served(closing, tmp_path, function):
    workers = closing(workers_for("fine", function, time_limit=0.4))
    await workers.start()
    found = await workers.score(request(folder=str(tmp_path)))
    assert outcomes(found) == {"timed_out"}
    assert reason(found) == f"the call took longer than 0.4 s; `{function}` was running"
    (process,) = noted(tmp_path)
    with pytest.raises(ProcessLookupError):  # killed and reaped, no zombie
        os.kill(process, 0)
    assert await workers.compute_metrics(["p"], ["c"], []) != {}


@pytest.mark.parametrize(
    ("function", "how"),
    [("exits", "exit code 7"), ("crashes", "SIGSEGV"), ("is_killed", "SIGKILL, perhaps because")],
)
async def test_dying_worker_fails_its_call_and_is_replaced(closing, function, how):
    workers = closing(workers_for(function))
    for _ in range(2):
        found = await workers.score(request())
        assert outcomes(found) == {"failed"}
        assert how in reason(found)
        assert f"`{function}` was running" in reason(found)


@pytest.mark.parametrize("function", ["runs_out_of_memory", "interrupts"])
async def test_exceptions_of_any_kind_fail_the_call_and_keep_the_worker(closing, function):
    workers = closing(workers_for(function))
    for _ in range(2):
        assert outcomes(await workers.score(request())) == {"failed"}


@pytest.mark.parametrize("function", ["raises_half_a_character", "returns_half_a_character"])
async def test_text_that_cannot_be_written_is_escaped_in_reasons(closing, function):
    workers = closing(workers_for(function))
    found = await workers.score(request())
    assert outcomes(found) == {"failed"}
    assert "\\ud83d" in reason(found)
    reason(found).encode()
    with pytest.raises(RewardWorkerError, match=r"half: \\ud83d"):
        await workers.compute_metrics(["half"], [], [])


async def test_text_that_cannot_be_written_is_escaped_in_what_is_logged(closing):
    workers = closing(workers_for("notes_half_a_character"))
    found = await workers.score(request())
    assert rewards(found) == (1.0, 1.0)
    assert found.metrics == {"half \\ud83d": 1.0}
    long = hex(10**5000)
    assert found.members[0].notes == {"\\ud83d": {"\\ud83d": ["\\ud83d"], "long": long}}


async def test_score_that_cannot_be_written_fails_its_group_only(closing):
    workers = closing(RewardWorkers(f"{MODULE}:make_unwritable", {}))
    for _ in range(2):
        found = await workers.score(request())
        assert outcomes(found) == {"failed"}
        assert "scoring raised" in reason(found)


async def test_limit_holds_for_each_function_not_for_all_together(closing):
    workers = closing(workers_for("naps_once", "naps_again", "naps_a_third_time", time_limit=0.8))
    await workers.start()
    assert outcomes(await workers.score(request(nap=0.35))) == {"scored"}
    found = await workers.score(request(nap=600))
    assert outcomes(found) == {"timed_out"}
    assert "`naps_once` was running" in reason(found)


async def test_other_workers_go_on_while_one_hangs(closing, tmp_path):
    slow = closing(workers_for("hangs", time_limit=1.5, workers=2))
    await slow.start()
    started = time.monotonic()
    calls = [slow.score(request(folder=str(tmp_path))) for _ in range(2)]
    assert [outcomes(score) for score in await asyncio.gather(*calls)] == [{"timed_out"}] * 2
    assert time.monotonic() - started < 3  # together, not one after the other


# 3. nothing stays behind


@pytest.mark.parametrize("function", ["leaves_family_and_hangs", "leaves_family_and_exits"])
@LINUX
async def test_family_ends_with_its_worker(closing, tmp_path, function):
    workers = closing(workers_for(function, time_limit=0.6))
    await workers.start()
    found = await workers.score(request(folder=str(tmp_path)))
    assert outcomes(found) <= {"timed_out", "failed"}
    family = noted(tmp_path)
    assert len(family) >= 3
    assert gone(family)


def own_children() -> set[int]:
    """Processes of which this one is the parent, those that ended and were not reaped among them."""
    threads = Path("/proc/self/task").iterdir()
    return {int(child) for thread in threads for child in (thread / "children").read_text().split()}


@LINUX
async def test_every_worker_is_reaped_however_it_ended(tmp_path):
    before = own_children()
    fine = workers_for("fine")
    assert rewards(await fine.score(request())) == FINE
    assert own_children() > before
    hanging = workers_for("hangs", time_limit=0.3)
    assert outcomes(await hanging.score(request(folder=str(tmp_path)))) == {"timed_out"}
    dying = workers_for("crashes", workers=2)
    calls = [dying.score(request(draw)) for draw in range(3)]
    assert set().union(*map(outcomes, await asyncio.gather(*calls))) == {"failed"}
    for each in (fine, hanging, dying):
        await each.close()
    assert own_children() <= before


@LINUX
async def test_close_ends_what_a_reward_left_running(tmp_path):
    workers = workers_for("leaves_family_and_answers")
    assert outcomes(await workers.score(request(folder=str(tmp_path)))) == {"scored"}
    family = noted(tmp_path)
    assert all(alive(process) for process in family)
    await workers.close()
    assert gone(family)


@LINUX
async def test_close_does_not_wait_for_a_call(tmp_path, caplog):
    workers = workers_for("hangs", time_limit=600)
    call = asyncio.ensure_future(workers.score(request(folder=str(tmp_path))))
    while not noted(tmp_path):  # noqa: ASYNC110 — the event is in another process
        await asyncio.sleep(0.005)
    await workers.close()
    ended = await call
    assert outcomes(ended) == {"failed"}
    assert reason(ended) == "the reward workers were closed during the call"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert gone(noted(tmp_path))
    assert not [t for t in threading.enumerate() if t.name.startswith("reward-worker")]
    await workers.close()
    with pytest.raises(RewardWorkerError, match="closed"):
        await workers.score(request())


PARENT = """
import asyncio, os, signal, sys, time
from pathlib import Path
from groupwise.rewards.scoring import ScoreRequest
from groupwise.rewards.workers import RewardWorkers

async def main(module, function, folder):
    workers = RewardWorkers(f"{module}:make", {"functions": [function]}, time_limit=600)
    asked = ScoreRequest(0, ["p"], ["c"], [[1]], {"folder": [folder]}, 0, 1)
    call = asyncio.ensure_future(workers.score(asked))
    while len(list(Path(folder).iterdir())) < int(sys.argv[4]):
        await asyncio.sleep(0.005)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main(*sys.argv[1:4]))
"""


@pytest.mark.parametrize(
    ("function", "family"), [("leaves_family_and_hangs", 4), ("holds_the_interpreter", 1)]
)
@LINUX
def test_all_end_when_the_parent_is_killed(tmp_path, function, family):
    arguments = [str(MODULE), function, str(tmp_path), str(family)]
    subprocess.run([sys.executable, "-c", PARENT, *arguments], check=False, timeout=30)
    assert len(noted(tmp_path)) == family
    assert gone(noted(tmp_path))


# 4. the protocol


async def test_output_is_logged_and_standard_input_empty(closing, caplog):
    caplog.set_level(logging.INFO, "groupwise.rewards.output")
    workers = closing(workers_for("talks"))
    assert outcomes(await workers.score(request())) == {"scored"}
    await workers.close()
    assert "reward worker 0: said to stdout" in caplog.messages
    assert "reward worker 0: said to stderr" in caplog.messages


async def test_spam_neither_stalls_nor_floods(closing, caplog):
    caplog.set_level(logging.INFO, "groupwise.rewards.output")
    workers = closing(workers_for("spams"))
    assert outcomes(await workers.score(request())) == {"scored"}
    await workers.close()
    assert len(caplog.messages) < 250
    assert sum("left out" in message for message in caplog.messages) == 1
    assert max(map(len, caplog.messages)) < 2100


@pytest.mark.parametrize("function", ["comes_back_twice", "presses_ctrl_c"])
async def test_forked_copies_and_interrupts_do_not_disturb(closing, function):
    workers = closing(workers_for(function))
    for _ in range(3):
        assert rewards(await workers.score(request())) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("function", "part"),
    [("scribbles_on_the_line", "no readable answer"), ("closes_the_line", "closed its connection")],
)
async def test_rubbish_on_the_line_fails_the_call_and_replaces_the_worker(closing, function, part):
    workers = closing(workers_for(function))
    for _ in range(2):
        found = await workers.score(request())
        assert outcomes(found) == {"failed"}
        assert part in reason(found)


async def test_wrong_number_of_verdicts_fails_the_call(closing):
    workers = closing(RewardWorkers(f"{MODULE}:make_miscounting", {}))
    assert "1 verdicts for 2" in reason(await workers.score(request()))


async def test_value_that_cannot_be_sent_names_its_column(closing):
    workers = closing(workers_for("fine"))
    with pytest.raises(RewardWorkerError, match=r"column `hook`"):
        await workers.score(request(fine=1, hook=lambda: 1))


async def test_value_that_cannot_be_read_is_an_error(closing):
    class Unreadable:
        def __reduce__(self):
            return (int, ("not a number",))

    workers = closing(workers_for("fine"))
    with pytest.raises(RewardWorkerError, match="not a number"):
        await workers.score(request(value=Unreadable()))


# 5. starting


async def test_failing_factory_tells_why_at_start_and_at_every_call(closing):
    workers = closing(RewardWorkers(f"{MODULE}:make_badly", {}))
    with pytest.raises(RewardWorkerError, match="cannot be made"):
        await workers.start()
    with pytest.raises(RewardWorkerError, match="cannot be made"):
        await workers.score(request())


async def test_task_error_in_the_worker_is_passed_on(closing, tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_package\n")
    workers = closing(RewardWorkers(f"{broken}:make", {}))
    with pytest.raises(RewardWorkerError, match="pip install no_such_package"):
        await workers.score(request())


async def test_crash_at_start_is_repeated_a_bounded_number_of_times(closing, tmp_path):
    log = tmp_path / "log"
    workers = closing(RewardWorkers(f"{MODULE}:crash_at_start", {"log": str(log)}))
    for _ in range(2):
        with pytest.raises(RewardWorkerError, match=r"(?s)exit code 9.*last words"):
            await workers.score(request())
    assert len(log.read_text().split()) == START_ATTEMPTS


async def test_start_has_a_limit_of_its_own(closing):
    workers = closing(RewardWorkers(f"{MODULE}:hang_at_start", {}, start_limit=0.5))
    with pytest.raises(RewardWorkerError, match=r"not ready after 0\.5 s"):
        await workers.start()
