"""`groupwise rl`, `sft` and `eval` with `model.backend: tinker`, against a real server whose Tinker protocol is used by the real client.

1. The run is the one that this machine would have made with the same seeds: the same draws, and the same losses up to rounding.
2. A loop that is killed goes on from what the service saved, with its optimiser, and ends as it would have.
3. Supervised runs train and evaluate there, and evaluations answer from saved weights.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import groupwise
from groupwise.core.errors import ModelError
from groupwise.core.types import Completion, GroupRequest
from groupwise.engine.backends.tinker import saved
from groupwise.engine.sampler.torch_sampler import TorchSampler
from groupwise.runs.store import Store
from groupwise.tasks.rollouts.seeds import derive
from tests.integration.server.server_process import Server, running
from tests.integration.sft_task import __file__ as LESSONS
from tests.processes import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),  # loops begin in processes of their own, and an engine beside them
    # The tinker package leaves sockets open when its client is closed; `key` has them collected here, not in another test.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

TOY = str(Path(__file__).parents[1] / "toy_task.py")
ROOT = Path(__file__).parents[3]
STEPS = 4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("served") / "output") as process:
        yield process


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TINKER_API_KEY", "tml-none")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    yield
    gc.collect()


def config_of(runs: Path, server: Server | None = None, **more: Any) -> dict[str, Any]:
    service = {} if server is None else {"backend": "tinker", "base_url": server.url}
    configuration: dict[str, Any] = {
        "model": {"name": "tiny", **service},
        "lora": {"r": 4},
        "sampler": {"max_completion_length": 6},
        "training": {
            "max_steps": STEPS,
            "prompts_per_step": 2,
            "num_generations": 4,
            "learning_rate": 1.0,
            "lr_scheduler_type": "constant",
            "adam_epsilon": 1.0,  # an update as large as its gradient: no rounding decides on a sign
            "max_grad_norm": None,
            "seed": 3,
        },
        "rewards": {"in_process": True},
        "eval": {"max_prompts": 3},
        "run": {"name": "r", "dir": str(runs), "save_steps": 2},
    }
    for section, values in more.items():
        configuration[section] = {**configuration.get(section, {}), **values}
    return configuration


def seeds_of_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this machine's sampler draw with the seeds that the service derives from the first member's."""
    generate = TorchSampler.generate

    async def derived(self: TorchSampler, request: GroupRequest) -> tuple[Completion, ...]:
        first = request.seeds[0] % 2**63
        seeds = tuple(derive("verbs", first, index) for index in range(len(request.seeds)))
        drawn = await generate(self, replace(request, seeds=seeds))
        return tuple(
            replace(completion, seed=seed)
            for completion, seed in zip(drawn, request.seeds, strict=True)
        )

    monkeypatch.setattr(TorchSampler, "generate", derived)


def tokens_of(run: Path) -> list[tuple[int, tuple[int, ...]]]:
    with Store.open(run / "run.db", readonly=True) as store:
        return [
            (group.draw, rollout.completion_ids)
            for record in store.steps()
            for group in store.groups(record.step)
            for rollout in group.rollouts
        ]


NAMES = ("reward", "loss", "loss/policy", "loss/kl", "grad_norm", "ratio", "kl")
"""Metrics that do not depend on the time that a step took."""


def numbers_of(run: Path) -> dict[str, list[float]]:
    with Store.open(run / "run.db", readonly=True) as store:
        curves = store.metrics(NAMES)
    return {name: [value for _, value in curve] for name, curve in curves.items()}


def assert_equal_numbers(run: Path, other: Path) -> None:
    mine, others = numbers_of(run), numbers_of(other)
    assert {"loss", "grad_norm"} <= mine.keys() == others.keys()
    for (
        name,
        values,
    ) in mine.items():  # rows are cut up otherwise there, and bfloat16 rounds to 1 in 256
        assert values == pytest.approx(others[name], rel=0.02, abs=1e-3), name


@pytest.mark.parametrize(
    "algorithm",
    [{"type": "dr_grpo"}, {"type": "grpo", "beta": 0.1}],
    ids=["ppo", "custom"],
)
def test_the_run_is_that_of_this_machine(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: dict[str, Any]
) -> None:
    there = groupwise.rl(config_of(tmp_path / "there", server, algorithm=algorithm), TOY).folder
    with monkeypatch.context() as patched:
        seeds_of_the_service(patched)
        here = groupwise.rl(config_of(tmp_path / "here", algorithm=algorithm), TOY).folder
    assert tokens_of(there) == tokens_of(here)
    assert_equal_numbers(there, here)


def test_a_killed_loop_continues_with_the_services_state(server: Server, tmp_path: Path) -> None:
    whole = groupwise.rl(config_of(tmp_path / "whole", server), TOY).folder
    file = tmp_path / "config.yaml"
    settings = config_of(tmp_path / "killed", server, run={"name": "killed", "save_steps": 1})
    file.write_text(json.dumps(settings))  # which YAML contains
    words = [sys.executable, "-m", "groupwise", "rl", "--config", str(file), "--task-module", TOY]
    loop = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    run = tmp_path / "killed" / "killed"
    wait_until((run / "checkpoints" / "step-2").exists, "a checkpoint of two steps")
    os.kill(loop.pid, signal.SIGKILL)
    loop.communicate()
    resumed = groupwise.rl(settings, TOY, resume=True)
    assert resumed.exit_code == 0
    assert tokens_of(run) == tokens_of(whole)
    assert numbers_of(run) == numbers_of(whole)
    assert saved.read(run / "final").updates == STEPS


def test_the_config_that_ships_runs(server: Server, tmp_path: Path) -> None:
    words = [
        *("model.name=tiny", f"model.base_url={server.url}", f"run.dir={tmp_path}"),
        *("training.max_steps=1", "eval.before_and_after=false", "task.train_size=8"),
    ]
    ended = groupwise.rl(ROOT / "configs/tinker.yaml", "sort_words", overrides=words)
    assert (ended.exit_code, ended.summary["state"]) == (0, "finished")
    other = ["model.name=other", "model.tokenizer=tiny"]
    with pytest.raises(ModelError, match=r"does not have\. It has: .*tiny"):
        groupwise.rl(ROOT / "configs/tinker.yaml", "sort_words", overrides=[*words, *other])


def test_supervised_runs_train_there_and_are_evaluated(server: Server, tmp_path: Path) -> None:
    def settings(runs: Path, server: Server | None = None) -> dict[str, Any]:
        configuration = config_of(runs, server)
        kept = ("max_steps", "learning_rate", "lr_scheduler_type", "adam_epsilon", "seed")
        training = {key: configuration["training"][key] for key in kept} | {"examples_per_step": 4}
        return {key: configuration[key] for key in ("model", "lora", "run")} | {
            "training": training
        }

    there = groupwise.sft(settings(tmp_path / "there", server), LESSONS).folder
    here = groupwise.sft(settings(tmp_path / "here"), LESSONS).folder
    assert_equal_numbers(there, here)
    assert saved.read(there / "final").updates == STEPS

    # Reinforcement learning starts from there, and an evaluation answers from its checkpoint.
    config = config_of(tmp_path / "further", server, training={"max_steps": 1})
    further = groupwise.rl(config, TOY, init_from=str(there)).folder
    result = groupwise.evaluate(config, TOY, policy=str(further / "final"))
    assert result.rows
