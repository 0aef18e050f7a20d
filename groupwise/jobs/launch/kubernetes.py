"""A job as a manifest for Kubernetes: rendered and checked here; a user of the cluster applies it (`kubectl apply -f`).

The models below are the fields of `batch/v1` Job and `v1` Service that are used, with the limits of their values by Kubernetes' API
reference, so that no manifest is made that an API server would reject. Kubernetes never begins a job again; we do, from a checkpoint. So
there is no retry, and no pod is replaced before it has ended.

Arguments are lists, and no shell sees them. Kubernetes itself replaces `$(NAME)` in them, so each `$` is doubled, which it turns back.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from groupwise.core.errors import UsageError
from groupwise.core.settings.field_errors import field_errors
from groupwise.jobs.launch.packaging import GRACE_SECONDS

LONGEST_NAME = 50
"""Most letters of a job's name: names of its pods add a number and five letters, and are labels of at most 63."""
PORT = 29500
"""Port at which the other pods meet the first."""
RANK = "NODE_RANK"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
JOB_NAME = "batch.kubernetes.io/job-name"
"""The label that Kubernetes gives the pods of a job."""
LEAVING_SECONDS = 30
"""Seconds for a pod to end, in addition to the time in which a training writes its checkpoint."""
SHARED_MEMORY = "shared-memory"
RESULTS = "results"
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
"""A DNS label, RFC 1123."""
Names = Annotated[
    str,
    Field(
        pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$", max_length=253
    ),
]
"""A DNS subdomain, RFC 1123."""
Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$")]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
AbsolutePath = Annotated[str, Field(pattern=r"^/[^:\x00]*$")]
Image = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:@-]*$", max_length=1000)]
Count = Annotated[int, Field(ge=1, le=100_000)]


class _Model(BaseModel):
    model_config = ConfigDict(
        strict=True, extra="forbid", alias_generator=to_camel, populate_by_name=True, frozen=True
    )


class _Metadata(_Model):
    name: Names
    namespace: Name | None = None
    labels: dict[str, str] = {}


class _Key(_Model):
    name: Names
    key: Variable


class _Field(_Model):
    field_path: str


class _From(_Model):
    secret_key_ref: _Key | None = None
    field_ref: _Field | None = None


class _Variable(_Model):
    name: Variable
    value_from: _From


class _Resources(_Model):
    limits: dict[str, Quantity]


class _Mount(_Model):
    name: Name
    mount_path: AbsolutePath


class _Claim(_Model):
    claim_name: Names


class _Empty(_Model):
    medium: Literal["Memory"]


class _Volume(_Model):
    name: Name
    persistent_volume_claim: _Claim | None = None
    empty_dir: _Empty | None = None


class _Container(_Model):
    name: Name
    image: Image
    command: Annotated[tuple[str, ...], Field(min_length=1)]
    working_dir: AbsolutePath
    env: tuple[_Variable, ...]
    resources: _Resources
    volume_mounts: tuple[_Mount, ...]


class _PodSpec(_Model):
    restart_policy: Literal["Never"] = "Never"
    termination_grace_period_seconds: Count
    subdomain: Name | None = None
    containers: tuple[_Container]
    volumes: tuple[_Volume, ...]


class _Pod(_Model):
    metadata: dict[Literal["labels"], dict[str, str]]
    spec: _PodSpec


class _JobSpec(_Model):
    completions: Count
    parallelism: Count
    completion_mode: Literal["Indexed", "NonIndexed"]
    backoff_limit: Literal[0] = 0
    pod_replacement_policy: Literal["Failed"] = "Failed"
    active_deadline_seconds: Annotated[int, Field(ge=1)]
    template: _Pod


class _Job(_Model):
    api_version: Literal["batch/v1"] = "batch/v1"
    kind: Literal["Job"] = "Job"
    metadata: _Metadata
    spec: _JobSpec


class _Port(_Model):
    name: Name
    port: Annotated[int, Field(ge=1, le=65535)]


class _ServiceSpec(_Model):
    # `ip` is one word there.
    cluster_ip: Literal["None"] = Field("None", alias="clusterIP")
    publish_not_ready_addresses: bool = True
    selector: dict[str, str]
    ports: tuple[_Port, ...]


class _Service(_Model):
    api_version: Literal["v1"] = "v1"
    kind: Literal["Service"] = "Service"
    metadata: _Metadata
    spec: _ServiceSpec


@dataclass(frozen=True, slots=True)
class ManifestOptions:
    """The contents of the manifest."""

    name: str
    command: tuple[str, ...]
    image: str
    """An image that has groupwise, and the project in `workdir`."""
    hours: float
    nodes: int = 1
    gpus: int = 1
    """GPUs for each node."""
    namespace: str | None = None
    pvc: str | None = None
    """An existing volume claim, mounted at the folder of runs."""
    secret: str | None = None
    """Name of an existing Secret."""
    variables: tuple[str, ...] = ()
    """Keys of the Secret, which become variables of the same names."""
    workdir: str = "/workspace"
    cpus: str | None = None
    memory: str | None = None


