"""What `--policy` finds, in which order, and what it says when there is nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import groupwise
from groupwise.core.errors import RunNotFoundError
from groupwise.training.evaluation import policies
from groupwise.training.evaluation.policies import find_policy
from tests.integration.toy_run import TOY, config


@pytest.fixture(scope="module")
def runs(whole_toy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("policies") / "runs"
    return Path(shutil.copytree(whole_toy.runs, folder))


def test_a_policy_is_base_a_run_a_step_or_a_folder(runs):
    assert find_policy("base", runs).folder is None
    assert find_policy("toy", runs).folder == (runs / "toy" / "final").resolve()
    assert find_policy("toy", runs).label == "toy@5"
    assert find_policy("toy@4", runs).folder == (runs / "toy" / "checkpoints" / "step-4").resolve()
    assert find_policy(str(runs / "toy" / "final"), runs).run is None


def test_a_hub_id_comes_last(runs, monkeypatch):
    asked = []

    def fetched(reference):
        asked.append(reference)
        return runs / "toy" / "final"

    monkeypatch.setattr(policies, "fetch_files", fetched)
    assert find_policy("someone/adapter@v2", runs).label == "someone/adapter@v2"
    assert find_policy(str(runs / "toy"), runs).run is not None, "an existing path is not a hub id"
    assert asked == ["someone/adapter@v2"]
    with pytest.raises(RunNotFoundError):
        find_policy("no-slash", runs)
    with pytest.raises(RunNotFoundError):
        find_policy("./no/folder", runs)


def test_the_adapter_is_really_used(runs, tmp_path):
    """A perturbed adapter gives other answers than the one it was copied from."""
    copy = tmp_path / "copy"
    shutil.copytree(runs / "toy" / "final", copy)
    settings = config(runs)
    settings["eval"]["temperature"] = 1.0
    trained = groupwise.evaluate(settings, TOY, policy="toy")
    same = groupwise.evaluate(settings, TOY, policy=str(copy))
    assert [row["completion"] for row in same.rows] == [row["completion"] for row in trained.rows]
    perturb(copy)
    other = groupwise.evaluate(settings, TOY, policy=str(copy))
    assert [row["completion"] for row in other.rows] != [row["completion"] for row in trained.rows]


def perturb(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "adapter_model.safetensors"
    save_file({name: tensor + 0.5 for name, tensor in load_file(path).items()}, path)
