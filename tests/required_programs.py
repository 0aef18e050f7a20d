"""Programs of this machine that tests need, servers above all. Where one is not there a test is skipped, with the reason; where
`GROUPWISE_REAL_SERVERS=1` says that there must be real ones it fails."""

import os
import shutil
from typing import NoReturn

import pytest

SEARCH_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/local/sbin:/usr/local/bin"


def skip_or_fail(reason: str) -> NoReturn:
    """A test cannot go on without."""
    if os.environ.get("GROUPWISE_REAL_SERVERS") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def require_programs(*programs: str, install: str = "openssh-server iproute2 nftables") -> str:
    """The first of them, once all are found; `install`: what Debian calls them."""
    found = {name: shutil.which(name, path=SEARCH_PATH) for name in programs}
    absent = [name for name, path in found.items() if path is None]
    if absent:
        skip_or_fail(f"there is no {', '.join(absent)} (Debian: apt install {install})")
    return str(found[programs[0]])


def root_needed() -> None:
    """For machines in namespaces; others skip."""
    if os.geteuid() != 0:
        pytest.skip("machines in namespaces need root")


def with_parent_death_signal(how: str = "QUIT") -> list[str]:
    """Before a command: the kernel sends it that signal when the thread that began it ends, however that ends. Linux alone can."""
    program = shutil.which("setpriv", path=SEARCH_PATH)
    return [] if program is None else [program, "--pdeathsig", how, "--"]
