"""Operations on machines: every change makes an event, repeating it changes nothing, and an impossible one says what to do instead."""

from datetime import UTC, datetime, timedelta
from typing import Any

import asyncssh
import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from groupwise.api.schemas.problems import Refusal
from groupwise.jobs.fleet.attempts import records
from groupwise.jobs.fleet.machines import observation
from groupwise.jobs.fleet.operations import machines, prune, status
from groupwise.jobs.fleet.operations.machines import NewMachine
from groupwise.jobs.fleet.store.database import database_time
from groupwise.jobs.fleet.store.tables import VM, ControlProcess, Job


def host_key() -> str:
    public = asyncssh.generate_private_key("ssh-ed25519").export_public_key().decode()
    return " ".join(public.split()[:2])


def set_columns(small: Any, vm_id: str, **columns: Any) -> None:
    def write(session: Session) -> None:
        session.execute(update(VM).where(VM.vm_id == vm_id).values(**columns))

    small.database.run(write)


def test_a_lost_machine_is_an_alarm_while_jobs_wait_for_it(small: Any) -> None:
    def lost() -> list[str]:
        return [a["message"] for a in small.do(status.overview)["alarms"] if a["kind"] == "lost"]

    for vm_id in ("one", "two"):
        small.machine(vm_id)
        small.job("pending", resources={"gpus": 0, "vm": vm_id})
    assert lost() == []
    small.do(machines.lost, "one")
    assert lost() == ["one was marked as lost, and 1 job can run only there"]


def test_the_status_says_how_old_it_is_while_nothing_looks_at_the_machines(small: Any) -> None:
    small.machine("one", last_polled=datetime.now(UTC) - timedelta(seconds=300))
    overview = small.do(status.overview)
    assert overview["machines"]["outdated_seconds"] == pytest.approx(300, abs=30)
    now = overview["time"]
    row = {"host": "h", "pid": 1, "started_at": now, "seen_at": now}
    small.database.run(lambda s: s.add(ControlProcess(owner="p", role="poller", **row)))
    assert small.do(status.overview)["machines"]["outdated_seconds"] is None


def test_a_removed_machine_may_come_back(small: Any) -> None:
    small.do(machines.add, NewMachine("gpu-1", "10.0.0.1", user="ada", host_key=host_key()))
    small.do(machines.drain, "gpu-1", "noisy")
    (alarm,) = [a for a in small.do(status.overview)["alarms"] if a["kind"] == "draining"]
    assert alarm["remedy"] == "`groupwise fleet vm undrain gpu-1` gives it jobs again"
    assert small.do(machines.remove, "gpu-1")["active"] is False
    assert small.do(machines.listing) == []
    with pytest.raises(Refusal, match="was removed"):
        small.do(machines.drain, "gpu-1")
    small.do(machines.add, NewMachine("gpu-1", "10.0.0.9", user="ada"))
    (found,) = small.do(machines.listing)
    assert (found["ip_address"], found["drain_reason"], found["host_key"]) == (
        "10.0.0.9",
        None,
        None,
    )


def given_up(small: Any, vm_id: str) -> int:
    """An attempt that ended when its machine was declared lost; nobody has seen that it is over there."""
    small.machine(vm_id)
    epoch = small.attempt(small.job("running"), vm_id, state="ended", cleanup="clean")
    small.do(machines.lost, vm_id)
    return epoch


def test_a_machine_that_was_given_up_and_is_added_again_is_not_used_before_it_is_emptied(
    small: Any,
) -> None:
    epoch = given_up(small, "gpu-1")
    lost_at = small.vm("gpu-1").lost_at
    small.do(machines.remove, "gpu-1")
    found = small.do(machines.add, NewMachine("gpu-1", "10.0.0.1", user="ada"))
    assert (found["lost_at"], found["active"]) == (lost_at, True)
    (left,) = small.database.read(lambda s: records.unreleased_members(s, "gpu-1"))
    assert left.epoch == epoch
    assert not small.database.run(lambda s: records.return_to_use(s, "me", "gpu-1"))
    small.database.run(lambda s: records.record_released(s, epoch, 0))
    assert small.database.run(lambda s: records.return_to_use(s, "me", "gpu-1"))
    assert small.vm("gpu-1").lost_at is None
    small.do(machines.lost, "gpu-1")
    small.do(machines.remove, "gpu-1")
    found = small.do(machines.add, NewMachine("gpu-1", "10.0.0.1", user="ada"))
    assert found["lost_at"] is None, "nothing was left there"


def test_a_job_on_a_lost_machine_is_pruned_only_after_the_machine(small: Any) -> None:
    given_up(small, "gpu-1")
    (lost,) = small.database.read(lambda s: list(s.scalars(select(Job.job_id))))
    failed = update(Job).values(status="failed")
    small.database.run(lambda s: s.execute(failed))
    assert small.do(prune.remove, [lost]) == []
    small.do(machines.remove, "gpu-1")
    assert small.do(prune.remove, [lost]) == [lost]


