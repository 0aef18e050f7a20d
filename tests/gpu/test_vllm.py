"""A run's own vLLM server on the learner's GPU: `make gpu`.

1. Another process maps the learner's weights by their handles, as vLLM's weight-transfer engine `ipc` does.
2. vLLM itself sleeps while the run learns, and takes all weights; skipped unless GROUPWISE_VLLM_PYTHON names an environment with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import groupwise
from groupwise.engine.models.tiny import tiny_model
from groupwise.engine.sampler.servers.witness import Witness
from groupwise.engine.sampler.weights import ServedModel
from tests.integration.real_vllm.real_server import PYTHON, write_model
from tests.integration.toy_run import STEPS, TOY, config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU here"),
]
MAPS = """\
import json, pickle, sys
from base64 import b64decode
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor
update = json.load(sys.stdin)
gpu = str(torch.cuda.get_device_properties(0).uuid)
sums = []
for handle in pickle.loads(b64decode(update["ipc_handles_pickled"])):
    arguments = list(handle[gpu])
    arguments[6] = 0
    sums.append(rebuild_cuda_tensor(*arguments).double().sum().item())
print(json.dumps(sums))
"""
"""What vLLM does with handles, in the words of torch alone."""


def test_another_process_maps_the_weights() -> None:
    model: Any = tiny_model()
    weights = ServedModel(model.to("cuda"))
    update = Witness(weights).ipc_handles()
    mapped = subprocess.run(
        [sys.executable, "-c", MAPS],
        input=json.dumps(update),
        capture_output=True,
        text=True,
        check=False,
    )
    assert mapped.returncode == 0, mapped.stderr
    expected = [tensor.double().sum().item() for tensor in weights.tensors().values()]
    assert json.loads(mapped.stdout) == pytest.approx(expected)


@pytest.mark.skipif(
    "GROUPWISE_VLLM_PYTHON" not in os.environ,
    reason="GROUPWISE_VLLM_PYTHON names the Python of an environment with vLLM",
)
@pytest.mark.parametrize("lora", [{"r": 4, "alpha": 8}, None])
def test_a_server_on_the_learners_gpu_takes_turns_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: dict[str, Any] | None
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    write_model(tmp_path / "model")
    given = {**config(tmp_path / "runs", learning_rate=1e-3), "lora": lora}
    # On a GPU vLLM computes adapters in bfloat16 alone.
    dtype, tolerance = ("bfloat16", 0.5) if lora else ("float32", 0.01)
    given["model"] = {"name": str(tmp_path / "model"), "dtype": dtype}
    given["sampler"] = {
        "engine": "vllm", "vllm_python": str(PYTHON), "max_completion_length": 6, "logprob_tolerance": tolerance
    }  # fmt: skip
    result = groupwise.rl(given, TOY)
    assert (result.summary["state"], result.summary["steps"]) == ("finished", STEPS)
