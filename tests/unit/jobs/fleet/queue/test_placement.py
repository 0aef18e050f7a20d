"""Where a job can run.

1. A GPU is never given twice: whole to one job, or shares of it whose sum is at most its memory.
2. A gang gets distinct machines, all or none.
3. The answer does not depend on the order in which machines and GPUs are told.
4. Without room there is always a reason; with room there is always a place, as a search over all choices says.
5. Large holes are left for large jobs.
6. A job that waited for long is served in the end, however many small ones come.
"""

import itertools
import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.jobs.fleet.queue import placement
from groupwise.jobs.fleet.queue.elastic import elastic_of
from groupwise.jobs.fleet.queue.placement import (
    NOTHING_WITHHELD,
    Avoid,
    Blocked,
    Machine,
    MachineGPU,
    Placement,
    WithheldCapacity,
    apply,
    has_room,
    place,
    withhold,
)
from groupwise.jobs.fleet.queue.resources import Resources


def gpu(gpu_id: int, index: int = 0, **more: object) -> MachineGPU:
    known: dict[str, object] = {"model": "NVIDIA A100-SXM4-80GB", "memory_mb": 80_000, **more}
    return MachineGPU(gpu_id, index, f"GPU-{gpu_id}", **known)  # pyright: ignore[reportArgumentType]


def machine(name: str, gpus: int = 0, first: int = 0, **more: object) -> Machine:
    of_it = tuple(gpu(first + n, n) for n in range(gpus))
    return Machine(name, of_it, **more)  # pyright: ignore[reportArgumentType]


def placed(answer: Placement | Blocked) -> dict[str, list[int]]:
    assert isinstance(answer, Placement), answer
    return {seat.vm_id: [gpu.index for gpu in seat.gpus] for seat in answer.seats}


def reasons(answer: Placement | Blocked) -> str:
    assert isinstance(answer, Blocked), answer
    assert answer.reasons
    return "\n".join(answer.reasons)


def with_gpu(of: Machine, index: int, **changed: object) -> Machine:
    gpus = tuple(
        replace(g, **changed) if g.index == index else g  # pyright: ignore[reportArgumentType]
        for g in of.gpus
    )
    return replace(of, gpus=gpus)


# --- one job, machines as they are ----------------------------------------------------------------


def test_the_smallest_hole_that_fits() -> None:
    large, small = machine("a", 8), machine("b", 2, first=10)
    assert placed(place(Resources(gpus=1), [large, small])) == {"b": [0]}
    assert placed(place(Resources(gpus=4), [large, small])) == {"a": [0, 1, 2, 3]}


def test_named_gpus_and_machines() -> None:
    fleet = [machine("a", 4), machine("b", 4, first=10)]
    assert placed(place(Resources(gpus=2, named=(3, 1), vm="b"), fleet)) == {"b": [3, 1]}
    assert placed(place(Resources(gpus=1, named=("GPU-12",)), fleet)) == {"b": [2]}
    assert placed(place(Resources(gpus=1, vm="a"), fleet)) == {"a": [0]}
    fleet[1] = with_gpu(fleet[1], 3, whole=True)
    assert "GPU 3 in use" in reasons(place(Resources(gpus=1, named=(3,), vm="b"), fleet))
    assert "no machine c" in reasons(place(Resources(gpus=1, vm="c"), fleet))
    assert "no GPU 9" in reasons(place(Resources(gpus=1, named=(9,), vm="b"), fleet))
    two_vendors = [Machine("c", (gpu(30, 0), gpu(31, 0)))]
    asked = Resources(gpus=1, named=(0,), vm="c")
    assert "GPU-30 or GPU-31: name its UUID" in reasons(place(asked, two_vendors))
    replaced = Machine("c", (gpu(30, 0, trouble="is not there any more"), gpu(31, 0)))
    assert placed(place(asked, [replaced])) == {"c": [0]}


