"""How published adapters get into servers: from a folder that both can read, under a new name for each version.

groupwise-<run>-v<version>-<fingerprint>

A name that is used once cannot serve other weights, nor cached keys and values of earlier ones. Loading is idempotent. An adapter listed
with the same folder is already loaded; one listed with another folder was left by a killed process, and is loaded again. An adapter in the
server's list is ours if it is in the run's own folder; all of ours except the one to serve are unloaded.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from groupwise.api.openai_client.response_parsing import excerpt, read_json
from groupwise.core import atomic_files
from groupwise.core.errors import EndpointError, UsageError
from groupwise.core.types import Policy
from groupwise.engine.sampler.servers.server_pool import Served, Server
from groupwise.runs import publications

LOAD, UNLOAD = "/load_lora_adapter", "/unload_lora_adapter"
OURS = "groupwise-"
"""How names of publications begin."""
NO_SUCH_ROUTE = frozenset({404, 405})
ALREADY_LOADED = ("already been loaded", "already loaded", "already exists")
"""What vLLM says, and SGLang in its releases, of an adapter that is loaded once more."""
NOT_LOADED = "does not exist. Loaded LoRAs"
"""What SGLang says of an adapter to unload that it does not have; vLLM answers 404."""


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model in a server's list."""

    root: str | None
    """Its folder, as a path on the server."""
    longest: int | None
    """Most tokens of prompt and completion; None for adapters, and if the server does not report it."""


@dataclass(frozen=True, slots=True)
class SharedFolder:
    """A folder that this machine and the servers share, used if the servers cannot read the publications' folder."""

    local_path: Path
    server_path: str
    """Its path on the servers."""

    def put(self, policy: Policy, source: str) -> str:
        """Copy the folder of a publication there, completely or not at all; returns the copy's path on the servers."""
        run, name = Path(policy.path).parent.name, policy_name(policy)
        target = self.local_path / run / name
        building = target.with_name(f".building-{name}")
        with atomic_files.explaining_disk_errors(target):
            shutil.rmtree(building, ignore_errors=True)
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(source, building)
            building.rename(target)
        return f"{self.server_path}/{run}/{name}"

    def remove(self, policy: Policy) -> None:
        """Remove the copy of a publication."""
        folder = self.local_path / Path(policy.path).parent.name
        shutil.rmtree(folder / policy_name(policy), ignore_errors=True)
        # Only an empty folder can be removed. A run of the same name on another machine may still use it.
        with suppress(OSError):
            folder.rmdir()


def policy_name(policy: Policy) -> str:
    """A publication's name on the servers: its adapter's, or the version of all weights."""
    run = re.sub(r"[^A-Za-z0-9._-]+", "-", policy.run)
    return f"{OURS}{run}-v{policy.version}-{policy.fingerprint}"


def is_policy_name(name: str | None) -> bool:
    """True for the name of a publication, by this run or by another one."""
    return name is not None and name.startswith(OURS)


