"""Views of free capacity: from reservations, which are authoritative, and from observations, which only subtract.

`gpu_free` has a line for each GPU, `vm_overview` one for each machine, with `total_gpus` and `available_gpus` in addition to its columns.
They are for users and dashboards; placement reads the rows themselves, and also checks the age of an observation. Capacity that an
untracked attempt holds (`queue/untracked_processes.py`) counts as free here.
"""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import Boolean, Column, Integer, MetaData, Table, Text

from groupwise.jobs.fleet.states import Contact, Observed
from groupwise.jobs.fleet.store.tables import VM

_GPU_FREE = f"""
CREATE VIEW gpu_free AS
SELECT gpus.gpu_id, gpus.vm_id, gpus."index", gpus.uuid, gpus.model, gpus.memory_mb,
       COALESCE(held.whole, 0) > 0 AS reserved,
       COALESCE(held.share_mb, 0) AS shared_mb,
       (vms.active AND NOT vms.draining AND NOT vms.degraded AND vms.cordoned IS NULL AND vms.lost_at IS NULL
           AND vms.contact = '{Contact.OK}' AND gpus.observed = '{Observed.OK}' AND gpus.quarantined IS NULL) AS usable,
       (vms.active AND NOT vms.draining AND NOT vms.degraded AND vms.cordoned IS NULL AND vms.lost_at IS NULL
           AND vms.contact = '{Contact.OK}' AND gpus.observed = '{Observed.OK}' AND gpus.quarantined IS NULL
           AND held.gpu_id IS NULL) AS available
FROM gpus
JOIN vms ON vms.vm_id = gpus.vm_id
LEFT JOIN (
    SELECT gpu_id, sum(CASE WHEN share_mb IS NULL THEN 1 ELSE 0 END) AS whole, sum(share_mb) AS share_mb
    FROM reservations WHERE released_at IS NULL AND gpu_id IS NOT NULL GROUP BY gpu_id
) AS held ON held.gpu_id = gpus.gpu_id
"""

_VM_OVERVIEW = """
CREATE VIEW vm_overview AS
SELECT vms.*, COALESCE(counted.total, 0) AS total_gpus, COALESCE(counted.available, 0) AS available_gpus
FROM vms
LEFT JOIN (
    SELECT vm_id, count(*) AS total, sum(CASE WHEN available THEN 1 ELSE 0 END) AS available
    FROM gpu_free GROUP BY vm_id
) AS counted ON counted.vm_id = vms.vm_id
"""

NAMES = ("vm_overview", "gpu_free")
"""The views in the order in which they can be dropped: those that depend on others first."""


def statements() -> Iterator[str]:
    """The CREATE statements, the same in both databases."""
    yield _GPU_FREE
    yield _VM_OVERVIEW


_views = MetaData()

gpu_free = Table(
    "gpu_free",
    _views,
    Column("gpu_id", Integer, primary_key=True),
    Column("vm_id", Text),
    Column("index", Integer),
    Column("uuid", Text),
    Column("model", Text),
    Column("memory_mb", Integer),
    Column("reserved", Boolean),
    Column("shared_mb", Integer),
    Column("usable", Boolean),
    Column("available", Boolean),
)
"""`reserved`: as a whole; `shared_mb`: held by shares; `usable`: jobs could get it if it were free; `available`: usable and wholly free."""

vm_overview = Table(
    "vm_overview",
    _views,
    *(Column(column.name, column.type) for column in VM.__table__.columns),
    Column("total_gpus", Integer),
    Column("available_gpus", Integer),
)
"""The columns of `vms`, and two counts."""
