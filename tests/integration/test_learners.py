"""Runs with several learners, each with a model of its own (`distributed.learners`).

1. A run with two is that of one process up to rounding.
2. It goes on with another number of them, 2 → 1 → 2, and after each load all ranks have the same weights.
3. A rank that is killed ends the run with code 75 and leaves no process; resumed, it equals the undisturbed run to the bit.
4. So it does when the main process is killed.
5. Under torchrun it is the same run; a rank that is killed there ends all.
6. Supervised runs and full fine-tuning have them, too.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file

import groupwise
from groupwise.core.errors import WorkerLostError
from groupwise.engine.distributed.learner import RankLearner
from groupwise.training.assembly import start
from groupwise.training.loops import rl as loop
from tests.forked_zygote import fork_peers
from tests.integration.test_ranks import SFT, below, killed_after_a_checkpoint, metrics, supervised
from tests.integration.toy_run import (
    STEPS,
    TOY,
    begun_in_child,
    config,
    go_on,
    what_must_be_equal,
)
from tests.ports import free_port
from tests.processes import all_gone

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]
SOAK = pytest.mark.soak(suite="engine")


@pytest.fixture(scope="module", autouse=True)
def forked():
    with pytest.MonkeyPatch.context() as patch:
        fork_peers(patch)
        yield


def scaled(runs: Path, learners: int = 2, **training) -> dict:
    settings = config(runs, lr_scheduler_type="constant", **training)
    settings["run"]["threads"] = learners
    settings["model"] |= {"dtype": "float32"}
    return {**settings, "distributed": {"learners": learners}}


NAMES = ("reward", "loss", "grad_norm", "completions/mean_length")
WEIGHTS, ALL_WEIGHTS = "adapter_model.safetensors", "model.safetensors"


def assert_close(one: Path, other: Path, file: str = WEIGHTS) -> None:
    """Up to rounding: what two runs measured, where both are of the toy task, and their final weights."""
    if one.name == "toy":
        assert metrics(other, *NAMES) == pytest.approx(metrics(one, *NAMES), rel=1e-3, abs=1e-5)
    found, same = (load_file(folder / "final" / file) for folder in (one, other))
    assert found.keys() == same.keys()
    for name, tensor in found.items():
        assert same[name].numpy() == pytest.approx(tensor.numpy(), rel=1e-3, abs=1e-4), name


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    runs = tmp_path_factory.mktemp("alone")
    assert groupwise.rl(scaled(runs, 1), TOY).exit_code == 0
    return runs / "toy"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    runs = tmp_path_factory.mktemp("undisturbed")
    assert groupwise.rl(scaled(runs), TOY).exit_code == 0
    return runs / "toy"


@pytest.fixture
def loaded(monkeypatch) -> list[list[str]]:
    """Fingerprints of all learners' weights after each load."""
    found, load = [], RankLearner.load

    def noted(self, folder):
        load(self, folder)
        found.append(self._ranks.call_all_now("learner.fingerprint"))

    monkeypatch.setattr(RankLearner, "load", noted)
    return found


def test_two_learners_learn_what_one_process_does(alone, undisturbed):
    assert_close(alone, undisturbed)


def test_a_run_continues_with_another_number(alone, tmp_path, loaded):
    groupwise.rl(scaled(tmp_path, 2, max_steps=2), TOY)
    one = groupwise.rl(scaled(tmp_path, 1, max_steps=4), TOY, resume_from="toy@2")
    two = groupwise.rl(scaled(tmp_path, 2), TOY, resume_from="toy@4")
    assert (one.exit_code, two.exit_code) == (0, 0)
    assert [(len(each), len(set(each))) for each in loaded] == [(2, 1)]
    assert_close(alone, tmp_path / "toy")


class Killed:
    """Kills a rank when a step is committed, or in the middle of the next update."""

    def __init__(self, monkeypatch, rank: int, step: int, moment: str) -> None:
        self.processes: tuple[int, ...] = ()
        made, commit, update = start.start_training, loop.commit, RankLearner.update

        async def noted(*arguments):
            parts = await made(*arguments)
            self.processes = parts.ranks.processes
            return parts

        def kill(taken: int, here: str) -> None:
            if taken == step and here == moment:
                os.kill(self.processes[rank], signal.SIGKILL)

        def committed(run, *arguments):
            found = commit(run, *arguments)
            kill(run.step, "commit")
            self.step = run.step  # pyright: ignore[reportAttributeAccessIssue]
            return found

        async def updated(learner, params):
            kill(getattr(self, "step", 0), "update")
            return await update(learner, params)

        monkeypatch.setattr(start, "start_training", noted)
        monkeypatch.setattr(loop, "commit", committed)
        monkeypatch.setattr(RankLearner, "update", updated)


