"""The fake machines keep what a runner promises."""

from typing import Any

import pytest

from groupwise.jobs.hosts.host import Request
from tests.fake_hosts import FakeHost, FakeHosts


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
        launch(host, "job", 1, "G0"), launch(host, "next", 2, "G0"),
        launch(host, "share", 3, "G1", share_mb=10), launch(host, "share", 4, "G1", share_mb=10),
        launch(host, "whole", 5, "G1"), launch(host, "gone", 6, "G7"),
        launch(host, "slot", 7, slot=0), launch(host, "slot too", 8, slot=0),
    ]  # fmt: skip
    assert found == [
        *("running", "gpu_busy", "running", "running"),
        *("gpu_busy", "gpu_missing", "running", "gpu_busy"),
    ]
    host.foreign.add("G0")
    rack.tick()
    rack.tick()
    assert launch(host, "late", 9, "G0") == "foreign_busy"
