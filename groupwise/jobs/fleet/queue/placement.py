"""Placement: on which machines and GPUs a job can run. A pure function of its requirements and the machines' free capacity.

`capacity.py` reads the machines from the database into the dataclasses below; `claim.py` calls `place` and books the result. Each machine
is examined by itself: it yields either a seat or a reason that its operator can act on. Of the machines with a seat, the one with least
left over is chosen, which keeps large gaps for large jobs (best fit). The result depends only on the contents, never on their order.

In a fleet of thousands most machines are alike: as many GPUs of one model, equally busy. For a job that takes whole GPUs or a slot, one of
them is as good as another, so of each kind only the first ones by name are examined (`_examined`).

GPUs are given whole or in shares of their memory, never both at once. A job without GPUs takes a CPU slot. On a machine that fronts an
engine (`elastic.py`) every job takes a slot and the engine assigns the GPUs, so the machine's own free capacity does not matter.

A large job would starve while small ones take each GPU as it becomes free. So GPUs are withheld for a job that has waited longer than
`LONG_WAIT_SECONDS`: `withhold` chooses the machines where least is missing for it, and no later job gets the chosen GPUs. As GPUs become
free, less and less is missing, so the choice converges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from operator import attrgetter

from groupwise.api.schemas.fleet import MAX_SLOTS
from groupwise.core.terminal.quantities import counted
from groupwise.jobs.fleet.queue import elastic
from groupwise.jobs.fleet.queue.elastic import Elastic
from groupwise.jobs.fleet.queue.resources import Resources, fits_model, model_words

LONG_WAIT_SECONDS = 600.0
"""GPUs are withheld for a job that has waited for room longer than this many seconds."""
MAX_REASONS = 12
"""Maximum lines of reasons why there is no room; the rest are only counted."""
_NAMED_MACHINES = 3
"""Maximum machines named for each reason; the rest are only counted."""


@dataclass(frozen=True, slots=True)
class MachineGPU:
    """A GPU as placement sees it."""

    gpu_id: int
    index: int
    uuid: str
    model: str | None = None
    memory_mb: int | None = None
    trouble: str | None = None
    """The reason why no new job gets it, even if it is free: `foreign_busy`, `quarantined: …`."""
    whole: bool = False
    """True if one job holds the whole GPU."""
    shares_mb: int = 0
    """MB of its memory that shares hold."""
    vendor: str = "NVIDIA"

    @property
    def is_mig(self) -> bool:
        """True for a MIG device, which is a part of a card."""
        return "mig" in model_words(self.model or "")

    @property
    def idle(self) -> bool:
        """True if no job holds any part of it."""
        return not self.whole and not self.shares_mb


_KINDS: dict[tuple[object, ...], int] = {}
"""Numbers of kinds of machines. Once there are `_MAX_KINDS` it is emptied; new kinds then get numbers that were not used before."""
_MAX_KINDS = 10_000
_NUMBERS = count(1)


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine as placement sees it."""

    vm_id: str
    gpus: tuple[MachineGPU, ...] = ()
    trouble: str | None = None
    """The reason why nothing new is placed there: `draining`, `unreachable …`."""
    unreachable_reason: str | None = None
    """The reason if not even a command of `fleet exec` can run there: `unreachable …`, but not `draining`."""
    projects: frozenset[str] | None = None
    """Only jobs of these projects are placed there; None: jobs of any project."""
    closed: bool = False
    """True for a machine whose `projects` do not include that of the job being placed."""
    slots: int = 0
    """Places for jobs without GPUs; if the machine fronts an engine, for all jobs."""
    taken_slots: frozenset[int] = frozenset()
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    prepared: bool = True
    """True if an environment for training jobs is set up there."""
    cpus: int | None = None
    """Number of its CPUs; None: not known yet."""
    ram_mb: int | None = None
    disk_free_mb: int | None = None
    promised_cpus: int = 0
    """CPUs promised to running jobs that requested some."""
    promised_ram_mb: int = 0
    engine: Elastic | None = None
    """The engine that starts the jobs instead of this machine, whose own CPUs and memory then do not count."""
    _kind: int | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def kind(self) -> int:
        """Equal for machines on which a job's seat costs the same, if both may run it; computed once."""
        if self._kind is None:
            gpus = [
                (g.memory_mb or 0, g.model or "", g.vendor, g.trouble or "", g.whole, g.shares_mb)
                for g in self.gpus
            ]
            content = (
                self.vm_id if self.engine else None,
                *(self.trouble, self.slots, self.taken_slots, self.cpus, self.ram_mb),
                *(self.promised_cpus, self.promised_ram_mb, *sorted(gpus)),
            )
            if len(_KINDS) >= _MAX_KINDS:
                _KINDS.clear()
            object.__setattr__(
                self, "_kind", _KINDS.get(content) or _KINDS.setdefault(content, next(_NUMBERS))
            )
        assert self._kind is not None
        return self._kind

    def gives_gpus_for(self, resources: Resources) -> bool:
        """True if the job requests GPUs and gets them from the machine itself."""
        return self.engine is None and resources.gpu_count > 0


