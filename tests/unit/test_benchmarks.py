"""The arithmetic behind the benchmarks; what they measure is run by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import against_trl
from benchmarks.against_trl import ratio
from benchmarks.roofline import (
    learning_flops,
    sampling_floor,
    sizes_of,
)
from benchmarks.work import NATURAL, W1, Work


def measured(ours: float, theirs: float, natural: bool = False, peak: int = 3000) -> dict[str, Any]:
    """A cell in which a step of each side takes so many seconds, TRL's for twice as many tokens and with 6,000 MiB."""
    work = NATURAL if natural else W1

    def side(seconds: float, tokens: float, mib: int, start_up: float) -> dict[str, Any]:
        return {
            "seconds": {phase: [seconds, seconds] for phase in against_trl.PHASES},
            "tokens": [tokens, tokens],
            "peak_mib": mib,
            "start_up_seconds": start_up,
        }

    return {
        "work": asdict(work),
        "groupwise": side(ours, 10.0, peak, 8.0),
        "trl": side(theirs, 20.0, 6000, 4.0),
    }


def test_ratios_are_of_seconds_or_of_seconds_per_token() -> None:
    assert ratio(measured(2.0, 10.0), "step") == pytest.approx(5.0)
    assert ratio(measured(2.0, 10.0, natural=True), "step") == pytest.approx(2.5)


@pytest.fixture
def against(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """The command for W1, unless the arguments say otherwise, which comes out as it is given here; what is stored is in `tmp_path`."""
    described = {"processor": "Slow One", "cores": 2, "gpu": None}
    monkeypatch.setattr(against_trl, "RESULTS", tmp_path)
    monkeypatch.setattr(against_trl, "machine", lambda: described)

    def run(*words: str, result: dict[str, Any] | None = None) -> None:
        alone = ["--dtype", "float32", "--cell", "W1"]
        monkeypatch.setattr("sys.argv", ["against_trl", *alone, *words])
        monkeypatch.setattr(against_trl, "compare", lambda *_: result)
        against_trl.main()

    return run


def test_a_check_passes_where_nothing_got_worse_and_fails_where_something_did(
    against: Callable[..., None], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="--store"):
        against("--check")
    against("--store", result=measured(2.0, 10.0))
    [file] = tmp_path.iterdir()
    kept = file.read_text()
    for passes in (measured(2.0, 10.0), measured(4.0, 18.0)):
        against("--check", result=passes)
    for worse, told in (
        (measured(2.0, 8.0), r"W1, sampling: 4\.00 times"),
        (measured(2.0, 10.0, peak=4500), "W1, memory: 75%"),
    ):
        with pytest.raises(SystemExit, match=told):
            against("--check", result=worse)
    with pytest.raises(SystemExit, match=r"short .*--store"):
        against("--check", "--cell", "short")
    assert file.read_text() == kept


def test_floors_grow_with_the_work_and_sampling_waits_for_memory_or_products() -> None:
    sizes = sizes_of("tiny")
    weights = sizes.body + sizes.output
    one = Work((10,), 1, 6)
    assert sampling_floor(one, sizes, rate=1e30, weights_per_second=1.0) == 5 * weights
    assert sampling_floor(one, sizes, rate=2.0, weights_per_second=1e30) == 5 * weights
    # Layers forward and back for 10 + 20 tokens, the head for 20.
    assert learning_flops(Work((10,), 4, 5), sizes) == 4 * (30 * sizes.body + 20 * sizes.output)
