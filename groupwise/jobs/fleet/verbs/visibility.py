"""What an actor that is bound to projects is told: how machines are reached, and what was said of jobs of other projects, stays out.

Machines belong to nobody's project, so that everybody sees which there are, what is free there, and that one takes no work. Why it takes
none is text that somebody wrote, or the last lines of whoever's job it was; and a GPU that is kept for a job is kept for somebody's.
Whoever is bound to no project is told all of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from sqlalchemy import select
from sqlalchemy.orm import Session

from groupwise.jobs.fleet.store.tables import Job
from groupwise.jobs.fleet.verbs.actor import Actor

Document = dict[str, Any]

UNTOLD = "why is told to keys that are bound to no project"
OTHERS = "jobs of other projects"
FACTS = ("load", "cpus", "ram_mb", "ram_free_mb", "disk_free_mb", "machine_time", "missed_at")
"""Facts of a machine that all actors may see; the others name attempts."""
OF_OPERATORS = ("options", "address")
"""Settings of an engine that only operators see."""
TOLD_OF_GPU = ("quarantined", "accused", "detail")
REASONS = ("blocked_reasons", "waiting", "waits")
"""Fields of a job's document that say why it waits."""

_OF_MACHINE = re.compile(
    r"(: (?:unreachable|cordoned|its GPUs cannot be read|its engine)): .*", re.DOTALL
)
_OF_GPU = re.compile(
    r"(is quarantined|is in use by somebody outside of the fleet|is not there any more|does not answer as it should"
    r"|is split by MIG, which is not placed on)(?:: | \().*",
    re.DOTALL,
)
_KEPT = re.compile(r"(kept for )(.+?)(, waiting for long)", re.DOTALL)


def machine(actor: Actor, document: Document) -> Document:
    """A machine's document, as the actor is told it."""
    if actor.projects is None:
        return document
    kept_for: Sequence[str] | None = document["projects"]
    own = kept_for and [name for name in kept_for if actor.may_see(name)]
    nobodys: Document = dict.fromkeys(("user", "ssh_key_path", "jump", "workdir", "probe"))
    untold = {name: document[name] and UNTOLD for name in ("cordoned", "problem")}
    engine: Mapping[str, Any] = document["engine"] or {}
    nobodys["engine"] = {name: engine[name] for name in engine if name not in OF_OPERATORS} or None
    known: Mapping[str, Any] = document["facts"] or {}
    facts = {name: known[name] for name in FACTS if name in known}
    return {**document, **nobodys, **untold, "projects": own, "facts": facts}


def gpu(actor: Actor, document: Document) -> Document:
    """A GPU's document, likewise."""
    if actor.projects is None:
        return document
    return {**document, **{name: document[name] and UNTOLD for name in TOLD_OF_GPU}}


def event(actor: Actor, document: Document) -> Document:
    """An event of a machine; actors bound to projects see only that it happened, and when."""
    if actor.projects is None:
        return document
    untold = dict.fromkeys(("epoch", "before", "after", "detail"))
    return {**document, **untold, "actor": "somebody"}


def job(session: Session, actor: Actor, document: Document) -> Document:
    """The document of a job that the actor may see; why it waits may speak of others."""
    if actor.projects is None:
        return document
    told: Document = {
        name: reasons(session, actor, document[name]) for name in REASONS if document.get(name)
    }
    if "events" in document:
        told["events"] = [_of_job(session, actor, each) for each in document["events"]]
    return {**document, **told}


def _of_job(session: Session, actor: Actor, event: Mapping[str, Any]) -> Document:
    detail = event["detail"]
    if not isinstance(detail, dict) or "reasons" not in detail:
        return dict(event)
    said = cast("dict[str, Any]", detail)
    return {**event, "detail": {**said, "reasons": reasons(session, actor, said["reasons"])}}


def reasons(session: Session, actor: Actor, lines: Sequence[Any]) -> list[str]:
    """Why a job waits, in the words of `queue`, without those of others."""
    found: list[str] = []
    for line in lines:
        text = _OF_MACHINE.sub(rf"\1 ({UNTOLD})", str(line))
        text = _OF_GPU.sub(rf"\1 ({UNTOLD})", text)
        found.append(_KEPT.sub(lambda kept: _of_own(session, actor, kept), text))
    return found


def _of_own(session: Session, actor: Actor, kept: re.Match[str]) -> str:
    names = kept[2].split(", ")
    query = select(Job.job_id).where(Job.job_id.in_(names), Job.project.in_(actor.projects or ()))
    own = sorted(session.scalars(query))
    return kept[1] + ", ".join(own if len(own) == len(names) else [*own, OTHERS]) + kept[3]
