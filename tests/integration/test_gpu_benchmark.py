"""The GPU benchmark also runs on a CPU, in its smallest size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gpu


def test_all_parts_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other sizes stay in the file."""
    out = tmp_path / "found.json"
    out.write_text('{"sizes": {"8B": {"of": "yesterday"}}}')
    words = ["--sizes", "tiny", "--budgets", "200", "--eager", "--all-weights", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["benchmarks.gpu", *words, "--profiles", str(tmp_path)])
    monkeypatch.setattr(gpu, "prepare_process", lambda threads: None)  # this one has one thread
    gpu.main()
    sizes = json.loads(out.read_text())["sizes"]
    assert sizes.pop("8B") == {"of": "yesterday"}
    found = sizes["tiny"]
    assert {*found} == {
        "sampling without graphs", "sampling", "few long rows", "gap", "learning, 200 tokens",
        "in any order, 200 tokens", "publication", "all weights, 200 tokens",
    }  # fmt: skip
    assert all(value >= 0 for key in found.keys() - {"gap"} for value in found[key].values())
    assert found["gap"]["mean_absolute"] < 0.05
    assert {each.stem for each in tmp_path.glob("*.txt")} == {
        "sampling-tiny", "learning-tiny", "all-weights-tiny",
    }  # fmt: skip
