"""Hides from an actor that is bound to projects how machines are reached, and everything about jobs of other projects.

Machines belong to no project, so every actor sees which exist, their free capacity, and whether one takes work. The reason why it takes
none is hidden: an operator wrote it, or it quotes the log of any project's job; so are the jobs for which a GPU is kept. An actor that is
bound to no project sees everything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from sqlalchemy import select
from sqlalchemy.orm import Session

from groupwise.jobs.fleet.operations.actor import Actor
from groupwise.jobs.fleet.store.tables import Job

Document = dict[str, Any]

HIDDEN = "only keys without projects may read the reason"
OTHER_PROJECTS = "jobs of other projects"
VISIBLE_FACTS = (
    "load",
    "cpus",
    "ram_mb",
    "ram_free_mb",
    "disk_free_mb",
    "machine_time",
    "missed_at",
)
"""Facts of a machine that all actors may see; the others name attempts."""
HIDDEN_ENGINE_FIELDS = ("options", "address")
"""Settings of an engine that only operators see."""
HIDDEN_GPU_FIELDS = ("quarantine_reason", "fault_report", "detail")
REASON_FIELDS = ("blocked_reasons", "waiting", "waits")
"""Fields of a job's document that say why it waits."""

_OF_MACHINE = re.compile(
    r"(: (?:unreachable|draining|its GPUs cannot be read|its engine)): .*", re.DOTALL
)
_OF_GPU = re.compile(
    r"(is quarantined|is in use by somebody outside of the fleet|is not there any more|does not answer as it should)"
    r"(?:: | \().*",
    re.DOTALL,
)
_KEPT_FOR = re.compile(r"(kept for )((?:(?!kept for ).)+?)(, waiting for long)", re.DOTALL)


def machine(actor: Actor, document: Document) -> Document:
    """A machine's document with the fields that the actor may see."""
    if actor.projects is None:
        return document
    kept_for: Sequence[str] | None = document["projects"]
    visible_projects = kept_for and [name for name in kept_for if actor.may_see(name)]
    hidden_fields: Document = dict.fromkeys(("user", "ssh_key_path", "jump", "workdir", "probe"))
    redacted_fields = {name: document[name] and HIDDEN for name in ("drain_reason", "problem")}
    engine: Mapping[str, Any] = document["engine"] or {}
    hidden_fields["engine"] = {
        name: engine[name] for name in engine if name not in HIDDEN_ENGINE_FIELDS
    } or None
    facts_in_row: Mapping[str, Any] = document["facts"] or {}
    facts = {name: facts_in_row[name] for name in VISIBLE_FACTS if name in facts_in_row}
    return {
        **document,
        **hidden_fields,
        **redacted_fields,
        "projects": visible_projects,
        "facts": facts,
    }


def gpu(actor: Actor, document: Document) -> Document:
    """A GPU's document with the fields that the actor may see."""
    if actor.projects is None:
        return document
    return {**document, **{name: document[name] and HIDDEN for name in HIDDEN_GPU_FIELDS}}


def event(actor: Actor, document: Document) -> Document:
    """An event of a machine; actors bound to projects see only that it happened, and when."""
    if actor.projects is None:
        return document
    hidden = dict.fromkeys(("epoch", "before", "after", "detail"))
    return {**document, **hidden, "actor": "somebody"}


def job(session: Session, actor: Actor, document: Document) -> Document:
    """The document of a job that the actor may see, without other projects' jobs in the reasons why it waits."""
    if actor.projects is None:
        return document
    visible = dict(document)
    for name in REASON_FIELDS:
        if document.get(name):
            visible[name] = reasons(session, actor, document[name])
    if "events" in document:
        visible["events"] = [dict(event_row) for event_row in document["events"]]
        for event_row in visible["events"]:
            detail = event_row["detail"]
            if isinstance(detail, dict) and "reasons" in detail:
                fields = cast("dict[str, Any]", detail)
                event_row["detail"] = {
                    **fields,
                    "reasons": reasons(session, actor, fields["reasons"]),
                }
    return visible


def reasons(session: Session, actor: Actor, lines: Sequence[Any]) -> list[str]:
    """The reasons why a job waits, in the words of `queue`, without those that concern other projects."""
    visible_reasons: list[str] = []
    for line in lines:
        text = _OF_MACHINE.sub(rf"\1 ({HIDDEN})", str(line))
        text = _OF_GPU.sub(rf"\1 ({HIDDEN})", text)
        visible_reasons.append(
            _KEPT_FOR.sub(lambda match: _visible_names(session, actor, match), text)
        )
    return visible_reasons


def _visible_names(session: Session, actor: Actor, match: re.Match[str]) -> str:
    names = match[2].split(", ")
    query = select(Job.job_id).where(Job.job_id.in_(names), Job.project.in_(actor.projects or ()))
    visible_names = sorted(session.scalars(query))
    return (
        match[1]
        + ", ".join(
            visible_names if len(visible_names) == len(names) else [*visible_names, OTHER_PROJECTS]
        )
        + match[3]
    )
