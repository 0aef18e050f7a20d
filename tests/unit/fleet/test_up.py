"""The connections that the roles of a process keep."""

from collections.abc import Callable

import pytest

from groupwise.fleet import up
from groupwise.fleet.attempts.records import Machine
from groupwise.fleet.up import Hosts


class Way:
    """A host that is closed, or not."""

    def __init__(self, machine: Machine) -> None:
        self.to = machine.ip_address
        self.closed = 0

    async def close(self) -> None:
        self.closed += 1


def machine(vm_id: str, address: str) -> Machine:
    return Machine(
        vm_id=vm_id, transport="ssh", ip_address=address, port=22, user=None, ssh_key_path=None,
        jump=None, host_key="pinned", workdir="work", python="python3", deadman=None, probe=None,
        idle_memory_mb=0, lost=False, takes_new=True,
    )  # fmt: skip


@pytest.fixture
def way_to(monkeypatch: pytest.MonkeyPatch) -> tuple[Hosts, Callable[[Machine], Way]]:
    monkeypatch.setattr(up, "host_of", Way)
    hosts = Hosts()

    def way(machine: Machine) -> Way:
        found = hosts(machine)
        assert isinstance(found, Way)
        return found

    return hosts, way


async def test_a_way_is_kept_until_its_machine_is_gone_or_somewhere_else(
    way_to: tuple[Hosts, Callable[[Machine], Way]],
) -> None:
    hosts, way = way_to
    first, other = way(machine("a", "10.0.0.1")), way(machine("b", "10.0.0.2"))
    assert way(machine("a", "10.0.0.1")) is first
    moved = way(machine("a", "10.0.0.3"))
    assert (moved.to, first.closed) == ("10.0.0.3", 0)  # somebody may be speaking
    await hosts.keep_only({"a"})
    assert (first.closed, moved.closed, other.closed) == (1, 0, 1)
    assert way(machine("a", "10.0.0.3")) is moved
    await hosts.close()
    assert (first.closed, moved.closed, other.closed) == (1, 1, 1)
