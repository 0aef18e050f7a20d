"""The parts of a run on a training server (`groupwise rl … run.server=http://gpu-machine:8000`).

`groupwise.training.assembly.processes` makes the same parts on this machine.

`session.py` has numbered calls, file transfer in both directions, and the heartbeat. `start` opens a session, sends the necessary files,
and returns a `RemoteSampler` and a `RemoteLearner`. Their publications and states are local files, as if the parts were in this process.

Run, record and checkpoints are local. The server keeps nothing that the loop needs: if its engine ends, the run resumes from the last
checkpoint, which holds the learner's state to the bit.

The server chooses the layout of the work for its own machine, and the run records it. Weights that a run starts from are sent if they are
local files. Otherwise the server loads the base from its own files under the same name, and it must be the same to the bit.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2
from pydantic import TypeAdapter

from groupwise.api.client.connection import read_answer
from groupwise.api.client.errors import NoAnswer, Refused
from groupwise.api.schemas.parts import (
    LOST,
    OF_RUN,
    SECTIONS,
    Discard,
    Fingerprint,
    Generate,
    Load,
    LoadState,
    Open,
    PartsKind,
    PartsOpenedAnswer,
    PlanAnswer,
    PlanRequest,
    Publish,
    SaveState,
)
from groupwise.core import atomic_files
from groupwise.core.errors import PolicyMismatchError, UsageError
from groupwise.core.types import Completion, GroupRequest, Policy
from groupwise.engine.backends.remote.session import (
    FIRST_RETRY_TIMEOUT,
    RequestThread,
    Session,
    as_usage,
)
from groupwise.engine.backends.verb_learner import Verb, VerbLearner
from groupwise.engine.sampler.rules import refuse_changed_draws
from groupwise.runs import publications

SENT = "sent"
"""Prefix of the session's folders that hold the files a run starts from."""


@dataclass(frozen=True, slots=True)
class RemotePartsSpec:
    """Describes the parts to make on the server."""

    kind: PartsKind
    config: Mapping[str, Any]
    """The run's config, as JSON."""
    run: str
    publish_folder: Path
    longest_prompt: int | None
    """Length in tokens; None if nothing is sampled."""
    base: str
    """Identity of the base; see `groupwise.engine.models.identity`."""
    called: str | None = None
    """The base's name in written adapters; None: the server's name for it."""
    keep_publications: int = 2
    model: Path | None = None
    """A folder with the base to send; None: the server has it under the configured name."""
    adapter: Path | None = None
    """A folder with the adapter to start from; None: a new one."""
    weights: Path | None = None
    """A folder with the weights to serve, an adapter or a whole model, if nothing is trained."""

    @property
    def folders_to_send(self) -> dict[str, Path]:
        """Folders to send to the server, by their role."""
        folders = {"model": self.model, "adapter": self.adapter, "weights": self.weights}
        return {name: folder for name, folder in folders.items() if folder is not None}


@dataclass(frozen=True, slots=True)
class RemoteParts:
    """Parts that are ready to use; the caller closes the session."""

    session: Session
    sampler: RemoteSampler
    learner: RemoteLearner
    stop_token_ids: tuple[int, ...]
    layout: Mapping[str, Any]


def planned_layout(
    url: str,
    kind: PartsKind,
    config: Mapping[str, Any],
    longest_prompt: int | None,
    transport: httpx2.AsyncBaseTransport | None = None,
) -> dict[str, Any]:
    """The layout of the work on the server's machine, as `groupwise.training.placement.Layout`. Raises UsageError if it is refused."""
    config_file = Path(config["model"]["name"]).expanduser() / "config.json"
    body = PlanRequest(
        kind=kind,
        config=sections(kind, config),
        longest_prompt=longest_prompt,
        described=config_file.read_text(encoding="utf-8") if config_file.is_file() else None,
    )
    with RequestThread(url, transport=transport) as thread:
        request = thread.client.send(
            "POST",
            "/parts/plan",
            body=body.model_dump_json().encode(),
            server_wait=120.0,
            retry_timeout=FIRST_RETRY_TIMEOUT,
        )
        try:
            return read_answer(PlanAnswer, thread.now(request)).layout
        except (Refused, NoAnswer) as error:
            raise as_usage(error) from None


