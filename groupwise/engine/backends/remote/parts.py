"""The parts of a run on a training server (`groupwise rl … run.server=http://gpu-machine:8000`).

`groupwise.training.build` makes the same parts here.

session.py    parts of a server under an id: calls by number, files in both directions, a sign of life, in a thread of their own
learner.py    a `groupwise.core.types.Learner` there
sampler.py    a `groupwise.core.types.Sampler` there

Run, record and checkpoints are here. The server keeps nothing that the loop needs: when its engine ends, the run is resumed from the
last checkpoint, which holds the learner's state to the bit.

The server decides how the work is laid out, for its own machine, and the run records that. Weights that a run starts from are sent if
they are files of this machine; a base is loaded by the server from its own files under the same name, and must be the same to the bit.
"""

from __future__ import annotations

import hashlib
import secrets
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from groupwise.api.client.errors import NoAnswer, Refused
from groupwise.api.client.exchange import Call
from groupwise.api.schemas.parts import (
    LOST,
    OF_RUN,
    SECTIONS,
    Open,
    PartsKind,
    PartsOpenedAnswer,
    PlanAnswer,
    PlanRequest,
)
from groupwise.engine.backends.remote.learner import RemoteLearner
from groupwise.engine.backends.remote.sampler import Published, RemoteSampler, weight_files
from groupwise.engine.backends.remote.session import (
    FIRST_PATIENCE,
    RequestThread,
    Session,
    answer_as,
    as_usage,
)

SENT = "sent"
"""Prefix of the parts' folders that hold the files a run starts from."""


@dataclass(frozen=True, slots=True)
class RemotePartsSpec:
    """Describes the parts to make."""

    kind: PartsKind
    config: Mapping[str, Any]
    """The run's config, as JSON."""
    run: str
    publish_folder: Path
    longest_prompt: int | None
    """Tokens; None if nothing is sampled."""
    base: str
    """Fingerprint of the base; see `groupwise.engine.models.identity`."""
    called: str | None = None
    """The base's name in adapters; None: as the server names it."""
    keep_publications: int = 2
    model: Path | None = None
    """A folder with the base; None: the server has it under the name that the config gives."""
    adapter: Path | None = None
    """A folder with the adapter to start from."""
    weights: Path | None = None
    """A folder with the served weights, an adapter or a whole model, if nothing is trained."""

    @property
    def sent(self) -> dict[str, Path]:
        """Folders that are sent to the server, by their role."""
        given = {"model": self.model, "adapter": self.adapter, "weights": self.weights}
        return {name: folder for name, folder in given.items() if folder is not None}


@dataclass(frozen=True, slots=True)
class RemoteParts:
    """Parts that are ready; the caller closes the session."""

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
    """How the work would be laid out on the server's machine, as `groupwise.training.placement.Layout` has it. Raises UsageError."""
    own = Path(config["model"]["name"]).expanduser() / "config.json"
    body = PlanRequest(
        kind=kind,
        config=sections(kind, config),
        longest_prompt=longest_prompt,
        described=own.read_text(encoding="utf-8") if own.is_file() else None,
    )
    call = Call(
        *("POST", "/parts/plan", answer_as(PlanAnswer), body.model_dump_json().encode()),
        waits=120.0,
    )
    with RequestThread(url, transport=transport) as line:
        try:
            return line.now(line.ask(call, FIRST_PATIENCE)).layout
        except (Refused, NoAnswer) as error:
            raise as_usage(error) from None


async def start(
    url: str, wanted: RemotePartsSpec, transport: httpx2.AsyncBaseTransport | None = None
) -> RemoteParts:
    """Have the server make parts. Raises UsageError if it refuses, ClientError if it is lost on the way; nothing is left then."""
    session = Session(url, transport=transport)
    try:
        await session.open(owner_of(wanted))
        for name, folder in wanted.sent.items():
            files = model_files(folder) if name == "model" else weight_files(folder)
            await session.awaited(session.upload(files, f"{SENT}-{name}"))
        order = Open(
            kind=wanted.kind,
            config=sections(wanted.kind, wanted.config),
            run=wanted.run,
            longest_prompt=wanted.longest_prompt,
            base=wanted.base,
        ).model_copy(update={name: f"{SENT}-{name}" for name in wanted.sent})
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
            wanted.publish_folder,
            published,
            wanted.keep_publications,
            wanted.called,
            tells_trained_logprobs=opened.tells_trained_logprobs,
        ),
        opened.stop_token_ids,
        opened.layout,
    )


def model_files(folder: Path) -> list[Path]:
    """All files of a model, with its tokenizer."""
    return sorted(
        path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")
    )


def sections(kind: PartsKind, config: Mapping[str, Any]) -> dict[str, Any]:
    """Sections of the config that the server receives: nothing of data, rewards, task and tracking."""
    run = {key: config["run"][key] for key in OF_RUN}
    return {**{key: config[key] for key in SECTIONS[kind] if key in config}, "run": run}


def owner_of(wanted: RemotePartsSpec) -> str:
    """A name that is the same when a run is resumed: its folder has only one loop at a time, so an earlier one no longer exists."""
    if wanted.kind == "serving":
        return f"evaluation ({secrets.token_hex(6)})"
    place = f"{uuid.getnode()}:{socket.gethostname()}:{Path(wanted.config['run']['dir']).resolve()}:{wanted.run}"
    return f"{wanted.run[:80]} ({hashlib.sha256(place.encode()).hexdigest()[:12]})"
