"""Makes virtual environments for programs whose packages contradict ours, by this environment's pip, or else by uv.

Each is made in a new folder, and a record names the one in use, so that an installation that fails or is interrupted leaves the previous
one in use. A lock lets only one process make one at a time.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from groupwise.core.errors import UsageError
from groupwise.core.terminal.ticker import Ticker

logger = logging.getLogger(__name__)

LOCK = "lock"


def make(
    folder: Path, words: Sequence[str], *, what: str, say: bool, environment: Mapping[str, str]
) -> bool:
    """Make a virtual environment in `folder` and install what `words` ask for; returns True if pip did it, False for uv.

    `what`: the packages, for messages. `say`: show a line of progress. `environment`: its variables. Raises UsageError with the whole
    output of an installer that fails.
    """
    # No pip inside: that would need ensurepip, which some systems leave out.
    venv.create(folder, with_pip=False)
    return add_packages(folder, words, what=what, say=say, environment=environment)


def installer_for(python: str) -> list[str]:
    """The words before those that name packages in a command that installs for this interpreter. UsageError if there is no installer."""
    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "--python", python, "install"]
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--python", python]
    raise UsageError("There is neither pip nor uv to install packages with.")


def add_packages(
    folder: Path, words: Sequence[str], *, what: str, say: bool, environment: Mapping[str, str]
) -> bool:
    """Install what `words` ask for into the virtual environment in `folder`; see `make`."""
    installer = installer_for(str(folder / "bin" / "python"))
    has_pip = find_spec("pip") is not None
    command = [*installer, *(word for word in words if has_pip or not word.startswith("--report"))]
    with Ticker() if say else nullcontext() as ticker:

        def show(line: str) -> None:
            if ticker:
                ticker.show(f"{what}: {line}")

        show("installing")
        code, output = run_installer(command, environment, show)
        if code:
            raise UsageError(
                f"{what} could not be installed ({' '.join(command[:4])} …):\n{output.strip()}"
            )
        show("installed")
    return has_pip


def run_installer(
    command: Sequence[str], environment: Mapping[str, str], show: Callable[[str], None]
) -> tuple[int, str]:
    """Run a program to its end; `show` gets each line of its output. Returns its exit code and the whole output, errors included."""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=dict(environment),
    ) as process:
        assert process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line)
            if line.strip():
                show(line.strip())
    return process.returncode, "".join(lines)


@contextmanager
def exclusive(folder: Path) -> Generator[None]:
    """Hold the lock of a folder of environments, which is made if need be; wait if another process holds it.

    The holder may remove the folder. Anyone who waited for that lock makes and locks the folder again.
    """
    while (lock := _lock(folder)) is None:
        pass
    with lock:
        yield


def _lock(folder: Path) -> IO[str] | None:
    """The locked file; None if the folder was removed while this process waited for the lock."""
    folder.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError), ExitStack() as stack:
        lock = stack.enter_context((folder / LOCK).open("w"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning(
                "another process is making the environment in %s; waiting for it", folder
            )
            fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.samestat(os.fstat(lock.fileno()), (folder / LOCK).stat()):
            stack.pop_all()
            return lock
    return None
