"""The request for a job, `JobRequest`, which is the same for the command line, the API and Python.

It has two halves. `Columns` are the columns of `jobs` that users also write by hand. `RequestDocument` is everything else and is stored as
one JSON document in `jobs.request`; users who write rows may fill it too. Admission (`admission.py`) reads both halves back from the row,
regardless of its writer, so there is a single way into the queue.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from groupwise.api.schemas.fail_fast import FailFast
from groupwise.core.errors import UsageError
from groupwise.core.settings.field_errors import field_errors
from groupwise.jobs.fleet.queue.failures import (
    BUDGETS,
    CHARGED_RETRIES,
    REFUSED_LAUNCH,
    RetryPolicy,
)
from groupwise.jobs.fleet.queue.resources import MAX_MB, Resources
from groupwise.jobs.fleet.queue.resources import problems as resource_problems
from groupwise.jobs.hosts.failures import FailureClass
from groupwise.jobs.hosts.spec import JOB_ID, MAX_ARTEFACTS, SHA256, FileEntry, path_problems

COMMAND = "COMMAND"
"""The kind of a job that is an argument list and nothing else."""
MAX_PRIORITY = 1000
"""Largest absolute value; each step is worth an hour of waiting."""
MAX_INTEGER = 2**31 - 1
MAX_FILES = 100_000

Text = Annotated[str, Field(min_length=1, max_length=4096)]
Whole = Annotated[int, Field(ge=1, le=MAX_INTEGER)]
Seconds = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Retries = Annotated[int, Field(ge=0, le=100)]
Priority = Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]

M = TypeVar("M", bound=BaseModel)

_SECRET = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]*|file:/.+")
_AFTER = re.compile(rf"({JOB_ID.pattern})(:ok)?")
_WEBHOOK = re.compile(r"https?://[^\s/@]+(/\S*)?")
_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")


class _Strict(FailFast, BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class RequestedLimits(_Strict):
    """What an attempt may use besides its resources; None means the default."""

    time_seconds: Seconds | None = None
    """Time limit in seconds, counted from the start of the command."""
    grace_seconds: Annotated[float, Field(ge=0, le=86400, allow_inf_nan=False)] | None = None
    """Seconds between TERM and KILL."""
    artefact_mb: Annotated[int, Field(ge=1, le=MAX_MB)] | None = None
    """Largest size in MB of all artefacts of one machine. To fetch nothing, ask for no artefacts."""
    artefact_files: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """MAX_ARTEFACTS for jobs from now on; those that were admitted with more come to their end."""


class RequestedRetries(_Strict):
    """How often a job is tried again after which failure; what is left out has its default."""

    charged: Retries | None = None
    """Retries after all failures together that may be the job's own fault; None means 2, or as many as `per_class` allows after one of
    them. All other failures together have 30, or as many as `per_class` allows after one of them."""
    per_class: dict[Annotated[FailureClass, Field(strict=False)], Retries] = {}
    once: bool = False
    """Never begin the command again once it has begun, whatever became of it."""

    @property
    def charged_limits(self) -> dict[FailureClass, int]:
        """The limits of classes that count for `charged`."""
        return {name: most for name, most in self.per_class.items() if BUDGETS[name].charged}


class RequestDocument(_Strict):
    """What a job requests beyond its columns: the document of `jobs.request`."""

    arguments: list[str] = []
    """The command, for kind COMMAND."""
    environment: dict[str, str] = {}
    files: Annotated[
        dict[str, Annotated[tuple[str, int, int], Field(strict=False)]],
        Field(max_length=MAX_FILES),
    ] = {}
    """Path in the working folder → sha256, mode, size of a blob that the control machine has."""
    secrets: dict[str, str] = {}
    """Variable → where the control machine finds its value: `env:NAME` or `file:/path`."""
    resources: Resources = Resources()
    limits: RequestedLimits = RequestedLimits()
    retry: RequestedRetries = RequestedRetries()
    labels: Annotated[dict[str, str], Field(max_length=64)] = {}
    """Labels by which people find the job."""
    artefacts: list[str] | None = None
    """Paths to fetch at the end; None: as its kind has it."""
    checkpoints: list[str] | None = None
    after: Annotated[list[str], Field(max_length=1000)] = []
    """Jobs that must have ended before it begins: `JOB`, or `JOB:ok` where that one must have completed."""
    webhook: Text | None = None
    """Address that is called when the job has ended."""
    hold: bool = False
    """It waits until it is released."""
    allow_smaller_batch: bool = False
    """It may begin again with a smaller batch when the GPU's memory was too small."""

    def document(self) -> dict[str, Any]:
        """The document for `jobs.request`, without fields that have their defaults."""
        return self.model_dump(
            mode="json", exclude_defaults=True, include=set(RequestDocument.model_fields)
        )

    def retry_policy(self) -> RetryPolicy:
        """The retry policy, for the decision after a failure."""
        charged = self.retry.charged
        if charged is None:
            charged = max([CHARGED_RETRIES, *self.retry.charged_limits.values()])
        return RetryPolicy(charged, self.retry.per_class, self.allow_smaller_batch, self.retry.once)

    def manifest(self) -> dict[str, FileEntry]:
        """Its files in the form of a spec."""
        return {path: FileEntry(*entry) for path, entry in self.files.items()}


