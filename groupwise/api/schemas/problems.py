"""Every problem that a client of the training server can get, in one table, and the form in which it travels.

Code that cannot answer a request raises a `Refusal` with the code of a row of `KINDS`; the server renders it once, as
problem+json (RFC 9457), and the client reads it back as a `Problem`, from which it makes a typed error. Status, title and meaning stand
in the table alone, so that server, client, document and pages cannot disagree. A code is never given another meaning.

`detail` says what was given, what was expected, what exists and what to do; `errors` names each field of a request that is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from groupwise.core.errors import GroupwiseError
from groupwise.core.plugins import printable
from groupwise.core.settings.field_errors import field_errors

MEDIA_TYPE = "application/problem+json"
TYPE_PREFIX = "urn:groupwise:problem:"


@dataclass(frozen=True, slots=True)
class ProblemKind:
    """A row of the table."""

    status: int
    """The HTTP status."""
    title: str
    """The same for each occurrence, for people."""
    meaning: str
    """The problem, and what the client can do about it."""
    retry: bool = False
    """True if the same request may succeed later, unchanged."""


KINDS: Mapping[str, ProblemKind] = {
    # who asks
    "unauthorised": ProblemKind(
        401,
        "No valid key",
        "The request has no key, or one that the server does not know. Send it as `Authorization: Bearer`, `X-API-Key` or `api-key`.",
    ),
    "forbidden": ProblemKind(
        403,
        "The key may not do this",
        "The key is known, but its role is too low for the route: read < train < admin.",
    ),
    # where
    "not_found": ProblemKind(404, "No such route", "There is nothing at this address."),
    "method_not_allowed": ProblemKind(
        405, "No such method here", "The address exists, but not for this HTTP method."
    ),
    # what is asked for
    "unknown_group": ProblemKind(
        404,
        "No such group",
        "No group of this server has this id, or matches the completions that were sent.",
    ),
    "unknown_checkpoint": ProblemKind(
        404, "No such checkpoint", "There is no checkpoint of this name."
    ),
    "unknown_version": ProblemKind(
        404, "No such version", "The run has never had this version of its policy."
    ),
    "unknown_run": ProblemKind(
        404, "No such run", "The server's folder holds no run of this name."
    ),
    "unknown_model": ProblemKind(
        404, "No such model", "No policy is served under this name; /v1/models lists them."
    ),
    "unknown_response": ProblemKind(
        404,
        "No such response",
        "No response of this key is kept under this id: it never was, was deleted, or is older than a day.",
    ),
    "unknown_parts": ProblemKind(
        404,
        "No such parts",
        "No sampler and learner are open under this id: they never were, or the server has restarted since.",
    ),
    "unknown_call": ProblemKind(
        404,
        "No such call",
        "No call of these parts has this number, or its answer was given some minutes ago and is no longer kept.",
    ),
    "unknown_file": ProblemKind(
        404, "No such file", "There is no file or folder of this name, or no longer."
    ),
    "parts_gone": ProblemKind(
        410,
        "The parts have ended",
        "Sampler and learner have ended, and `detail` says why. The loop that drove them continues from its own last checkpoint.",
    ),
    "parts_taken": ProblemKind(
        410,
        "The parts were taken away",
        "Another client closed them, or the same run has opened others from elsewhere. The loop does not continue by itself then.",
    ),
    "version_gone": ProblemKind(
        410,
        "Version no longer kept",
        "The version has existed, but only checkpoints and the last few versions are kept.",
    ),
    # whether a run can be asked
    "not_started": ProblemKind(
        409, "No run", "No training has been started; POST /start begins one."
    ),
    "run_active": ProblemKind(
        409,
        "A run is active",
        "A training is under way. To go on with it, leave the start out: GET /status has its step. For another one, stop it first, or "
        "start with `replace: true`, which stops it cleanly.",
    ),
    "finished": ProblemKind(
        409,
        "The run is finished",
        "max_steps are done or the run was stopped. Status, model and checkpoints stay readable; POST /start begins the next one.",
    ),
    "full_fine_tuning": ProblemKind(
        409,
        "All weights are being trained",
        "A run that trains all weights uses the model alone; nothing else can be trained meanwhile.",
    ),
    "manual_mode": ProblemKind(
        409,
        "Steps are taken by hand",
        "The run was started with `steps: manual`, so waiting for a step would never end. Post without `wait`, then POST /step.",
    ),
    "auto_mode": ProblemKind(
        409,
        "Steps are taken automatically",
        "The run was started with `steps: auto`; /step then takes only the groups that the request names.",
    ),
    "nothing_to_train": ProblemKind(
        409, "Nothing to train", "No rewarded group waits, so there is no step to take."
    ),
    "checkpoint_exists": ProblemKind(
        409, "The name is taken", "There is a checkpoint of this name already; choose another one."
    ),
    # what has become of a group
    "lease_expired": ProblemKind(
        410,
        "The group's lease has expired",
        "Its rewards came later than the lease allows. Ask for completions again; `lease_seconds` of /start sets the time.",
    ),
    "group_given_up": ProblemKind(
        410, "The group was given up", "It was deleted by its client; no rewards are taken for it."
    ),
    "group_stale": ProblemKind(
        410,
        "The group is stale",
        "The policy has moved on by more than `staleness` steps since the group was sampled; it is not trained any more.",
    ),
    "group_quarantined": ProblemKind(
        410,
        "The group is quarantined",
        "A step with this group ended the engine twice. It is kept and named in /status, and the run went on without it.",
    ),
    "group_in_use": ProblemKind(
        409,
        "The group is part of a step",
        "It is already rewarded, planned or trained, so it can neither be given up nor named for another step.",
    ),
    "already_rewarded": ProblemKind(
        409,
        "The group has other rewards",
        "Rewards for it were accepted before, and they differ from these. Those stand.",
    ),
    "draw_taken": ProblemKind(
        409,
        "The draw is taken",
        "Another group of the run has this position in the order of draws.",
    ),
    "call_taken": ProblemKind(
        409,
        "The number of the call is taken",
        "The parts were called under this number before, with other content.",
    ),
    # idempotency
    "in_progress": ProblemKind(
        409,
        "The first request is still being answered",
        "A request with the same Idempotency-Key is under way; ask again for its answer.",
        retry=True,
    ),
    "idempotency_key_reused": ProblemKind(
        422,
        "The Idempotency-Key was used for another request",
        "The same key came with another body before. Make a new key for each new request.",
    ),
    # what was given
    "invalid_request": ProblemKind(
        422,
        "The request is not valid",
        "The body, a header or a parameter is not what the route takes; `errors` names each field.",
    ),
    "settings_conflict": ProblemKind(
        422,
        "The settings do not go together",
        "Each value is right by itself, but the training cannot be done with all of them.",
    ),
    "model_not_allowed": ProblemKind(
        422,
        "The model is not allowed",
        "The server loads only built-in models and what its settings allow; `detail` names the setting.",
    ),
    "resume_mismatch": ProblemKind(
        422,
        "The checkpoint was made with something else",
        "The settings differ from those of the checkpoint in what a resume cannot change.",
    ),
    "tokenizer_mismatch": ProblemKind(
        422,
        "The client's tokenizer differs",
        "The prompt's tokens or the tokenizer's hash are not the server's. GET /tokenizer has the right one.",
    ),
    "echo_mismatch": ProblemKind(
        422,
        "The echo differs from the group",
        "Prompt, completions or tokens that were sent along are not those that the server has kept.",
    ),
    "prompt_too_long": ProblemKind(
        422,
        "The prompt is too long",
        "It has more tokens than the run takes; `max_prompt_length` of /start sets the limit.",
    ),
    "too_large": ProblemKind(
        413,
        "The request is too large",
        "The body has more bytes than the server, or this route, reads.",
    ),
    "unsupported_media_type": ProblemKind(
        415,
        "The body has another format",
        "Send `Content-Type: application/json`, as it is or compressed by gzip.",
    ),
    # too much, or not now
    "too_busy": ProblemKind(
        429,
        "Too many groups wait",
        "Sampling is as far ahead of learning as it may be, until rewards are posted or a step is done. Ask again after `Retry-After` "
        "seconds; the client of OpenAI does so `max_retries` times.",
        retry=True,
    ),
    "rate_limited": ProblemKind(
        429,
        "Too many requests",
        "The key asks more often than the server's settings allow; ask again after `Retry-After` seconds.",
        retry=True,
    ),
    "engine_recovering": ProblemKind(
        503,
        "The engine is recovering",
        "The engine ended and is being started again from its last checkpoint. Nothing acknowledged is lost.",
        retry=True,
    ),
    "engine_failed": ProblemKind(
        503,
        "The engine has failed",
        "It ended too often and is not started again; /status has the reason.",
    ),
    "disk_full": ProblemKind(
        503,
        "The disk is full",
        "The request could not be kept, so it is not accepted. Make room on the server's disk and send it again.",
        retry=True,
    ),
    "shutting_down": ProblemKind(
        503, "The server is shutting down", "It takes no new work; ask again later.", retry=True
    ),
    "timed_out": ProblemKind(
        504,
        "The answer took too long",
        "The work was ended at the server's limit. Ask for less at once, or again later.",
        retry=True,
    ),
    # the fleet
    "database_away": ProblemKind(
        503,
        "The database does not answer",
        "Nothing was changed. Jobs continue where they run; ask again after `Retry-After` seconds.",
        retry=True,
    ),
    "file_busy": ProblemKind(
        503,
        "The file is being received",
        "Another client is sending the same file. Ask after `Retry-After` seconds how much of it is there, and continue from there.",
        retry=True,
    ),
    "unknown_job": ProblemKind(
        404, "No such job", "No job of the projects that you may see has this id."
    ),
    "unknown_vm": ProblemKind(404, "No such machine", "The fleet has no machine of this name."),
    "unknown_gpu": ProblemKind(404, "No such GPU", "The machine has no GPU of this index or UUID."),
    "unknown_key": ProblemKind(404, "No such key", "The fleet has no key with this id."),
    "unknown_project": ProblemKind(
        404, "No such project", "The fleet has no project of this name."
    ),
    "job_state": ProblemKind(
        409,
        "Not in this state of the job",
        "What was asked cannot be done with a job in its present state; `detail` names the state and what can be done.",
    ),
    "vm_exists": ProblemKind(
        409, "The name is taken", "The fleet has a machine of this name; choose another name."
    ),
    "vm_in_use": ProblemKind(
        409,
        "The machine is in use",
        "Attempts still run there or hold its GPUs. Drain it and wait, or declare it lost if it never comes back.",
    ),
    "vm_state": ProblemKind(
        409,
        "Not in this state of the machine",
        "What was asked cannot be done with a machine in its present state; `detail` says what can.",
    ),
    "host_key_mismatch": ProblemKind(
        409,
        "Another host key",
        "The machine shows another host key than the one that was to be trusted, or has shown none yet.",
    ),
    "internal": ProblemKind(
        500,
        "An error of the server",
        "The request was not answered because of a mistake in the server; its log has the details under the id in X-Request-ID of the "
        "answer.",
    ),
}
"""All problems: code -> HTTP status, title, meaning, whether a retry may help."""


class FieldError(BaseModel):
    """One field of a request that is wrong."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    field: str = Field(
        description="Place of the field: `rewards.3`, `groups.0.group_id`; empty for the body as a whole."
    )
    message: str = Field(description="The expected value, or the mistake in the given one.")


