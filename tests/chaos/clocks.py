"""Wall clocks that somebody sets: of a process of the control plane, and of a machine. Every other clock stays as it is.

A file says by how many seconds a clock is off; whoever writes it sets the clock, also of what runs already. A process of the control
plane gets its clock by a `sitecustomize` that is on its path, a machine by a `python3` that stands before its own: the runner does
without sitecustomize, and its supervisors are forks of it.
"""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path

from tests.chaos.fleet import ROOT, Control
from tests.ssh_hosts import FullHost

DAY = 86_400.0

SHIFT = """
import time

def _shift():
    path = {path!r}
    now, fine, of_clock = time.time, time.time_ns, time.clock_gettime

    def off():
        with open(path) as file:
            return float(file.read())

    time.time = lambda: now() + off()
    time.time_ns = lambda: fine() + int(off() * 1e9)
    time.clock_gettime = lambda clock: of_clock(clock) + (off() if clock == time.CLOCK_REALTIME else 0.0)

_shift()
"""

PYTHON = """\
#!{python} -IS
import os, sys
if "-c" not in sys.argv:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
{shift}
exec(sys.argv[sys.argv.index("-c") + 1], {{"__name__": "__main__"}})
"""
"""Bootstrap, runner and supervisor live in such a process; commands of jobs get the interpreter itself."""


class WallClock:
    """One that can be set."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.set(0.0)

    def set(self, seconds: float) -> None:
        """So far from the true time, from now on."""
        new = self.path.with_suffix(".new")
        new.write_text(f"{seconds}\n")
        new.chmod(0o644)
        new.replace(self.path)


def of_control(control: Control, folder: Path) -> WallClock:
    """The clock of such a process, from its next life on."""
    place = folder / f"clock-of-{control.name}"
    place.mkdir()
    clock = WallClock(place / "off")
    (place / "sitecustomize.py").write_text(SHIFT.format(path=str(clock.path)))
    control.environment["PYTHONPATH"] = f"{place}:{ROOT}"
    return clock


def of_machine(host: FullHost) -> WallClock:
    """The clock of a machine, from the next request to it on."""
    python = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin")
    assert python is not None
    clock = WallClock(host.folder / "bin" / "clock")
    program = host.folder / "bin" / "python3"
    shift = textwrap.dedent(SHIFT.format(path=str(clock.path)))
    program.write_text(PYTHON.format(python=python, shift=shift))
    program.chmod(0o755)
    return clock