@dataclass(frozen=True, slots=True)
class Seat:
    """A job's share of one machine."""

    vm_id: str
    gpus: tuple[MachineGPU, ...] = ()
    slot: int | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """A job's seats: one for each of its machines, rank 0 first."""

    seats: tuple[Seat, ...]


@dataclass(frozen=True, slots=True)
class Blocked:
    """There is no room for the job. `reasons` is never empty."""

    reasons: tuple[str, ...]
    never: bool = False
    """There would be no room even if the whole fleet were idle."""


@dataclass(frozen=True, slots=True)
class WithheldCapacity:
    """GPUs and slots that are withheld, each with the job that they are withheld for."""

    gpus: Mapping[int, str] = field(default_factory=dict[int, str])
    """gpu_id → job_id."""
    slots: Mapping[tuple[str, int], str] = field(default_factory=dict[tuple[str, int], str])
    """(vm_id, slot) → job_id."""

    def union(self, other: WithheldCapacity) -> WithheldCapacity:
        """Merge both; an entry of `self` wins."""
        return WithheldCapacity({**other.gpus, **self.gpus}, {**other.slots, **self.slots})


NOTHING_WITHHELD = WithheldCapacity()


@dataclass(frozen=True, slots=True)
class Avoid:
    """Machines and GPUs that a job gets only if nothing else is free."""

    machines: frozenset[str] = frozenset()
    gpus: frozenset[int] = frozenset()
    """GPUs, by gpu_id."""
    slots: frozenset[tuple[str, int]] = frozenset()
    """(vm_id, slot)."""


NOTHING_AVOIDED = Avoid()


def place(
    resources: Resources,
    machines: Iterable[Machine],
    *,
    held_for_others: WithheldCapacity = NOTHING_WITHHELD,
    avoid: Avoid = NOTHING_AVOIDED,
) -> Placement | Blocked:
    """Find room for the job, or return the reasons why there is none. Entries of `avoid` are used only if nothing else is free."""
    ordered = sorted(machines, key=lambda machine: machine.vm_id)
    placement = room(resources, ordered, held_for_others, avoid)
    return placement or _blocked_reasons(resources, ordered, held_for_others, avoid)


def room(
    resources: Resources,
    machines: Iterable[Machine],
    held_for_others: WithheldCapacity,
    avoid: Avoid,
) -> Placement | None:
    """Like `place`, without reasons."""

    def find(machine: Machine) -> Seat | None:
        if not (resources.oversubscribe or has_room(machine)):
            return None
        seat = _find_seat(resources, machine, held_for_others, avoid)
        return seat if isinstance(seat, Seat) else None

    choices: list[list[tuple[tuple[object, ...], Seat]]] = []
    for of_vendor in _by_vendor(resources, machines):
        seats = [
            (_seat_cost(resources, machine, seat, avoid), seat)
            for machine, seat in _examined(resources, of_vendor, find, held_for_others, avoid)
        ]
        if len(seats) >= resources.machines:
            choices.append(sorted(seats, key=lambda rated: rated[0])[: resources.machines])
    if not choices:
        return None
    best = min(choices, key=lambda seats: [cost for cost, _ in seats])
    return Placement(tuple(sorted((s for _, s in best), key=lambda seat: seat.vm_id)))


