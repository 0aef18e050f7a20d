"""What jobs request from Ray: the options of the Jobs API, resources, and the address of a head."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from groupwise.core.errors import UsageError
from groupwise.jobs.hosts.ray import ADDRESS, GANG, WANTED
from groupwise.jobs.hosts.spec import Limits

USUAL_CPUS = 1
"""CPUs of a job that requests none: with zero CPUs Ray would not count it, and would run it on the head next to its own processes."""
OWN = {"CPU": "--cpus", "GPU": "--gpus", "memory": "--memory"}
"""Resources that have their own command-line option."""
MOST = 1e9
"""Largest amount of a resource that may be requested."""


def ray_options(
    asks: Mapping[str, Any], gpus: int, limits: Limits, *, nodes: int = 1
) -> tuple[str]:
    """The options of the Jobs API for a job with these requests and `gpus` on each node. `limits` is ignored: Ray has none."""
    found: dict[str, Any] = {"entrypoint_num_cpus": asks.get("cpus") or USUAL_CPUS}
    if gpus:
        found["entrypoint_num_gpus"] = gpus
    if asks.get("memory"):
        found["entrypoint_memory"] = asks["memory"]
    if asks.get("resources"):
        found["entrypoint_resources"] = dict(asks["resources"])
    if nodes > 1:
        resources = found.pop("entrypoint_resources", {})
        bundle = {WANTED[name]: amount for name, amount in found.items()}
        found = {GANG: {"nodes": nodes, "bundle": {**bundle, **resources}}}
    return (json.dumps(found),)


def resources_of(words: Iterable[str]) -> dict[str, float]:
    """Parse resource amounts from words of the form NAME=N. Raises UsageError for an invalid word, or a resource that has its own
    option."""
    found: dict[str, float] = {}
    for word in words:
        name, _, number = word.rpartition("=")
        try:
            amount = float(number)
        except ValueError:
            amount = 0.0
        if not name or name.startswith("-") or not 0 < amount < MOST:
            raise UsageError(
                f"--resource {word}: NAME=N is expected, a resource of Ray's nodes and a number above 0, as accelerator_type:A100=0.001."
            )
        if name in OWN:
            raise UsageError(f"--resource {word}: this one is asked for by {OWN[name]}.")
        if name in found:
            raise UsageError(f"--resource {word}: {name} stands there twice.")
        found[name] = amount
    return found


def checked_address(word: str) -> str:
    """Normalize the address of a head's dashboard that a user wrote. Raises UsageError if it is invalid."""
    found = word.rstrip("/")
    try:
        of_http = urlsplit(found)
        is_one = of_http.scheme in ("http", "https") and of_http.hostname and of_http.port != 0
    except ValueError:
        is_one = False
    if not is_one or "," in found or "@" in found:
        raise UsageError(
            f"--address {word.rpartition('@')[2]}: the address of Ray's dashboard is expected, as that machine reaches it: {ADDRESS}. Its "
            "token is read there."
        )
    return found