class AdapterFiles:
    """A `groupwise.engine.sampler.servers.sampler.WeightSync` by files of adapters."""

    kind: Literal["adapter", "full"] = "adapter"

    def __init__(
        self,
        shared: SharedFolder | None = None,
        write_by_expert: Callable[[str], None] | None = None,
    ) -> None:
        """`shared`: None if the servers can read the folder of the publications. `write_by_expert`: see `TorchPolicy.write_by_expert`;
        None if the adapter changes no experts."""
        self._shared = shared
        self._write_by_expert = write_by_expert
        self._claimed: Path | None = None
        """Folder of the files that `write_by_expert` has written, by policy."""

    def offer(self, policy: Policy) -> Served:
        """See `WeightSync.offer`."""
        folder = policy.path
        if self._write_by_expert is not None:
            if self._claimed is None:
                size = sum(file.stat().st_size for file in Path(policy.path).iterdir())
                self._claimed = publications.claim(Path(policy.path).parent, 2 * size)
            folder = str(self._claimed / policy_name(policy))
            shutil.rmtree(folder, ignore_errors=True)  # the same policy may be offered again
            self._write_by_expert(folder)
        if self._shared is not None:
            folder = self._shared.put(policy, folder)
        return Served(policy_name(policy), policy.version, policy.fingerprint, folder, policy)

    async def serve(
        self, server: Server, served: Served, models: Mapping[str, ListedModel]
    ) -> None:
        """See `WeightSync.serve`; no other adapter of the same run stays."""
        name, folder = served.name, served.folder
        assert folder is not None
        if name in models and models[name].root != folder:
            await unload(server, name)
        if name not in models or models[name].root != folder:
            await _load_adapter(server, name, folder)
        mine = folder.rpartition("/")[0]
        roots = {other: entry.root for other, entry in models.items() if entry.root is not None}
        for other, root in {**server.adapters, **roots}.items():
            if other != name and root.rpartition("/")[0] == mine:
                await unload(server, other)

    async def still_serves(self, server: Server, served: Served) -> bool:
        """See `WeightSync.still_serves`: each answer names its adapter."""
        return True

    def forget(self, server: Server, served: Served) -> None:
        """See `WeightSync.forget`: the adapter is unloaded."""
        server.notify(server.adapters_url + UNLOAD, {"lora_name": served.name})

    def remove(self, served: Served) -> None:
        """See `WeightSync.remove`."""
        if self._claimed is not None:
            shutil.rmtree(self._claimed / served.name, ignore_errors=True)
            if not any(self._claimed.iterdir()):
                publications.release(self._claimed)
                self._claimed = None
        if self._shared is not None and served.policy is not None:
            self._shared.remove(served.policy)


async def list_models(server: Server) -> dict[str, ListedModel]:
    """The models of a server by name. Raises EndpointError."""
    return await server.client.ask("GET", "/models", None, _read_listed, 0)


def _read_listed(body: bytes) -> dict[str, ListedModel]:
    entries: object = read_json(body).get("data")
    if not isinstance(entries, list):
        raise EndpointError(f"answered no list of models, but {excerpt(body)}")
    models: dict[str, ListedModel] = {}
    for entry in cast("list[Any]", entries):
        fields = cast("Mapping[str, Any]", entry) if isinstance(entry, Mapping) else {}
        name, root, longest = (fields.get(key) for key in ("id", "root", "max_model_len"))
        if isinstance(name, str):
            models[name] = ListedModel(
                root if isinstance(root, str) else None, longest if type(longest) is int else None
            )
    return models


async def _load_adapter(server: Server, name: str, folder: str) -> None:
    body = {"lora_name": name, "lora_path": folder}
    server.adapters[name] = folder
    try:
        await server.client.ask("POST", server.adapters_url + LOAD, body, len, 0)
    except EndpointError as error:
        if error.status == 400 and any(words in str(error) for words in ALREADY_LOADED):
            return  # an earlier attempt, whose answer was lost, loaded it
        if error.status in NO_SUCH_ROUTE and folder not in str(error) and name not in str(error):
            raise UsageError(
                f"{server.url} takes no adapters while it runs: {error}\n{server.adapters_remedy}"
            ) from None
        if error.is_retryable and error.status != 500:
            raise
        raise UsageError(
            f"{server.url} could not load the adapter {folder}: {error}\nIt must see that folder (sampler.adapter_folder is one that both "
            "machines have), and have been started with a --max-lora-rank of at least lora.r."
        ) from None


async def unload(server: Server, name: str) -> None:
    """Make a server unload an adapter; do nothing if the server does not have it."""
    try:
        await server.client.ask("POST", server.adapters_url + UNLOAD, {"lora_name": name}, len, 0)
    except EndpointError as error:
        if error.is_retryable and error.status != 500:
            raise
        if error.status != 404 and NOT_LOADED not in str(error):
            raise UsageError(f"{server.url} could not unload the adapter {name}: {error}") from None
    server.adapters.pop(name, None)
