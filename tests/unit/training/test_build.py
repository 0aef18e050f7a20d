"""Where ranks are expected, and what a sampler is told."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from groupwise.core.errors import UsageError
from groupwise.engine.distributed import prefork
from groupwise.engine.models import machine, probes
from groupwise.training import build, placement
from groupwise.training.config import load_config


def test_a_zygote_is_begun_early_only_where_it_will_be_needed(monkeypatch, tmp_path):
    begun = []
    monkeypatch.setattr(build, "NVIDIA", tmp_path / "nvidiactl")
    monkeypatch.setattr(prefork, "start_zygote", lambda: begun.append(True))
    monkeypatch.setattr(prefork, "end_zygote", begun.clear)
    monkeypatch.setattr(placement, "available_cores", lambda: 2)

    def expected(**sections) -> bool:
        with build.expected_ranks(load_config(sections).config):
            found = bool(begun)
        assert not begun
        return found

    large = {"name": "some/model"}
    assert expected(model=large)
    assert not expected(model={"name": "tiny"})
    assert not expected(model=large, run={"processes": 1})
    assert not expected(model=large, run={"threads": 1})
    assert not expected(model=large, lora=None)
    build.NVIDIA.touch()
    assert not expected(model=large)


def test_memory_of_all_processes_counts_what_they_share_once(monkeypatch):
    monkeypatch.setattr(probes, "peak_memory", lambda device: 100)

    def held(*ranks: tuple[int, int | None]) -> int | None:
        told: Any = SimpleNamespace(call_all_now=lambda name, device: [*ranks])
        return build.Closable(ranks=told).peak_memory("cpu")

    assert build.Closable().peak_memory("cpu") == 100
    assert held((50, 20), (40, 25)) == 100 + 30 + 15 + 25
    assert held((50, 20), (40, None)) is None, "their sum would count the model several times"


def by_servers() -> tuple[Any, placement.Layout]:
    sampler = {"engine": "vllm", "url": "http://127.0.0.1:1"}
    config = load_config({"model": {"name": "tiny"}, "sampler": sampler}).config
    return config, placement.choose_layout(config, 20)


async def test_what_samples_here_refuses_servers(tmp_path):
    config, layout = by_servers()
    with pytest.raises(UsageError, match=r"sampler\.engine .* this command"):
        build.training_parts(config, layout, "run", tmp_path)
    with pytest.raises(UsageError, match=r"sampler\.engine .* a base for"):
        await build.start_base(config, layout)


def test_one_process_learns_where_servers_sample(monkeypatch):
    monkeypatch.setattr(placement, "available_cores", lambda: 8)
    config, layout = by_servers()
    assert layout.processes == placement.most_processes(config) == 1


def test_a_process_computes_in_tf32_only_for_runs_that_ask_for_it(monkeypatch):
    monkeypatch.setattr(machine, "prepare_process", lambda threads: None)
    _, layout = by_servers()
    build._prepare_process(replace(layout, tf32=True))
    assert not machine.exact_products(torch.float32)
    build._prepare_process(layout)
    assert machine.exact_products(torch.float32), "what comes after the run"
