"""Runs whose sampling and learning is done by ranks.

1. A run with two ranks is that of one process up to rounding; repeated, it is equal to the bit.
2. It resumes as every run does, after kill -9 of all its processes too, to the bit.
3. It resumes with other processes, with a warning; so does one that was recorded before there were any.
4. A rank that dies ends the run with a message; it can be resumed.
5. Supervised runs, other kinds of rollouts, full fine-tuning, evaluations, replays and profiles work likewise.
6. Nothing is left of the processes, however the run ends.
"""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import groupwise
from groupwise.cli.main import main
from groupwise.core.errors import RunError
from groupwise.engine.distributed.forked_workers import ForkedWorkers
from groupwise.runs.store import Store
from groupwise.training.assembly import start
from groupwise.training.loops import rl as loop
from groupwise.training.review.replay import replay
from tests.forked_zygote import fork_zygotes
from tests.integration.toy_run import (
    STEPS,
    TOY,
    begun_in_child,
    config,
    crash_at,
    go_on,
    ratios_of,
    what_must_be_equal,
)
from tests.processes import all_gone, is_gone

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
SOAK = pytest.mark.soak(suite="engine")

SFT = str(Path(__file__).with_name("sft_task.py"))
GAME = str(Path(__file__).resolve().parents[2] / "examples/03_guessing_game/task.py")


def ranked(runs: Path, processes: int = 2, **training) -> dict:
    settings = config(runs, **training)
    settings["run"] |= {"threads": processes, "processes": processes}
    settings["model"] |= {"dtype": "float32"}
    return settings


def supervised(runs: Path, processes: int, **training) -> dict:
    return {
        "model": {"name": "tiny", "dtype": "float32"},
        "training": {"max_steps": 4, "examples_per_step": 4, "learning_rate": 0.05, **training},
        "eval": {"eval_steps": 2},
        "run": {"name": "sft", "dir": str(runs), "threads": processes, "processes": processes},
    }


@pytest.fixture(scope="module", autouse=True)
def forked():
    with pytest.MonkeyPatch.context() as patch:
        fork_zygotes(patch)
        yield


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    runs = tmp_path_factory.mktemp("whole")
    assert groupwise.rl(ranked(runs), TOY).exit_code == 0
    return runs / "toy"


def metrics(folder: Path, *names: str, steps: int = STEPS) -> list[float]:
    with Store.open(folder / "run.db", readonly=True) as store:
        return [store.step_metrics(step)[name] for step in range(steps) for name in names]


def test_a_run_with_ranks_is_that_of_one_process(uninterrupted, tmp_path):
    groupwise.rl(ranked(tmp_path, processes=1), TOY)
    names = ("reward", "loss", "grad_norm", "completions/mean_length")
    assert metrics(uninterrupted, *names) == pytest.approx(
        metrics(tmp_path / "toy", *names), rel=1e-3, abs=1e-5
    )
    assert metrics(uninterrupted, "sampling/logprob_gap") == pytest.approx([0.0] * STEPS, abs=1e-4)
    alone = ratios_of(tmp_path / "toy")
    assert len(alone) > 100
    assert ratios_of(uninterrupted) == pytest.approx(alone, abs=1e-4)


def test_repeated_runs_are_equal(uninterrupted, tmp_path):
    """Also where the first rank is profiled, and by a replay."""
    settings = ranked(tmp_path)
    settings["run"]["profile"] = 1
    groupwise.rl(settings, TOY)
    assert what_must_be_equal(tmp_path / "toy") == what_must_be_equal(uninterrupted)
    trace = json.loads((tmp_path / "toy/profile/step-1.json").read_text())
    names = {event["name"] for event in trace["traceEvents"] if event.get("ph") == "X"}
    assert {"learner.forward_backward", "learner.update", "learner.publish"} <= names
    assert any(name.startswith("aten::") for name in names)
    assert replay("toy", runs_dir=uninterrupted.parent).exact


@SOAK
@pytest.mark.parametrize("number", [15, 35, 55])
def test_a_crash_of_the_main_process_leaves_nothing_and_can_be_resumed(
    uninterrupted, tmp_path, number
):
    assert crash_at(number, lambda: groupwise.rl(ranked(tmp_path), TOY)) == 17
    go_on(ranked(tmp_path))
    assert what_must_be_equal(tmp_path / "toy") == what_must_be_equal(uninterrupted)


def below(process: int) -> list[int]:
    """The processes that it has started, and theirs."""
    children = Path(f"/proc/{process}/task").glob("*/children")
    found = [int(word) for file in children for word in file.read_text().split()]
    return [*found, *(other for each in found for other in below(each))]


