"""The answer of GET /activity: a training server at one instant, for people and for the pages that show it to them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from groupwise.api.schemas.training import EventData, ResponseModel

LivingState = Literal["open", "rewarded", "held", "planned"]
MAX_GROUPS = 200
"""Living groups that are listed one by one; GET /status counts all of them."""
MAX_EVENTS = 30
PROMPT_SHOWN = 300
"""Characters of a group's prompt."""


class LivingGroup(ResponseModel):
    """A group of the run that a step may still learn from."""

    group_id: str = Field(description="The group's id, as its client knows it.")
    name: str | None = Field(
        default=None,
        description="The name that its client gave it (`metadata.group`); POST /trajectories/close takes that of a group of trajectories.",
    )
    state: LivingState = Field(description="Its state, from sampling to training.")
    draw: int = Field(description="Its place in the run's order of draws.")
    members: int = Field(description="Its completions, or its trajectories.")
    rewarded: int = Field(default=0, description="Number of those that have a reward.")
    sampled_step: int = Field(description="Steps that were done when it was sampled.")
    key_id: str = Field(description="Id of the API key that asked for it; `local` without keys.")
    prompt: str = Field(description="The beginning of its prompt.")
    opened_at: float = Field(description="Seconds since 1970.")
    lease_seconds: float | None = Field(
        default=None, description="Seconds until its lease ends; null once it is rewarded."
    )
    mean_reward: float | None = Field(
        default=None, description="Mean reward of the scored members; null before the rewards."
    )


class WaitingRequest(ResponseModel):
    """A request for completions that waits until there is room for it."""

    key_id: str = Field(description="Id of the API key of the request.")
    groups: int = Field(description="Groups that it requests.")
    draws: list[int] = Field(
        default=[], description="Those that it names, whose turn has to come; else any."
    )
    seconds: float = Field(description="Since it came.")


class PlannedStep(ResponseModel):
    """A step whose groups are chosen, and which is not done."""

    step: int = Field(description="Its index, from 0.")
    group_ids: list[str] = Field(description="Its groups, in the order of training.")
    engines_lost: int = Field(
        default=0,
        description="How often the engine has ended during this step; after the second time the step is left out.",
    )


class KnownClient(ResponseModel):
    """A client that has sent requests since the server began, named by its key. GET /status, /activity and /metrics do not count."""

    key_id: str = Field(description="Id of the API key; `local` without keys.")
    role: str = Field(description="The role of the key.")
    requests: int = Field(description="Number of requests that were answered.")
    refused: int = Field(
        default=0, description="Number of those that were answered with a problem."
    )
    last_request: str = Field(description="Method and route of the last request.")
    last_problem: str | None = Field(
        default=None, description="Code of the problem that they had last."
    )
    idle_seconds: float = Field(description="Since their last request was answered.")


class SessionModel(ResponseModel):
    """A model that a client trains through the Tinker API."""

    id: str = Field(description="The model's id, as its client knows it.")
    base: str | None = Field(
        default=None, description="The model or weights that it began as; null while it is made."
    )
    rank: int | None = Field(default=None, description="Rank of its adapter.")
    steps: int = Field(default=0, description="Updates that were made.")
    waiting: int = Field(default=0, description="Calls that wait for their turn or are under way.")


class Session(ResponseModel):
    """A client that trains through the Tinker API."""

    id: str = Field(description="The session's id, as its client knows it.")
    silent_seconds: float = Field(description="Since it was heard of.")
    let_go_seconds: float = Field(
        description="Until it is ended if another client needs the room of its models, unless it sends another request. Without "
        "models: until it is ended in any case."
    )
    models: list[SessionModel] = Field(default=[], description="Its models.")
    samplers: int = Field(default=0, description="Weights that it samples with.")


class LoopElsewhere(ResponseModel):
    """A loop on another machine that has sampler and learner of this server."""

    id: str = Field(description="Id of its parts.")
    owner: str = Field(description="Its run, with a mark of where it is.")
    silent_seconds: float = Field(description="Since it was heard of.")
    calls: int = Field(default=0, description="Number of calls that wait or are under way.")


class ActivityAnswer(ResponseModel):
    """Everything at one instant."""

    at: float = Field(description="Seconds since 1970, by the server's clock.")
    run_id: str | None = Field(default=None, description="The run; null before the first.")
    groups: list[LivingGroup] = Field(
        default=[], description=f"Its living groups, the oldest first, {MAX_GROUPS} at most."
    )
    capacity: int | None = Field(
        default=None, description="Groups that may be under way at once; null without a run."
    )
    sampling: int = Field(default=0, description="Groups that are being sampled.")
    waiting: list[WaitingRequest] = Field(
        default=[], description="Requests that wait for room, in the order in which they came."
    )
    planned: list[PlannedStep] = Field(
        default=[], description="Steps that are to be done next, or are under way."
    )
    events: list[EventData] = Field(
        default=[], description=f"What has happened of late, the last first, {MAX_EVENTS} at most."
    )
    clients: list[KnownClient] = Field(
        default=[],
        description="Clients that have sent requests since the server began, the latest first.",
    )
    sessions: list[Session] = Field(
        default=[], description="Sessions of clients that train through the Tinker API."
    )
    loop_elsewhere: LoopElsewhere | None = Field(
        default=None, description="The loop that has the machine, if one has."
    )
