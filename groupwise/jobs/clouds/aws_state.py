"""Records on this machine of jobs whose EC2 machines end: the order, the ending, the log, the folder of the results.

While a job's machine exists, that machine is asked. Afterwards only these records and the facts that AWS remembers are left: enough to
report how a job ended, and to start its next attempt on another machine. They contain no values of secrets.

The known cost of a job's machines is part of the record: AWS reports machines for about an hour after their end, so what was seen is
stored here. If a machine's end was never reported, it counts until it was found to be missing, or until its deadline: its cost is never
underestimated. Disks, network traffic, and changes of a spot price are only in AWS's bill.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import TypeAdapter

from groupwise.core import atomic_files
from groupwise.core.errors import UsageError
from groupwise.jobs.clouds.backend import Cost, Ending, Order
from groupwise.jobs.clouds.ec2 import Machine
from groupwise.jobs.clouds.folder import EARLIER, INCOMING
from groupwise.jobs.hosts.driver import Resume
from groupwise.jobs.hosts.files import BlobStore
from groupwise.jobs.hosts.seal import MANIFEST
from groupwise.jobs.hosts.spec import path_problems


@dataclass(frozen=True, slots=True)
class InstanceUsage:
    """The lifetime of a machine, and its price. Times are seconds since the epoch."""

    since: float
    until: float
    """Its end, or the time when it was last seen."""
    price: float | None
    """Dollars per hour; None: not known."""
    ended: bool
    deadline: float | None = None
    """Time at which it ends by itself at the latest."""

    @property
    def hours(self) -> float:
        return max(0.0, self.until - self.since) / 3600


def usage_of(machines: Iterable[Machine], now: float) -> dict[str, InstanceUsage]:
    """The usage of each machine by id, as AWS reports it."""
    usage: dict[str, InstanceUsage] = {}
    for machine in machines:
        tags, price = machine.tags, machine.tags.get("price")
        since = float(tags.get("since", now))
        ended_at, has_ended = now, machine.state in ("shutting-down", "terminated")
        if has_ended:
            latest = min(now, max(since, float(tags.get("deadline", now))))
            ended_at = latest if machine.ended_at is None else machine.ended_at
        deadline = None if "deadline" not in tags else float(tags["deadline"])
        dollars = None if price is None else float(price)
        usage[machine.id] = InstanceUsage(since, ended_at, dollars, has_ended, deadline)
    return usage


def with_forgotten(
    usage: Mapping[str, InstanceUsage], reported: Collection[str], now: float
) -> dict[str, InstanceUsage]:
    """Extend the usage of machines that AWS no longer reports and whose end was not seen: they may have existed until their deadlines."""
    extended = dict(usage)
    for name, instance in usage.items():
        if not instance.ended and name not in reported and instance.deadline is not None:
            extended[name] = replace(
                instance, until=max(instance.until, min(now, instance.deadline))
            )
    return extended


def cost_of(usage: Mapping[str, InstanceUsage]) -> Cost | None:
    """The total cost of these machines; None if no price is known."""
    priced = {
        name: (instance, instance.price)
        for name, instance in usage.items()
        if instance.price is not None
    }
    if not priced:
        return None
    dollars = sum(price * instance.hours for instance, price in priced.values())
    listed = [
        f"{name} {instance.hours:.2f} h at ${price:.2f}"
        for name, (instance, price) in priced.items()
    ]
    unknown = [
        f"{name} has no known price and is not counted" for name in sorted(set(usage) - set(priced))
    ]
    not_counted = (
        "without disks, and without machines that AWS has forgotten and this machine has never seen"
    )
    return Cost(round(dollars, 2), "; ".join((", ".join(listed), *unknown, not_counted)))


@dataclass(frozen=True, slots=True)
class Record:
    """The record of one job."""

    name: str
    order: Mapping[str, Any] | None = None
    """The order's document; None: the job was launched from another machine."""
    attempt: int = 1
    """The newest known attempt."""
    results: str | None = None
    """The folder of the last fetch of its results."""
    endings: Mapping[int, Ending] = field(default_factory=dict[int, Ending])
    """Endings by attempt, as its machine reported them."""
    machines: Mapping[str, InstanceUsage] = field(default_factory=dict[str, InstanceUsage])
    """Usage of its machines by id, as far as known here."""


_RECORD = TypeAdapter(Record)