def test_labels_cpus_ram_and_disk() -> None:
    one = machine("a", 1, labels={"rack": "3"}, cpus=8, ram_mb=1000, disk_free_mb=50)
    fits = Resources(gpus=1, labels={"rack": "3"}, cpus=8, ram_mb=1000, disk_mb=50)
    assert placed(place(fits, [one])) == {"a": [0]}
    for asked, why in (
        ({"gpu_model": "H100"}, "not H100"),
        ({"gpu_memory_mb": 81_000}, "80000 MB"),
        ({"labels": {"rack": "4"}}, "label rack=4 is wanted, and there it is '3'"),
        ({"labels": {"zone": "x"}}, "label zone=x is wanted, and it is not set"),
        ({"cpus": 9}, "8 CPUs, 9 wanted"),
        ({"ram_mb": 1001}, "1000 MB of RAM, 1001 wanted"),
        ({"disk_mb": 51}, "50 MB free on its disk, 51 wanted"),
    ):
        assert why in reasons(place(Resources.model_validate({"gpus": 1, **asked}), [one]))
    unknown = place(Resources(gpus=1, ram_mb=1), [machine("a", 1)])
    assert "unknown MB of RAM" in reasons(unknown)


def test_only_a_job_that_asks_for_a_mig_device_gets_one() -> None:
    split = with_gpu(machine("a", 3), 0, trouble="is split into MIG devices")
    profile = "NVIDIA A100-SXM4-80GB MIG 3g.40gb"
    parts = (replace(g, uuid=f"MIG-{g.index}", index=0, model=profile) for g in split.gpus[1:])
    split = replace(split, gpus=(split.gpus[0], *parts))
    for asked, uuid in (
        (Resources(gpus=1, gpu_model="MIG-3g.40gb"), "MIG-1"),
        (Resources(gpus=1, gpu_model="A100 MIG 3g.40gb", share_mb=100), "MIG-1"),
        (Resources(gpus=1, named=("MIG-2",)), "MIG-2"),
    ):
        answer = place(asked, [split])
        assert isinstance(answer, Placement)
        assert [gpu.uuid for gpu in answer.seats[0].gpus] == [uuid]
    for asked, told in (
        (Resources(gpus=1), "which a job gets if --gpu-model names its profile"),
        (Resources(gpus=1, share_mb=100), "if --gpu-model names its profile"),
        (Resources(gpus=1, gpu_model="A100"), "not A100"),
        (Resources(gpus=1, gpu_model="MIG-1g.10gb"), "not MIG-1g.10gb"),
        (Resources(gpus=1, named=(0,), vm="a"), "split into"),
    ):
        assert told in reasons(place(asked, [split]))


def test_a_job_gets_gpus_of_one_vendor() -> None:
    def amd(gpu_id: int, index: int) -> MachineGPU:
        return gpu(gpu_id, index, vendor="AMD", model="AMD Instinct MI300X")

    mixed = Machine("a", (gpu(1, 0), gpu(2, 1), amd(3, 0), amd(4, 1), amd(5, 2)))
    other = Machine("b", (gpu(6, 0), gpu(7, 1)))

    def given(fleet: list[Machine], **asked: Any) -> set[int]:
        answer = place(Resources(**asked), fleet)
        assert isinstance(answer, Placement)
        return {gpu.gpu_id for seat in answer.seats for gpu in seat.gpus}

    assert given([mixed], gpus=3) == {3, 4, 5}
    assert given([mixed], gpus=2, gpu_model="A100") == {1, 2}
    assert given([mixed, other], gpus=2, machines=2) == {1, 2, 6, 7}
    waits = withhold(Resources(gpus=3), [with_gpu(mixed, 2, whole=True)], job_id="j")
    assert set(waits.gpus) == {3, 4, 5}
    for asked, told in (
        (Resources(gpus=4), "a: 3 of 3 GPUs fit, 4 wanted"),
        (Resources(gpus=4), "those of each are counted by themselves"),
        (Resources(gpus=1, named=(0,), vm="a"), "GPU-1 or GPU-3: name its UUID"),
        (Resources(gpus=2, named=("GPU-1", 2), vm="a"), "some of both are named"),
    ):
        assert told in reasons(place(asked, [mixed]))
    unseen = with_gpu(Machine("a", (gpu(1, 0), amd(3, 1))), 0, trouble="is quarantined")
    same_index = replace(unseen, gpus=(unseen.gpus[0], amd(3, 0)))
    assert "name its UUID" in reasons(place(Resources(gpus=1, named=(0,), vm="a"), [same_index]))


