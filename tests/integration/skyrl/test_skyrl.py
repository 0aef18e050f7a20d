"""`groupwise rl`, `sft` and `eval` with `model.backend: tinker` against SkyRL's server, which is neither edited nor patched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from groupwise.engine.backends.tinker import saved
from groupwise.runs.store import Store
from tests.integration.cookbook.workplace import MODEL
from tests.integration.sft_task import __file__ as LESSONS
from tests.integration.skyrl.gradients import __file__ as GRADIENTS
from tests.integration.skyrl.skyrl_server import (
    ENVIRONMENT,
    ROOT,
    SkyrlServer,
    client_packages,
    make_model,
)
from tests.processes import wait_until
from tests.required_programs import skip_or_fail

pytestmark = [pytest.mark.soak(suite="skyrl"), pytest.mark.timeout(900)]

TOY = str(Path(__file__).parents[1] / "toy_task.py")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not ENVIRONMENT.exists():
        skip_or_fail("scripts/real_environment.py skyrl makes the environment of these tests")
    folder = tmp_path_factory.mktemp("skyrl")
    make_model(folder)
    return folder


@pytest.fixture(scope="module")
def server(workplace: Path) -> Iterator[SkyrlServer]:
    one = SkyrlServer(workplace)
    try:
        one.begin()
        yield one
    finally:
        one.kill()


@pytest.fixture(scope="module")
def environment(workplace: Path) -> dict[str, str]:
    """That of a process with the tinker package that speaks with the server."""
    found = f"{client_packages(workplace)}:{ROOT}"
    settings = {"PYTHONPATH": found, "TINKER_API_KEY": "tml-none", "TINKER_TELEMETRY": "0"}
    return {**os.environ, **settings, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def settings_of(server: SkyrlServer, runs: Path, **more: Any) -> dict[str, Any]:
    model = {
        "name": MODEL,
        "backend": "tinker",
        "base_url": server.url,
        "tokenizer": str(server.folder / MODEL),
        "loss_reduction": "mean",
    }
    training = {
        "max_steps": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "max_grad_norm": None,
        "seed": 3,
    }
    found: dict[str, Any] = {
        "model": model,
        "lora": {"r": 4},
        "training": training,
        "run": {"name": "r", "dir": str(runs), "save_steps": 1},
    }
    for section, values in more.items():
        found[section] = {**found.get(section, {}), **values}
    return found


def rl_settings(server: SkyrlServer, runs: Path, **more: Any) -> dict[str, Any]:
    found = settings_of(server, runs, **more)
    found["training"] |= {"prompts_per_step": 2, "num_generations": 4}
    found |= {"sampler": {"max_completion_length": 12}, "rewards": {"in_process": True}}
    return found | {"eval": {"max_prompts": 3}}


def command(name: str, settings: Mapping[str, Any], folder: Path, task: str, *words: str) -> list[str]:  # fmt: skip
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(settings))  # which YAML contains
    usual = ["--config", str(file), "--task-module", task]
    return [sys.executable, "-m", "groupwise", name, *usual, *words]


def ran(words: list[str], environment: Mapping[str, str]) -> str:
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def curve(run: Path, name: str) -> list[float]:
    with Store.open(run / "run.db", readonly=True) as store:
        return [value for _, value in store.metrics((name,))[name]]


def test_mean_losses_of_skyrl_become_sums(
    server: SkyrlServer, environment: dict[str, str], tmp_path: Path
) -> None:
    """Tokens that are not trained change nothing, and two rows teach as much as both alone, whatever the loss."""
    said = ran([sys.executable, GRADIENTS, server.url, MODEL, str(tmp_path)], environment)
    for loss, changes in json.loads(said.splitlines()[-1]).items():
        assert abs(changes["short"]) > 1e-3, loss
        assert changes["long"] == pytest.approx(changes["short"], rel=0.02), loss
        summed = changes["short"] + changes["other"]
        assert changes["both"] == pytest.approx(summed, rel=0.05, abs=1e-3), loss


@pytest.mark.parametrize(
    "algorithm",
    [{"type": "dr_grpo"}, {"type": "grpo", "beta": 0.1}, {"type": "cispo"}, {"type": "gspo"}],
    ids=lambda algorithm: algorithm["type"],
)
def test_a_policy_learns_there_and_is_evaluated(
    server: SkyrlServer, environment: dict[str, str], tmp_path: Path, algorithm: dict[str, Any]
) -> None:
    settings = rl_settings(server, tmp_path, algorithm=algorithm)
    ran(command("rl", settings, tmp_path, TOY), environment)
    rewards = curve(tmp_path / "r", "reward")
    assert len(rewards) == 4
    assert rewards[-1] > rewards[0]
    words = command("eval", settings, tmp_path, TOY, "--policy", str(tmp_path / "r" / "final"))
    ran(words, environment)


def test_supervised_runs_train_there(
    server: SkyrlServer, environment: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_of(server, tmp_path, training={"examples_per_step": 4, "max_steps": 16})
    ran(command("sft", settings, tmp_path, LESSONS), environment)
    losses = curve(tmp_path / "r", "loss")
    assert losses[-1] < 0.95 * losses[0]


def test_a_run_continues_after_the_end_of_both_sides(
    server: SkyrlServer, environment: dict[str, str], tmp_path: Path
) -> None:
    settings = rl_settings(server, tmp_path)
    words = command("rl", settings, tmp_path, TOY)
    with (tmp_path / "loop.txt").open("wb") as output:
        loop = subprocess.Popen(words, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        reached = (tmp_path / "r" / "checkpoints" / "step-2").exists
        wait_until(reached, "a checkpoint of two steps", timeout_s=300.0)
    finally:
        os.kill(loop.pid, signal.SIGKILL)
        loop.wait(20)
    server.kill()
    server.begin()
    ran([*words, "--resume"], environment)
    assert len(curve(tmp_path / "r", "reward")) == 4
    assert saved.read(tmp_path / "r" / "final").updates == 4


def test_unsupported_keys_are_refused_by_name(
    server: SkyrlServer, environment: dict[str, str], tmp_path: Path
) -> None:
    more = {"model": {"loss_reduction": None}, "training": {"max_grad_norm": 1.0}}
    settings = rl_settings(server, tmp_path, **more, lora={"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]})  # fmt: skip
    words = command("rl", settings, tmp_path, TOY)
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=False)  # fmt: skip
    assert done.returncode != 0
    for key in ("model.loss_reduction", "training.max_grad_norm", "lora.target_modules"):
        assert key in done.stdout + done.stderr
