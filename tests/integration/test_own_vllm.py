"""A run starts a server of vLLM for itself, keeps it alive, and ends it (`sampler.vllm_python`): a program that begins as vLLM's does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import groupwise
from groupwise.errors import UsageError
from groupwise.sampler.vllm.own import gpus_beside
from tests.integration.running import STEPS, TOY, config

FAKE = Path(__file__).parents[1] / "fake_vllm.py"


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What stands in the place of the Python of vLLM's environment."""
    monkeypatch.setenv("FAKE_VLLM_TOLD", str(tmp_path / "told"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    program = tmp_path / "vllm python"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" "$@"\n')
    program.chmod(0o755)
    return program


def settings(folder: Path, python: Path, **sampler: Any) -> dict[str, Any]:
    found = config(folder / "runs")
    found["model"]["dtype"] = "float32"
    found["sampler"] = {
        "engine": "vllm", "vllm_python": str(python), "max_completion_length": 6, **sampler
    }  # fmt: skip
    return found


def told(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "told").read_text().splitlines()]


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "Z"
    except FileNotFoundError:
        return True


def test_a_run_has_a_server_and_ends_it(tmp_path: Path, python: Path) -> None:
    result = groupwise.rl(settings(tmp_path, python), TOY)
    assert result.summary["state"] == "finished"
    (server,) = told(tmp_path)
    assert (server["served_model_name"], server["max_lora_rank"]) == ("tiny", 8)
    assert (server["host"], server["enable_lora"]) == ("127.0.0.1", True)
    assert gone(server["pid"])


def test_one_that_is_killed_is_begun_anew(tmp_path: Path, python: Path) -> None:
    (tmp_path / "killing.py").write_text(
        f"""\
import json, os, pathlib, signal
from groupwise.callbacks.base import Callback
class Kills(Callback):
    def on_step_end(self, *_, **__):
        lines = pathlib.Path({str(tmp_path / "told")!r}).read_text().splitlines()
        if len(lines) == 1:
            os.kill(json.loads(lines[0])["pid"], signal.SIGKILL)
"""
    )
    given = settings(tmp_path, python)
    given["callbacks"] = [f"{tmp_path}/killing.py:Kills"]
    result = groupwise.rl(given, TOY)
    assert (result.summary["state"], result.summary["steps"]) == ("finished", STEPS)
    first, second = told(tmp_path)
    assert first["port"] == second["port"]
    assert gone(second["pid"])


def test_one_that_cannot_begin_says_why(tmp_path: Path, python: Path) -> None:
    python.write_text("#!/bin/sh\necho no module named vllm >&2\nexit 1\n")
    with pytest.raises(UsageError, match=r"ended. Its last words.*\n.*no module named vllm"):
        groupwise.rl(settings(tmp_path, python), TOY)
    with pytest.raises(UsageError, match="there is no program"):
        groupwise.rl(settings(tmp_path, tmp_path / "nothing"), TOY)


def test_a_run_that_is_killed_leaves_none(tmp_path: Path, python: Path) -> None:
    words = [
        f"sampler.{name}={json.dumps(value)}"
        for name, value in settings(tmp_path, python)["sampler"].items()
    ]
    run = subprocess.Popen(
        [sys.executable, "-m", "groupwise", "rl", "--task-module", TOY, "model.name=tiny", "lora.r=4",
         "training.max_steps=100000", *words],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    record = tmp_path / "told"
    while not (record.exists() and record.read_text().endswith("\n")):
        assert run.poll() is None
        time.sleep(0.05)
    (server,) = told(tmp_path)
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    while not gone(server["pid"]):
        time.sleep(0.05)


def test_it_has_the_gpus_that_the_learner_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus_beside(0, 1, 0.9) is None
    assert gpus_beside(4, 2, 0.9) == ("1", "2")
    assert gpus_beside(4, 1, 0.9, learners=3) == ("3",)
    assert gpus_beside(1, 1, 0.5) == ("0",)
    with pytest.raises(UsageError, match="need 4 GPUs, and there are 3"):
        gpus_beside(3, 2, 0.9, learners=2)
    with pytest.raises(UsageError, match="on which the run learns, too"):
        gpus_beside(1, 1, 0.9)
    with pytest.raises(UsageError, match="tensor_parallel_size is 2, but beside"):
        gpus_beside(2, 2, 0.9)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-7")
    assert gpus_beside(2, 1, 0.9) == ("GPU-7",)