def test_a_command_of_exec_runs_beside_all_others() -> None:
    command = Resources(gpus=0, vm="a", oversubscribe=True)
    machines = {"a": machine("a", 1, slots=1, taken_slots=frozenset({0}), trouble="draining")}
    for _ in range(2):
        answer = place(command, machines.values())
        assert isinstance(answer, Placement)
        apply(answer, command, machines)
    assert len(machines["a"].taken_slots) == 3
    assert has_room(replace(machines["a"], slots=2, trouble=None)), "its slots stay those of jobs"
    gone = replace(machines["a"], unreachable_reason="unreachable: no key")
    assert "unreachable: no key" in reasons(place(command, [gone]))


def test_machines_to_avoid_are_the_last_resort() -> None:
    fleet = [machine("a", 1), machine("b", 8, first=10)]
    asked = Resources(gpus=1)
    avoid = Avoid(frozenset({"a"}))
    assert placed(place(asked, fleet, avoid=avoid)) == {"b": [0]}
    assert placed(place(asked, fleet[:1], avoid=avoid)) == {"a": [0]}


# --- any job, any fleet ---------------------------------------------------------------------------

MODELS = ("A100", "V100")


@st.composite
def fleets(draw: st.DrawFn) -> list[Machine]:
    machines: list[Machine] = []
    numbers = itertools.count()
    for name in "abcd"[: draw(st.integers(0, 4))]:
        gpus = tuple(draw(_gpus(next(numbers), index)) for index in range(draw(st.integers(0, 3))))
        slots = draw(st.integers(0, 2))
        machines.append(
            Machine(
                name,
                gpus,
                trouble=draw(st.sampled_from([None, None, None, "draining"])),
                slots=slots,
                taken_slots=frozenset(draw(st.sets(st.integers(0, max(0, slots - 1))))),
                labels=draw(st.sampled_from([{}, {"rack": "1"}])),
                prepared=draw(st.booleans()),
                ram_mb=draw(st.sampled_from([None, 100, 200])),
                promised_ram_mb=draw(st.sampled_from([0, 50])),
            )
        )
    return machines


def _gpus(gpu_id: int, index: int) -> st.SearchStrategy[MachineGPU]:
    return st.builds(
        MachineGPU,
        st.just(gpu_id),
        st.just(index),
        st.just(f"GPU-{gpu_id}"),
        st.sampled_from(MODELS),
        st.sampled_from([None, 10, 20]),
        st.sampled_from([None, None, None, "is missing"]),
        st.sampled_from([False, False, True]),
    ).flatmap(
        lambda made: st.sampled_from([0, 0, 5, 10]).map(
            lambda shares: made if made.whole else replace(made, shares_mb=shares)
        )
    )


@st.composite
def needs(draw: st.DrawFn) -> Resources:
    labels = draw(st.sampled_from([{}, {"rack": "1"}]))
    ram = draw(st.sampled_from([None, 100]))
    kind = draw(st.sampled_from(["whole", "share", "slot", "index", "uuid"]))
    if kind == "slot":
        return Resources(
            gpus=0,
            machines=draw(st.integers(1, 3)),
            labels=labels,
            ram_mb=ram,
            prepared=draw(st.booleans()),
        )
    if kind == "index":
        names = tuple(draw(st.lists(st.integers(0, 2), min_size=1, max_size=2, unique=True)))
        return Resources(gpus=len(names), named=names, vm=draw(st.sampled_from("abcd")))
    if kind == "uuid":
        return Resources(gpus=1, named=(f"GPU-{draw(st.integers(0, 8))}",))
    about: dict[str, object] = {
        "gpu_model": draw(st.sampled_from([None, *MODELS])),
        "gpu_memory_mb": draw(st.sampled_from([None, 10, 20])),
        "labels": labels,
        "ram_mb": ram,
    }
    if kind == "share":
        share = draw(st.sampled_from([5, 10]))
        return Resources(gpus=1, share_mb=share, **about)  # pyright: ignore[reportArgumentType]
    return Resources(
        gpus=draw(st.integers(1, 3)),
        machines=draw(st.integers(1, 3)),
        **about,  # pyright: ignore[reportArgumentType]
    )


