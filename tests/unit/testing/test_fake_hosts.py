"""The fake machines keep what a runner promises."""

from typing import Any

import pytest

from groupwise.hosts.answers import RunnerState
from groupwise.hosts.driver import Known, Runner
from groupwise.hosts.port import HostUnreachable, OutcomeUnknown, Request, RunnerRefused
from groupwise.testing.fake_hosts import FakeHost, FakeHosts, Fault, Script


@pytest.fixture
def rack() -> FakeHosts:
    return FakeHosts({"a": ["G0", "G1"]})


@pytest.fixture
def host(rack: FakeHosts) -> FakeHost:
    return rack["a"]


def launch(host: FakeHost, job: str, epoch: int, *gpus: str, **more: Any) -> Any:
    """The state that the attempt is in, or the code of the refusal."""
    body = {
        "job": job, "epoch": epoch, "rank": 0, "members": 1, "spec": {"files": {}},
        "gpus": list(gpus), **more,
    }  # fmt: skip
    told: Any = host.perform(Request("launch", body)).body
    return told["refused"]["code"] if told.get("refused") else told["state"]


def ask(host: FakeHost, verb: str, job: str, epoch: int, **more: Any) -> dict[str, Any]:
    return dict(host.perform(Request(verb, {"job": job, "epoch": epoch, **more})).body)


def test_an_attempt_is_begun_once_and_void_excludes_it(rack: FakeHosts, host: FakeHost) -> None:
    assert [launch(host, "job", 5, "G0") for _ in range(2)] == ["running"] * 2
    assert [r["what"] for r in rack.history] == ["start"]
    assert launch(host, "job", 4) == "lower_epoch"
    assert ask(host, "void", "job", 5)["state"] == "running"
    assert ask(host, "void", "other", 1)["state"] == launch(host, "other", 1) == "voided"
    rack.tick()
    rack.tick()
    ask(host, "forget", "job", 5)
    assert launch(host, "job", 5) == "voided"


def test_gpus_and_slots_belong_to_one_or_to_shares(rack: FakeHosts, host: FakeHost) -> None:
    found = [
        launch(host, "job", 1, "G0"),
        launch(host, "next", 2, "G0"),
        launch(host, "share", 3, "G1", share_mb=10),
        launch(host, "share", 4, "G1", share_mb=10),
        launch(host, "whole", 5, "G1"),
        launch(host, "gone", 6, "G7"),
        launch(host, "slot", 7, slot=0),
        launch(host, "slot too", 8, slot=0),
    ]
    assert found == [
        *("running", "gpu_busy", "running", "running"),
        *("gpu_busy", "gpu_missing", "running", "gpu_busy"),
    ]
    host.foreign.add("G0")
    rack.tick()
    rack.tick()
    assert launch(host, "late", 9, "G0") == "foreign_busy"


def test_exits_leaks_and_power(rack: FakeHosts, host: FakeHost) -> None:
    rack.scripts |= {
        "bad": [Script(ticks=1, code=3, tail="no\n", leaks=True)],
        "stubborn": [Script(ticks=99, ignores_term=True)],
        "meek": [Script(ticks=99)],
        "long": [Script(ticks=99)],
    }
    for epoch, job in enumerate(("bad", "stubborn", "meek", "long"), 1):
        launch(host, job, epoch, *(["G0"] if job == "bad" else []))
    for epoch, job in ((2, "stubborn"), (3, "meek")):
        assert ask(host, "kill", job, epoch, grace=1)["state"] == "running"
    rack.tick()
    rack.tick()
    found = {job: f.exit for f in host.folders.values() if (job := f.job) and f.exit}
    assert (found["bad"]["code"], found["bad"]["tail"]) == (3, "no\n")
    assert [found[job]["signal"] for job in ("stubborn", "meek")] == [9, 15]
    assert not ask(host, "release", "bad", 1, gpus=["G0"])["clean"]
    assert launch(host, "next", 5, "G0") == "gpu_busy"
    host.clean_up()
    assert ask(host, "release", "bad", 1, gpus=["G0"])["clean"]
    host.kill_supervisor("long", 4)
    assert ask(host, "status", "long", 4)["state"] == "lost"
    host.power_off()
    host.boot()
    assert ask(host, "status", "long", 4)["state"] == "rebooted"


async def test_what_was_said_to_go_wrong_does(rack: FakeHosts, host: FakeHost) -> None:
    async def void(epoch: int) -> None:
        await host.call(Request("void", {"job": "job", "epoch": epoch}), timeout=1.0)

    faults = (Fault.REQUEST_LOST, Fault.ANSWER_LOST, Fault.UNREACHABLE, Fault.REFUSED, Fault.LATE)
    errors = (OutcomeUnknown, OutcomeUnknown, HostUnreachable, RunnerRefused, OutcomeUnknown)
    for epoch, (fault, error) in enumerate(zip(faults, errors, strict=True), 1):
        host.fail("void", fault)
        with pytest.raises(error):
            await void(epoch)
    assert list(host.folders) == ["job.2"]
    assert await host.deliver() == 1
    assert "job.5" in host.folders
    host.cut()
    with pytest.raises(HostUnreachable):
        await void(6)


async def test_wait_answers_when_something_differs(rack: FakeHosts, host: FakeHost) -> None:
    launch(host, "job", 1)
    runner = Runner(host)
    known = {("job", 1): Known(RunnerState.RUNNING)}
    assert await runner.wait(known, seconds=0.01) == ()
    rack.tick()
    rack.tick()
    (state,) = await runner.wait(known, seconds=5.0)
    assert state.state is RunnerState.EXITED
