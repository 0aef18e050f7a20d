"""Prompts that a callback chooses are drawn again, as those that the buffer itself would have chosen, also over a crash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import groupwise
from groupwise.core import atomic_files
from groupwise.runs.store import Store
from tests.integration.toy_run import TOY, config, die, go_on, in_child, what_must_be_equal

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

THRESHOLD = 0.1


def settings(runs: Path, *, by_callback: bool) -> dict[str, Any]:
    own = None if by_callback else THRESHOLD
    given = {**config(runs, max_steps=6), "eval": {"before_and_after": False}}
    given["data"] = {"replay": {"success_threshold": own, "warmup_entries": 2}}
    if by_callback:
        given["callbacks"] = [{"name": "success_cache", "threshold": THRESHOLD}]
    return given


def origins(run: Path) -> list[str]:
    with Store.open(run / "run.db", readonly=True) as store:
        return [group.origin for step in range(6) for group in store.groups(step)]


def test_cached_successes_are_part_of_the_checkpoints(tmp_path):
    torch.set_num_threads(1)
    whole, crashed = tmp_path / "whole", tmp_path / "crashed"
    groupwise.rl(settings(whole, by_callback=True), TOY)
    left = iter(range(3))

    def run() -> None:
        atomic_files.on_write = lambda at: (
            die() if at == "commit:step:before" and next(left, None) is None else None
        )
        groupwise.rl(settings(crashed, by_callback=True), TOY)

    assert in_child(run) == 17
    go_on(settings(crashed, by_callback=True))
    assert (
        what_must_be_equal(crashed / "toy")["record"] == what_must_be_equal(whole / "toy")["record"]
    )
    assert "replay" in origins(crashed / "toy")
