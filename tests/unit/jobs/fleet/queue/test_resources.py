"""A job's resources, as people write them and as JSON."""

import re
from typing import Any

import pytest

from groupwise.core.errors import UsageError
from groupwise.jobs.fleet.queue.resources import fits_model, parse


def test_gpu_count_defaults_to_1_if_the_fleet_has_gpus() -> None:
    assert parse().settled(1).gpu_count == 1
    assert parse().settled(0).gpu_count == 0
    for asked in (parse(gpu_model="a100"), parse(gpu_memory=40_000), parse(share=10_000)):
        assert asked.settled(0).gpu_count == 1
    assert parse(gpus="vm-1:0,3").settled(0).gpu_count == 2


@pytest.mark.parametrize(("words", "gpus", "named", "vm"), [
    ("2", 2, (), None), ("0", 0, (), None), ("vm-3:0,1", None, (0, 1), "vm-3"), ("vm-3:GPU-ab", None, ("GPU-ab",), "vm-3"),
    ("GPU-ab, GPU-cd", None, ("GPU-ab", "GPU-cd"), None), ("MIG-ab", None, ("MIG-ab",), None),
])  # fmt: skip
def test_forms_of_gpus(
    words: str, gpus: int | None, named: tuple[int | str, ...], vm: str | None
) -> None:
    found = parse(gpus=words)
    assert (found.gpus, found.named, found.vm) == (gpus, named, vm)


A100_80, A100_40 = "NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-40GB"
A100_PCIE, A100_SLICE = "NVIDIA A100 80GB PCIe", "NVIDIA A100-SXM4-80GB MIG 3g.40gb"
H100_SXM, H100_PCIE = "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe"
SLURM_SLICE = "a100_1g.10gb+me"
RTX_4090, RTX_4090_D = "NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090 D"
RTX_4070, RTX_4070_TI = "NVIDIA GeForce RTX 4070", "NVIDIA GeForce RTX 4070 Ti"
MEMORY_MB = {H100_PCIE: 85520, RTX_4090: 25757, A100_SLICE: 42144, "NVIDIA L40S": 48305}
MODELS = {
    "A100": [A100_80, A100_PCIE, A100_40], "nvidia_a100-sxm4-80gb": [A100_80], "A100-SXM": [A100_80, A100_40],
    "a100-80gb": [A100_80, A100_PCIE], "A100-40G": [A100_40], "A100-80GB-SXM": [A100_80], "A100-PCIe": [A100_PCIE], "A10": [],
    "H100": [H100_SXM, H100_PCIE], "H100-SXM": [H100_SXM], "H100-SXM5-80GB": [H100_SXM], "H100-80GB": [H100_SXM, H100_PCIE],
    "NVIDIA-H100-80GB-HBM3": [H100_SXM], "H100_40GB": [], "H10": [],
    "RTX4090": [RTX_4090], "rtx 4090": [RTX_4090], "geforce rtx 4090": [RTX_4090], "RTX4090-24GB": [RTX_4090], "rtx4090d": [RTX_4090_D],
    "RTX4070": [RTX_4070], "RTX4070Ti": [RTX_4070_TI], "RTX-4070-TI": [RTX_4070_TI],
    "GeForce": [RTX_4090, RTX_4090_D, RTX_4070, RTX_4070_TI],
    "RTX6000": ["Quadro RTX 6000"], "RTX6000-Ada": ["NVIDIA RTX 6000 Ada Generation"],
    "L4": ["NVIDIA L4"], "L40": ["NVIDIA L40"], "L40S": ["NVIDIA L40S"], "L40S-48GB": ["NVIDIA L40S"],
    "GB10": ["NVIDIA GB10"], "GB": ["NVIDIA GB10"],
    "MI300": ["AMD Instinct MI300X"], "MI300X": ["AMD Instinct MI300X"], "mi300a": [], "MI30": [],
    "AMD": ["AMD Instinct MI300X", "AMD Radeon RX 7900 XTX"], "RX7900XTX": ["AMD Radeon RX 7900 XTX"], "RX 7900 XT": [],
    "MIG-3g.40gb": [A100_SLICE], "3G.40GB": [A100_SLICE], "A100-MIG-3g.40gb": [A100_SLICE], "A100 MIG": [A100_SLICE, SLURM_SLICE],
    "a100_1g.10gb.me": [SLURM_SLICE], "MIG-1g.10gb": [], "A100-MIG-80GB": [], "A100 MIG 40GB": [A100_SLICE], "H100-MIG-3g.40gb": [],
}  # fmt: skip
"""What is asked for, and the models of all below that it means."""


def test_models_are_found_by_the_names_that_people_type() -> None:
    known = {model for models in MODELS.values() for model in models}
    for wanted, models in MODELS.items():
        assert {m for m in known if fits_model(wanted, m, MEMORY_MB.get(m))} == {*models}, wanted
    no_model = {model for model in known if fits_model(None, model, None)}
    assert no_model == known - {A100_SLICE, SLURM_SLICE}
    assert not fits_model("A100", None, 81920)


@pytest.mark.parametrize(("asked", "told"), [
    ({"gpus": "2", "gpu_model": "MIG-3g.40gb"}, "only one MIG device"), ({"gpus": "MIG-ab,MIG-cd"}, "only one MIG device"),
    ({"gpus": f"GPU-{'a' * 16},GPU-aaaaaaaa-bbbb"}, "of one vendor"), ({"gpus": "MIG-3g.40gb"}, "a count (2)"),
])  # fmt: skip
def test_contradictory_gpu_requests_are_refused(asked: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=re.escape(told)):
        parse(**asked)


def test_the_shape_depends_on_needs_and_project_alone() -> None:
    one = parse(gpus="1", labels=["a=1", "b=2"])
    same = parse(gpus="1", labels=["b=2", "a=1"])
    assert one.shape("p") == same.shape("p")
    others = {
        parse(gpus="2").shape("p"), parse(gpus="1").shape("p"), one.shape("q"), one.shape("p"),
    }  # fmt: skip
    assert len(others) == 4
