"""The parts in several processes."""

from types import SimpleNamespace
from typing import Any

from groupwise.engine.models import probes
from groupwise.training.assembly.parts import Closable


def test_memory_of_all_processes_counts_what_they_share_once(monkeypatch):
    monkeypatch.setattr(probes, "peak_memory", lambda device: 100)

    def held(*ranks: tuple[int, int | None]) -> int | None:
        told: Any = SimpleNamespace(call_all_now=lambda name, device: [*ranks])
        return Closable(ranks=told).peak_memory("cpu")

    assert Closable().peak_memory("cpu") == 100
    assert held((50, 20), (40, 25)) == 100 + 30 + 15 + 25
    assert held((50, 20), (40, None)) is None, "their sum would count the model several times"
