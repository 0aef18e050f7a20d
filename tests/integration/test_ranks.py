"""Runs whose sampling and learning is done by ranks.

1. A run with two ranks is that of one process up to rounding; repeated, it is equal to the bit.
2. It resumes as every run does, after kill -9 of all its processes too, to the bit.
3. It resumes with other processes, with a warning; so does one that was recorded before there were any.
4. A rank that dies ends the run with a message; it can be resumed.
5. Supervised runs, other kinds of rollouts, full fine-tuning, evaluations, replays and profiles work likewise.
6. Nothing is left of the processes, however the run ends.
7. Ctrl-C while they start does not wait until they have.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import groupwise
from groupwise import build
from groupwise.errors import RunError
from groupwise.loops import rl as loop
from groupwise.ranks import ahead
from groupwise.ranks.tree import Ranks
from groupwise.review.replay import replay
from groupwise.runs.store import Store
from tests.forked_zygote import fork_zygotes
from tests.integration.running import (
    STEPS,
    TOY,
    begun_in_child,
    config,
    crash_at,
    go_on,
    ratios_of,
    what_must_be_equal,
)
from tests.unit.ranks.toys import all_gone, is_gone

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

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
        "training": {
            "max_steps": 4,
            "examples_per_step": 4,
            "learning_rate": 0.05,
            **training,
        },
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


def metrics(folder: Path, *names: str) -> list[float]:
    with Store.open(folder / "run.db", readonly=True) as store:
        return [store.step_metrics(step)[name] for step in range(STEPS) for name in names]


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


@pytest.mark.parametrize("lag", [0, 1])
def test_repeated_runs_are_equal(uninterrupted, tmp_path, lag):
    groupwise.rl(ranked(tmp_path / "one", lag=lag), TOY)
    found = what_must_be_equal(tmp_path / "one" / "toy")
    if lag == 0:
        assert found == what_must_be_equal(uninterrupted)
        return
    groupwise.rl(ranked(tmp_path / "other", lag=lag), TOY)
    assert found == what_must_be_equal(tmp_path / "other" / "toy")


@pytest.mark.parametrize(
    "number", [15, pytest.param(35, marks=pytest.mark.soak(suite="engine")), 55]
)
def test_a_crash_of_the_main_process_leaves_nothing_and_can_be_resumed(
    uninterrupted, tmp_path, number
):
    def start():
        groupwise.rl(ranked(tmp_path), TOY)

    assert crash_at(number, start) == 17
    go_on(ranked(tmp_path))
    assert what_must_be_equal(tmp_path / "toy") == what_must_be_equal(uninterrupted)


def below(process: int) -> list[int]:
    """The processes that it has started, and theirs."""
    children = Path(f"/proc/{process}/task").glob("*/children")
    found = [int(word) for file in children for word in file.read_text().split()]
    return [*found, *(other for each in found for other in below(each))]


def test_kill_9_of_a_real_run_leaves_nothing_and_can_be_resumed(uninterrupted, tmp_path):
    main = begun_in_child(lambda: groupwise.rl(ranked(tmp_path), TOY))
    try:
        first = tmp_path / "toy/checkpoints/step-2"
        while not first.exists() and not is_gone(main):
            time.sleep(0.01)
        processes = below(main)
    finally:
        os.kill(main, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(main, 0)[1]) == -signal.SIGKILL
    assert len(processes) >= 3, "a zygote and two ranks"
    assert all_gone(processes)
    go_on(ranked(tmp_path))
    assert what_must_be_equal(tmp_path / "toy") == what_must_be_equal(uninterrupted)


class Killed:
    """Kills a rank after a step."""

    def __init__(self, monkeypatch, step):
        self.processes: tuple[int, ...] = ()
        commit, made = loop.commit, build.start_training

        async def noted(*arguments):
            parts = await made(*arguments)
            assert isinstance(parts.ranks, Ranks)
            self.processes = (parts.ranks.zygote, *parts.ranks.processes)
            return parts

        def committed(run, *arguments):
            found = commit(run, *arguments)
            if run.step == step:
                os.kill(self.processes[2], signal.SIGKILL)
            return found

        monkeypatch.setattr(build, "start_training", noted)
        monkeypatch.setattr(loop, "commit", committed)


def test_a_rank_that_dies_ends_the_run(uninterrupted, tmp_path, monkeypatch):
    killed = Killed(monkeypatch, step=3)
    with pytest.raises(RunError, match=r"Model worker 2 of 2 ended: SIGKILL(.|\n)*--resume"):
        groupwise.rl(ranked(tmp_path), TOY)
    assert all_gone(killed.processes)
    monkeypatch.undo()
    with pytest.MonkeyPatch.context() as patch:
        fork_zygotes(patch)
        go_on(ranked(tmp_path))
    assert what_must_be_equal(tmp_path / "toy") == what_must_be_equal(uninterrupted)


def test_a_resume_with_other_processes_says_so(tmp_path, monkeypatch):
    Killed(monkeypatch, step=3)
    with suppress(RunError):
        groupwise.rl(ranked(tmp_path), TOY)
    monkeypatch.undo()
    plan = groupwise.rl(ranked(tmp_path, processes=1), TOY, resume=True, dry_run=True)
    assert [each for each in plan.summary["plan"]["warnings"] if "processes" in each] == [
        "resumed with another layout: run.processes was 2, is 1; results agree up to rounding"
    ]
    assert plan.summary["plan"]["layout"]["processes"] == 1
    assert groupwise.rl(ranked(tmp_path, processes=1), TOY, resume=True).exit_code == 0


def test_a_run_that_was_recorded_before_there_were_processes(tmp_path):
    settings = ranked(tmp_path, processes=1)
    settings["training"]["max_steps"] = 2
    groupwise.rl(settings, TOY)
    with Store.open(tmp_path / "toy" / "run.db") as store:
        layout = store.get_meta()["layout"]
        assert layout.pop("processes") == 1
        store.set_meta({"layout": layout, "finished_at": None})
    assert replay("toy", runs_dir=tmp_path).exact
    settings["run"] |= {"processes": 2, "threads": 2}
    settings["training"]["max_steps"] = 3
    plan = groupwise.rl(settings, TOY, resume_from="toy@2", dry_run=True)
    assert any("run.processes was 1, is 2" in each for each in plan.summary["plan"]["warnings"])


def test_a_run_with_ranks_is_replayed_to_the_bit(uninterrupted):
    assert replay("toy", runs_dir=uninterrupted.parent).exact


def test_a_profile_shows_the_first_rank_and_changes_nothing(uninterrupted, tmp_path):
    settings = ranked(tmp_path)
    settings["run"]["profile"] = 1
    groupwise.rl(settings, TOY)
    assert what_must_be_equal(tmp_path / "toy") == what_must_be_equal(uninterrupted)
    trace = json.loads((tmp_path / "toy/profile/step-1.json").read_text())
    names = {event["name"] for event in trace["traceEvents"] if event.get("ph") == "X"}
    assert {"learner.forward_backward", "learner.update", "learner.publish"} <= names
    assert any(name.startswith("aten::") for name in names)


@pytest.mark.parametrize("policy", ["toy", "base"])
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
    "two stages": (
        TOY,
        {
            "rollout": {"type": "two_stage", "max_reasoning_length": 5, "max_answer_length": 3},
            "sampler": {"slots": 8},
        },
    ),
    "games": (
        GAME,
        {
            "rollout": {"type": "environment", "max_turns": 2},
            "sampler": {"max_completion_length": 1},
        },
    ),
    "all weights": (TOY, {"lora": None, "algorithm": {"type": "grpo", "beta": 0.1}}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_run_has_ranks(tmp_path, kind):
    task, more = KINDS[kind]
    folders = []
    for processes in (1, 2, 2):
        runs = tmp_path / str(len(folders))
        groupwise.rl({**ranked(runs, processes, num_generations=16), **more}, task)
        folders.append(runs / "toy")
    alone, one, other = folders
    names = ("reward", "completions/mean_length", "sampling/logprob_gap")
    assert len(set(metrics(one, "reward"))) > 1, "there is something to compare"
    assert metrics(one, *names) == pytest.approx(metrics(alone, *names), rel=1e-3, abs=1e-5)
    assert what_must_be_equal(one) == what_must_be_equal(other)


@pytest.mark.parametrize(
    ("lora", "training"),
    [({"r": 4, "alpha": 8}, {}), ({"r": 4, "alpha": 8}, {"packing": False}), (None, {})],
    ids=["packed", "unpacked", "all weights"],
)
def test_a_supervised_run_has_ranks_too(tmp_path, lora, training):
    folders = []
    for processes in (1, 2, 2):
        runs = tmp_path / str(len(folders))
        groupwise.sft({**supervised(runs, processes, **training), "lora": lora}, SFT)
        folders.append(runs / "sft")
    alone, one, other = folders
    assert what_must_be_equal(one) == what_must_be_equal(other)
    losses = []
    for folder in (alone, one):
        with Store.open(folder / "run.db", readonly=True) as store:
            evaluated = [record.metrics["eval_loss"] for record in store.evaluations()]
            losses.append([store.step_metrics(step)["loss"] for step in range(4)] + evaluated)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


# --- with fresh interpreters, as a user has them --------------------------------------------------


def started(runs: Path, *words: str) -> subprocess.Popen[bytes]:
    runs.mkdir(exist_ok=True)
    settings = runs / "config.yaml"
    settings.write_text(json.dumps(ranked(runs)))
    command = [sys.executable, "-m", "groupwise", "rl", "-c", str(settings), "-t", TOY, *words]
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )


def wait_for(what, main: subprocess.Popen[bytes], patience: float = 90.0) -> None:
    deadline = time.monotonic() + patience
    while not what() and main.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_all_of_its_processes_ends_a_real_run_cleanly(tmp_path, number, code):
    """As a terminal sends Ctrl-C, and a queue TERM: the step under way is saved."""
    main = started(tmp_path, "training.max_steps=10000", "run.save_steps=10000")
    assert main.stderr is not None
    steps = re.compile(rb"step +(\d+)/10000")
    seen = b""
    while len(steps.findall(seen)) < 3:
        seen += os.read(main.stderr.fileno(), 1 << 16)
        assert main.poll() is None, seen.decode()
    processes = below(main.pid)
    for each in (main.pid, *processes):
        with suppress(ProcessLookupError):
            os.kill(each, number)
    _, talk = main.communicate(timeout=60)
    assert main.returncode == code, (seen + talk).decode()
    assert json.loads((tmp_path / "toy/summary.json").read_text())["state"] == "interrupted"
    last = max(int(step) for step in steps.findall(seen + talk))
    assert [each.name for each in (tmp_path / "toy/checkpoints").glob("step-*")] == [f"step-{last}"]
    assert all_gone(processes)


@pytest.mark.parametrize("command", ["rl", "sft", "evaluate"])
def test_ctrl_c_does_not_wait_for_ranks_that_are_starting(command, tmp_path, monkeypatch):
    def hangs(*_, **__):
        os.kill(os.getppid(), signal.SIGINT)
        signal.pause()

    started: list[Ranks] = []

    def noted():
        started.append(take())
        return started[-1]

    take = ahead.take
    monkeypatch.setattr(ahead, "take", noted)
    for kind in ("training", "supervised", "serving"):
        monkeypatch.setitem(build._MAKERS, kind, hangs)
    settings = supervised(tmp_path, 2) if command == "sft" else ranked(tmp_path)
    task = SFT if command == "sft" else TOY
    with pytest.raises(KeyboardInterrupt):
        getattr(groupwise, command)(settings, task)
    assert all_gone([ranks.zygote for ranks in started])
    if command != "evaluate":
        (summary,) = tmp_path.glob("*/summary.json")
        assert json.loads(summary.read_text())["state"] == "interrupted"
        monkeypatch.undo()
        assert getattr(groupwise, command)(settings, task, resume=True).exit_code == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ctrl_c_ends_a_real_run_whose_ranks_are_starting(tmp_path):
    main = started(tmp_path)
    wait_for(lambda: below(main.pid), main)
    processes = below(main.pid)
    os.kill(main.pid, signal.SIGINT)
    _, talk = main.communicate(timeout=60)
    assert main.returncode == 130, talk.decode()
    assert json.loads((tmp_path / "toy/summary.json").read_text())["state"] == "interrupted"
    assert all_gone(processes)
