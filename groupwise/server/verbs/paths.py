"""How the client names what was saved: `tinker://<model>/weights/<name>`, or `tinker://<model>/sampler_weights/<name>`."""

from __future__ import annotations

from collections.abc import Mapping

from groupwise.errors import UsageError
from groupwise.server.verbs.port import Stored, StoredKind

SCHEME = "tinker://"


def path_of(stored: Stored) -> str:
    """As the client names what was saved."""
    return f"{SCHEME}{stored.model}/{stored.kind}/{stored.name}"


def stored_at(path: str) -> Stored:
    """The inverse of `path_of`. UsageError for another path."""
    kinds: Mapping[str, StoredKind] = {"weights": "weights", "sampler_weights": "sampler_weights"}
    parts = path.removeprefix(SCHEME).split("/")
    if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] not in kinds or not all(parts):
        raise UsageError(
            f"{path!r} is no path of saved weights. They look like tinker://<model>/weights/<name> or "
            "tinker://<model>/sampler_weights/<name>."
        )
    return Stored(parts[0], kinds[parts[1]], parts[2])
