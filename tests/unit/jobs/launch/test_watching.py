"""Watching a job with a stand-in for its place: each byte of the log once, results when there are new ones, retries while the place does
not answer."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from groupwise.jobs.clouds.backend import (
    Backend,
    Busy,
    CloudError,
    Ending,
    FetchedResults,
    Handle,
    Outcome,
    Phase,
    Status,
    Unreachable,
)
from groupwise.jobs.hosts.answers import LogPart
from groupwise.jobs.launch import watching
from groupwise.jobs.launch.watching import Watch

HANDLE = Handle("stand-in", "job", 1)
ENDED = Ending(Outcome.SUCCEEDED, "done")


@dataclass
class Place:
    """Its statuses one after the other; `away` calls from now on find nobody."""

    statuses: list[Status]
    written: bytes = b""
    fetched: list[str] = field(default_factory=list[str])
    away: int = 0
    silence: float = 0.0
    """Seconds until such a call is given up."""
    why: type[CloudError] = Unreachable
    refuses: CloudError | None = None

    async def _answer(self) -> None:
        if self.refuses is not None:
            raise self.refuses
        if self.away:
            await watching.asyncio.sleep(self.silence)
            self.away -= 1
            raise self.why("it is away.")

    async def status(self, handle: Handle) -> Status:
        await self._answer()
        return self.statuses[0]

    async def wait(self, handle: Handle, seen: Status, seconds: float) -> Status:
        await self._answer()
        self.statuses.pop(0)
        return self.statuses[0]

    async def log(self, handle: Handle, offset: int, limit: int) -> LogPart:
        await self._answer()
        return LogPart(len(self.written), self.written[offset : offset + limit])

    async def fetch(self, handle: Handle, folder: Path) -> FetchedResults:
        await self._answer()
        self.fetched.append(self.statuses[0].phase)
        return FetchedResults(folder, (), 0, {})


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []

    async def sleep(seconds: float) -> None:
        if seconds:
            found.append(seconds)

    monkeypatch.setattr(watching.asyncio, "sleep", sleep)
    monkeypatch.setattr(watching, "time", SimpleNamespace(monotonic=lambda: sum(found)))
    return found


@pytest.fixture
def output() -> list[Any]:
    return []


@pytest.fixture
def watch(output: list[Any], tmp_path: Path) -> Watch:
    return Watch(tmp_path, output.append, output.append)


def running(log: int = 0, checkpoints: int = 0) -> Status:
    return Status(Phase.RUNNING, log, checkpoints)


async def ends(watch: Watch, place: Place) -> Status:
    status, _ = await watch.until_ended(cast("Backend", place), HANDLE)
    return status


async def test_each_byte_of_the_log_is_written_once(
    watch: Watch, output: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "PIECE", 3)
    place = Place(
        [running(), running(4), running(9), Status(Phase.ENDED, 11, ending=ENDED)], b"hello there"
    )
    status = await ends(watch, place)
    assert status.ending == ENDED
    assert b"".join(output) == b"hello there"
    assert max(map(len, output)) == 3


@pytest.mark.parametrize(
    ("steps", "fetched"),
    [
        ([(0, 0, 0), (5, 0, 0), (5, 1, 0), (9, 1, 0), (9, 3, 0)], 3),
        ([(0, 2, 4), (0, 2, 4), (0, 2, 6), (0, 2, 8)], 4),
    ],
    ids=["more checkpoints", "as many as before may be others"],
)
async def test_results_come_with_each_new_checkpoint_and_at_the_end(
    watch: Watch, steps: list[tuple[int, int, int]], fetched: int
) -> None:
    *_, last = steps
    place = Place([*(Status(Phase.RUNNING, *each) for each in steps)], b"123456789")
    place.statuses.append(Status(Phase.ENDED, *last, ENDED))
    await ends(watch, place)
    assert place.fetched == [*[Phase.RUNNING] * (fetched - 1), Phase.ENDED]


@pytest.mark.parametrize("why", [Unreachable, Busy])
async def test_an_unreachable_place_is_asked_again_and_reported_once(
    watch: Watch, output: list[Any], slept: list[float], why: type[CloudError]
) -> None:
    place = Place([Status(Phase.ENDED, 2, ending=ENDED)], b"ok", away=3, why=why)
    await ends(watch, place)
    assert [each for each in output if each != b"ok"] == [
        "it is away. Asking again.",
        "it answers again",
    ]
    assert b"ok" in output
    assert (slept, len(place.fetched)) == ([watching.RETRY_SECONDS] * 3, 1)


async def test_patience_has_an_end_and_a_refusal_is_not_asked_again(
    watch: Watch, slept: list[float]
) -> None:
    with pytest.raises(CloudError, match="never"):
        await ends(watch, Place([running()], refuses=CloudError("never")))
    assert slept == []
    for silence in (0.0, 50.0):  # the time of calls counts, too
        slept.clear()
        with pytest.raises(Unreachable):
            await ends(watch, Place([running()], away=10**6, silence=silence))
        assert 0 <= sum(slept) - silence - watching.RETRY_TIMEOUT <= silence


async def test_watching_continues_after_an_interruption_without_repeating_output(
    watch: Watch, output: list[Any]
) -> None:
    class Interrupts(Place):
        async def wait(self, handle: Handle, seen: Status, seconds: float) -> Status:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await ends(watch, Interrupts([running(5)], b"12345"))
    assert b"".join(output) == b"12345"
    await ends(watch, Place([Status(Phase.ENDED, 7, ending=ENDED)], b"1234567"))
    assert b"".join(output) == b"1234567"
