"""How the end of a run is recorded, when callbacks are told of it: a run counts as finished once nothing is left to do."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from groupwise.errors import CallbackError
from groupwise.loops.outcome import end, exit_code
from groupwise.runs.folder import FINAL_STEP


class Folder:
    """A run's folder that notes what is said in it, in order."""

    name = "toy"

    def __init__(self) -> None:
        self.said: list[str] = []
        self.store = SimpleNamespace(get_meta=lambda: {FINAL_STEP: 3})

    def summarise(self, state: str, summary: Any) -> None:
        self.said.append(f"summary: {state}")

    def finish(self, state: str, summary: Any) -> None:
        self.said.append(f"record: {state}")


def run(told: Any, left: tuple[str, ...] = (), asked: int | None = None) -> Any:
    """A run whose callbacks do `told` when they are told of its end."""
    folder = Folder()

    async def tell(end: Any) -> None:
        folder.said.append(f"told: {end.state}")
        told()

    return SimpleNamespace(
        folder=folder,
        callbacks=SimpleNamespace(end=tell, left=left),
        interruption=SimpleNamespace(asked=asked),
        step=3,
        say=lambda text: None,
    )


@pytest.fixture(autouse=True)
def _nothing_to_hand_out(monkeypatch):
    """No model card and no upload, which need weights."""

    async def nothing(*_: Any) -> dict[str, Any]:
        return {}

    monkeypatch.setattr("groupwise.loops.outcome._write_card", lambda *_: None)
    monkeypatch.setattr("groupwise.loops.outcome._uploaded", nothing)


def fail(error: BaseException) -> Any:
    def failing() -> None:
        raise error

    return failing


def nothing() -> None:
    pass


async def ended(ending: Any) -> dict[str, Any]:
    return await end(ending, "finished", {"steps": 3})


async def test_the_record_speaks_last():
    ending = run(nothing)
    summary = await ended(ending)
    assert ending.folder.said == ["summary: finished", "told: finished", "record: finished"]
    assert (summary["state"], exit_code(ending, summary)) == ("finished", 0)


@pytest.mark.parametrize(
    ("asked", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (None, 130)]
)
async def test_work_that_is_left_makes_an_interrupted_run(asked, code):
    ending = run(nothing, left=("the rest",), asked=asked)
    summary = await ended(ending)
    assert ending.folder.said[-1] == "record: interrupted"
    assert (summary["state"], exit_code(ending, summary)) == ("interrupted", code)


@pytest.mark.parametrize(
    ("error", "recorded"), [(CallbackError("critical"), True), (KeyboardInterrupt(), False)]
)
async def test_a_run_that_breaks_off_while_they_are_told_can_be_resumed(error, recorded):
    """Unless it is a critical one that fails, which would fail again."""
    ending = run(fail(error))
    with pytest.raises(type(error)):
        await ended(ending)
    assert ("record: finished" in ending.folder.said) == recorded
