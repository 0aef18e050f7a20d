"""A job as a Kubernetes manifest, or as a task of SkyPilot or dstack: rendered and checked here, and started by the user
(`kubectl apply -f`, `sky launch`, `dstack apply`).

The user's values are checked against the limits in Kubernetes' API reference, so an API server does not reject the manifest. The rest of
a `batch/v1` Job and a `v1` Service is written out below. Kubernetes never restarts a job; we do, from a checkpoint. So there is no
retry, and no pod is replaced before it has ended.

Arguments are lists, and no shell processes them. Kubernetes itself replaces `$(NAME)` in them, so each `$` is doubled, which Kubernetes
reverts.

SkyPilot and dstack rent machines of many clouds and queue jobs for them, which Groupwise does not. Both run a shell script in an image, in
a copy of the folder in which they are called, so arguments are quoted for the shell. Options that a format cannot express are refused, or
become a comment at the head of the YAML.
"""

from __future__ import annotations

import io
import math
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, cast

from pydantic import Field, TypeAdapter, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from groupwise.core.errors import UsageError
from groupwise.core.settings.field_errors import field_errors
from groupwise.core.terminal.quantities import parse_size
from groupwise.jobs.hosts.runner.protocol import is_utf8
from groupwise.jobs.launch.packaging import GRACE_SECONDS

LONGEST_NAME = 50
"""Longest name of a job: names of its pods add a number and five characters, and are labels of at most 63."""
PORT = 29500
"""Port of the first pod to which the other pods connect."""
RANK = "NODE_RANK"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
JOB_NAME = "batch.kubernetes.io/job-name"
"""The label that Kubernetes sets on the pods of a job."""
LEAVING_SECONDS = 30
"""Seconds for a pod to end, in addition to the time for writing a training's checkpoint."""

LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
DnsLabel = Annotated[str, Field(pattern=rf"^{LABEL}$", max_length=63)]
"""A DNS label, RFC 1123."""
DnsName = Annotated[str, Field(pattern=rf"^{LABEL}(\.{LABEL})*$", max_length=253)]
"""A DNS subdomain, RFC 1123."""
Cores = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?m?$")]
Bytes = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(k|M|G|T|Ki|Mi|Gi|Ti)?$")]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
AbsolutePath = Annotated[str, Field(pattern=r"^/[^:\x00]*$")]
LabelValue = Annotated[
    str, Field(pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$", max_length=63)
]
LabelKey = Annotated[
    str,
    Field(
        pattern=rf"^({LABEL}(\.{LABEL})*/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
        max_length=317,
    ),
]
"""A name of at most 63 letters, which may have a DNS subdomain before it: nvidia.com/gpu.product."""
Image = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:@-]*$", max_length=1000)]
NO_RETRIES = (
    "It is tried once. After a preemption or failure begin it again with --resume behind the verb."
)
CLUSTER_OPTIONS = ("namespace", "node_selector", "toleration", "image_pull_secret")
SAVE_SECONDS = int(GRACE_SECONDS) + LEAVING_SECONDS
SHARED_MEMORY_GB = 16
"""Upper limit in GB: containers have 64 MB by default, and worker processes and NCCL need more."""


@dataclass(frozen=True, slots=True)
class Toleration:
    """A taint of nodes that pods tolerate: `KEY`, `KEY:EFFECT`, `KEY=VALUE` or `KEY=VALUE:EFFECT`."""

    key: LabelKey
    value: LabelValue | None = None
    """None: any value."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """None: any effect."""

    @classmethod
    def parse(cls, text: str) -> Toleration:
        """Read the form of the command line. The values are checked with those of the job."""
        taint, colon, effect = text.rpartition(":")
        key, equals, value = (taint if colon else text).partition("=")
        return cls(key, value if equals else None, cast("Any", effect if colon else None))

    def document(self) -> dict[str, str]:
        """The toleration as an entry of a pod's `tolerations`."""
        operator = (
            {"operator": "Exists"}
            if self.value is None
            else {"operator": "Equal", "value": self.value}
        )
        return {"key": self.key, **operator, **({"effect": self.effect} if self.effect else {})}


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """The values in a manifest, or in a task of SkyPilot or dstack."""

    name: DnsName
    command: Annotated[tuple[str, ...], Field(min_length=1)]
    image: Image
    """An image that contains groupwise, and the project in `workdir`."""
    hours: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    nodes: Annotated[int, Field(ge=1, le=100_000)] = 1
    gpus: Annotated[int, Field(ge=0)] = 1
    """GPUs of each node."""
    namespace: DnsLabel | None = None
    volume: DnsName | None = None
    """An existing PersistentVolumeClaim, or volume of dstack, mounted at the folder of runs."""
    secret: DnsName | None = None
    """Name of an existing Secret."""
    variables: tuple[Variable, ...] = ()
    """Keys of the Secret, which become environment variables of the same names."""
    workdir: AbsolutePath | None = None
    """Folder of the project in the image; None: /workspace."""
    cpus: Cores | None = None
    memory: Bytes | None = None
    disk_gb: Annotated[int, Field(ge=1)] | None = None
    node_selector: Mapping[LabelKey, LabelValue] = field(default_factory=dict[str, str])
    """Labels that nodes must have."""
    toleration: tuple[Toleration, ...] = ()
    image_pull_secret: tuple[DnsName, ...] = ()
    """Existing Secrets with which images are pulled."""
    gpu_model: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9-]*$")] | None = None
    """GPU model by the name that SkyPilot and dstack use: H100, A100-80GB."""
    spot: bool = False
    setup: str | None = None
    """Shell command before the job."""


