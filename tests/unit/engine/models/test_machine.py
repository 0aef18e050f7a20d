"""What files tell of a machine is what torch would tell."""

import platform
from types import SimpleNamespace

import pytest
import torch

from groupwise.engine.models import machine

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
    monkeypatch.setattr(machine, "_build", lambda: SimpleNamespace(cuda=cuda, hip=None))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert machine.choose_device() == device


def test_without_torch_it_says_what_to_install(monkeypatch):
    machine._build.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"groupwise\[train\]"):
        machine.torch_version()
