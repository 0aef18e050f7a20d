"""The first program of a launched job: it creates the job's environment unless it exists, and then becomes the job's command.

This file is sent to the folder `.groupwise` of the working folder, together with `builder.py` (`groupwise.jobs.fleet.machines.builder`)
and its input files. It needs only Python 3.8. An environment is named after its contents, so the next job with the same requirements
reuses it. `BUILDING` and `READY` stand around the builder's part of the job's log.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

BUILDING = "The environment of this job:"
"""The first line of the log."""
READY = "The environment is ready."
"""The last line before the log of the command."""
UNAVAILABLE = 69
"""EX_UNAVAILABLE of sysexits.h: the environment cannot be created."""
NOT_FOUND = 127
"""The exit code of shells for a command that does not exist."""


def main() -> None:
    """Create the environment, then become the command. Never returns."""
    python = make_environment(os.path.dirname(os.path.abspath(__file__)))
    programs = os.path.dirname(python)
    command = sys.argv[1:]
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([programs, os.environ.get("PATH", os.defpath)]),
        "VIRTUAL_ENV": os.path.dirname(programs),
    }
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        sys.exit(NOT_FOUND)


def make_environment(folder: str) -> str:
    """Create the environment; returns its interpreter. Ends the job if that fails; the builder has printed the reason."""
    path = os.path.join(folder, "order.json")
    with open(path, encoding="utf-8") as file:
        order = json.load(file)
    order["folder"] = os.path.expanduser(order["folder"])
    with open(path, "w", encoding="utf-8") as file:
        json.dump(order, file)
    os.write(sys.stdout.fileno(), f"{BUILDING}\n".encode())
    if subprocess.call([sys.executable, "-I", "builder.py"], cwd=folder, stdin=subprocess.DEVNULL):
        sys.exit(UNAVAILABLE)
    os.write(sys.stdout.fileno(), f"{READY}\n".encode())
    with open(os.path.join(folder, "result.json"), encoding="utf-8") as file:
        return str(json.load(file)["python"])


if __name__ == "__main__":
    main()