def manifests(options: RenderOptions) -> list[dict[str, Any]]:
    """The documents in the order in which they must be applied. Raises UsageError for values that Kubernetes would reject."""
    refused = {
        "gpu_model": ": --node-selector nvidia.com/gpu.product=NAME does, with NVIDIA's operator",
        "spot": ": --node-selector and --toleration do, as the cluster's provider names them",
        "setup": ": what it would do belongs into the image",
    }
    if len(options.name) > LONGEST_NAME:
        raise UsageError(
            f"--name {options.name}: {LONGEST_NAME} letters at most, since pods have longer names, and none of more than 63."
        )
    check_options("Kubernetes", options, None, refused)
    if options.nodes > 1 and "." in options.name:
        raise UsageError(
            f"--name {options.name}: several nodes find each other by it, without dots."
        )
    labels = {"app.kubernetes.io/name": "groupwise", "app.kubernetes.io/instance": options.name}
    metadata: dict[str, Any] = {"name": options.name, "labels": labels}
    if options.namespace is not None:
        metadata["namespace"] = options.namespace
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "clusterIP": "None",
            # The other pods look up the first pod's address before it is ready.
            "publishNotReadyAddresses": True,
            "selector": {JOB_NAME: options.name},
            "ports": [{"name": "meeting", "port": PORT}],
        },
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "completions": options.nodes,
            "parallelism": options.nodes,
            "completionMode": "Indexed" if options.nodes > 1 else "NonIndexed",
            "backoffLimit": 0,
            "podReplacementPolicy": "Failed",
            "activeDeadlineSeconds": math.ceil(options.hours * 3600),
            "template": {"metadata": {"labels": labels}, "spec": _pod_spec(options)},
        },
    }
    return [service, job] if options.nodes > 1 else [job]


def check_options(
    engine: str, options: RenderOptions, name_pattern: str | None, refused: Mapping[str, str]
) -> None:
    """Raise UsageError for values that the engine would reject, and for fields in `refused`, which it cannot express; the text there names
    the alternative."""
    for name, instead in refused.items():
        if getattr(options, name):
            raise UsageError(f"--{name.replace('_', '-')}: {engine} cannot express that{instead}.")
    if name_pattern is not None and not re.fullmatch(name_pattern, options.name):
        raise UsageError(f"--name {options.name}: {engine} takes names of the form {name_pattern}.")
    if not all(is_utf8(argument) and "\0" not in argument for argument in options.command):
        raise UsageError("an argument is not text, or has a NUL character in it.")
    try:
        TypeAdapter(RenderOptions).validate_python(asdict(options))
    except ValidationError as error:
        lines = [
            f"\n  {field_error.field} {field_error.given!r}: {field_error.message}"
            for field_error in field_errors(error)
        ]
        raise UsageError(f"{engine} would not take this:" + "".join(lines)) from None