def gives(machine: Machine, asked: Resources, held: WithheldCapacity) -> bool:
    """By a search over all choices of GPUs: whether the machine could seat the job."""
    if machine.trouble or (asked.vm and asked.vm != machine.vm_id):
        return False
    if any(machine.labels.get(name) != value for name, value in asked.labels.items()):
        return False
    if asked.prepared and not machine.prepared:
        return False
    if asked.ram_mb and (machine.ram_mb or 0) - machine.promised_ram_mb < asked.ram_mb:
        return False
    if asked.gpus == 0:
        return any(
            n not in machine.taken_slots and (machine.vm_id, n) not in held.slots
            for n in range(machine.slots)
        )
    return any(
        all(suits(gpu, asked, held) for gpu in choice)
        and all(any(name in (g.index, g.uuid) for g in choice) for name in asked.named)
        for choice in itertools.combinations(machine.gpus, asked.gpu_count)
    )


def suits(gpu: MachineGPU, asked: Resources, held: WithheldCapacity) -> bool:
    if gpu.trouble or gpu.whole or gpu.gpu_id in held.gpus:
        return False
    if asked.gpu_model and asked.gpu_model != gpu.model:
        return False
    if asked.gpu_memory_mb and (gpu.memory_mb or 0) < asked.gpu_memory_mb:
        return False
    if asked.share_mb:
        return gpu.shares_mb + asked.share_mb <= (gpu.memory_mb or 0)
    return gpu.shares_mb == 0


@st.composite
def withheld(draw: st.DrawFn) -> WithheldCapacity:
    gpus = draw(st.sets(st.integers(0, 10), max_size=3))
    slots = draw(st.sets(st.tuples(st.sampled_from("abcd"), st.integers(0, 1)), max_size=2))
    return WithheldCapacity(dict.fromkeys(gpus, "other"), dict.fromkeys(slots, "other"))


@settings(max_examples=60)
@given(fleets(), needs(), withheld(), st.randoms())
def test_a_place_is_found_whenever_there_is_one(
    fleet: list[Machine], asked: Resources, held: WithheldCapacity, rng: random.Random
) -> None:
    answer = place(asked, fleet, held_for_others=held)
    possible = sum(gives(machine, asked, held) for machine in fleet) >= asked.machines
    assert isinstance(answer, Placement) == possible
    shuffled = [replace(m, gpus=_mixed(m.gpus, rng)) for m in _mixed(fleet, rng)]
    assert place(asked, shuffled, held_for_others=held) == answer
    if isinstance(answer, Placement):
        assert all(has_room(m) for m in fleet if any(m.vm_id == s.vm_id for s in answer.seats))
    if isinstance(answer, Blocked):
        assert answer.reasons
        assert all(answer.reasons)
        return
    by_name = {machine.vm_id: machine for machine in fleet}
    assert len({seat.vm_id for seat in answer.seats}) == len(answer.seats) == asked.machines
    for seat in answer.seats:
        assert len({gpu.gpu_id for gpu in seat.gpus}) == len(seat.gpus) == asked.gpu_count
        assert all(gpu in by_name[seat.vm_id].gpus for gpu in seat.gpus)
        assert all(suits(gpu, asked, held) for gpu in seat.gpus)
        assert (seat.slot is not None) == (asked.gpus == 0)


@settings(max_examples=150)
@given(fleets(), needs(), withheld(), st.data())
def test_machines_that_are_alike_need_not_all_be_examined(
    machines: list[Machine], asked: Resources, held: WithheldCapacity, data: st.DataObject
) -> None:
    fleet = [
        replace(
            m,
            vm_id=f"{m.vm_id}{n or ''}",
            gpus=tuple(replace(g, gpu_id=g.gpu_id + n) for g in m.gpus),
        )
        for n in (0, 1000, 2000)
        for m in machines
    ]
    names = [*(m.vm_id for m in fleet), "another"]
    ids = [*(g.gpu_id for m in fleet for g in m.gpus), 5000]
    avoid = Avoid(
        data.draw(st.frozensets(st.sampled_from(names), max_size=2)),
        data.draw(st.frozensets(st.sampled_from(ids), max_size=3)),
    )

    def answers() -> tuple[Any, WithheldCapacity]:
        answer = place(asked, fleet, held_for_others=held, avoid=avoid)
        return answer, withhold(asked, fleet, job_id="big", held=held)

    with mock.patch.object(placement, "_is_touched", return_value=True):
        of_all = answers()
    assert answers() == of_all


