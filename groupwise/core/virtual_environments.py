"""Makes virtual environments for programs whose packages contradict ours, by this environment's pip, or else by uv.

Each is made in a new folder, and a record names the one in use, so that an installation that fails or is interrupted leaves the previous
one in use. A lock lets only one process make one at a time.
"""

from __future__ import annotations

import fcntl
import logging
import shutil
import subprocess
import sys
import venv
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from groupwise.core.errors import UsageError

logger = logging.getLogger(__name__)

LOCK = "lock"
LAST_CHARACTERS = 2000
"""How much of an installer's error output a message shows."""


def make(
    folder: Path, words: Sequence[str], *, what: str, say: bool, environment: Mapping[str, str]
) -> bool:
    """Make a virtual environment in `folder` and install what `words` ask for; returns True if pip did it, False for uv.

    `what`: the packages, for messages. `say`: show the installer's progress. `environment`: its variables. Raises UsageError with its last
    output.
    """
    # No pip inside: that would need ensurepip, which some systems leave out.
    venv.create(folder, with_pip=False)
    return add_packages(folder, words, what=what, say=say, environment=environment)


def add_packages(
    folder: Path, words: Sequence[str], *, what: str, say: bool, environment: Mapping[str, str]
) -> bool:
    """Install what `words` ask for into the virtual environment in `folder`; see `make`."""
    target = str(folder / "bin" / "python")
    pip = [sys.executable, "-m", "pip"]
    has_pip = subprocess.run([*pip, "--version"], capture_output=True, check=False).returncode == 0
    if has_pip:
        installer = [*pip, "--python", target, "install"]
    elif uv := shutil.which("uv"):
        installer = [uv, "pip", "install", "--python", target]
    else:
        raise UsageError("There is neither pip nor uv to install packages with.")
    command = [*installer, *(word for word in words if has_pip or not word.startswith("--report"))]
    result = subprocess.run(
        command,
        stdout=None if say else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env=dict(environment),
    )
    if result.returncode:
        last = result.stderr[-LAST_CHARACTERS:].strip()
        raise UsageError(f"{what} could not be installed ({' '.join(command[:4])} …):\n{last}")
    return has_pip


@contextmanager
def exclusive(folder: Path) -> Generator[None]:
    """Hold the lock of a folder of environments, which is made if need be; wait if another process holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning(
                "another process is making the environment in %s; waiting for it", folder
            )
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
