"""A loss or gradient that is not finite: the update is left out and counted, its rows are kept, too many in a row stop the run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import groupwise
from groupwise.core.errors import NonFiniteError
from groupwise.core.types import Row, from_json
from groupwise.engine.learner.torch_learner import TorchLearner
from groupwise.runs.checkpoints import newest
from groupwise.runs.store import Store
from groupwise.training.loops import training
from tests.integration.toy_run import STEPS, TOY, config


@pytest.fixture
def spoil(monkeypatch):
    """Make loss or gradient of the updates of some numbers (from 0) something that is not a number."""

    def spoiled(what: str, numbers: set[int]) -> None:
        original, calls = TorchLearner.forward_backward, []

        async def forward_backward(self, rows, loss, denominators):
            sums = await original(self, rows, loss, denominators)
            if len(calls) in numbers and what == "loss":
                sums["loss/policy"] = math.nan
            if len(calls) in numbers and what == "gradient":
                next(iter(self._parameters.values())).grad.fill_(math.inf)
            calls.append(rows)
            return sums

        monkeypatch.setattr(TorchLearner, "forward_backward", forward_backward)

    return spoiled


def versions(folder: Path) -> list[tuple[int, int]]:
    with Store.open(folder / "run.db", readonly=True) as store:
        return [(record.version_in, record.version_out) for record in store.steps()]


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_an_update_is_left_out_without_a_trace_in_the_weights(tmp_path, spoil, what):
    """That of the last step, before which there is a checkpoint."""
    spoil(what, {STEPS - 1})
    assert groupwise.rl(config(tmp_path), TOY).exit_code == 0
    folder = tmp_path / "toy"
    assert versions(folder) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 4)]
    weights = ("checkpoints/step-4", "checkpoints/step-5", "final")
    files = [(folder / place / "adapter_model.safetensors").read_bytes() for place in weights]
    assert files[0] == files[1] == files[2]
    kept = (folder / "non-finite" / "step-4.jsonl").read_text().splitlines()
    rows = [from_json(Row, line) for line in kept]
    with Store.open(folder / "run.db", readonly=True) as store:
        sampled = {r.completion_ids for group in store.groups(4) for r in group.rollouts}
        assert store.metrics(["updates/left_out"])["updates/left_out"] == [(5, 1.0)]
    assert rows
    assert {row.completion_ids for row in rows} <= sampled


def test_a_resumed_run_continues_counting(tmp_path, spoil):
    """Too many in a row stop the run; from its checkpoint, one step into the streak, it stops where it stopped before."""
    spoil("loss", {1, 2, 3})
    for resume in (False, True):
        with pytest.raises(NonFiniteError, match=r"3 .*max_non_finite_steps"):
            groupwise.rl(config(tmp_path), TOY, resume=resume)
        assert versions(tmp_path / "toy") == [(0, 1), (1, 1), (1, 1)]
        checkpoint = newest(tmp_path / "toy" / "checkpoints")
        assert checkpoint is not None
        assert (checkpoint.step, checkpoint.extra["position"]["non_finite"]) == (2, 1)
        spoil("loss", set(range(STEPS)))


def test_how_many_is_configured_and_one_good_step_starts_over(tmp_path, spoil):
    spoil("loss", {0, 2, 4})
    assert groupwise.rl(config(tmp_path, max_non_finite_steps=2), TOY).exit_code == 0
    assert versions(tmp_path / "toy") == [(0, 0), (0, 1), (1, 1), (1, 2), (2, 2)]
    spoil("loss", {0})
    with pytest.raises(NonFiniteError):
        groupwise.rl(config(tmp_path / "strict", max_non_finite_steps=1), TOY)


def test_updates_that_are_left_out_among_several_leave_the_others_and_keep_some_rows(
    tmp_path, spoil, monkeypatch
):
    monkeypatch.setattr(training, "MAX_NON_FINITE_FILES", 2)
    torch.set_num_threads(1)
    spoil("gradient", {0, 1, 2})
    groupwise.rl(config(tmp_path, num_iterations=2, max_steps=3), TOY)
    assert versions(tmp_path / "toy") == [(0, 0), (0, 1), (1, 2)]
    kept = sorted(path.name for path in (tmp_path / "toy" / "non-finite").iterdir())
    assert kept == ["step-0-2.jsonl", "step-0.jsonl"]