def _examined(
    resources: Resources,
    machines: Iterable[Machine],
    find: Callable[[Machine], Seat | None],
    held: WithheldCapacity,
    avoid: Avoid = NOTHING_AVOIDED,
) -> Iterator[tuple[Machine, Seat]]:
    """Seats that `find` returns, on as many machines of each kind as the job wants; on all machines for named GPUs and shares.

    A machine of which something is withheld or avoided costs as much as others of its kind or more, so it does not count as one of them.
    """
    all_differ = bool(resources.named) or resources.share_mb is not None
    remaining: dict[int, int] = {}
    for machine in sorted(machines, key=attrgetter("vm_id")):
        if not all_differ and not remaining.get(machine.kind, resources.machines):
            continue
        if _unfit_reason(resources, machine):
            continue  # this one, but maybe not others of its kind
        seat = find(machine)
        if seat is not None:
            yield machine, seat
        if not all_differ and not _is_touched(machine, held, avoid):
            left = remaining.get(machine.kind, resources.machines)
            remaining[machine.kind] = 0 if seat is None else left - 1


def _is_touched(machine: Machine, held: WithheldCapacity, avoid: Avoid) -> bool:
    """True if something of the machine is withheld for another job, or avoided."""
    return (
        machine.vm_id in avoid.machines
        or any(vm_id == machine.vm_id for vm_id, _ in (*held.slots, *avoid.slots))
        or any(gpu.gpu_id in held.gpus or gpu.gpu_id in avoid.gpus for gpu in machine.gpus)
    )


def _by_vendor(resources: Resources, machines: Iterable[Machine]) -> list[list[Machine]]:
    """The machines, once for each vendor of their GPUs and with its GPUs alone, as one job cannot compute with CUDA and with ROCm.

    Only once if there is one vendor, or if the job gets one GPU or names them. A machine with GPUs of the other vendor alone is left out.
    """
    machines = list(machines)
    if resources.named or resources.gpu_count * resources.machines < 2:
        return [machines]
    vendors = sorted({gpu.vendor for machine in machines for gpu in machine.gpus})
    if len(vendors) < 2:
        return [machines]
    return [
        [
            replace(machine, gpus=gpus)
            for machine in machines
            if (gpus := tuple(gpu for gpu in machine.gpus if gpu.vendor == vendor))
            or not machine.gpus
        ]
        for vendor in vendors
    ]


def apply(placement: Placement, resources: Resources, machines: dict[str, Machine]) -> None:
    """Book the placement in `machines`; the next job of the same round then sees only the remaining capacity."""
    for seat in placement.seats:
        machine = machines[seat.vm_id]
        booked = {
            gpu.gpu_id: replace(gpu, whole=True)
            if resources.share_mb is None
            else replace(gpu, shares_mb=gpu.shares_mb + resources.share_mb)
            for gpu in machine.gpus
            if any(gpu.gpu_id == seat_gpu.gpu_id for seat_gpu in seat.gpus)
        }
        machines[seat.vm_id] = replace(
            machine,
            gpus=tuple(booked.get(gpu.gpu_id, gpu) for gpu in machine.gpus),
            taken_slots=machine.taken_slots | ({seat.slot} if seat.slot is not None else set()),
            promised_cpus=machine.promised_cpus + (resources.cpus or 0),
            promised_ram_mb=machine.promised_ram_mb + (resources.ram_mb or 0),
        )


def is_oversubscribed(slot: int | None) -> bool:
    """True for the number of a CPU slot beyond those that a machine can have (`Resources.oversubscribe`)."""
    return slot is not None and slot >= MAX_SLOTS


def has_room(machine: Machine, held: WithheldCapacity = NOTHING_WITHHELD) -> bool:
    """False only if no job at all could find room there, apart from withheld capacity. A quick check: True may still be wrong."""
    if machine.trouble:
        return False
    if any(
        n not in machine.taken_slots and (machine.vm_id, n) not in held.slots
        for n in range(machine.slots)
    ):
        return True
    return any(
        gpu.trouble is None
        and not gpu.whole
        and (gpu.idle or gpu.shares_mb < (gpu.memory_mb or 0))
        and gpu.gpu_id not in held.gpus
        for gpu in machine.gpus
    )