def test_a_look_that_was_under_way_at_what_it_was_before_says_nothing(small: Any) -> None:
    small.do(machines.add, NewMachine("gpu-1", "10.0.0.1", user="ada", host_key=host_key()))
    asked_at = small.database.run(database_time)
    set_columns(small, "gpu-1", boot_id="of another one")
    small.do(machines.remove, "gpu-1")
    small.do(machines.add, NewMachine("gpu-1", "10.0.0.9", user="ada", host_key=host_key()))
    vm = small.vm("gpu-1")
    assert vm.observed_round > asked_at
    assert vm.boot_id is None
    missed = small.database.run(lambda s: observation.record_miss(s, "gpu-1", asked_at, "no route"))
    assert (missed, small.vm("gpu-1").problem) == (0, None)


def test_a_machine_in_use_is_not_removed(small: Any) -> None:
    small.machine("vm-1")
    job = small.job("running")
    small.attempt(job, "vm-1", state="ended", cleanup="leaking")
    with pytest.raises(Refusal, match=f"{job} .*cleanup leaking.*vm drain vm-1.*vm mark-lost vm-1"):
        small.do(machines.remove, "vm-1")
    small.do(machines.drain, "vm-1")
    with pytest.raises(Refusal, match=r"drained already.*vm mark-lost vm-1") as refusal:
        small.do(machines.remove, "vm-1")
    assert "vm drain" not in str(refusal.value)
    assert small.vm("vm-1").active
    small.do(machines.lost, "vm-1")
    with pytest.raises(Refusal, match="within seconds"):
        small.do(machines.remove, "vm-1")


def test_trust_pins_the_key_that_was_shown(small: Any) -> None:
    small.machine("vm-1", contact="new")
    with pytest.raises(Refusal, match="host key"):
        small.do(machines.trust, "vm-1")
    key, other = host_key(), machines.fingerprint(host_key())
    set_columns(small, "vm-1", seen_host_key=key, contact="untrusted")
    with pytest.raises(Refusal, match="ssh-keygen -lf") as refused:
        small.do(machines.trust, "vm-1", other)
    assert refused.value.code == "host_key_mismatch"
    assert small.vm("vm-1").host_key is None
    found = small.do(machines.trust, "vm-1", machines.fingerprint(key))
    assert (found["host_key"], found["seen_host_key"], found["contact"]) == (key, None, "new")
    assert small.do(machines.trust, "vm-1")["host_key"] == key
    assert small.events() == [("user:ada", "vm.trusted")]


def test_keys_bound_to_projects_cannot_change_machines(small: Any) -> None:
    small.machine("vm-1")
    for operation in (machines.drain, machines.lost, machines.remove, machines.trust):
        with pytest.raises(Refusal, check=lambda refused: refused.code == "forbidden"):
            small.as_("ours").do(operation, "vm-1")


def test_a_machine_in_use_stays_the_place_that_it_is(small: Any) -> None:
    """So does one where something may be left."""
    small.machine("vm-1", gpus=1, user="ml", workdir="groupwise-fleet")
    small.attempt(small.job("running"), "vm-1", gpu=0)
    for column in ("user", "workdir"):
        with pytest.raises(Refusal, check=lambda refused: refused.code == "vm_in_use"):
            small.do(machines.change, "vm-1", **{column: "other"})
    small.do(machines.change, "vm-1", user="ml", workdir="groupwise-fleet", cpu_slots=2)
    assert small.do(machines.change, "vm-1", ip_address="10.0.0.9")["contact"] == "new"
    assert [kind for _, kind in small.events()] == ["vm.changed", "vm.changed"]
    small.machine("vm-2", user="ml")
    small.attempt(small.job("failed"), "vm-2", state="ended", cleanup="clean")
    with pytest.raises(Refusal, match="workdir"):
        small.do(machines.change, "vm-2", workdir="other")


# Behind an engine


SLURM = {"name": "slurm", "slots": 4, "gpus": 2, "options": ["--account=lab"]}


def test_two_machines_of_one_folder_would_end_each_others_jobs(small: Any) -> None:
    small.do(machines.add, NewMachine("a", "login", user="ada", workdir="w"))
    with pytest.raises(Refusal, match="w of the same machine"):
        small.do(machines.add, NewMachine("b", "login", user="ada", workdir="w", engine=SLURM))
    for spelled in ("w/", "./w", "~/w", "x/../w"):
        with pytest.raises(Refusal, match="--workdir"):
            small.do(machines.add, NewMachine("b", "login", user="ada", workdir=spelled))
    small.do(machines.add, NewMachine("b", "login", user="ada", engine=SLURM))
    with pytest.raises(Refusal, match="of the same machine"):
        small.do(machines.change, "b", workdir="w")
    small.do(machines.remove, "a")
    assert small.do(machines.change, "b", workdir="w")["workdir"] == "w"
