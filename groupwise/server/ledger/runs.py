"""The runs that were started on a server, in order; at most one is active.

A run is added before the client that started it gets its answer. When it ends, for any reason, its groups, plans and rewards stay readable.
Its tokenizer is stored with it, so that GET /tokenizer is answered without an engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from groupwise.api.schemas.problems import Refusal
from groupwise.api.schemas.training import TokenizerAnswer
from groupwise.runs.encoding import label, pack_json, unpack_json
from groupwise.server.engine.engine_protocol import Opened
from groupwise.server.ledger.transaction import Row, Transaction

RunState = Literal["active", "stopped", "finished", "failed", "replaced"]


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run as the server stores it."""

    run: str
    folder: str
    settings: dict[str, Any]
    """Settings as posted by the client."""
    config: dict[str, Any]
    """Config as given to the engine."""
    state: RunState
    reason: str | None
    """Why it is no longer active, if there is more to say than the state."""
    incarnation: int
    """Number of times that steps were taken again and may have given different results."""
    started_at: float
    """Seconds since 1970, like `ended_at`."""
    ended_at: float | None
    tokenizer: Tokenizer | None = None
    """None: the run was started by a server version that did not store it."""


_COLUMNS = (
    "run, folder, settings, config, state, reason, incarnation, started_at, ended_at, tokenizer"
)


def add_run(
    transaction: Transaction,
    run: str,
    folder: str,
    settings: Mapping[str, Any],
    config: Mapping[str, Any],
    tokenizer: Tokenizer | None = None,
) -> RunRow:
    """Add a run and make it the active one. Refuses with `run_active` if another run is active."""
    if (active := active_run(transaction)) is not None:
        raise Refusal(
            "run_active",
            f"the run {active.run} is active. Stop it first, or start with `replace: true`, which stops it cleanly.",
        )
    transaction.insert(
        "runs",
        run=run,
        folder=folder,
        settings=pack_json(settings),
        config=pack_json(config),
        state="active",
        started_at=transaction.now,
        tokenizer=_pack_tokenizer(tokenizer),
    )
    return read_run(transaction, run)


def read_run(transaction: Transaction, run: str) -> RunRow:
    """Read one run; refuses with `unknown_run` if there is none of this name."""
    row = transaction.first(f"SELECT {_COLUMNS} FROM runs WHERE run = ?", (label(run),))
    if row is None:
        names = ", ".join(row.run for row in list_runs(transaction)) or "none yet"
        raise Refusal(
            "unknown_run", f"there is no run {run!r} on this server; its runs are: {names}."
        )
    return _run_row(row)


def active_run(transaction: Transaction) -> RunRow | None:
    """The run that groups are sampled for; None if there is none."""
    row = transaction.first(f"SELECT {_COLUMNS} FROM runs WHERE state = 'active'")
    return None if row is None else _run_row(row)


def list_runs(transaction: Transaction) -> list[RunRow]:
    """All runs, in the order in which they were started."""
    return [
        _run_row(row) for row in transaction.all(f"SELECT {_COLUMNS} FROM runs ORDER BY position")
    ]


def reactivate_run(
    transaction: Transaction,
    run: str,
    settings: Mapping[str, Any],
    config: Mapping[str, Any],
    tokenizer: Tokenizer | None = None,
) -> RunRow:
    """Make a run active again, with these settings from now on. Refuses with `run_active` if another run is active."""
    set_run_state(transaction, run, "active")
    transaction.execute(
        "UPDATE runs SET settings = ?, config = ?, tokenizer = ? WHERE run = ?",
        (pack_json(settings), pack_json(config), _pack_tokenizer(tokenizer), run),
    )
    return read_run(transaction, run)


def set_run_state(
    transaction: Transaction, run: str, state: RunState, reason: str | None = None
) -> RunRow:
    """Make the run active again, or end it with a reason. Refuses with `run_active` if another run is active."""
    read_run(transaction, run)
    active = active_run(transaction)
    if state == "active" and active is not None and active.run != run:
        raise Refusal(
            "run_active", f"the run {active.run} is active. Stop it before {run} continues."
        )
    transaction.execute(
        "UPDATE runs SET state = ?, reason = ?, ended_at = ? WHERE run = ?",
        (
            state,
            None if reason is None else label(reason),
            None if state == "active" else transaction.now,
            run,
        ),
    )
    return read_run(transaction, run)


def require_active(transaction: Transaction, run: str) -> None:
    """Refuse with `finished` if the run is not the active one."""
    row = read_run(transaction, run)
    if row.state != "active":
        raise Refusal(
            "finished",
            f"the run {run} is {row.state}{f' ({row.reason})' if row.reason else ''}: it takes nothing more. "
            "Status, model and checkpoints stay readable; POST /start begins the next run.",
        )


def _run_row(row: Row) -> RunRow:
    run, folder, settings, config, *columns, packed = row
    documents, tokenizer = (unpack_json(settings), unpack_json(config)), None
    if packed is not None:
        facts = unpack_json(packed)
        tokenizer = Tokenizer(facts["hash"], tuple(facts["stop_token_ids"]))
    return RunRow(run, folder, *documents, *columns, tokenizer=tokenizer)


def _pack_tokenizer(tokenizer: Tokenizer | None) -> str | None:
    return None if tokenizer is None else pack_json(asdict(tokenizer))


ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")
TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A run's tokenizer, stored so that it can be described without an engine."""

    hash: str
    """Name of the folder with its files."""
    stop_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, opened: Opened) -> Tokenizer:
        """The tokenizer of a run that an engine has opened."""
        return cls(opened.tokenizer_hash, opened.stop_token_ids)


def tokenizer_answer(folder: Path, tokenizer: Tokenizer) -> TokenizerAnswer:
    """Describe the tokenizer files in this folder."""
    tokenizer_file, config_file = folder / "tokenizer.json", folder / "tokenizer_config.json"
    facts: dict[str, Any] = json.loads(config_file.read_text()) if config_file.is_file() else {}
    tokens = {role: facts[role] for role in ROLES if facts.get(role)}  # text, or `content` of it
    texts = {role: t if isinstance(t, str) else str(t["content"]) for role, t in tokens.items()}
    template = folder / TEMPLATE
    return TokenizerAnswer(
        hash=tokenizer.hash,
        chat_template=template.read_text() if template.is_file() else facts.get("chat_template"),
        tokenizer_json=tokenizer_file.read_text() if tokenizer_file.is_file() else None,
        special_tokens=texts,
        stop_token_ids=list(tokenizer.stop_token_ids),
    )
