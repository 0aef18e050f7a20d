"""What `test_clearing.py` in `tests/unit/fleet/machines` and `tests/unit/fleet/files` ask of the database alone, on PostgreSQL."""

import inspect

from tests.unit.fleet.files import test_clearing as files
from tests.unit.fleet.machines import test_clearing as machines

disk = files.disk
globals().update(
    (name, test)
    for module in (files, machines)
    for name, test in vars(module).items()
    if name.startswith("test_") and set(inspect.signature(test).parameters) <= {"database", "disk"}
)