def test_few_of_many_equal_machines_are_examined() -> None:
    fleet = [machine(f"m{n:04}", 8, first=10 * n) for n in range(1000)]
    fleet[500] = replace(fleet[500], labels={"rack": "1"})
    with mock.patch.object(placement, "_find_seat", wraps=placement._find_seat) as find_seat:
        assert set(placed(place(Resources(gpus=2, machines=2), fleet))) == {"m0000", "m0001"}
        assert set(placed(place(Resources(gpus=2, labels={"rack": "1"}), fleet))) == {"m0500"}
        avoid = Avoid(frozenset({"m0000"}))
        assert set(placed(place(Resources(gpus=2), fleet, avoid=avoid))) == {"m0001"}
    assert find_seat.call_count == 5


def _mixed(items: Iterable[Any], rng: Any) -> Any:
    mixed = list(items)
    rng.shuffle(mixed)
    return tuple(mixed)


@settings(max_examples=60)
@given(fleets(), st.lists(needs(), max_size=12))
def test_no_gpu_or_slot_is_given_twice(fleet: list[Machine], jobs: list[Resources]) -> None:
    machines = {machine.vm_id: machine for machine in fleet}
    wholes = {g.gpu_id for m in fleet for g in m.gpus if g.whole}
    shares = {g.gpu_id: g.shares_mb for m in fleet for g in m.gpus if g.shares_mb}
    slots = {(m.vm_id, n) for m in fleet for n in m.taken_slots}
    for asked in jobs:
        answer = place(asked, machines.values())
        if isinstance(answer, Blocked):
            continue
        apply(answer, asked, machines)
        for seat in answer.seats:
            if seat.slot is not None:
                assert (seat.vm_id, seat.slot) not in slots
                slots.add((seat.vm_id, seat.slot))
            for gpu in seat.gpus:
                assert gpu.gpu_id not in wholes
                if asked.share_mb:
                    shares[gpu.gpu_id] = shares.get(gpu.gpu_id, 0) + asked.share_mb
                    assert shares[gpu.gpu_id] <= (gpu.memory_mb or 0)
                else:
                    assert gpu.gpu_id not in shares
                    wholes.add(gpu.gpu_id)


# --- waiting for long -----------------------------------------------------------------------------


def test_gpus_held_for_one_job_are_not_given_to_others() -> None:
    fleet = [with_gpu(machine("a", 2), 1, whole=True)]
    kept = withhold(Resources(gpus=2), fleet, job_id="big")
    assert set(kept.gpus) == {0, 1}
    said = reasons(place(Resources(gpus=1), fleet, held_for_others=kept))
    assert "kept for big" in said
    assert isinstance(place(Resources(gpus=1), fleet), Placement)


@settings(max_examples=60)
@given(st.data())
def test_a_gang_is_served_however_many_small_jobs_come(data: st.DataObject) -> None:
    """Small jobs take whatever they may the moment it is free; one of those that run ends at a time, whichever it is."""
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=2, max_size=4))
    asked = Resources(gpus=data.draw(st.integers(1, 2)), machines=2)
    fleet = {
        name: replace(m, gpus=tuple(replace(g, whole=True) for g in m.gpus))
        for number, (name, count) in enumerate(zip("abcd", sizes, strict=False))
        for m in [machine(name, count, first=10 * number)]
    }
    if sum(size >= asked.gpu_count for size in sizes) < asked.machines:
        return
    total = sum(sizes)
    running = [(name, g.gpu_id) for name, m in fleet.items() for g in m.gpus]
    for _ in range(total):
        if isinstance(place(asked, fleet.values()), Placement):
            break
        kept = withhold(asked, fleet.values(), job_id="gang")
        worth = [entry for entry in running if entry[1] in kept.gpus] or running
        ended = data.draw(st.sampled_from(worth))
        running.remove(ended)
        name, gpu_id = ended
        fleet[name] = with_gpu(fleet[name], gpu_id % 10, whole=False)
        while True:  # small ones that stand behind the gang
            kept = withhold(asked, fleet.values(), job_id="gang")
            small = place(Resources(gpus=1), fleet.values(), held_for_others=kept)
            if isinstance(small, Blocked):
                break
            apply(small, Resources(gpus=1), fleet)
            running.append((small.seats[0].vm_id, small.seats[0].gpus[0].gpu_id))
    assert isinstance(place(asked, fleet.values()), Placement)


