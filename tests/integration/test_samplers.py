"""Runs whose completions are drawn by processes that only sample (`distributed.samplers`).

1. A run with one learner and samplers is that of one process to the bit, whichever schedule it has; with several learners up to rounding.
2. With a lag, sampling goes on while learners learn.
3. Learners hold no sampler, samplers no learner.
4. A sampler that is killed is replaced, at whatever moment, and the run is the undisturbed one to the bit; one that ends again and again
   ends the run, with the reason. One that hangs is killed after `distributed.sampler_timeout`.
5. A learner that is killed ends the run with code 75 and leaves no process; resumed, it equals the undisturbed run to the bit.
6. So it does when the main process is killed.
7. A run goes on with other numbers of both; after each load all learners have the same weights.
8. A sampler that serves other weights stops the run.
9. Full fine-tuning, evaluations and replays have them, too.
"""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

import groupwise
from groupwise.core.errors import PolicyMismatchError, RunError
from groupwise.engine.distributed.learner import RankLearner
from groupwise.engine.distributed.messages import Cancel
from groupwise.engine.distributed.sampler import RankSampler
from groupwise.engine.distributed.sampler_workers import MAX_CONSECUTIVE_ENDS, SamplerWorkers
from groupwise.engine.distributed.worker_state import WorkerState
from groupwise.engine.sampler.torch_sampler import TorchSampler
from groupwise.training.assembly import start
from groupwise.training.review.replay import replay
from tests.forked_zygote import fork_peers
from tests.integration.test_learners import (
    NAMES,
    SOAK,
    assert_close,
    loaded,  # noqa: F401 — a fixture
    lost_by_a_kill,
    scaled,
)
from tests.integration.test_ranks import below, killed_after_a_checkpoint, metrics
from tests.integration.toy_run import STEPS, TOY, go_on, what_must_be_equal
from tests.processes import all_gone

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def forked(monkeypatch):
    fork_peers(monkeypatch)


def apart(runs: Path, learners: int = 1, samplers: int = 2, **training) -> dict:
    settings = scaled(runs, learners, **training)
    settings["run"]["threads"] = learners + samplers
    return {**settings, "distributed": {"learners": learners, "samplers": samplers}}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """By one process, with each lag."""
    found = {}
    for lag in (0, 1):
        runs = tmp_path_factory.mktemp(f"lag-{lag}")
        assert groupwise.rl(scaled(runs, 1, max_off_policy_steps=lag), TOY).exit_code == 0
        found[lag] = runs / "toy"
    return found


@pytest.mark.parametrize("lag", [pytest.param(0, marks=SOAK), 1])
def test_the_run_of_one_process_to_the_bit(alone, tmp_path, monkeypatch, lag):
    """Where nothing is sampled there are no keys and values, where nothing is learnt no optimiser."""
    found, made = {}, start._parts_of_halves

    def noted(learners, samplers, **more):
        for name, half in (("learners", learners), ("samplers", samplers)):
            found[name] = half.call_all_now("parts_there")
        return made(learners, samplers, **more)

    monkeypatch.setattr(start, "_parts_of_halves", noted)
    monkeypatch.setattr(WorkerState, "parts_there", parts_there, raising=False)
    assert groupwise.rl(apart(tmp_path, max_off_policy_steps=lag), TOY).exit_code == 0
    assert what_must_be_equal(tmp_path / "toy") == what_must_be_equal(alone[lag])
    assert found == {"learners": [(False, True)], "samplers": [(True, False)] * 2}


def parts_there(hosted: WorkerState) -> tuple[bool, bool]:
    return hosted.sampler is not None, hosted.learner is not None


def test_other_numbers_of_both(alone, tmp_path, loaded):  # noqa: F811
    groupwise.rl(apart(tmp_path, 2, 2, max_steps=2), TOY)
    assert metrics(tmp_path / "toy", *NAMES, steps=2) == pytest.approx(
        metrics(alone[0], *NAMES, steps=2), rel=1e-3, abs=1e-5
    )
    one = groupwise.rl(apart(tmp_path, 1, 1, max_steps=4), TOY, resume_from="toy@2")
    two = groupwise.rl(apart(tmp_path, 2, 3), TOY, resume_from="toy@4")
    assert (one.exit_code, two.exit_code) == (0, 0)
    assert [(len(each), len(set(each))) for each in loaded] == [(1, 1), (2, 1)]
    assert_close(alone[0], tmp_path / "toy")