def withhold(
    resources: Resources,
    machines: Iterable[Machine],
    *,
    job_id: str,
    held: WithheldCapacity = NOTHING_WITHHELD,
) -> WithheldCapacity:
    """Choose capacity to withhold for a waiting job, in addition to that `held` for earlier jobs; none if it could not run even on idle
    machines.

    Machines are chosen where least is missing. As no later job gets the chosen capacity, the missing amount never rises.
    """
    choices: list[list[tuple[tuple[int, int, str], Seat]]] = []
    for of_vendor in _by_vendor(resources, machines):
        nearest = partial(_nearest_seat, resources, held=held)
        seats = [
            (
                (
                    _missing(resources, machine, seat),
                    sum(gpu.shares_mb for gpu in seat.gpus),
                    machine.vm_id,
                ),
                seat,
            )
            for machine, seat in _examined(resources, of_vendor, nearest, held)
        ]
        if len(seats) >= resources.machines:
            choices.append(sorted(seats, key=lambda rated: rated[0])[: resources.machines])
    if not choices:
        return NOTHING_WITHHELD
    best = min(choices, key=lambda seats: sum(missing for (missing, _, _), _ in seats))
    return WithheldCapacity(
        {gpu.gpu_id: job_id for _, seat in best for gpu in seat.gpus},
        {(seat.vm_id, seat.slot): job_id for _, seat in best if seat.slot is not None},
    )


# --- one machine ----------------------------------------------------------------------------------


def _find_seat(
    resources: Resources, machine: Machine, held: WithheldCapacity, avoid: Avoid
) -> Seat | str:
    """The job's seat on this machine, or the reason why it gets none."""
    if reason := _unfit_reason(resources, machine) or _promised_shortage(resources, machine):
        return reason
    if not machine.gives_gpus_for(resources):
        return _find_slot(resources, machine, held, avoid)
    fitting = _fitting_gpus(resources, machine)
    if isinstance(fitting, str):
        return fitting
    free_gpus = [g for g in fitting if _is_free(g, resources) and g.gpu_id not in held.gpus]
    if len(free_gpus) < resources.gpu_count:
        held_by = sorted({held.gpus[g.gpu_id] for g in fitting if g.gpu_id in held.gpus})
        withheld = f"; GPUs are kept for {', '.join(held_by)}, waiting for long" if held_by else ""
        if resources.named:
            in_use = [str(g.index) for g in fitting if g not in free_gpus]
            return f"GPU {', '.join(in_use)} in use{withheld}"
        if resources.share_mb is not None:
            max_share = max(
                (0 if g.whole else (g.memory_mb or 0) - g.shares_mb for g in fitting), default=0
            )
            return f"at most {max_share} MB of a GPU free to share, {resources.share_mb} wanted{withheld}"
        return f"{len(free_gpus)} of {counted(len(fitting), 'fitting GPU')} free, {resources.gpu_count} wanted{withheld}"
    if resources.named:
        return Seat(machine.vm_id, tuple(free_gpus))
    # Prefer the smallest GPU that fits; for a share, the fullest with room. Sorts are stable, so the last one counts most.
    free_gpus.sort(key=lambda g: ((g.memory_mb or 0) - g.shares_mb, g.index, g.gpu_id))
    if resources.share_mb is not None:
        free_gpus.sort(key=lambda g: g.idle)  # a GPU that is shared already, if any
    free_gpus.sort(key=lambda g: g.gpu_id in avoid.gpus)
    chosen_gpus = sorted(free_gpus[: resources.gpu_count], key=lambda g: (g.index, g.gpu_id))
    return Seat(machine.vm_id, tuple(chosen_gpus))


