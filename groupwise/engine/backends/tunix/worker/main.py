"""Run by the Python of Tunix's environment, as a file: finds the package that it belongs to, and nothing else of the environment that
holds that package, so that the libraries of the two are never mixed: `main.py SOCKET PARENT`.

The worker ends with the process PARENT, however that ends, even if a child of it still holds the other end of the socket.
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
    """Make `groupwise` importable from where this file is."""
    spec = spec_from_file_location(
        PACKAGE.name, PACKAGE / "__init__.py", submodule_search_locations=[str(PACKAGE)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[PACKAGE.name] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # of the whole process group: the run decides what follows
    take_package()
    from groupwise.core.processes.family import MARK, tie_to_parent

    tie_to_parent(int(sys.argv[2]), os.environ[MARK])  # which forks: before JAX has threads
    from groupwise.engine.backends.tunix.worker.service import serve

    serve(socket.socket(fileno=int(sys.argv[1])))
