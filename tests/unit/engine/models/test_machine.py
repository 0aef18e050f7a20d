"""Facts about the machine read from files equal torch's; and the number of usable cores, by files such as containers have."""

import os
import platform
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from groupwise.core.errors import ConfigError
from groupwise.core.types import GroupRequest, LossSpec, Row, SamplingParams
from groupwise.engine.learner.torch_learner import TorchLearner
from groupwise.engine.learner.weights import TrainedModel
from groupwise.engine.models import machine
from groupwise.engine.models.config import ModelConfig
from groupwise.engine.models.machine import (
    available_cores,
    choose_tf32,
    engine_products,
    exact_products,
    set_tf32,
)
from groupwise.engine.models.tiny import tiny_model, tiny_tokenizer
from groupwise.engine.sampler.queued import DecodeLayout
from groupwise.engine.sampler.torch_sampler import TorchSampler
from groupwise.engine.sampler.weights import ServedModel

WIDE = "avx2 fma avx512vl avx512bw avx512dq"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere oneDNN says what it has")
@pytest.mark.parametrize("file", [machine.CPUINFO, machine.CPUINFO / "none"])
def test_this_machine_is_described_as_by_torch(file, monkeypatch):
    monkeypatch.setattr(machine, "CPUINFO", file)
    found, capability = torch.cpu.get_capabilities(), torch.backends.cpu.get_cpu_capability()
    assert machine.has_bfloat16("cpu") is any(map(found.get, ("avx512_bf16", "amx_bf16")))
    assert machine.describe_processor("cpu").endswith(f" ({capability})")
    assert machine.torch_version() == torch.__version__
    assert machine.choose_device() == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(("flags", "told", "instructions", "bfloat16"), [
    (WIDE, None, "AVX512", False), (f"{WIDE} avx512_bf16", None, "AVX512", True), (f"{WIDE} amx_bf16", "avx2", "AS TORCH SAYS", True),
    ("fma avx2 avx512f", None, "AVX2", False), ("sse", None, "AS TORCH SAYS", False),
])  # fmt: skip
def test_a_processor_is_known_by_its_flags(
    flags, told, instructions, bfloat16, tmp_path, monkeypatch
):
    first = f"model name\t: A CPU @ 3: GHz\nflags\t\t: {flags}\n"
    (tmp_path / "cpuinfo").write_text(f"{first}\nmodel name\t: B\nflags\t: amx_bf16\n")
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AS TORCH SAYS")
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    if told:
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", told)
    assert machine.describe_processor("cpu") == f"A CPU @ 3: GHz ({instructions})"
    assert machine.has_bfloat16("cpu") is bfloat16


@pytest.mark.parametrize(
    ("cuda", "driver", "device"),
    [("13.0", "nvidia0", "cuda"), ("13.0", "null", "cpu"), (None, "nvidia0", "cpu")],
)
def test_a_gpu_needs_a_driver_and_torch_built_for_it(cuda, driver, device, tmp_path, monkeypatch):
    (tmp_path / driver).touch()
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(machine, "DEVICES", tmp_path)
    monkeypatch.setattr(
        machine, "_torch_version_module", lambda: SimpleNamespace(cuda=cuda, hip=None)
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert machine.choose_device() == device


def test_a_gpu_without_tf32_is_refused_with_the_cure(monkeypatch):
    config = ModelConfig(name="x", dtype="tf32")
    monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    for device, said in (("cuda", "Tesla T4 has no TF32"), ("cpu", "on the CPU")):
        with pytest.raises(ConfigError, match=rf"{said}.*model\.dtype=float32"):
            choose_tf32(config, device)
    monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda: True)
    assert choose_tf32(config, "cuda")
    assert not choose_tf32(ModelConfig(name="x", dtype="float32"), "cuda")


@pytest.fixture
def torchs_own():
    """Torch's switches, as read and as they were before."""
    on_gpu: Any = torch.backends.cuda.matmul
    on_cpu: Any = cast("Any", torch.backends.mkldnn).matmul
    read = lambda: (on_gpu.fp32_precision, on_cpu.fp32_precision)  # noqa: E731
    before = read()
    yield read
    set_tf32(False)
    torch.set_float32_matmul_precision("highest")
    on_gpu.fp32_precision, on_cpu.fp32_precision = before


