"""What jobs request from Ray: the options of the Jobs API, resources, and the address of a head."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from groupwise.core.errors import UsageError
from groupwise.jobs.hosts.ray import ADDRESS, GANG, RESOURCE_NAMES
from groupwise.jobs.hosts.spec import Limits

DEFAULT_CPUS = 1
"""CPUs of a job that requests none: with zero CPUs Ray would not count it, and would run it on the head next to its own processes."""
OWN_OPTIONS = {"CPU": "--cpus", "GPU": "--gpus", "memory": "--memory"}
"""Resources that have their own command-line option."""
MAX_AMOUNT = 1e9
"""Largest amount of a resource that may be requested."""


def ray_options(
    place_options: Mapping[str, Any], gpus: int, limits: Limits, *, nodes: int = 1
) -> tuple[str]:
    """The options of the Jobs API for a job with these requests and `gpus` on each node. `limits` is ignored: Ray has none."""
    options: dict[str, Any] = {"entrypoint_num_cpus": place_options.get("cpus") or DEFAULT_CPUS}
    if gpus:
        options["entrypoint_num_gpus"] = gpus
    if place_options.get("memory"):
        options["entrypoint_memory"] = place_options["memory"]
    if place_options.get("resources"):
        options["entrypoint_resources"] = dict(place_options["resources"])
    if nodes > 1:
        resources = options.pop("entrypoint_resources", {})
        bundle = {RESOURCE_NAMES[name]: amount for name, amount in options.items()}
        options = {GANG: {"nodes": nodes, "bundle": {**bundle, **resources}}}
    return (json.dumps(options),)


def resources_of(words: Iterable[str]) -> dict[str, float]:
    """Parse resource amounts from words of the form NAME=N. Raises UsageError for an invalid word, or a resource that has its own
    option."""
    resources: dict[str, float] = {}
    for word in words:
        name, _, number = word.rpartition("=")
        try:
            amount = float(number)
        except ValueError:
            amount = 0.0
        if not name or name.startswith("-") or not 0 < amount < MAX_AMOUNT:
            raise UsageError(
                f"--resource {word}: NAME=N is expected, a resource of Ray's nodes and a number above 0, as accelerator_type:A100=0.001."
            )
        if name in OWN_OPTIONS:
            raise UsageError(f"--resource {word}: this one is asked for by {OWN_OPTIONS[name]}.")
        if name in resources:
            raise UsageError(f"--resource {word}: {name} stands there twice.")
        resources[name] = amount
    return resources


def checked_address(address: str) -> str:
    """Normalize the address of a head's dashboard that a user wrote. Raises UsageError if it is invalid."""
    url = address.rstrip("/")
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid or "," in url or "@" in url:
        raise UsageError(
            f"--address {address.rpartition('@')[2]}: the address of Ray's dashboard is expected, as that machine reaches it: {ADDRESS}. "
            "Its token is read there."
        )
    return url
