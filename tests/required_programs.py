"""Programs that tests need, mostly servers. If one is missing, the test is skipped; with `GROUPWISE_REAL_SERVERS=1` it fails."""

import os
import shutil
from typing import NoReturn

import pytest

SEARCH_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/local/sbin:/usr/local/bin"


def skip_or_fail(reason: str) -> NoReturn:
    """Skip the test, or fail it if `GROUPWISE_REAL_SERVERS=1`."""
    if os.environ.get("GROUPWISE_REAL_SERVERS") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def require_programs(*programs: str, install: str = "openssh-server iproute2 nftables") -> str:
    """The path of the first program, once all are found. `install`: their Debian packages."""
    found = {name: shutil.which(name, path=SEARCH_PATH) for name in programs}
    absent = [name for name, path in found.items() if path is None]
    if absent:
        skip_or_fail(f"there is no {', '.join(absent)} (Debian: apt install {install})")
    return str(found[programs[0]])


def root_needed() -> None:
    """Skip the test unless it runs as root: only root can make network namespaces."""
    if os.geteuid() != 0:
        pytest.skip("machines in namespaces need root")


def with_parent_death_signal(how: str = "QUIT") -> list[str]:
    """A command prefix (`setpriv --pdeathsig`): the kernel sends the signal when the thread that started the command ends. Linux only."""
    program = shutil.which("setpriv", path=SEARCH_PATH)
    return [] if program is None else [program, "--pdeathsig", how, "--"]