def _unfit_reason(resources: Resources, machine: Machine) -> str | None:
    """The reason why the machine could not run the job even if it were idle; None: it could."""
    if resources.vm is not None and machine.vm_id != resources.vm:
        return f"the job asks for {resources.vm}"
    if trouble := machine.unreachable_reason if resources.oversubscribe else machine.trouble:
        return trouble
    if machine.closed:
        return "it is kept for other projects"
    for name, value in sorted(resources.labels.items()):
        actual = machine.labels.get(name)
        if actual != value:
            found = "it is not set" if actual is None else f"there it is {actual!r}"
            return f"label {name}={value} is wanted, and {found}"
    if resources.prepared and not machine.prepared:
        return (
            f"not prepared for training kinds: `groupwise fleet vm prepare {machine.vm_id}`, or `groupwise fleet vm set {machine.vm_id} "
            "--python PATH` if an interpreter there has Groupwise"
        )
    disk = _shortage("MB free on its disk", resources.disk_mb, machine.disk_free_mb)
    if machine.engine is not None:
        return elastic.unfit(resources, machine.engine) or disk
    return (
        _shortage("CPUs", resources.cpus, machine.cpus)
        or _shortage("MB of RAM", resources.ram_mb, machine.ram_mb)
        or disk
    )


def _shortage(resource: str, minimum: int | None, available: int | None) -> str | None:
    if minimum is None or (available is not None and available >= minimum):
        return None
    return f"{'unknown' if available is None else available} {resource}, {minimum} wanted"


def _promised_shortage(resources: Resources, machine: Machine) -> str | None:
    """The reason why too few of its CPUs or too little RAM is left, after the promises to other jobs; None: enough."""
    if machine.engine is not None:
        return None
    cpus = (machine.cpus or 0) - machine.promised_cpus
    if resources.cpus is not None and cpus < resources.cpus:
        return f"{max(cpus, 0)} of {counted(machine.cpus or 0, 'CPU')} not promised to jobs, {resources.cpus} wanted"
    ram = (machine.ram_mb or 0) - machine.promised_ram_mb
    if resources.ram_mb is not None and ram < resources.ram_mb:
        return (
            f"{max(ram, 0)} of {machine.ram_mb} MB of RAM not promised to jobs, "
            f"{resources.ram_mb} wanted"
        )
    return None


def _find_slot(
    resources: Resources, machine: Machine, held: WithheldCapacity, avoid: Avoid
) -> Seat | str:
    """A free slot of the machine, or why there is none."""
    if resources.oversubscribe:  # numbers that no slot of a machine has
        avoided = {slot for vm_id, slot in avoid.slots if vm_id == machine.vm_id}
        taken = machine.taken_slots | avoided
        return Seat(machine.vm_id, slot=next(n for n in count(MAX_SLOTS) if n not in taken))
    if not machine.slots:
        return f"no CPU slots, and the job asks for no GPU (`groupwise fleet vm set {machine.vm_id} --cpu-slots 1` gives it one)"
    kind = "CPU slot" if machine.engine is None else f"place for jobs of {machine.engine.title}"
    kinds = "CPU slots" if machine.engine is None else f"places for jobs of {machine.engine.title}"
    free_slots = [n for n in range(machine.slots) if n not in machine.taken_slots]
    held_slots = [n for n in free_slots if (machine.vm_id, n) in held.slots]
    if len(held_slots) < len(free_slots):
        open_slots = [n for n in free_slots if n not in held_slots]
        best = min(open_slots, key=lambda n: ((machine.vm_id, n) in avoid.slots, n))
        return Seat(machine.vm_id, slot=best)
    if held_slots:
        job_ids = ", ".join(sorted({held.slots[machine.vm_id, n] for n in held_slots}))
        return f"its free {kinds} are kept for {job_ids}, waiting for long"
    return (
        f"its {kind} is taken" if machine.slots == 1 else f"all {machine.slots} {kinds} are taken"
    )