def _pod_spec(options: RenderOptions) -> dict[str, Any]:
    gpus = str(options.gpus) if options.gpus else None
    limits = {
        "nvidia.com/gpu": gpus,
        "cpu": options.cpus,
        "memory": options.memory,
        "ephemeral-storage": options.disk_gb and f"{options.disk_gb}G",
    }
    workdir = options.workdir or "/workspace"
    # Worker processes and NCCL use /dev/shm, which is small by default in containers.
    mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    volumes: list[dict[str, Any]] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    if options.volume is not None:
        runs = str(PurePosixPath(workdir) / "runs")
        mounts.append({"name": "results", "mountPath": runs})
        volumes.append({"name": "results", "persistentVolumeClaim": {"claimName": options.volume}})
    ranks = [{"name": RANK, "valueFrom": {"fieldRef": {"fieldPath": INDEX}}}]
    keys = [
        {"name": variable, "valueFrom": {"secretKeyRef": {"name": options.secret, "key": variable}}}
        for variable in sorted(options.variables)
    ]
    container = {
        "name": "job",
        "image": options.image,
        "command": [*command(options)],
        "workingDir": workdir,
        "env": [*(ranks if options.nodes > 1 else ()), *keys],
        "resources": {"limits": {name: value for name, value in limits.items() if value}},
        "volumeMounts": mounts,
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(GRACE_SECONDS) + LEAVING_SECONDS,
        **({"subdomain": options.name} if options.nodes > 1 else {}),
        **({"nodeSelector": dict(options.node_selector)} if options.node_selector else {}),
        **(
            {"tolerations": [each.document() for each in options.toleration]}
            if options.toleration
            else {}
        ),
        **(
            {"imagePullSecrets": [{"name": name} for name in options.image_pull_secret]}
            if options.image_pull_secret
            else {}
        ),
        "containers": [container],
        "volumes": volumes,
    }


def command(options: RenderOptions) -> tuple[str, ...]:
    """The container's command, with `$` doubled. Several nodes connect through torchrun, at the first of them."""
    arguments = tuple(argument.replace("$", "$$") for argument in options.command)
    if options.nodes == 1:
        return arguments
    meeting = (
        f"--nnodes={options.nodes}",
        f"--nproc-per-node={max(1, options.gpus)}",
        f"--node-rank=$({RANK})",
        f"--master-addr={options.name}-0.{options.name}",
        f"--master-port={PORT}",
    )
    return ("torchrun", *meeting, "--no-python", *arguments)


def as_yaml(documents: Sequence[Mapping[str, Any]], comments: Sequence[str] = ()) -> str:
    """YAML with all strings quoted: YAML 1.1 and 1.2 then read it the same way. `comments` are lines at its head."""

    def quoted(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: quoted(item) for k, item in cast("dict[str, Any]", value).items()}
        if isinstance(value, list):
            return [quoted(item) for item in cast("list[Any]", value)]
        return DoubleQuotedScalarString(value) if isinstance(value, str) else value

    writer, text = YAML(), io.StringIO()
    writer.explicit_start, writer.width = True, sys.maxsize
    writer.indent(mapping=2, sequence=4, offset=2)
    writer.dump_all([quoted(document) for document in documents], text)  # pyright: ignore[reportUnknownMemberType]
    return "".join(f"# {comment}\n" for comment in comments) + text.getvalue()


def skypilot_task(options: RenderOptions) -> tuple[dict[str, Any], list[str]]:
    """The task, and comments for its head. Raises UsageError for values that SkyPilot would reject or cannot express."""
    refused = {
        **dict.fromkeys(CLUSTER_OPTIONS, "; SkyPilot's own config says that for clusters"),
        "volume": "; a bucket for runs goes under file_mounts of the YAML",
        "workdir": "; the project is ~/sky_workdir there",
    }
    check_options("SkyPilot", options, r"[a-zA-Z0-9]+(?:[._-]{1,2}[a-zA-Z0-9]+)*", refused)
    if options.gpus and options.gpu_model is None:
        raise UsageError("SkyPilot rents GPUs by their model: --gpu-model H100, or --gpus 0.")
    first_address = '"$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"'
    script = _script(options, "$SKYPILOT_NODE_RANK", first_address)
    resources = {
        "accelerators": f"{options.gpu_model}:{options.gpus}" if options.gpus else None,
        "cpus": options.cpus and f"{_cpus(options.cpus)}+",
        "memory": options.memory and f"{_gib(options.memory)}+",
        "disk_size": options.disk_gb,
        "use_spot": options.spot or None,
        "image_id": f"docker:{options.image}",
        # Otherwise a managed job starts again on another machine, without its checkpoints.
        "job_recovery": "none",
        "autostop": {"idle_minutes": 30},
    }
    task = {
        "name": options.name,
        "num_nodes": options.nodes,
        "workdir": ".",
        "resources": {name: value for name, value in resources.items() if value is not None},
        **({"secrets": dict.fromkeys(options.variables)} if options.variables else {}),
        **({"setup": options.setup} if options.setup else {}),
        "run": f"timeout --kill-after={SAVE_SECONDS} {math.ceil(options.hours * 3600)} {script}",
    }
    secrets = "".join(f" --secret {name}" for name in options.variables)
    comments = [
        f"sky launch -c {options.name} THIS_FILE{secrets}",
        *(["The values of its secrets are those of your environment."] if secrets else []),
        "The project is the folder in which you call it, without what .gitignore or .skyignore names.",
        f"SkyPilot has no time limit: `timeout` ends the job after {options.hours:g} h, and lets it save for {SAVE_SECONDS} s.",
        f"Results stay on the machine: rsync -r {options.name}:sky_workdir/runs . After 30 idle minutes it stops; `sky down` ends it.",
        NO_RETRIES,
    ]
    return task, comments


