"""The database queries of `test_clearing.py` in `tests/unit/jobs/fleet/machines` and in `tests/unit/jobs/fleet/files`, on PostgreSQL."""

import inspect

from tests.unit.jobs.fleet.files import test_clearing as files
from tests.unit.jobs.fleet.machines import test_clearing as machines

disk = files.disk
globals().update(
    (name, test)
    for module in (files, machines)
    for name, test in vars(module).items()
    if name.startswith("test_") and set(inspect.signature(test).parameters) <= {"database", "disk"}
)