async def start(
    url: str, spec: RemotePartsSpec, transport: httpx2.AsyncBaseTransport | None = None
) -> RemoteParts:
    """Make parts on the server. Raises UsageError if it refuses, ClientError if the connection is lost; the session is then closed."""
    session = Session(url, transport=transport)
    try:
        await session.open(owner_of(spec))
        for name, folder in spec.folders_to_send.items():
            files = model_files(folder) if name == "model" else weight_files(folder)
            await session.run(session.upload(files, f"{SENT}-{name}"))
        order = Open(
            kind=spec.kind,
            config=sections(spec.kind, spec.config),
            run=spec.run,
            longest_prompt=spec.longest_prompt,
            base=spec.base,
        ).model_copy(update={name: f"{SENT}-{name}" for name in spec.folders_to_send})
        opened = PartsOpenedAnswer.model_validate(await session.call(order, ordered=True))
    except Refused as error:
        session.close()
        if error.code in LOST:
            raise
        raise as_usage(error) from None
    except BaseException:
        session.close()
        raise
    published: dict[str, Published] = {}
    return RemoteParts(
        session,
        RemoteSampler(session, opened.fingerprint, published),
        RemoteLearner(
            session,
            spec.publish_folder,
            published,
            spec.keep_publications,
            spec.called,
            tells_trained_logprobs=opened.tells_trained_logprobs,
        ),
        opened.stop_token_ids,
        opened.layout,
    )


def model_files(folder: Path) -> list[Path]:
    """All files of a model, including its tokenizer."""
    return sorted(
        path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")
    )


def sections(kind: PartsKind, config: Mapping[str, Any]) -> dict[str, Any]:
    """Sections of the config that the server receives; nothing about data, rewards, task and tracking."""
    run = {key: config["run"][key] for key in OF_RUN}
    return {**{key: config[key] for key in SECTIONS[kind] if key in config}, "run": run}


def owner_of(spec: RemotePartsSpec) -> str:
    """A name that stays the same when a run is resumed. A run's folder has one loop at a time, so an earlier owner no longer exists."""
    if spec.kind == "serving":
        return f"evaluation ({secrets.token_hex(6)})"
    identity = f"{uuid.getnode()}:{socket.gethostname()}:{Path(spec.config['run']['dir']).resolve()}:{spec.run}"
    return f"{spec.run[:80]} ({hashlib.sha256(identity.encode()).hexdigest()[:12]})"


_COMPLETIONS = TypeAdapter(tuple[Completion, ...])

Stamp = tuple[tuple[str, int, int], ...]
"""For each file of a folder: name, size, modification time in nanoseconds."""


@dataclass(frozen=True, slots=True)
class Published:
    """A downloaded publication."""

    remote_folder: str
    """Its folder on the server."""
    stamp: Stamp
    """Stamp of its local files; if they change, they may differ from the server's files."""


class RemoteSampler:
    """A `groupwise.core.types.Sampler` that uses the parts of a session."""

    def __init__(self, session: Session, fingerprint: str, published: dict[str, Published]) -> None:
        """`fingerprint`: of the weights that it serves. `published`: the learner's latest publications, by their local paths."""
        self._session = session
        self._fingerprint = fingerprint
        self._published = published

    async def generate(self, request: GroupRequest) -> tuple[Completion, ...]:
        """See `groupwise.core.types.Sampler.generate`."""
        refuse_changed_draws(request, "a training server's sampler")
        return _COMPLETIONS.validate_python(await self._session.call(Generate(request=request)))

    async def load(self, policy: Policy) -> None:
        """See `groupwise.core.types.Sampler.load`. Files that the server does not have are sent to it."""
        await self._session.run(self._ensure_loaded(policy))

    def fingerprint(self) -> str:
        """Fingerprint of the weights in the server's memory, as they were when they were loaded."""
        return self._fingerprint

    async def _ensure_loaded(self, policy: Policy) -> None:
        publication = self._published.get(policy.path)
        if publication is not None and publication.stamp == stamp_of(Path(policy.path)):
            try:
                return await self._load_policy(policy, publication.remote_folder)
            except UsageError:  # the server no longer keeps that folder
                del self._published[policy.path]
        remote_folder = self._session.new_folder("policy")
        await self._session.upload(weight_files(Path(policy.path)), remote_folder)
        try:
            await self._load_policy(policy, remote_folder)
        finally:
            await self._session.forget(remote_folder)

    async def _load_policy(self, policy: Policy, folder: str) -> None:
        try:
            self._fingerprint = await self._session.call_in_thread(
                Load(policy=replace(policy, path=folder))
            )
        except PolicyMismatchError:  # the server has loaded the weights all the same
            self._fingerprint = await self._session.call_in_thread(Fingerprint())
            raise


