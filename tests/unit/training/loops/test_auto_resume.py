"""A run resumes from its last checkpoint when the server has lost its sampler and learner, as long as it makes progress."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from groupwise.api.client.errors import ClientError, Refused
from groupwise.api.schemas.problems import Refusal
from groupwise.runs import checkpoints
from groupwise.runs.folder import RunFolder
from groupwise.training.config import LoadedConfig, load_config
from groupwise.training.loops import start
from groupwise.training.loops.start import MAX_FUTILE_RESUMES, StartMode, run_with_auto_resume


def lost(code: str = "parts_gone") -> ClientError:
    return Refused.about(Refusal(code, "the engine has ended").problem())


class Tried:
    """What a run comes to, each time that it is begun: the step of its newest checkpoint, and how it ends."""

    def __init__(self, runs: Path, *fates: tuple[int, BaseException | None]) -> None:
        config = {
            "model": {"name": "tiny"},
            "run": {"name": "r", "dir": str(runs), "server": "http://x"},
        }
        self.loaded: LoadedConfig = load_config(config)
        self.ways: list[StartMode] = []
        self._fates: Iterator[tuple[int, BaseException | None]] = iter(fates)
        self._run = RunFolder.create(runs, "r", self.loaded.config.model_dump(mode="json"), {})
        self._run.close()

    def begin(self, ways: StartMode) -> str:
        self.ways.append(ways)
        step, error = next(self._fates)
        if step and not (self._run.checkpoints / f"step-{step}").exists():
            checkpoints.save(self._run.checkpoints, step, lambda _: None, {})
        if error is not None:
            raise error
        return "done"


@pytest.fixture(autouse=True)
def awaited(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(start, "_await_server", found.append)
    return found


def test_it_continues_from_the_newest_checkpoint(tmp_path: Path, awaited: list[Any]) -> None:
    fates = ((0, lost()), (4, lost("unknown_parts")), (4, lost()), (8, lost()), (9, None))
    tried = Tried(tmp_path, *fates)
    assert run_with_auto_resume(tried.begin, StartMode(init_from="base"), tried.loaded) == "done"
    assert tried.ways == [
        StartMode(init_from="base"), StartMode(resume=True), StartMode(resume_from="r@4"), StartMode(resume_from="r@4"),
        StartMode(resume_from="r@8"),
    ]  # fmt: skip
    assert awaited == ["http://x"] * 4


def test_losses_without_progress_end_it(tmp_path: Path) -> None:
    tried = Tried(tmp_path, *[(2, lost())] * 10)
    with pytest.raises(ClientError, match="the engine has ended"):
        run_with_auto_resume(tried.begin, StartMode(), tried.loaded)
    assert len(tried.ways) == 1 + MAX_FUTILE_RESUMES