def manifests(asked: ManifestOptions) -> list[dict[str, Any]]:
    """The documents, in the order in which they are to be applied. Raises UsageError for values that Kubernetes would reject."""
    if len(asked.name) > LONGEST_NAME:
        raise UsageError(
            f"--name {asked.name}: {LONGEST_NAME} letters at most, since pods have longer names, and none of more than 63."
        )
    for word in asked.command:
        try:
            is_text = "\0" not in word.encode("utf-8").decode()
        except UnicodeEncodeError:  # lone surrogates
            is_text = False
        if not is_text:
            raise UsageError("an argument is no text, or has a NUL character in it.")
    try:
        found = [_service(asked), _job(asked)] if asked.nodes > 1 else [_job(asked)]
    except ValidationError as error:
        lines = [f"\n  {each.field} {each.given!r}: {each.message}" for each in field_errors(error)]
        raise UsageError("Kubernetes would not take this:" + "".join(lines)) from None
    return [each.model_dump(mode="json", by_alias=True, exclude_none=True) for each in found]


def _job(asked: ManifestOptions) -> _Job:
    mode = "Indexed" if asked.nodes > 1 else "NonIndexed"
    spec = _JobSpec(
        completions=asked.nodes,
        parallelism=asked.nodes,
        completion_mode=mode,
        active_deadline_seconds=math.ceil(asked.hours * 3600),
        template=_Pod(metadata={"labels": _labels(asked)}, spec=_pod(asked)),
    )
    return _Job(metadata=_metadata(asked), spec=spec)


def _service(asked: ManifestOptions) -> _Service:
    """The service that gives the first pod a name, also before it is ready: that is when the others look it up."""
    ports = (_Port(name="meeting", port=PORT),)
    spec = _ServiceSpec(clusterIP="None", selector={JOB_NAME: asked.name}, ports=ports)
    return _Service(metadata=_metadata(asked), spec=spec)


def _metadata(asked: ManifestOptions) -> _Metadata:
    return _Metadata(name=asked.name, namespace=asked.namespace, labels=_labels(asked))


def _labels(asked: ManifestOptions) -> dict[str, str]:
    return {"app.kubernetes.io/name": "groupwise", "app.kubernetes.io/instance": asked.name}


def _pod(asked: ManifestOptions) -> _PodSpec:
    limits = {"nvidia.com/gpu": str(asked.gpus) if asked.gpus else None}
    limits |= {"cpu": asked.cpus, "memory": asked.memory}
    mounts = [_Mount(name=SHARED_MEMORY, mount_path="/dev/shm")]
    volumes = [_Volume(name=SHARED_MEMORY, empty_dir=_Empty(medium="Memory"))]
    if asked.pvc is not None:
        mounts.append(_Mount(name=RESULTS, mount_path=str(PurePosixPath(asked.workdir) / "runs")))
        volumes.append(_Volume(name=RESULTS, persistent_volume_claim=_Claim(claim_name=asked.pvc)))
    ranks = [_Variable(name=RANK, value_from=_From(field_ref=_Field(field_path=INDEX)))]
    keys = [
        _Variable(
            name=each, value_from=_From(secret_key_ref=_Key(name=asked.secret or "", key=each))
        )
        for each in sorted(asked.variables)
    ]
    container = _Container(
        name="job",
        image=asked.image,
        command=command(asked),
        working_dir=asked.workdir,
        env=((*(ranks if asked.nodes > 1 else ()), *keys)),
        resources=_Resources(limits={n: each for n, each in limits.items() if each is not None}),
        volume_mounts=tuple(mounts),
    )
    return _PodSpec(
        termination_grace_period_seconds=int(GRACE_SECONDS) + LEAVING_SECONDS,
        subdomain=asked.name if asked.nodes > 1 else None,
        containers=(container,),
        volumes=tuple(volumes),
    )


def command(asked: ManifestOptions) -> tuple[str, ...]:
    """The command for Kubernetes, with `$` doubled; several nodes meet by torchrun, at the first of them."""
    words = tuple(each.replace("$", "$$") for each in asked.command)
    if asked.nodes == 1:
        return words
    meeting = (
        f"--nnodes={asked.nodes}",
        f"--nproc-per-node={max(1, asked.gpus)}",
        f"--node-rank=$({RANK})",
        f"--master-addr={asked.name}-0.{asked.name}",
        f"--master-port={PORT}",
    )
    return ("torchrun", *meeting, "--no-python", *words)


# --- writing it down ------------------------------------------------------------------------------


def as_yaml(documents: Sequence[dict[str, Any]]) -> str:
    """YAML in which every text is quoted, so that YAML 1.1 and 1.2 read it the same way."""
    return "".join("---\n" + "\n".join(_lines(each)) + "\n" for each in documents)


def _lines(value: Any) -> list[str]:
    """Lines of a mapping or a list that is not empty."""
    found: list[str] = []
    if isinstance(value, dict):
        for name, each in cast("dict[str, Any]", value).items():
            key = name if IDENTIFIER.fullmatch(name) else _scalar(name)
            if isinstance(each, (dict, list)) and each:
                found += [f"{key}:", *(f"  {line}" for line in _lines(each))]
            else:
                found.append(f"{key}: {_scalar(each)}")
        return found
    for each in cast("list[Any]", value):
        if isinstance(each, (dict, list)) and each:
            first, *others = _lines(each)
            found += [f"- {first}", *(f"  {line}" for line in others)]
        else:
            found.append(f"- {_scalar(each)}")
    return found


def _scalar(value: Any) -> str:
    """JSON, which is YAML except for letters beyond 16 bits: JSON writes them as a pair of escapes, YAML as one."""

    def joined(pair: re.Match[str]) -> str:
        high, low = int(pair[1], 16) - 0xD800, int(pair[2], 16) - 0xDC00
        return f"\\U{0x10000 + (high << 10) + low:08x}"

    pattern = r"\\u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})"
    return re.sub(pattern, joined, json.dumps(value))