def killed_after_a_checkpoint(runs: Path, start: Callable[[], object]) -> list[int]:
    """Kill -9 of a run in a process of its own, once it has a checkpoint; the processes that there were below it."""
    process = begun_in_child(start)
    try:
        while not (runs / "toy/checkpoints/step-2").exists() and not is_gone(process):
            time.sleep(0.01)
        found = below(process)
    finally:
        os.kill(process, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL
    assert all_gone(found)
    return found


def test_kill_9_of_a_real_run_leaves_nothing_and_can_be_resumed(uninterrupted, tmp_path):
    found = killed_after_a_checkpoint(tmp_path, lambda: groupwise.rl(ranked(tmp_path), TOY))
    assert len(found) >= 3, "a zygote and two ranks"
    go_on(ranked(tmp_path))
    assert what_must_be_equal(tmp_path / "toy") == what_must_be_equal(uninterrupted)


def test_a_rank_that_dies_ends_the_run(uninterrupted, tmp_path, monkeypatch):
    """It goes on with as many processes, or with others, of which it warns."""
    processes: list[int] = []
    commit, made = loop.commit, start.start_training

    async def noted(*arguments):
        parts = await made(*arguments)
        assert isinstance(parts.ranks, ForkedWorkers)
        processes.extend((parts.ranks.zygote, *parts.ranks.processes))
        return parts

    def committed(run, *arguments):
        found = commit(run, *arguments)
        if run.step == 3:
            os.kill(processes[2], signal.SIGKILL)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(start, "start_training", noted)
        patch.setattr(loop, "commit", committed)
        with pytest.raises(RunError, match=r"worker 2 of 2 ended: SIGKILL(.|\n)*--resume"):
            groupwise.rl(ranked(tmp_path), TOY)
    assert all_gone(processes)
    plan = groupwise.rl(ranked(tmp_path, processes=1), TOY, resume=True, dry_run=True).summary
    assert any("run.processes was 2, is 1" in each for each in plan["plan"]["warnings"])
    assert plan["plan"]["layout"]["processes"] == 1
    go_on(ranked(tmp_path))
    assert what_must_be_equal(tmp_path / "toy") == what_must_be_equal(uninterrupted)


@pytest.mark.parametrize("policy", ["toy", pytest.param("base", marks=SOAK)])
def test_an_evaluation_has_ranks_too(uninterrupted, tmp_path, policy):
    found = []
    for processes in (1, 2):
        settings = ranked(uninterrupted.parent, processes)
        settings["eval"] = {"temperature": 1.0, "samples_per_prompt": 3}
        file = tmp_path / f"{processes}.json"
        result = groupwise.evaluate(settings, TOY, policy=policy, output=file)
        found.append([row["completion"] for row in result.rows])
    assert found[0] == found[1]


KINDS: dict[str, Any] = {
    "two stages, with a lag": (
        TOY,
        {"max_off_policy_steps": 1},
        {
            "rollout": {"type": "two_stage", "max_reasoning_length": 5, "max_answer_length": 3},
            "sampler": {"max_num_seqs": 8},
        },
    ),
    "games": (
        GAME,
        {},
        {
            "rollout": {"type": "environment", "max_turns": 2},
            "sampler": {"max_completion_length": 1},
        },
    ),
    "all weights": (TOY, {}, {"lora": None, "algorithm": {"type": "grpo", "beta": 0.1}}),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=SOAK if kind == "games" else ()) for kind in KINDS]
)
def test_every_kind_of_run_has_ranks(tmp_path, kind):
    task, training, more = KINDS[kind]
    folders = []
    for processes in (1, 2):
        runs = tmp_path / str(len(folders))
        groupwise.rl({**ranked(runs, processes, num_generations=16, **training), **more}, task)
        folders.append(runs / "toy")
    alone, one = folders
    names = ("reward", "completions/mean_length", "sampling/logprob_gap")
    assert len(set(metrics(one, "reward"))) > 1, "there is something to compare"
    assert metrics(one, *names) == pytest.approx(metrics(alone, *names), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(
    ("lora", "training"),
    [
        ({"r": 4, "alpha": 8}, {}),
        pytest.param({"r": 4, "alpha": 8}, {"packing": False}, marks=SOAK),
        pytest.param(None, {}, marks=SOAK),
    ],
    ids=["packed", "unpacked", "all weights"],
)
def test_a_supervised_run_has_ranks_too(tmp_path, lora, training):
    folders = []
    for processes in (1, 2):
        runs = tmp_path / str(len(folders))
        groupwise.sft({**supervised(runs, processes, **training), "lora": lora}, SFT)
        folders.append(runs / "sft")
    losses = []
    for folder in folders:
        with Store.open(folder / "run.db", readonly=True) as store:
            evaluated = [record.metrics["eval_loss"] for record in store.evaluations()]
            losses.append([store.step_metrics(step)["loss"] for step in range(4)] + evaluated)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


# --- signals


def command(runs: Path, *words: str) -> int:
    """The command in a process of its own, whose words go to a file."""
    file = runs / "config.yaml"
    file.write_text(json.dumps(ranked(runs)))

    def work() -> None:
        os.setsid()
        with (runs / "said").open("wb") as said:
            os.dup2(said.fileno(), 2)
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        os._exit(main(["rl", "-c", str(file), "-t", TOY, *words]))

    return begun_in_child(work)


def ended(runs: Path, process: int, code: int) -> str:
    """What it said, once it has ended with that code."""
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    said = (runs / "said").read_text()
    assert status == code, said
    assert json.loads((runs / "toy/summary.json").read_text())["state"] == "interrupted"
    return said


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=SOAK)]
)
def test_a_signal_to_all_of_its_processes_ends_a_real_run_cleanly(tmp_path, number, code):
    """As a terminal sends Ctrl-C, and a queue TERM: the step under way is saved."""
    process = command(tmp_path, "training.max_steps=10000", "run.save_steps=10000")
    steps = re.compile(r"step +(\d+)/10000")
    while not is_gone(process):
        if (tmp_path / "said").exists() and len(steps.findall((tmp_path / "said").read_text())) > 2:
            break
        time.sleep(0.01)
    processes = below(process)
    for each in (process, *processes):
        with suppress(ProcessLookupError):
            os.kill(each, number)
    last = max(map(int, steps.findall(ended(tmp_path, process, code))))
    assert [each.name for each in (tmp_path / "toy/checkpoints").glob("step-*")] == [f"step-{last}"]
    assert all_gone(processes)