@pytest.mark.parametrize("schedule", ["fixed_lag", pytest.param("free", marks=SOAK)])
def test_sampling_continues_while_learners_learn(tmp_path, monkeypatch, schedule):
    """The gradient of a step is not handed out before the groups of the next one have been sampled: else it would wait for ever."""
    sampled: set[int] = set()
    steps, one_more = [], asyncio.Condition()
    generate, learn = RankSampler.generate, RankLearner.forward_backward

    async def noted(self, request):
        found = await generate(self, request)
        async with one_more:
            sampled.add(request.draw)
            one_more.notify_all()
        return found

    async def held_up(self, *arguments):
        found = await learn(self, *arguments)
        steps.append(len(steps))
        wanted = {*range(2 * min(STEPS, steps[-1] + 2))}
        async with one_more:
            await one_more.wait_for(lambda: sampled >= wanted)
        return found

    monkeypatch.setattr(RankSampler, "generate", noted)
    monkeypatch.setattr(RankLearner, "forward_backward", held_up)
    settings = apart(tmp_path, max_off_policy_steps=1, schedule=schedule)
    settings["eval"] = {"before_and_after": False}
    assert groupwise.rl(settings, TOY).exit_code == 0
    assert steps == [*range(STEPS)]


class Lost:
    """Kills a sampler as it is asked for something for the nth time; what it was sent by then it never begins."""

    def __init__(self, monkeypatch, rank: int, name: str, *numbers: int) -> None:
        self.seen: list[int] = []
        """All processes that there were."""
        self.killed = 0
        asked, took, count = SamplerWorkers._start_call, SamplerWorkers._handle_message, 0

        def ask(samplers, to, what, arguments):
            nonlocal count
            hit = (to, what) == (rank, name)
            count += hit
            if not (hit and count in numbers):
                return asked(samplers, to, what, arguments)
            process = samplers._pids[rank]
            os.kill(process, signal.SIGSTOP)
            found = asked(samplers, to, what, arguments)
            os.kill(process, signal.SIGKILL)
            self.killed += 1
            return found

        def take(samplers, *message):
            took(samplers, *message)
            self.seen += [each for each in samplers.processes if each not in self.seen]

        monkeypatch.setattr(SamplerWorkers, "_start_call", ask)
        monkeypatch.setattr(SamplerWorkers, "_handle_message", take)


@pytest.mark.parametrize(("lag", "rank", "name", "numbers"), [
    (1, 0, "sampler.generate", (4, 9)), (0, 0, "sampler.load", (2,)), pytest.param(0, 1, "sampler.generate", (3,), marks=SOAK),
    pytest.param(1, 1, "sampler.load", (1, 4), marks=SOAK), pytest.param(1, 0, "sampler.fingerprint", (2,), marks=SOAK),
    pytest.param(0, 0, "sampler.generate", (1, 5, 9), marks=SOAK),
])  # fmt: skip
def test_a_killed_sampler_is_replaced(alone, tmp_path, monkeypatch, lag, rank, name, numbers):
    lost = Lost(monkeypatch, rank, name, *numbers)
    assert groupwise.rl(apart(tmp_path, max_off_policy_steps=lag), TOY).exit_code == 0
    assert lost.killed == len(numbers)
    assert what_must_be_equal(tmp_path / "toy") == what_must_be_equal(alone[lag])
    log = (tmp_path / "toy/log.txt").read_text()
    assert log.count(f"Sampler {rank + 1} of 2 (distributed.samplers) ended: SIGKILL") == len(
        numbers
    )
    assert len(lost.seen) == 2 + len(numbers)
    assert all_gone(lost.seen)


@pytest.mark.parametrize("much", [False, pytest.param(True, marks=SOAK)])
def test_samplers_that_hang_are_replaced(alone, tmp_path, monkeypatch, much):
    """One of them in what it computes, once; the other one is stopped from outside, also while it is sent more than it can hold."""
    stopped, asked, decode = [], SamplerWorkers._start_call, TorchSampler._decode_one_token
    hangs = tmp_path / "hangs"

    def ask(samplers, to, what, arguments):
        if (to, what) == (1, "sampler.generate") and not stopped:
            stopped.append(samplers._pids[1])
            os.kill(stopped[0], signal.SIGSTOP)
            for _ in range(10_000 * much):
                samplers._send_message(samplers._by_rank[1], Cancel(10**9))
        return asked(samplers, to, what, arguments)

    def hanging(sampler):
        if not (hangs.exists() or much):
            hangs.touch()
            time.sleep(1000)
        decode(sampler)

    monkeypatch.setattr(SamplerWorkers, "_start_call", ask)
    monkeypatch.setattr(TorchSampler, "_decode_one_token", hanging)
    settings = apart(tmp_path)
    settings["distributed"]["sampler_timeout"] = 2.0
    assert groupwise.rl(settings, TOY).exit_code == 0
    assert what_must_be_equal(tmp_path / "toy") == what_must_be_equal(alone[0])
    log = (tmp_path / "toy/log.txt").read_text()
    assert "2 of 2 (distributed.samplers) ended" in log
    if not much:
        assert hangs.exists()
        for sampler in (1, 2):
            assert (
                f"Sampler {sampler} of 2 (distributed.samplers) ended: it gave no sign of life"
                in log
            )
    assert all_gone(stopped)


