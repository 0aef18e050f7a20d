"""The file that represents weights of a service in a run's folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from groupwise.core.errors import CheckpointError, ModelError
from groupwise.engine.backends.tinker import saved
from groupwise.engine.backends.tinker.saved import SavedWeights
from groupwise.engine.models.config import ModelConfig

WEIGHTS = SavedWeights(
    base_model="tiny",
    state="tinker://m/weights/a",
    sampler="tinker://m/sampler_weights/a",
    updates=3,
)


def model(adapter: str | None) -> ModelConfig:
    return ModelConfig(name="tiny", backend="tinker", adapter=adapter)


def test_written_weights_are_read_back(tmp_path: Path) -> None:
    saved.write(WEIGHTS, tmp_path)
    assert saved.read(tmp_path) == WEIGHTS


@pytest.mark.parametrize("content", [None, "{", "[]", '{"format": 2}', '{"format": 1, "new": 1}'])
def test_any_other_file_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / saved.FILE).write_text(content)
    with pytest.raises(CheckpointError, match=saved.FILE):
        saved.read(tmp_path)


def test_a_run_starts_from_a_path_or_from_a_folder_of_the_same_base(tmp_path: Path) -> None:
    saved.write(WEIGHTS, tmp_path)
    assert saved.starting_state(model(None)) is None
    assert saved.starting_state(model("tinker://x/weights/y")) == "tinker://x/weights/y"
    assert saved.starting_state(model(str(tmp_path))) == WEIGHTS.state
    assert saved.sampler_path(model(str(tmp_path))) == WEIGHTS.sampler
    with pytest.raises(ModelError, match="takes no files"):
        saved.starting_state(model(str(tmp_path / "elsewhere")))
    with pytest.raises(ModelError, match="a state to train from"):
        saved.sampler_path(model("tinker://x/weights/y"))
    facts = json.loads((tmp_path / saved.FILE).read_text())
    (tmp_path / saved.FILE).write_text(json.dumps({**facts, "base_model": "other"}))
    with pytest.raises(ModelError, match="trained on other"):
        saved.starting_state(model(str(tmp_path)))