class Problem(BaseModel):
    """Why a request was not answered, as RFC 9457 has it (`application/problem+json`), with the code that programs decide by."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    type: str = Field(description=f"`{TYPE_PREFIX}` and the code.")
    title: str = Field(description="The same for each problem of this code.")
    status: int = Field(description="The HTTP status.", ge=400, le=599)
    detail: str = Field(description="The mistake in this request, and how to mend it.")
    code: str = Field(description="The name of the problem; never changes its meaning.")
    errors: list[FieldError] = Field(
        default=[], description="Each field of the request that is wrong; empty for other problems."
    )
    retry_after: float | None = Field(
        default=None,
        description="Seconds after which asking again may help, as in `Retry-After`; null where it is unknown or would not help.",
        ge=0,
    )
    instance: str | None = Field(
        default=None, description="Address of the request, or where the server's log names it."
    )


class Refusal(GroupwiseError):
    """A request that is not answered, and why; raised by the server, rendered as a `Problem`."""

    def __init__(
        self,
        code: str,
        detail: str | None = None,
        *,
        field: str | None = None,
        problem: str | None = None,
        errors: Sequence[FieldError] = (),
        retry_after: float | None = None,
    ) -> None:
        """`code` is one of `KINDS`. Without `detail` its meaning is given; `retry_after` is in seconds.

        `field`: the only field that is wrong, and `problem` what is wrong with it, if `detail` says more than that.
        """
        assert code in KINDS, f"{code!r} is not a row of groupwise.api.schemas.problems.KINDS"
        super().__init__(printable(detail) if detail is not None else KINDS[code].meaning)
        self.code = code
        self.exit_code = 2 if KINDS[code].status < 500 else 1
        self.detail = self.message
        if field is not None:
            errors = (FieldError(field=field, message=problem or detail or self.message),)
        self.errors = tuple(errors)
        self.retry_after = retry_after

    @classmethod
    def of_fields(
        cls, error: ValidationError | Iterable[Mapping[str, Any]], model: Any = None
    ) -> Self:
        """`invalid_request` from pydantic's error, or its details: names each field that is wrong.

        `model`: the type that the body was read as, where it is known; then the words say more.
        """
        errors = [
            FieldError(field=field_error.field, message=field_error.message)
            for field_error in field_errors(error, model)
        ]
        return cls("invalid_request", summary_of(errors), errors=errors)

    @property
    def kind(self) -> ProblemKind:
        """Its row of the table."""
        return KINDS[self.code]

    @property
    def status(self) -> int:
        """Its HTTP status."""
        return self.kind.status

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer, such as Retry-After in whole seconds, rounded up, because HTTP has no fractions."""
        if self.retry_after is None:
            return {}
        return {"Retry-After": str(max(int(-(-self.retry_after // 1)), 0))}

    def problem(self, instance: str | None = None) -> Problem:
        """The problem as the client receives it."""
        return Problem(
            type=TYPE_PREFIX + self.code,
            title=self.kind.title,
            status=self.status,
            detail=self.detail,
            code=self.code,
            errors=list(self.errors),
            retry_after=self.retry_after,
            instance=instance,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_refusal, (self.code, self.detail, self.errors, self.retry_after)


def _rebuild_refusal(
    code: str, detail: str, errors: tuple[FieldError, ...], retry_after: float | None
) -> Refusal:
    return Refusal(code, detail, errors=errors, retry_after=retry_after)


def summary_of(errors: Sequence[FieldError]) -> str:
    """One line that names the first field that is wrong, and how many more there are."""
    if not errors:
        return KINDS["invalid_request"].meaning
    first_error = errors[0]
    field_prefix = f"{first_error.field}: " if first_error.field else ""
    suffix = f" ({len(errors) - 1} more under `errors`)" if len(errors) > 1 else ""
    return f"{field_prefix}{first_error.message}{suffix}"
