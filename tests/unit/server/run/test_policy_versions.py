"""Which versions of a run can be read, and what they are called."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from groupwise.api.schemas.problems import Refusal
from groupwise.core.types import Policy
from groupwise.runs import checkpoints
from groupwise.server.run.policy_versions import Versions


def save(place: Path, step: int) -> Path:
    """A checkpoint as an engine writes one, as far as it is read here."""

    def write(folder: Path) -> None:
        (folder / "adapter_model.safetensors").write_bytes(b"weights %d" % step)
        (folder / "adapter_config.json").write_text("{}")

    extra = {"position": {"policy": {"fingerprint": f"f{step}"}}}
    checkpoints.save(place, step, write, extra=extra)
    return place / f"step-{step}"


@pytest.fixture
def run(tmp_path: Path) -> Versions:
    """After five steps: 4 and 5 are published, 3 and 5 are saved, 1 has a name, 0 and 2 are gone."""
    folder = tmp_path / "runs" / "letters"
    named = save(tmp_path / "before", 1).rename(tmp_path / "first")
    for step in (3, 5):
        save(folder / "checkpoints", step)
    policies = {
        step: Policy("letters", step, f"f{step}", "adapter", str(save(tmp_path / "policies", step)))
        for step in (4, 5)
    }
    tokenizer = tmp_path / "tokenizers" / "t0"
    tokenizer.mkdir(parents=True)
    (tokenizer / "tokenizer.json").write_text("{}")
    return Versions("letters", folder, 5, policies, [named], tokenizer)


def read(run: Versions, version: str | None) -> tuple[str, str, Sequence[str], bytes]:
    opened = run.open(version)
    try:
        weights = next(each for each in opened.files if each.name.endswith(".safetensors"))
        names = [each.name for each in opened.files]
        return opened.address, opened.fingerprint, names, weights.file.read()
    finally:
        opened.close()


def test_published_saved_and_named_versions_can_be_read(run: Versions) -> None:
    assert run.steps() == [1, 3, 4, 5]
    for step in run.steps():
        files = ["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"]
        whole = (f"letters@{step}", f"f{step}", files, b"weights %d" % step)
        assert read(run, str(step)) == read(run, f"letters@{step}") == whole
    assert read(run, None) == read(run, "latest") == read(run, "5")
    gone, unknown = ("2", "letters@0"), ("6", "letters@6", "others@1", "letters@", "-1", "²")
    for version in (*gone, *unknown):
        with pytest.raises(Refusal, match="letters@1, letters@3") as refused:
            run.open(version)
        assert refused.value.code == ("version_gone" if version in gone else "unknown_version")