def stamp_of(folder: Path) -> Stamp:
    """Facts that change when the folder's files change, as far as can be seen without reading them."""
    facts = ((path.name, path.stat()) for path in sorted(folder.iterdir()))
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in facts)


def weight_files(folder: Path) -> list[Path]:
    """Weights and the files that describe them, without a run's record that may be in the same folder."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file() and path.suffix in (".safetensors", ".json", ".bin")
    )


ADAPTER_CONFIG, BASE = "adapter_config.json", "base_model_name_or_path"
"""File of an adapter that names its base, and the key for that name."""
_POLICY = TypeAdapter(Policy)


class RemoteLearner(VerbLearner):
    """A `groupwise.core.types.Learner` that uses the parts of a session."""

    def __init__(
        self,
        session: Session,
        publish_folder: Path,
        published: dict[str, Published],
        keep_publications: int = 2,
        base: str | None = None,
        *,
        tells_trained_logprobs: bool = True,
    ) -> None:
        """`published` collects publications; see `RemoteSampler`. `keep_publications`: how many of the latest keep their files. `base`: the
        name of the base in written adapters, because the server has another path for it. `tells_trained_logprobs`: see
        `groupwise.api.schemas.parts.PartsOpenedAnswer`."""
        self._session = session
        self._publish_folder = publish_folder
        self._published = published
        self._keep = keep_publications
        self._base = base
        self._tells_trained_logprobs = tells_trained_logprobs

    async def _call_verb(self, verb: Verb) -> Any:
        """See `VerbLearner._call_verb`."""
        return await self._session.call(verb, ordered=True)

    async def trained_logprobs(self) -> list[tuple[float, ...]] | None:
        """See `groupwise.core.types.Learner.trained_logprobs`; None if the server's version does not report them."""
        if not self._tells_trained_logprobs:
            return None
        return await super().trained_logprobs()

    def discard(self) -> None:
        """See `groupwise.core.types.Learner.discard`."""
        self._session.call_now(Discard(), ordered=True)

    async def publish(self, version: int) -> Policy:
        """See `groupwise.core.types.Learner.publish`. The files are downloaded; old publications are removed."""
        return await self._session.run(self._publish_version(version))

    async def save(self, folder: str) -> None:
        """See `groupwise.core.types.Learner.save`. Raises StoreError if the local files cannot be written."""
        with atomic_files.explaining_disk_errors(Path(folder)):
            await self._session.run(self._save_state(Path(folder)))

    def load(self, folder: str) -> None:
        """See `groupwise.core.types.Learner.load`."""
        self._session.now(self._load_state(Path(folder)))

    # --- within the session's thread --------------------------------------------------------------

    async def _publish_version(self, version: int) -> Policy:
        policy = _POLICY.validate_python(
            await self._session.call_in_thread(Publish(version=version), ordered=True)
        )
        folder = publications.version_folder(self._publish_folder, version)
        with atomic_files.explaining_disk_errors(folder):
            await self._fetch_files(policy.path, folder)
        self._published[str(folder)] = Published(policy.path, stamp_of(folder))
        for old in publications.remove_old(self._publish_folder, version, self._keep):
            self._published.pop(str(old), None)
        return replace(policy, path=str(folder))

    async def _fetch_files(self, remote_folder: str, folder: Path) -> None:
        await self._session.download(remote_folder, folder)
        described = folder / ADAPTER_CONFIG
        if self._base is not None and described.is_file():
            facts = {**json.loads(described.read_bytes()), BASE: self._base}
            described.write_text(json.dumps(facts, indent=2, sort_keys=True))

    async def _save_state(self, folder: Path) -> None:
        remote_folder = self._session.new_folder("state")
        await self._session.call_in_thread(SaveState(folder=remote_folder), ordered=True)
        await self._fetch_files(remote_folder, folder)
        await self._session.forget(remote_folder)

    async def _load_state(self, folder: Path) -> None:
        remote_folder = self._session.new_folder("state")
        await self._session.upload(weight_files(folder), remote_folder)
        await self._session.call_in_thread(LoadState(folder=remote_folder), ordered=True)
        await self._session.forget(remote_folder)