MAX_JSON = 1 << 20
"""Maximum bytes of a request without its files: it is read, compared and written while others wait to write."""


class Columns(_Strict):
    """The columns of a row that people write, as they are once the database has put in its defaults."""

    job_type: Text
    model: Text | None
    dataset: Text | None
    reward_function: Text | None
    preprocessing_pipeline: Text
    hyperparams: dict[str, JsonValue]
    use_unsloth: bool
    output_dir: Text
    max_steps: Whole
    learning_rate: Rate
    batch_size: Whole
    num_generations: Whole
    priority: Priority
    project: Annotated[str, Field(min_length=1, max_length=80)]
    name: Annotated[str, Field(max_length=256)] | None


class JobRequest(RequestDocument):
    """All that a submitter may say. Columns that are left out get the database's defaults."""

    job_type: Text | None = None
    """GRPO, SFT, EVAL or another kind that is installed; left out: COMMAND where there are arguments, else GRPO."""
    model: Text | None = None
    dataset: Text | None = None
    reward_function: Text | None = None
    preprocessing_pipeline: Text | None = None
    hyperparams: dict[str, JsonValue] | None = None
    use_unsloth: bool | None = None
    output_dir: Text | None = None
    max_steps: Whole | None = None
    learning_rate: Rate | None = None
    batch_size: Whole | None = None
    num_generations: Whole | None = None
    priority: Priority | None = None
    name: Annotated[str, Field(max_length=256)] | None = None

    @model_validator(mode="after")
    def _is_not_data(self) -> Self:
        size = len(self.model_dump_json(exclude={"files"}))
        if size > MAX_JSON:
            raise ValueError(
                f"the job is described by {size:,} bytes of JSON without its files; at most {MAX_JSON:,}. Put data into a file"
            )
        return self

    def columns(self) -> dict[str, Any]:
        """The columns that the request sets."""
        columns_set = self.model_dump(
            mode="json",
            exclude_none=True,
            include=set(JobRequest.model_fields) - set(RequestDocument.model_fields),
        )
        return {"job_type": COMMAND if self.arguments else "GRPO", **columns_set}

    def digest(self) -> str:
        """Hash that is equal for equal requests."""
        text = json.dumps([self.columns(), self.document()], sort_keys=True)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class InvalidRequest(UsageError):
    """The request is invalid; the message has one problem per line."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


def from_document(document: Mapping[str, Any]) -> JobRequest:
    """The request that a program sent as JSON; InvalidRequest lists all its problems."""
    return _validate_document(JobRequest, document)


def request_document_from(document: Mapping[str, Any]) -> RequestDocument:
    """Read the document of `jobs.request`; InvalidRequest lists all its problems."""
    return _validate_document(RequestDocument, document)


def columns_from_row(row: Mapping[str, Any]) -> Columns:
    """The columns of a row; InvalidRequest lists all their problems."""
    return _validate_document(Columns, {name: row[name] for name in Columns.model_fields})


def _validate_document(model: type[M], document: Mapping[str, Any]) -> M:
    try:
        return model.model_validate(dict(document))
    except ValidationError as error:
        raise InvalidRequest(map(str, field_errors(error, model))) from error


def problems(request: RequestDocument) -> list[str]:
    """Problems of a request whose values all have the right types, as messages. The spec's own checks are left to the spec."""
    retry, max_files = request.retry, request.limits.artefact_files
    retry_fields = [
        *(["retry.charged"] if retry.charged else []),
        *(
            f"retry.per_class.{name}"
            for name, most in retry.per_class.items()
            if most and name not in REFUSED_LAUNCH
        ),
        *(["allow_smaller_batch"] if request.allow_smaller_batch else []),
    ]
    messages = [
        *(f"resources: {problem}" for problem in resource_problems(request.resources)),
        *(
            problem
            for path, entry in request.files.items()
            for problem in _file_problems(path, entry)
        ),
        *(
            f"secret {name}: a reference is wanted, `env:NAME` or `file:/path` on the control machine"
            for name, reference in request.secrets.items()
            if not _SECRET.fullmatch(reference)
        ),
        *(
            f"after {dependency_text!r}: a job's id is wanted, or `ID:ok`"
            for dependency_text in request.after
            if not _AFTER.fullmatch(dependency_text)
        ),
        *_webhook_problems(request.webhook),
    ]
    if retry.once and retry_fields:
        messages.append(
            f"{retry_fields[0]} has no effect on a job that is to run once: leave it or retry.once out"
        )
    messages += [
        f"retry.per_class.{name} is {most}, but failures of this class count for retry.charged, which is {retry.charged}: raise that"
        for name, most in retry.charged_limits.items()
        if retry.charged is not None and most > retry.charged
    ]
    gpu_oom_retries = retry.per_class.get(FailureClass.GPU_OOM)
    if gpu_oom_retries and not request.allow_smaller_batch:
        messages.append(
            "retry.per_class.gpu_oom: the same batch would not fit either; allow a smaller one (allow_smaller_batch)"
        )
    if request.allow_smaller_batch and not retry.once and 0 in (retry.charged, gpu_oom_retries):
        messages.append(
            "allow_smaller_batch has no effect on a job without retries: allow some (retry.charged, retry.per_class.gpu_oom)"
        )
    if max_files is not None and max_files > MAX_ARTEFACTS:
        messages.append(
            f"limits.artefact_files: {max_files} is more than the {MAX_ARTEFACTS} that are fetched"
        )
    return messages


