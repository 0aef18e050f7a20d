"""A run that starts from an adapter on the hub: which commit it was belongs to the run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

import groupwise
from groupwise.core.errors import ResumeMismatchError
from groupwise.engine.models import adapters
from groupwise.runs.folder import read_config
from tests.integration.toy_run import TOY, config

FIRST, SECOND = "1" * 40, "2" * 40
HUB_ID = "someone/adapter"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """The hub's cache with two commits of an adapter that a run made; the branch `main` is the first."""
    torch.set_num_threads(1)
    made = groupwise.rl(config(tmp_path / "made", max_steps=1), TOY).folder / "final"
    stored = tmp_path / "hub" / "models--someone--adapter"
    for commit in (FIRST, SECOND):
        shutil.copytree(made, stored / "snapshots" / commit)
    (stored / "refs").mkdir()
    (stored / "refs/main").write_text(FIRST)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    adapters._fetched_once.cache_clear()
    return stored


def settings(tmp_path: Path, revision: str | None) -> dict[str, object]:
    model = {"name": "tiny", "adapter": HUB_ID, "adapter_revision": revision}
    return {**config(tmp_path / "runs"), "model": model}


def test_a_resume_continues_with_the_same_commit_only(tmp_path, cache):
    folder = groupwise.rl(
        settings(tmp_path, "main"), TOY, overrides=["training.max_steps=2"]
    ).folder
    assert read_config(folder)["model"]["adapter_revision"] == "main"
    with pytest.raises(
        ResumeMismatchError, match=rf'model.adapter_revision: "main" then, "{FIRST}"'
    ):
        groupwise.rl(settings(tmp_path, FIRST), TOY, resume_from="toy")
    (cache / "refs/main").write_text(SECOND)
    adapters._fetched_once.cache_clear()  # as in another process
    with pytest.raises(ResumeMismatchError, match="the base model"):
        groupwise.rl(settings(tmp_path, "main"), TOY, resume_from="toy")
    (cache / "refs/main").write_text(FIRST)
    adapters._fetched_once.cache_clear()
    went_on = ["training.max_steps=3"]
    result = groupwise.rl(settings(tmp_path, "main"), TOY, overrides=went_on, resume_from="toy")
    assert result.summary["steps"] == 3
