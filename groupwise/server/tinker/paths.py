"""The client's paths of saved weights: `tinker://<model>/weights/<name>`, or `tinker://<model>/sampler_weights/<name>`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import get_args

from groupwise.core.errors import UsageError
from groupwise.server.engine.verb_protocol import Stored, StoredKind
from groupwise.server.tinker import requests

SCHEME = "tinker://"
MODEL, SAVED = re.compile(r"[A-Za-z0-9][A-Za-z0-9:_.-]*"), re.compile(requests.NAME_PATTERN)
"""Model ids and names of saved weights. Both become folder names, so they are checked strictly."""


def path_of(stored: Stored) -> str:
    """The client's path for saved weights."""
    return f"{SCHEME}{stored.model}/{stored.kind}/{stored.name}"


def stored_at(path: str) -> Stored:
    """The inverse of `path_of`. UsageError if the path is malformed."""
    kinds: Mapping[str, StoredKind] = {kind: kind for kind in get_args(StoredKind)}
    parts = path.removeprefix(SCHEME).split("/")
    well_formed = len(parts) == 3 and MODEL.fullmatch(parts[0]) and SAVED.fullmatch(parts[2])
    if not path.startswith(SCHEME) or not well_formed or parts[1] not in kinds:
        raise UsageError(
            f"{path!r} is no path of saved weights. They look like tinker://<model>/weights/<name> or "
            "tinker://<model>/sampler_weights/<name>."
        )
    return Stored(parts[0], kinds[parts[1]], parts[2])