@pytest.mark.parametrize("own", ["highest", "high", "medium", "tf32"])
@pytest.mark.parametrize("enabled", [True, False])
def test_products_are_the_runs_while_the_engine_computes_and_otherwise_the_users(
    torchs_own, own, enabled
):
    if own == "tf32":  # by torch's newer switch
        torch.backends.cuda.matmul.fp32_precision = own
    else:
        torch.set_float32_matmul_precision(own)
    before = torchs_own()
    set_tf32(enabled)
    assert torchs_own() == before
    for _ in range(2):
        with engine_products():
            assert (torch.backends.cuda.matmul.fp32_precision == "tf32") == enabled
            assert torchs_own()[1] == before[1], "a processor's"
            if own != "tf32":
                assert torch.backends.cuda.matmul.allow_tf32 == enabled, "as other libraries ask"
        assert torchs_own() == before
    if own != "tf32":
        assert torch.get_float32_matmul_precision() == own
    assert exact_products(torch.float32) != enabled
    assert not exact_products(torch.bfloat16)


async def test_sampler_and_learner_compute_in_the_runs_precision(torchs_own, tmp_path):
    """Every layer of a forward and a backward pass, and of each token."""
    before, seen = torchs_own(), list[Any]()
    weights = TrainedModel(tiny_model())

    def note(*_: object) -> None:
        seen.append(torch.backends.cuda.matmul.fp32_precision)

    for module in weights.model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(note)
            module.weight.register_hook(note)
    set_tf32(True)
    learner = TorchLearner(
        weights, run="run", publish_folder=tmp_path, max_tokens_per_microbatch=64, seed=0
    )
    row = Row((5, 6), (7, 8), (1, 1), (0.0, 0.0), 1.0, 1.0)
    await learner.forward_backward([row], LossSpec("sft"), {"sft": 1.0})
    await learner.logprobs([row])
    sampler = TorchSampler(
        ServedModel(weights.model), tiny_tokenizer(), DecodeLayout(8, 64), native=False
    )
    await sampler.generate(GroupRequest(0, (5, 6, 7), (1,), SamplingParams(3)))
    await sampler.prompt_logprobs((5, 6, 7), 0)
    assert set(seen) == {"tf32"}
    assert torchs_own() == before


def test_without_torch_it_says_what_to_install(monkeypatch):
    machine._torch_version_module.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"groupwise\[train\]"):
        machine.torch_version()


NARROW = "/kubepods/pod7/app"


@pytest.fixture(autouse=True)
def no_groups(monkeypatch, tmp_path):
    """32 cores, and no groups yet."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(32), raising=False)
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)
    monkeypatch.setattr(machine, "OWN_CGROUPS", tmp_path / "own")


def limited(group: str, quota: object, period: object = 100_000, *, version: int = 2) -> None:
    """Give a group a limit."""
    folder = (machine.CGROUPS if version == 2 else machine.CGROUPS / "cpu") / group.lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    if version == 2:
        (folder / "cpu.max").write_text(f"{quota} {period}\n")
    else:
        (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (folder / "cpu.cfs_period_us").write_text(f"{period}\n")


def test_those_that_the_process_is_bound_to(monkeypatch):
    assert available_cores() == 32
    monkeypatch.delattr(os, "sched_getaffinity")
    for told, expected in ((8, 8), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda told=told: told)
        assert available_cores() == expected


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("quota", "period", "expected"), [
    (200_000, 100_000, 2), (150_000, 100_000, 2), (25_000, 5_000, 5), ("max", 100_000, 32), (-1, 100_000, 32), (200_000, 0, 32),
    ("", "", 32),
])  # fmt: skip
def test_a_limit_of_a_container(version, quota, period, expected):
    limited("/", quota, period, version=version)
    assert available_cores() == expected


@pytest.mark.parametrize(("version", "own"), [
    (2, f"0::{NARROW}"), (1, f"12:memory:/elsewhere\n4:cpu,cpuacct:{NARROW}\n1:name=systemd:/elsewhere\n0::/"),
    (1, f"4:cpuacct,cpu:{NARROW}"),
])  # fmt: skip
def test_the_narrowest_limit_holds(version, own):
    machine.OWN_CGROUPS.write_text(own)
    limited("/elsewhere", 100_000, version=version)
    assert available_cores() == 32
    limited("/", 800_000, version=version)
    assert available_cores() == 8, "of the root"
    limited("/kubepods/pod7", 300_000, version=version)
    assert available_cores() == 3, "of a group around its own"
    limited(NARROW, 400_000, version=version)
    assert available_cores() == 3
    limited(NARROW, 200_000, version=version)
    assert available_cores() == 2, "of its own"


def test_a_group_that_is_out_of_sight():
    machine.OWN_CGROUPS.write_text("0::/../../docker/0123\n")
    assert available_cores() == 32
    limited("/", 200_000)
    assert available_cores() == 2