def test_a_sampler_that_keeps_ending_ends_the_run(tmp_path, monkeypatch):
    lost = Lost(monkeypatch, 1, "sampler.generate", 2)
    resume = SamplerWorkers._resume

    def and_again(samplers, rank):
        again = rank == 1 and lost.killed > 0
        if again:
            os.kill(samplers._pids[rank], signal.SIGSTOP)
        resume(samplers, rank)
        if again:
            os.kill(samplers._pids[rank], signal.SIGKILL)

    monkeypatch.setattr(SamplerWorkers, "_resume", and_again)
    words = (
        rf"Sampler 2 of 2 (.|\n)*ended {MAX_CONSECUTIVE_ENDS} times (.|\n)*SIGKILL(.|\n)*--resume"
    )
    with pytest.raises(RunError, match=words) as ended:
        groupwise.rl(apart(tmp_path), TOY)
    assert ended.value.exit_code == 1
    assert len(lost.seen) == 2 + MAX_CONSECUTIVE_ENDS - 1
    assert all_gone(lost.seen)


@pytest.mark.parametrize(
    ("learners", "rank", "step", "moment"),
    [(1, 0, 3, "update"), pytest.param(2, 1, 2, "commit", marks=SOAK)],
)
def test_a_killed_learner_ends_the_run(alone, tmp_path, monkeypatch, learners, rank, step, moment):
    """The samplers, too."""
    before, processes, made = below(os.getpid()), [], start._parts_of_halves

    def noted(*halves, **more):
        processes.extend({*below(os.getpid())} - {*before})
        return made(*halves, **more)

    with monkeypatch.context() as patch:
        patch.setattr(start, "_parts_of_halves", noted)
        lost_by_a_kill(apart(tmp_path, learners), patch, rank, step, moment)
    assert len(processes) == learners + 2
    assert all_gone(processes)
    go_on(apart(tmp_path, learners))
    whole = alone[0]
    if learners > 1:
        assert groupwise.rl(apart(tmp_path / "whole", learners), TOY).exit_code == 0
        whole = tmp_path / "whole/toy"
    assert what_must_be_equal(tmp_path / "toy") == what_must_be_equal(whole)


def test_kill_9_of_the_main_process_leaves_nothing(alone, tmp_path):
    found = killed_after_a_checkpoint(tmp_path, lambda: groupwise.rl(apart(tmp_path), TOY))
    assert len(found) >= 3
    go_on(apart(tmp_path))
    assert what_must_be_equal(tmp_path / "toy") == what_must_be_equal(alone[0])


def test_a_sampler_that_serves_other_weights_stops_the_run(tmp_path, monkeypatch):
    asked, first = SamplerWorkers._start_call, []

    def ask(samplers, rank, name, arguments):
        if name == "sampler.load" and rank == 1:
            first.append(arguments)
            arguments = first[0]
        return asked(samplers, rank, name, arguments)

    monkeypatch.setattr(SamplerWorkers, "_start_call", ask)
    with pytest.raises(RunError, match="the samplers' weights"):
        groupwise.rl(apart(tmp_path), TOY)


def test_full_fine_tuning_evaluations_and_replays(tmp_path):
    settings = {
        kind: {**apart(tmp_path / kind, *numbers, max_steps=3), "lora": None}
        for kind, numbers in (("alone", (1, 0)), ("apart", (1, 2)))
    }
    for each in settings.values():
        each["algorithm"] = {"beta": 0.05}
        assert groupwise.rl(each, TOY).exit_code == 0
    one, other = (tmp_path / kind / "toy" for kind in settings)
    assert what_must_be_equal(one) == what_must_be_equal(other)
    assert replay("toy", runs_dir=tmp_path / "apart").exact
    results = [
        groupwise.evaluate(each, TOY, policy=str(other / "final"), output=tmp_path / f"{kind}.json")
        for kind, each in settings.items()
    ]
    assert results[0].rows == results[1].rows


def test_a_replaced_server_with_other_weights_stops_the_run(tmp_path, monkeypatch):
    Lost(monkeypatch, 1, "sampler.generate", 5)
    served = WorkerState.load_policy

    async def other(hosted, policy):
        return (await served(hosted, policy))[::-1]

    monkeypatch.setattr(WorkerState, "load_policy", other)
    with pytest.raises(PolicyMismatchError, match="Sampler 2"):
        groupwise.rl(apart(tmp_path), TOY)