def _fitting_gpus(resources: Resources, machine: Machine) -> list[MachineGPU] | str:
    """The GPUs that would suit the job if they were free, at least as many as it wants; else the reason why there are too few."""
    if not machine.gpus:
        return "no GPU"
    if resources.named:
        return _gpus_by_name(resources, machine)
    healthy_gpus = [gpu for gpu in machine.gpus if gpu.trouble is None]
    fitting = [gpu for gpu in healthy_gpus if _mismatch(resources, gpu) is None]
    if len(fitting) >= resources.gpu_count:
        return fitting
    summary = (
        f"{len(fitting)} of {counted(len(machine.gpus), 'GPU')} fit, {resources.gpu_count} wanted"
    )
    reasons = {f"GPU {g.index} {g.trouble}" for g in machine.gpus if g.trouble}
    reasons |= {reason for g in healthy_gpus if (reason := _mismatch(resources, g))}
    return f"{summary}: {'; '.join(sorted(reasons))}" if reasons else summary


def _gpus_by_name(resources: Resources, machine: Machine) -> list[MachineGPU] | str:
    """The GPUs that the job names by index or UUID, or the reason why one of them is unusable."""
    gpus: list[MachineGPU] = []
    for name in resources.named:
        # An index may be that of an earlier card, too, and is that of the MIG devices of a card. Each vendor's GPUs are counted from 0.
        named = [g for g in machine.gpus if g.uuid == name or (g.index == name and not g.is_mig)]
        usable = [g for g in named if g.trouble is None]
        if len(usable) > 1 or len({g.vendor for g in named}) > 1:
            return f"GPU {name} may be {' or '.join(g.uuid for g in named)}: name its UUID"
        gpu = next(iter(usable or named), None)
        if gpu is None:
            return f"no GPU {name}"
        if reason := gpu.trouble or _mismatch(resources, gpu):
            return f"GPU {name} {reason}"
        gpus.append(gpu)
    if len({gpu.gpu_id for gpu in gpus}) < len(gpus):
        return "one of its GPUs is named by index and by UUID"
    if len({gpu.vendor for gpu in gpus}) > 1:
        return "a job gets GPUs of NVIDIA or of AMD, and some of both are named"
    return gpus


def _mismatch(resources: Resources, gpu: MachineGPU) -> str | None:
    """The reason why the GPU does not suit the job, whether it is free or not; None: it does."""
    model, memory = resources.gpu_model, resources.gpu_memory_mb or resources.share_mb
    if not ((resources.named and model is None) or fits_model(model, gpu.model, gpu.memory_mb)):
        other = f"not {model}" if model else "which a job gets if --gpu-model names its profile"
        return f"is a {gpu.model or 'GPU of unknown model'}, {other}"
    if memory and (gpu.memory_mb is None or gpu.memory_mb < memory):
        memory_text = "unknown memory" if gpu.memory_mb is None else f"{gpu.memory_mb} MB"
        return f"has {memory_text}, {memory} MB wanted"
    return None


def _is_free(gpu: MachineGPU, resources: Resources) -> bool:
    if resources.share_mb is None:
        return gpu.idle
    return not gpu.whole and gpu.shares_mb + resources.share_mb <= (gpu.memory_mb or 0)


def _seat_cost(
    resources: Resources, machine: Machine, seat: Seat, avoid: Avoid
) -> tuple[object, ...]:
    """Sort key of a seat: first entries to avoid, then how much the seat fragments free capacity; the smallest is best."""
    idle = sum(gpu.idle and gpu.trouble is None for gpu in machine.gpus)
    idle_in_seat = sum(gpu.idle for gpu in seat.gpus)
    slots = machine.slots - len(machine.taken_slots)
    memory = sum((gpu.memory_mb or 0) - gpu.shares_mb for gpu in seat.gpus)
    breaks_new = resources.share_mb is not None and idle_in_seat
    return (
        machine.vm_id in avoid.machines,
        sum(gpu.gpu_id in avoid.gpus for gpu in seat.gpus)
        + ((seat.vm_id, seat.slot) in avoid.slots),
        machine.engine is not None,  # a job that could start now should not wait in another queue
        breaks_new,
        idle - idle_in_seat if seat.gpus else slots,
        memory,
        machine.vm_id,
    )


# --- withholding ----------------------------------------------------------------------------------


