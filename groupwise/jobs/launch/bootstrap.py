"""The first program of a launched job: it makes the job's environment unless it exists, and becomes the job's command.

This file travels in the folder `.groupwise` of the working folder, beside `builder.py` (`groupwise.jobs.fleet.machines.builder`) and the
files that it reads. It needs Python 3.8 and nothing else. An environment is named after its contents, so the next job that asks for the
same one finds it made.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

UNAVAILABLE = 69
"""EX_UNAVAILABLE of sysexits.h: the environment cannot be made there."""
NOT_FOUND = 127
"""The exit code of shells for a command that does not exist."""


def main() -> None:
    """Make the environment, then become the command. Never returns."""
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


def make_environment(here: str) -> str:
    """The interpreter of the environment. Ends the job if it cannot be made; the builder has printed why."""
    path = os.path.join(here, "order.json")
    with open(path, encoding="utf-8") as file:
        order = json.load(file)
    order["folder"] = os.path.expanduser(order["folder"])
    with open(path, "w", encoding="utf-8") as file:
        json.dump(order, file)
    if subprocess.call([sys.executable, "-I", "builder.py"], cwd=here, stdin=subprocess.DEVNULL):
        sys.exit(UNAVAILABLE)
    with open(os.path.join(here, "result.json"), encoding="utf-8") as file:
        return str(json.load(file)["python"])


if __name__ == "__main__":
    main()
