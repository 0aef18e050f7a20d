"""A run's own vLLM server on the learner's GPU: `make gpu`.

1. Another process maps the learner's weights by their handles, as vLLM's weight-transfer engine `ipc` does.
2. Another process on a second GPU receives them by NCCL, as vLLM's engine `nccl` does; one that is lost is not waited for.
3. vLLM itself sleeps while the run learns, and takes all weights; skipped unless GROUPWISE_VLLM_PYTHON names an environment with it.
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
from groupwise.core.errors import EndpointError
from groupwise.engine.models.tiny import tiny_model
from groupwise.engine.sampler.servers.local_policy import TorchPolicy
from groupwise.engine.sampler.weights import ServedModel
from tests.integration.real_vllm.real_server import PYTHON, write_model
from tests.integration.toy_run import STEPS, TOY, config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU here"),
]
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="a second GPU receives")
WITH_VLLM = pytest.mark.skipif(
    "GROUPWISE_VLLM_PYTHON" not in os.environ,
    reason="GROUPWISE_VLLM_PYTHON names the Python of an environment with vLLM",
)
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
RECEIVES = """\
import json, sys
from base64 import b64decode
import torch
from torch.cuda import nccl
torch.cuda.set_device(1)
comm = nccl.init_rank(2, b64decode(sys.argv[1]), 1)
nccl.all_reduce([torch.zeros(1, device="cuda:1")], comms=[comm])
update = json.loads(sys.argv[2])
sums = []
for dtype, shape in zip(update["dtype_names"], update["shapes"]):
    tensor = torch.empty(shape, dtype=getattr(torch, dtype), device="cuda:1")
    nccl.broadcast([tensor], 0, comms=[comm])
    sums.append(tensor.double().sum().item())
print(json.dumps(sums))
"""
"""What vLLM does with a group's unique id, likewise."""


def test_another_process_maps_the_weights() -> None:
    model: Any = tiny_model()
    weights = ServedModel(model.to("cuda"))
    update = TorchPolicy(weights).ipc_handles()
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


@TWO_GPUS
def test_another_gpu_receives_the_weights() -> None:
    model: Any = tiny_model()
    weights = ServedModel(model.to("cuda:0", dtype=torch.bfloat16))
    local_policy = TorchPolicy(weights)
    identity = local_policy.open_group("server")
    receiver = subprocess.Popen(
        [sys.executable, "-c", RECEIVES, identity, json.dumps(local_policy.weight_info())],
        stdout=subprocess.PIPE,
        text=True,
    )
    local_policy.join_group("server", 2, 120)
    local_policy.broadcast_weights("server", 60)
    out, _ = receiver.communicate(timeout=60)
    expected = [tensor.double().sum().item() for tensor in weights.tensors().values()]
    assert json.loads(out) == pytest.approx(expected)
    with pytest.raises(EndpointError):  # it has ended
        local_policy.broadcast_weights("server", 5)
    local_policy.close_group("server")
    assert torch.ones(3, device="cuda:0").sum().item() == 3, "the GPU is free again"


@TWO_GPUS
def test_a_receiver_that_never_comes_is_waited_for_a_limited_time() -> None:
    model: Any = tiny_model()
    local_policy = TorchPolicy(ServedModel(model.to("cuda:0")))
    local_policy.open_group("server")
    with pytest.raises(EndpointError, match="waited in vain"):
        local_policy.join_group("server", 2, 3)


@WITH_VLLM
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


@WITH_VLLM
@TWO_GPUS
def test_a_server_on_another_gpu_receives_all_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    write_model(tmp_path / "model")
    given = {**config(tmp_path / "runs", learning_rate=1e-3), "lora": None}
    given["model"] = {"name": str(tmp_path / "model"), "dtype": "float32"}
    given["sampler"] = {
        "engine": "vllm", "vllm_python": str(PYTHON), "max_completion_length": 6, "logprob_tolerance": 0.01,
        "weight_transfer": "nccl",
    }  # fmt: skip
    result = groupwise.rl(given, TOY)
    assert (result.summary["state"], result.summary["steps"]) == ("finished", STEPS)
    assert "reads them from files" not in (result.folder / "log.txt").read_text()
