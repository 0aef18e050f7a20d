"""The classes of the client's protobuf messages, which come with its package `tinker`.

Importing the package itself takes more than a second and starts threads; the file with the classes needs only protobuf. So the file is
loaded directly from the package's folder, without running the package.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from groupwise.core.errors import UsageError

MODULE = "tinker.proto.tinker_public_pb2"
FILE = "tinker_public_pb2.py"


@cache
def messages() -> Any:
    """The module with the classes. UsageError if the package is not installed."""
    if MODULE in sys.modules:
        return sys.modules[MODULE]
    package = find_spec("tinker")
    folders = list(package.submodule_search_locations or ()) if package is not None else []
    files = [path for folder in folders if (path := Path(folder) / "proto" / FILE).is_file()]
    if not files:
        raise UsageError(
            "The verbs read the messages of the Tinker client with classes from its package `tinker`, which is not installed. "
            "Run: pip install 'groupwise[tinker]'"
        )
    spec = spec_from_file_location("groupwise_tinker_messages", files[0])
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def is_installed() -> bool:
    """True if `messages` will find them."""
    return find_spec("tinker") is not None