# --- behind an engine ------------------------------------------------------------------------------


def cluster(name: str = "slurm", slots: int = 2, **more: object) -> Machine:
    engine = elastic_of({"name": "slurm", "slots": slots, "gpus": 4, **more})
    return Machine(name, slots=slots, engine=engine)


def seats(answer: Placement | Blocked) -> list[tuple[str, int | None]]:
    assert isinstance(answer, Placement), answer
    return [(seat.vm_id, seat.slot) for seat in answer.seats]


def test_a_job_takes_one_of_its_places_however_many_gpus_it_wants() -> None:
    machines = {"slurm": cluster()}
    for slot, gpus in ((0, 0), (1, 4)):
        wanted = Resources(gpus=gpus)
        found = place(wanted, machines.values())
        assert seats(found) == [("slurm", slot)]
        assert isinstance(found, Placement)
        apply(found, wanted, machines)
    assert "all 2 places" in reasons(place(Resources(gpus=1), machines.values()))
    assert not has_room(machines["slurm"])


def test_a_free_machine_is_preferred_to_the_queue_of_a_cluster() -> None:
    own, other = machine("zz", 1), machine("z-cpu", slots=1)
    assert seats(place(Resources(gpus=1), [cluster("a"), own])) == [("zz", None)]
    assert seats(place(Resources(gpus=0), [cluster("a"), other])) == [("z-cpu", 0)]
    busy = with_gpu(own, 0, whole=True)
    assert seats(place(Resources(gpus=1), [cluster("a"), busy])) == [("a", 0)]
    elsewhere = Avoid(machines=frozenset({"zz"}))
    assert seats(place(Resources(gpus=1), [cluster("a"), own], avoid=elsewhere)) == [("a", 0)]


def test_the_smallest_gpu_that_does() -> None:
    mixed = with_gpu(machine("a", 2), 0, memory_mb=80_000)
    mixed = with_gpu(mixed, 1, memory_mb=24_000)
    assert placed(place(Resources(gpus=1), [mixed])) == {"a": [1]}
    assert placed(place(Resources(gpus=1, gpu_memory_mb=40_000), [mixed])) == {"a": [0]}


def test_shares_of_a_gpu() -> None:
    fleet = {"a": machine("a", 2)}
    asked = Resources(gpus=1, share_mb=30_000)
    given_to: list[list[int]] = []
    for _ in range(4):
        answer = place(asked, fleet.values())
        given_to.append(placed(answer)["a"])
        assert isinstance(answer, Placement)
        apply(answer, asked, fleet)
    assert given_to == [[0], [0], [1], [1]]  # a GPU that is shared already, while it has room
    assert "20000 MB of a GPU free to share" in reasons(place(asked, fleet.values()))
    assert "0 of 2 fitting GPUs free" in reasons(place(Resources(gpus=1), fleet.values()))


def test_a_gang_gets_distinct_machines_or_nothing() -> None:
    fleet = [machine("a", 4), machine("b", 2, first=10), machine("c", 2, first=20)]
    assert placed(place(Resources(gpus=2, machines=2), fleet)) == {"b": [0, 1], "c": [0, 1]}
    assert "2 of the 3 machines" in reasons(
        place(Resources(gpus=2, machines=3), [*fleet[:2], with_gpu(fleet[2], 0, whole=True)])
    )
    never = place(Resources(gpus=2, machines=4), fleet)
    assert isinstance(never, Blocked)
    assert never.never


def test_nothing_is_withheld_for_a_job_that_can_never_run() -> None:
    fleet = [machine("a", 2), machine("b", 2, trouble="draining")]
    assert withhold(Resources(gpus=2, machines=2), fleet, job_id="big") == NOTHING_WITHHELD
    assert withhold(Resources(gpus=3), fleet, job_id="big") == NOTHING_WITHHELD
