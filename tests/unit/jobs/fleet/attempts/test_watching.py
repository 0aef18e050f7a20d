"""One long poll for each machine: which listeners it notifies, and which deadmen it keeps from expiring."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from groupwise.jobs.fleet.attempts.records import Machine
from groupwise.jobs.fleet.attempts.watching import MachineWatch, PollTiming
from groupwise.jobs.hosts.answers import MemberState, RunnerState
from groupwise.jobs.hosts.driver import Runner
from groupwise.jobs.hosts.host import Request
from tests.fake_hosts import FakeHosts, Script

QUICK = PollTiming(poll=5.0, first=0.005, longest=0.01)


class Ear:
    """A listener that writes down what it is told."""

    def __init__(self, job: str, epoch: int, machine_answers: bool = True) -> None:
        self.name = (job, epoch)
        self.last: MemberState | None = MemberState(job, epoch, RunnerState.RUNNING)
        self.machine_answers = machine_answers
        self.told: list[str] = []
        self.news = asyncio.Event()

    def on_state(self, state: MemberState) -> None:
        self.last = state
        self._tell(str(state.state))

    def on_contact_lost(self, reason: str) -> None:
        self._tell("silent")

    def on_contact(self) -> None:
        self._tell("again")

    def _tell(self, word: str) -> None:
        self.told.append(word)
        self.news.set()

    async def until(self, word: str) -> None:
        async with asyncio.timeout(5.0):
            while word not in self.told:
                self.news.clear()
                await self.news.wait()


@pytest.fixture
def rack() -> FakeHosts:
    made = FakeHosts({"a": []})
    for epoch in (1, 2):
        made.scripts[f"job-{epoch}"] = [Script(ticks=epoch)]
        launch = {
            "job": f"job-{epoch}", "epoch": epoch, "rank": 0, "members": 1,
            "spec": {"files": {}}, "gpus": [], "deadman": 100.0,
        }  # fmt: skip
        made["a"].perform(Request("launch", launch))
    return made


@pytest.fixture
async def watch(rack: FakeHosts) -> AsyncIterator[MachineWatch]:
    machine = Machine("a", "local", "", 22, None, None, None, None, "fleet", "python3", None, None, 500, False, True)  # fmt: skip
    runner = Runner(rack["a"])
    made = MachineWatch(machine, lambda _: runner, QUICK)
    yield made
    for listener in list(made.listeners.values()):
        made.remove(listener)


async def test_silence_is_reported_to_all_and_so_is_its_end(
    rack: FakeHosts, watch: MachineWatch
) -> None:
    one, two = Ear("job-1", 1), Ear("job-2", 2, machine_answers=False)
    watch.add(one)
    watch.add(two)
    running = asyncio.create_task(watch.run())
    await asyncio.sleep(0)
    rack["a"].cut()
    await one.until("silent")
    await two.until("silent")
    rack["a"].heal()
    await one.until("again")
    await two.until("again")
    watch.remove(one)
    watch.remove(two)
    await running


@pytest.mark.parametrize("news", [False, True])
async def test_a_machine_that_answers_at_once_is_not_asked_at_once_again(
    watch: MachineWatch, news: bool
) -> None:
    asked = 0

    async def at_once(*_: object, **__: object) -> tuple[MemberState, ...]:
        nonlocal asked
        asked += 1
        return (MemberState("job-1", 1, RunnerState.RUNNING, log_size=asked * news),)

    watch.runner(watch.machine).wait = at_once  # type: ignore[method-assign]
    watch.poll_timing = PollTiming(first=1000.0)
    watch.add(Ear("job-1", 1))
    running = asyncio.create_task(watch.run())
    for _ in range(50):
        await asyncio.sleep(0)
    assert asked == 1
    running.cancel()


async def test_the_deadman_of_an_attempt_that_is_written_down_as_silent_is_not_kept_quiet(
    rack: FakeHosts, watch: MachineWatch
) -> None:
    heard, unheard = Ear("job-1", 1), Ear("job-2", 2, machine_answers=False)
    watch.add(heard)
    watch.add(unheard)
    rack.advance(90.0)
    running = asyncio.create_task(watch.run())
    for _ in range(20):
        await asyncio.sleep(0)
    rack.advance(20.0)
    folders = rack["a"].folders
    assert folders["job-1.1"].exit is None
    assert folders["job-2.2"].exit is not None
    assert folders["job-2.2"].exit["reason"] == "deadman"
    watch.remove(heard)
    watch.remove(unheard)
    await running