class JobRecords:
    """The records of one place, in a folder. A record is replaced as a whole; the last writer wins."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def names(self) -> list[str]:
        """Names of the jobs that have a record."""
        return sorted(path.stem for path in self.folder.glob("*.json"))

    def find(self, name: str) -> Record | None:
        """The record of this job; None if it is missing or cannot be read."""
        try:
            return _RECORD.validate_json(self._record_path(name).read_bytes())
        except (OSError, ValueError):
            return None

    def write(self, record: Record) -> None:
        """Write a record durably."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        document = {"format": 1, **_RECORD.dump_python(record, mode="json")}
        atomic_files.write_json(self._record_path(record.name), document)

    def record_start(self, order: Order, attempt: int, store: BlobStore) -> None:
        """Record that an attempt starts, and keep its files for the next one. If files are missing here, no next attempt can be started
        from here."""
        blobs, record = self._blobs(), self.find(order.name) or Record(order.name)
        missing = [e.sha256 for e in order.spec.files.values() if e.sha256 not in blobs]
        for sha256 in filter(store.__contains__, missing):
            blobs.put_file(store.path(sha256))
        has_all_files = all(sha256 in blobs for sha256 in missing)
        document = order.document() if has_all_files else record.order
        self.write(replace(record, order=document, attempt=attempt))

    def record_fetch(self, name: str, attempt: int, folder: Path, ending: Ending | None) -> None:
        """Record that an attempt's results are in that folder, and how it ended, if it has."""
        record = self.find(name) or Record(name)
        endings = {**record.endings, **({} if ending is None else {attempt: ending})}
        newest = max(record.attempt, attempt)
        self.write(replace(record, attempt=newest, results=str(folder.absolute()), endings=endings))

    def record_usage(
        self, name: str, current: Mapping[str, InstanceUsage]
    ) -> Mapping[str, InstanceUsage]:
        """Record the current usage of a job's machines; returns it merged with the earlier one. Without a record of the job nothing is
        stored."""
        record = self.find(name)
        if record is None:
            return current
        # The first recorded end of a machine is the most exact.
        ends = {name: instance for name, instance in record.machines.items() if instance.ended}
        usage = {**record.machines, **current, **ends}
        self.write(replace(record, machines=usage))
        return usage

    def remove(self, name: str) -> None:
        """Remove a job's record and logs, and the files that no other job needs."""
        self._record_path(name).unlink(missing_ok=True)
        for path in self.folder.glob(f"{name}.log-*"):
            path.unlink(missing_ok=True)
        if (self.folder / "blobs").is_dir():
            records = filter(None, map(self.find, self.names()))
            orders = [Order.from_document(record.order) for record in records if record.order]
            needed = {entry.sha256 for order in orders for entry in order.spec.files.values()}
            self._blobs().collect(needed)

    def copy_files_to(self, order: Order, store: BlobStore) -> None:
        """Copy those of the order's files that `store` lacks and that were kept."""
        blobs = self._blobs()
        missing = [entry.sha256 for entry in order.spec.files.values() if entry.sha256 not in store]
        for sha256 in missing:
            if sha256 in blobs:
                store.put_file(blobs.path(sha256))

    def log(self, name: str, attempt: int) -> Path:
        """The path of the kept log of an attempt."""
        return self.folder / f"{name}.log-{attempt}"

    def _record_path(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _blobs(self) -> BlobStore:
        return BlobStore(self.folder / "blobs")


def newest_checkpoint(results: Path, store: BlobStore) -> Resume | None:
    """The newest complete checkpoint among the results in a folder; its files are put into the store."""
    candidates: list[tuple[int, PurePosixPath, dict[str, Any]]] = []
    for manifest in atomic_files.files_below(results):
        if manifest.name != MANIFEST:
            continue
        path = PurePosixPath(manifest.parent.relative_to(results).as_posix())
        if not path.parts or path.parts[0] in (EARLIER, INCOMING):
            continue
        try:
            document = json.loads(manifest.read_bytes())
            step, entries = document["step"], dict(document["files"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # not a checkpoint's manifest
        if type(step) is int and not any(path_problems("file", name) for name in entries):
            candidates.append((step, path, entries))
    for step, path, entries in sorted(
        candidates, key=lambda candidate: candidate[:2], reverse=True
    ):
        try:
            files = store.put_files({n: results / path / n for n in (*entries, MANIFEST)})
            differs = any(
                (files[name].sha256, files[name].size) != (entry["sha256"], entry["size"])
                for name, entry in entries.items()
            )
        except (UsageError, OSError, KeyError, TypeError):
            continue  # a file is missing
        if not differs:
            manifest = {f"{path}/{name}": entry for name, entry in files.items()}
            return Resume(manifest, step, str(path))
    return None
