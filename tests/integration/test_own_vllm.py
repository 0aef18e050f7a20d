"""A run starts a server of vLLM for itself, keeps it alive, and ends it (`sampler.vllm_python`): a program that begins as vLLM's does."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import groupwise
from groupwise.core.errors import UsageError
from groupwise.engine.sampler.vllm.own import free_gpus
from groupwise.training.callbacks.base import Callback
from tests.fake_vllm_server import VllmServer
from tests.integration.toy_run import TOY, begun_in_child, config
from tests.processes import all_gone

FAKE = Path(__file__).parents[1] / "fake_vllm.py"
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What stands in the place of the Python of vLLM's environment."""
    monkeypatch.setenv("FAKE_VLLM_TOLD", str(tmp_path / "told"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    program = tmp_path / "vllm python"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" "$@"\n')
    program.chmod(0o755)
    with VllmServer(logprobs_mode="processed_logprobs") as server:
        monkeypatch.setenv("FAKE_VLLM_THERE", server.url)
        yield program


def settings(folder: Path, python: Path) -> dict[str, Any]:
    found = {**config(folder / "runs", max_steps=3), "eval": {"before_and_after": False}}
    found["model"]["dtype"] = "float32"
    found["sampler"] = {
        "engine": "vllm", "vllm_python": str(python), "max_completion_length": 6
    }  # fmt: skip
    return found


def told(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "told").read_text().splitlines()]


class Kills(Callback):
    """The first one."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if len(told(self.folder)) == 1:
            os.kill(told(self.folder)[0]["pid"], signal.SIGKILL)


def test_a_run_has_a_server_and_one_that_is_killed_is_begun_anew(
    tmp_path: Path, python: Path
) -> None:
    given = settings(tmp_path, python)
    given["callbacks"] = [{"name": f"{__name__}:Kills", "folder": str(tmp_path)}]
    result = groupwise.rl(given, TOY)
    assert (result.summary["state"], result.summary["steps"]) == ("finished", 3)
    servers = told(tmp_path)
    assert len(servers) == 2
    assert len({each["port"] for each in servers}) == 1
    for server in servers:
        assert (server["served_model_name"], server["max_lora_rank"]) == ("tiny", 8)
        assert (server["host"], server["enable_lora"]) == ("127.0.0.1", True)
    assert all_gone([each["pid"] for each in servers])


def test_one_that_cannot_begin_says_why(
    tmp_path: Path, python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("groupwise.engine.sampler.vllm.own.LOOKS_EVERY", 0.05)
    python.write_text("#!/bin/sh\necho no module named vllm >&2\nexit 1\n")
    with pytest.raises(UsageError, match=r"ended\..*\n.*module named vllm"):
        groupwise.rl(settings(tmp_path, python), TOY)
    with pytest.raises(UsageError, match="there is no program"):
        groupwise.rl(settings(tmp_path, tmp_path / "nothing"), TOY)


def test_a_run_that_is_killed_leaves_none(tmp_path: Path, python: Path) -> None:
    """Also one that waits for it."""
    record = tmp_path / "told"
    python.write_text(f'#!/bin/sh\necho "$$" > "{record}"\nexec sleep 1000\n')
    run = begun_in_child(lambda: groupwise.rl(settings(tmp_path, python), TOY))
    while not (record.exists() and record.read_text().endswith("\n")):
        assert os.waitpid(run, os.WNOHANG) == (0, 0)
        time.sleep(0.02)
    os.kill(run, signal.SIGKILL)
    os.waitpid(run, 0)
    assert all_gone([int(record.read_text())])


def test_it_has_the_gpus_that_the_learner_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert free_gpus(0, 1, 0.9) is None
    assert free_gpus(4, 2, 0.9) == ("1", "2")
    assert free_gpus(4, 1, 0.9, learners=3) == ("3",)
    assert free_gpus(1, 1, 0.5) == ("0",)
    with pytest.raises(UsageError, match="need 4 GPUs, and there are 3"):
        free_gpus(3, 2, 0.9, learners=2)
    with pytest.raises(UsageError, match="gpu_memory_utilization"):
        free_gpus(1, 1, 0.9)
    with pytest.raises(UsageError, match="tensor_parallel_size is 2"):
        free_gpus(2, 2, 0.9)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-7")
    assert free_gpus(2, 1, 0.9) == ("GPU-7",)