def lost_by_a_kill(
    settings: dict, patch: pytest.MonkeyPatch, rank: int, step: int, moment: str
) -> Killed:
    """A run ends with code 75 because a learner was killed."""
    killed = Killed(patch, rank, step, moment)
    which = rf"Learner {rank + 1} of {settings['distributed']['learners']}(.|\n)*SIGKILL"
    with pytest.raises(WorkerLostError, match=which) as lost:
        groupwise.rl(settings, TOY)
    assert (lost.value.exit_code, lost.value.code) == (75, "worker_lost")
    assert all_gone(killed.processes)
    return killed


@pytest.mark.parametrize(("rank", "step", "moment"), [
    (1, 3, "update"), pytest.param(0, 2, "commit", marks=SOAK), pytest.param(1, 1, "commit", marks=SOAK),
    pytest.param(0, 0, "update", marks=SOAK),
])  # fmt: skip
def test_a_killed_rank_ends_the_run(undisturbed, tmp_path, monkeypatch, rank, step, moment):
    with monkeypatch.context() as patch:
        lost_by_a_kill(scaled(tmp_path), patch, rank, step, moment)
    go_on(scaled(tmp_path))
    assert what_must_be_equal(tmp_path / "toy") == what_must_be_equal(undisturbed)


@SOAK
def test_kill_9_of_the_main_process_leaves_nothing(undisturbed, tmp_path):
    found = killed_after_a_checkpoint(tmp_path, lambda: groupwise.rl(scaled(tmp_path), TOY))
    assert len(found) >= 2
    go_on(scaled(tmp_path))
    assert what_must_be_equal(tmp_path / "toy") == what_must_be_equal(undisturbed)


def test_processes_that_are_started_together_are_its_learners(undisturbed, tmp_path):
    """As torchrun starts them, by words in the environment."""
    port = free_port()

    def be(rank: int) -> None:
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        os.environ |= {key: str(value) for key, value in own.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        assert groupwise.rl(scaled(tmp_path), TOY).exit_code == 0

    for process in [begun_in_child(partial(be, rank)) for rank in range(2)]:
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    assert what_must_be_equal(tmp_path / "toy") == what_must_be_equal(undisturbed)


@SOAK
@pytest.mark.parametrize("machines", [1, 2])
def test_torchrun_gives_the_same_run(undisturbed, tmp_path, machines):
    """With interpreters of their own."""
    for agent in torchrun(tmp_path, machines):
        talk, _ = agent.communicate(timeout=200)
        assert agent.returncode == 0, talk.decode()
    assert what_must_be_equal(tmp_path / "toy") == what_must_be_equal(undisturbed)


@SOAK
def test_under_torchrun_a_killed_rank_ends_all(undisturbed, tmp_path):
    (agent,) = torchrun(tmp_path, 1, "training.max_steps=10000")
    first = tmp_path / "toy/checkpoints/step-2"
    while not first.exists() and agent.poll() is None:
        time.sleep(0.01)
    processes = below(agent.pid)
    os.kill(the_one_with(b"RANK=1", processes), signal.SIGKILL)
    agent.communicate(timeout=100)
    assert agent.returncode != 0
    assert all_gone(processes)
    go_on(scaled(tmp_path))
    assert what_must_be_equal(tmp_path / "toy")["files"].keys() == (
        what_must_be_equal(undisturbed)["files"].keys()
    )


def the_one_with(word: bytes, processes: list[int]) -> int:
    """In its environment."""
    found: list[int] = []
    for each in processes:
        with suppress(OSError):  # it ends meanwhile
            if word in Path(f"/proc/{each}/environ").read_bytes().split(b"\0"):
                found.append(each)
    (process,) = found
    return process


def torchrun(runs: Path, machines: int, *words: str) -> list[subprocess.Popen[bytes]]:
    file = runs / "config.yaml"
    file.write_text(json.dumps(scaled(runs)))
    if machines == 1:
        meeting = ["--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    else:
        own = ("--master-addr=127.0.0.1", f"--master-port={free_port()}")
        meeting = ["--nproc-per-node=1", *own]
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={machines}", *meeting]
    run = ["-m", "groupwise", "rl", "-c", str(file), "-t", TOY, *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return [
        subprocess.Popen(
            [*command, f"--node-rank={rank}", "--local-addr=127.0.0.1", *run],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        for rank in range(machines)
    ]


@pytest.mark.parametrize("kind", [pytest.param("all weights", marks=SOAK), "sft"])
def test_other_trainings_have_learners_too(tmp_path, kind):
    folders = []
    for learners in (1, 2):
        runs = tmp_path / str(learners)
        if kind == "sft":
            settings = supervised(runs, 1)
            del settings["run"]["processes"]
            settings["run"]["threads"] = learners
            groupwise.sft({**settings, "distributed": {"learners": learners}}, SFT)
            folders.append(runs / "sft")
        else:
            groupwise.rl({**scaled(runs, learners), "lora": None}, TOY)
            folders.append(runs / "toy")
    assert_close(*folders, file=WEIGHTS if kind == "sft" else ALL_WEIGHTS)


assert STEPS == 5, "the resumes stop after steps 2 and 4"