def _file_problems(path: str, entry: tuple[str, int, int]) -> list[str]:
    sha256, mode, size = entry
    messages = path_problems("file", path)
    if not SHA256.fullmatch(sha256) or not 0 <= mode <= 0o777 or size < 0:
        messages.append(f"file {path!r}: [sha256, permission bits, bytes] is wanted")
    return messages


def _webhook_problems(address: str | None) -> list[str]:
    if address is None:
        return []
    if not _WEBHOOK.fullmatch(address):
        return ["webhook: an address of http:// or https:// is wanted, without user and password"]
    try:
        parts = urlsplit(address)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        return [f"webhook {address[:100]!r}: {error}"]
    if not is_host(host) or port == 0:
        return [f"webhook {address[:100]!r}: {host!r} port {port} is not a valid address"]
    return []


def is_host(name: str) -> bool:
    """True for an IP address, or a name that DNS could resolve: labels of 1 to 63 characters."""
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        pass
    else:
        return True
    try:
        labels = name.encode("idna").decode("ascii").removesuffix(".").split(".")
    except UnicodeError:  # an empty label, one that is too long, or letters that no name has
        return False
    return len(name) <= 253 and all(_LABEL.fullmatch(label) for label in labels)


def dependency(entry: str) -> tuple[str, bool]:
    """Split an entry of `after` into the job's id, and whether that job must have completed."""
    job_id, _, condition = entry.partition(":")
    return job_id, condition == "ok"
