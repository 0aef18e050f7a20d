"""The worker's entry point: `main.py SOCKET PARENT`, run as a file by the Python of Tunix's environment.

It makes the package that this file belongs to importable, and nothing else of that package's environment, so the libraries of the two
environments are never mixed. The worker ends when the process PARENT ends for any reason, even if one of PARENT's children still holds
the other end of the socket.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[4]


def take_package() -> None:
    """Make `groupwise` importable from the location of this file."""
    spec = spec_from_file_location(
        PACKAGE.name, PACKAGE / "__init__.py", submodule_search_locations=[str(PACKAGE)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[PACKAGE.name] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    # Sent to the whole process group; the run decides when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    take_package()
    from groupwise.core.processes.process_tree import MARK, tie_to_parent

    tie_to_parent(int(sys.argv[2]), os.environ[MARK])  # it forks: call it before JAX has threads
    from groupwise.engine.backends.tunix.worker.service import serve

    serve(socket.socket(fileno=int(sys.argv[1])))