def _nearest_seat(resources: Resources, machine: Machine, held: WithheldCapacity) -> Seat | None:
    """The seat that would be free soonest if nothing new started; None: there is none even on an idle machine."""
    if _unfit_reason(resources, machine):
        return None
    if not machine.gives_gpus_for(resources):
        slots = [n for n in range(machine.slots) if (machine.vm_id, n) not in held.slots]
        slots.sort(key=lambda n: (n in machine.taken_slots, n))
        return Seat(machine.vm_id, slot=slots[0]) if slots else None
    fitting = _fitting_gpus(resources, machine)
    if isinstance(fitting, str):
        return None
    open_gpus = [gpu for gpu in fitting if gpu.gpu_id not in held.gpus]
    if len(open_gpus) < resources.gpu_count:
        return None
    open_gpus.sort(key=lambda g: (g.whole, g.shares_mb, g.memory_mb or 0, g.index, g.gpu_id))
    if resources.share_mb is not None:
        open_gpus.sort(key=lambda g: (g.whole, g.shares_mb - (g.memory_mb or 0)))
    return Seat(machine.vm_id, tuple(open_gpus[: resources.gpu_count]))


def _missing(resources: Resources, machine: Machine, seat: Seat) -> int:
    """How many things of the seat another job holds."""
    return (
        sum(not _is_free(gpu, resources) for gpu in seat.gpus)
        + (seat.slot in machine.taken_slots)
        + (_promised_shortage(resources, machine) is not None)
    )


# --- words ----------------------------------------------------------------------------------------


def _blocked_reasons(
    resources: Resources, machines: Sequence[Machine], held: WithheldCapacity, avoid: Avoid
) -> Blocked:
    """Summarise why there is no room: a line for each reason with the machines that have it, the most frequent first."""
    if not machines:
        return Blocked(("the fleet has no machine: `groupwise fleet vm add` adds one",), never=True)
    if resources.vm is not None and all(m.vm_id != resources.vm for m in machines):
        return Blocked((f"the fleet has no machine {resources.vm}",), never=True)
    fitting_count = willing_count = 0
    refusals: list[tuple[str, str]] = []
    fleets = _by_vendor(resources, machines)
    for of_vendor in fleets:
        seats = [_find_seat(resources, machine, held, avoid) for machine in of_vendor]
        willing_count = max(willing_count, sum(isinstance(seat, Seat) for seat in seats))
        nearest = [_nearest_seat(resources, machine, NOTHING_WITHHELD) for machine in of_vendor]
        fitting_count = max(fitting_count, sum(seat is not None for seat in nearest))
        refusals += [
            (machine.vm_id, seat)
            for machine, seat in zip(of_vendor, seats, strict=True)
            if isinstance(seat, str) and resources.vm in (None, machine.vm_id)
        ]
    is_never = fitting_count < resources.machines
    lines: list[str] = []
    if is_never:
        subject = (
            f"only {fitting_count} of the {counted(resources.machines, 'machine')} wanted"
            if fitting_count
            else "no machine"
        )
        lines.append(f"{subject} could run it, even if nothing else ran")
    elif resources.machines > 1:
        lines.append(f"{willing_count} of the {resources.machines} machines wanted have room now")
    if len(fleets) > 1:
        lines.append("a job gets GPUs of one vendor, so those of each are counted by themselves")
    by_reason: dict[str, list[str]] = {}
    for vm_id, reason in dict.fromkeys(refusals):
        by_reason.setdefault(reason, []).append(vm_id)
    ordered = sorted(by_reason.items(), key=lambda entry: (-len(entry[1]), entry[0]))
    for reason, names in ordered[:MAX_REASONS]:
        extra_count = len(names) - _NAMED_MACHINES
        rest_note = f" and {extra_count} more" if extra_count > 0 else ""
        lines.append(f"{', '.join(names[:_NAMED_MACHINES])}{rest_note}: {reason}")
    if other_reasons := ordered[MAX_REASONS:]:
        count = sum(len(names) for _, names in other_reasons)
        lines.append(
            f"{counted(count, 'machine')} more, for {counted(len(other_reasons), 'other reason')}"
        )
    return Blocked(tuple(lines), is_never)
