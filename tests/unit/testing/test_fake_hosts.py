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


def launch(host: FakeHost, job: str, epoch: int, *gpus: str, **more: Any) -> dict[str, Any]:
    body = {
        "job": job, "epoch": epoch, "rank": 0, "members": 1, "spec": {"files": {}},
        "gpus": list(gpus), **more,
    }  # fmt: skip
    return dict(host.perform(Request("launch", body)).body)


def ask(host: FakeHost, verb: str, job: str, epoch: int, **more: Any) -> dict[str, Any]:
    return dict(host.perform(Request(verb, {"job": job, "epoch": epoch, **more})).body)


def test_a_launch_that_is_repeated_begins_nothing_anew(rack: FakeHosts, host: FakeHost) -> None:
    assert launch(host, "job", 1, "G0")["state"] == "running"
    assert launch(host, "job", 1, "G0")["state"] == "running"
    assert [r["what"] for r in rack.history] == ["start"]


def test_void_and_launch_exclude_each_other(host: FakeHost) -> None:
    assert ask(host, "void", "job", 1)["state"] == "voided"
    assert launch(host, "job", 1)["state"] == "voided"
    assert launch(host, "job", 2)["state"] == "running"
    assert ask(host, "void", "job", 2)["state"] == "running"


def test_a_lower_epoch_is_refused_and_a_forgotten_one_stays_void(
    rack: FakeHosts, host: FakeHost
) -> None:
    launch(host, "job", 5)
    assert launch(host, "job", 4)["refused"]["code"] == "lower_epoch"
    rack.tick()
    rack.tick()
    ask(host, "forget", "job", 5)
    assert launch(host, "job", 5)["state"] == "voided"


def test_a_gpu_belongs_to_one_or_to_shares(rack: FakeHosts, host: FakeHost) -> None:
    launch(host, "job", 1, "G0")
    assert launch(host, "next", 2, "G0")["refused"]["code"] == "gpu_busy"
    assert launch(host, "share", 3, "G1", share_mb=10)["state"] == "running"
    assert launch(host, "share", 4, "G1", share_mb=10)["state"] == "running"
    assert launch(host, "whole", 5, "G1")["refused"]["code"] == "gpu_busy"
    assert launch(host, "gone", 6, "G7")["refused"]["code"] == "gpu_missing"
    host.foreign.add("G0")
    rack.tick()
    rack.tick()
    assert launch(host, "late", 7, "G0")["refused"]["code"] == "foreign_busy"


def test_a_slot_belongs_to_one(rack: FakeHosts, host: FakeHost) -> None:
    launch(host, "job", 1, slot=0)
    assert ask(host, "status", "job", 1)["slot"] == 0
    assert launch(host, "next", 2, slot=0)["refused"]["code"] == "gpu_busy"
    assert launch(host, "other", 3, slot=1)["state"] == "running"
    rack.tick()
    rack.tick()
    assert launch(host, "late", 4, slot=0)["state"] == "running"


def test_what_is_left_behind_holds_the_gpu(rack: FakeHosts, host: FakeHost) -> None:
    rack.scripts["job"] = [Script(ticks=1, leaks=True)]
    launch(host, "job", 1, "G0")
    rack.tick()
    assert ask(host, "status", "job", 1)["state"] == "exited"
    assert not ask(host, "release", "job", 1, gpus=["G0"])["clean"]
    assert launch(host, "next", 2, "G0")["refused"]["code"] == "gpu_busy"
    host.clean_up()
    assert ask(host, "release", "job", 1, gpus=["G0"])["clean"]


def test_exit_records(rack: FakeHosts, host: FakeHost) -> None:
    rack.scripts |= {
        "bad": [Script(ticks=1, code=3, tail="no\n")],
        "stubborn": [Script(ticks=99, ignores_term=True)],
        "meek": [Script(ticks=99)],
    }
    for epoch, job in enumerate(("bad", "stubborn", "meek"), 1):
        launch(host, job, epoch)
    for epoch, job in ((2, "stubborn"), (3, "meek")):
        assert ask(host, "kill", job, epoch, grace=1)["state"] == "running"
    rack.tick()
    rack.tick()
    found = {job: f.exit for f in host.folders.values() if (job := f.job) and f.exit}
    assert (found["bad"]["code"], found["bad"]["reason"]) == (3, "exited")
    assert found["bad"]["tail"] == "no\n"
    assert (found["stubborn"]["signal"], found["stubborn"]["reason"]) == (9, "cancelled")
    assert (found["meek"]["signal"], found["meek"]["reason"]) == (15, "cancelled")


def test_power_and_supervisors(rack: FakeHosts, host: FakeHost) -> None:
    rack.scripts["job"] = [Script(ticks=99)]
    launch(host, "job", 1, "G0")
    host.kill_supervisor("job", 1)
    assert ask(host, "status", "job", 1)["state"] == "lost"
    assert not ask(host, "release", "job", 1, gpus=["G0"])["clean"]
    host.power_off()
    host.boot()
    assert ask(host, "status", "job", 1)["state"] == "rebooted"
    assert ask(host, "release", "job", 1, gpus=["G0"])["clean"]
    assert [r["what"] for r in rack.history] == ["start", "supervisor_killed", "power_off", "boot"]


async def test_files_that_are_what_they_were_listed_as_come_together(
    rack: FakeHosts, host: FakeHost
) -> None:
    rack.scripts["job"] = [Script(ticks=1, files={"outputs/x": b"one", "outputs/y": b"other"})]
    launch(host, "job", 1)
    rack.tick()
    runner = Runner(host)
    files = dict((await runner.manifest("job", 1)).files)
    files["outputs/z"] = files["outputs/x"]
    host.folders["job.1"].artefacts["outputs/y"] = b"these"
    assert await runner.gather("job", 1, files) == {"outputs/x": b"one"}


async def test_what_was_said_to_go_wrong_does(rack: FakeHosts, host: FakeHost) -> None:
    async def void(epoch: int) -> None:
        await host.call(Request("void", {"job": "job", "epoch": epoch}), timeout=1.0)

    for fault in (Fault.REQUEST_LOST, Fault.ANSWER_LOST, Fault.UNREACHABLE, Fault.REFUSED):
        host.fail("void", fault)
    for epoch, error in enumerate(
        (OutcomeUnknown, OutcomeUnknown, HostUnreachable, RunnerRefused), 1
    ):
        with pytest.raises(error):
            await void(epoch)
    assert list(host.folders) == ["job.2"]
    host.fail("void", Fault.LATE)
    with pytest.raises(OutcomeUnknown):
        await void(5)
    assert "job.5" not in host.folders
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


def test_each_attempt_has_its_script(rack: FakeHosts, host: FakeHost) -> None:
    rack.scripts["job"] = [Script(ticks=1, code=1), Script(ticks=1, code=2)]
    for epoch in (1, 2, 3):
        launch(host, "job", epoch)
        rack.tick()
    assert [f.exit["code"] for f in host.folders.values() if f.exit] == [1, 2, 2]