def dstack_task(options: RenderOptions) -> tuple[dict[str, Any], list[str]]:
    """The configuration of a task, and comments for its head. Raises UsageError for values that dstack would reject or cannot express."""
    refused = {
        **dict.fromkeys(CLUSTER_OPTIONS, "; dstack's server has that of its Kubernetes backend"),
        "image_pull_secret": "; registry_auth in the YAML does that",
    }
    check_options("dstack", options, "[a-z][a-z0-9-]{1,40}", refused)
    if replaced := [word for word in options.command if re.search(r"\$\{\{\s*groups\b", word)]:
        raise UsageError(
            f"{replaced[0]}: dstack's server would replace that by an address, or refuse it."
        )
    workdir = options.workdir or "/workspace"
    memory = None if options.memory is None else _gib(options.memory)
    shared = SHARED_MEMORY_GB if memory is None else max(1, min(SHARED_MEMORY_GB, memory // 2))
    model = f"{options.gpu_model}:" if options.gpu_model and options.gpus else ""
    resources = {
        "gpu": f"{model}{options.gpus}",
        "cpu": options.cpus and f"{_cpus(options.cpus)}..",
        "memory": None if memory is None else f"{memory}GB..",
        "shm_size": f"{shared}GB",
        "disk": options.disk_gb and f"{options.disk_gb}GB..",
    }
    script = _script(options, "$DSTACK_NODE_RANK", '"$DSTACK_MASTER_NODE_IP"')
    # With `exec` the job itself, and not only a shell, receives SIGTERM.
    commands = [*([options.setup] if options.setup else []), f"exec {script}"]
    task = {
        "type": "task",
        "name": options.name,
        **({"nodes": options.nodes} if options.nodes > 1 else {}),
        "image": options.image,
        "working_dir": workdir,
        "files": [f".:{workdir}"],
        **({"env": list(options.variables)} if options.variables else {}),
        # dstack replaces `${{ … }}` in commands, and `$$` by `$`.
        "commands": [command.replace("$", "$$") for command in commands],
        "resources": {name: value for name, value in resources.items() if value is not None},
        **({"volumes": [f"{options.volume}:{workdir}/runs"]} if options.volume else {}),
        "spot_policy": "spot" if options.spot else "on-demand",
        "max_duration": math.ceil(options.hours * 3600),
        "stop_duration": SAVE_SECONDS,
    }
    comments = [
        "dstack apply -f THIS_FILE, which lies in the folder of the project; .gitignore and .dstackignore leave files out.",
        *(["Variables of `env` have the values of your environment."] if options.variables else []),
        *(
            []
            if options.volume
            else ["Without a volume for runs the results are gone with the run."]
        ),
        *(["Its nodes need a fleet with `placement: cluster`."] if options.nodes > 1 else []),
        NO_RETRIES,
    ]
    return task, comments


def _script(options: RenderOptions, rank: str, address: str) -> str:
    """The command for a shell. `rank` and `address` are the shell's words for the node's number, and for the first node's address."""
    command = shlex.join(options.command)
    if options.nodes == 1:
        return command
    return (
        f"torchrun --nnodes={options.nodes} --nproc-per-node={max(1, options.gpus)} --node-rank={rank} --master-addr={address} "
        f"--master-port={PORT} --no-python {command}"
    )


def _cpus(text: str) -> int:
    """Whole CPU cores for Kubernetes' `8` or `7500m`."""
    return math.ceil(float(text.removesuffix("m")) / (1000 if text.endswith("m") else 1))


def _gib(text: str) -> int:
    size = parse_size(text)
    assert size is not None, "RenderOptions checks it"
    return math.ceil(size / 2**30)
