"""`Resources`: the requirements of a job, read from command-line words, stored as JSON, compared by a hash.

A submitter gives them in words (`parse`: `--gpus 2`, `--gpus vm-3:0,1`, `--disk 64GB`) or as JSON; admission settles open values and
stores the result with the job; placement reads it. Jobs of one project with equal resources have one `shape`: placement looks for room once
for all of them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from groupwise.api.schemas.fail_fast import FailFast
from groupwise.api.schemas.fleet import MOST_GPUS
from groupwise.core.errors import UsageError
from groupwise.core.settings.field_errors import field_errors

MOST_MACHINES = 1024
MOST_MB = 2**31 - 1
"""The largest value of a database column: 2 million GB."""

Megabytes = Annotated[int, Field(gt=0, le=MOST_MB)]
Name = Annotated[str, Field(min_length=1, max_length=256)]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_DECIMAL = {"": 1.0, "m": 1.0, "g": 1e3, "t": 1e6}
_BINARY = {"m": 1.048576, "g": 1073.741824, "t": 1099511.627776}
_COUNT = re.compile(r"\d+")
_UUID = re.compile(r"(GPU|MIG)-.+", re.IGNORECASE)


class Resources(FailFast, BaseModel):
    """What one job needs. Numbers count for each of its machines."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    gpus: Annotated[int, Field(ge=0, le=MOST_GPUS)] | None = None
    """On each machine. None is settled at admission: 1, or 0 in a fleet without GPUs. 0: a CPU slot."""
    named: Annotated[tuple[int | str, ...], Field(strict=False)] = ()
    """These GPUs and no others: indices on `vm`, or UUIDs."""
    vm: Name | None = None
    """This machine and no other."""
    gpu_model: Name | None = None
    """Part of the model's name, in any case: `a100`, `H100 80GB`."""
    gpu_memory_mb: Megabytes | None = None
    """That a GPU has at least."""
    share_mb: Megabytes | None = None
    """Memory of one GPU that is shared with others; without it GPUs are given whole."""
    machines: Annotated[int, Field(ge=1, le=MOST_MACHINES)] = 1
    """A gang: all at once, or none."""
    cpus: Annotated[int, Field(ge=1, le=MOST_GPUS * 64)] | None = None
    ram_mb: Megabytes | None = None
    disk_mb: Megabytes | None = None
    """Free on the machine's disk before it starts."""
    labels: dict[str, str] = {}
    """That a machine has."""
    prepared: bool = False
    """An environment that an operator has named for the machine; admission says so of training kinds, which need Groupwise there."""

    def settled(self, gpus_by_default: int) -> Resources:
        """A copy in which the number of GPUs is set."""
        if self.gpus is not None:
            return self
        wants_one = bool(self.gpu_model or self.gpu_memory_mb or self.share_mb)
        count = len(self.named) or (1 if wants_one else gpus_by_default)
        return self.model_copy(update={"gpus": count})

    @property
    def gpu_count(self) -> int:
        """GPUs on each machine, once settled."""
        assert self.gpus is not None, "resources are settled at admission"
        return self.gpus

    def as_json(self) -> dict[str, Any]:
        """The canonical form, without default values."""
        return self.model_dump(mode="json", exclude_defaults=True)

    def shape(self, project: str) -> str:
        """Hash that is equal for jobs of the project with equal resources."""
        text = json.dumps([project, self.as_json()], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def problems(resources: Resources) -> list[str]:
    """Values that are valid by themselves but contradict each other, as messages for the submitter."""
    messages: list[str] = []
    indices = [name for name in resources.named if isinstance(name, int)]
    if any(index < 0 for index in indices):
        messages.append("the index of a GPU is 0 or more")
    if indices and resources.vm is None:
        messages.append("a GPU that is named by its index needs the machine too: --gpus VM:0,1")
    if len(set(resources.named)) < len(resources.named):
        messages.append("a GPU is named twice")
    if resources.named and resources.gpus not in (None, len(resources.named)):
        messages.append(f"{len(resources.named)} GPUs are named, but gpus says {resources.gpus}")
    if resources.share_mb and (resources.gpus not in (None, 1) or len(resources.named) > 1):
        messages.append("a share is one of one GPU: leave gpus out, or ask for whole GPUs")
    min_memory, share = resources.gpu_memory_mb, resources.share_mb
    if resources.gpus == 0 and (resources.gpu_model or min_memory or share or resources.named):
        messages.append("gpus is 0, so nothing can be said of the GPUs: leave one of the two out")
    if resources.machines > 1 and (resources.vm or resources.named):
        messages.append("a job on several machines cannot name one, nor GPUs of it: use labels")
    if resources.machines > 1 and resources.share_mb:
        messages.append("a job on several machines gets whole GPUs: leave the share out")
    return messages


def from_json(document: Mapping[str, Any]) -> Resources:
    """Read a document of `as_json`, or one written by hand; UsageError lists all its problems."""
    try:
        resources = Resources.model_validate(dict(document))
    except ValidationError as error:
        raise UsageError("\n".join(map(str, field_errors(error, Resources)))) from error
    if messages := problems(resources):
        raise UsageError("\n".join(messages))
    return resources


def parse(
    *,
    gpus: str | None = None,
    vm: str | None = None,
    gpu_model: str | None = None,
    gpu_memory: str | None = None,
    share: str | None = None,
    machines: int = 1,
    cpus: int | None = None,
    ram: str | None = None,
    disk: str | None = None,
    labels: Sequence[str] = (),
) -> Resources:
    """Parse resources from the words of the command line; UsageError lists all their problems.

    `gpus` is a count, `VM:0,1`, `VM:GPU-uuid` or `GPU-uuid,GPU-uuid`; sizes are `40GB`, `512MB` or a plain number of MB.
    """
    errors: list[str] = []
    count, indices, vm_of_gpus = _parse_gpus(gpus, errors)
    if vm is not None and vm_of_gpus not in (None, vm):
        errors.append(f"--vm says {vm}, --gpus says {vm_of_gpus}: name one machine")
    wanted_labels: dict[str, str] = {}
    for label in labels:
        name, equals, value = label.partition("=")
        if not name or not equals:
            errors.append(f"--vm-label {label!r}: NAME=VALUE is wanted")
        elif name in wanted_labels:
            errors.append(f"--vm-label {name} is given twice")
        wanted_labels[name] = value
    document: dict[str, Any] = {
        "gpus": count,
        "named": indices,
        "vm": vm or vm_of_gpus,
        "gpu_model": gpu_model,
        "gpu_memory_mb": _parse_size("--gpu-memory", gpu_memory, errors),
        "share_mb": _parse_size("--share-mb", share, errors),
        "machines": machines,
        "cpus": cpus,
        "ram_mb": _parse_size("--memory", ram, errors),
        "disk_mb": _parse_size("--disk", disk, errors),
        "labels": wanted_labels,
    }
    try:
        resources = from_json(document)
    except UsageError as error:
        raise UsageError("\n".join([*errors, str(error)])) from error
    if errors:
        raise UsageError("\n".join(errors))
    return resources


def _parse_gpus(
    text: str | None, errors: list[str]
) -> tuple[int | None, list[int | str], str | None]:
    """Parse --gpus into (count, names, machine). Problems are added to `errors`."""
    if text is None:
        return None, [], None
    if _COUNT.fullmatch(text.strip()):
        return int(text), [], None
    vm, colon, names_text = text.rpartition(":")
    names = [name.strip() for name in names_text.split(",")]
    if not all(_COUNT.fullmatch(name) or _UUID.fullmatch(name) for name in names) or (
        colon and not vm
    ):
        errors.append(
            f"--gpus {text!r}: a count (2), indices on a machine (VM:0,1) or UUIDs (GPU-…,GPU-…)"
        )
        return None, [], None
    return None, [int(n) if _COUNT.fullmatch(n) else n for n in names], vm or None


def megabytes(option: str, text: str) -> int:
    """Parse a size from the command line into MB. UsageError if it is no size, or 0."""
    errors: list[str] = []
    size = _parse_size(option, text, errors)
    if errors:
        raise UsageError(errors[0])
    if not size:
        raise UsageError(f"{option} {text}: what is wanted is at least 1 MB, as {option} 40GB.")
    return size


def _parse_size(option: str, text: str | None, errors: list[str]) -> int | None:
    """Parse `40GB` into decimal megabytes, the manufacturers' unit: a GPU sold with 80 GB then has 80 GB. None if no size is given."""
    if text is None:
        return None
    match = _SIZE.fullmatch(text.strip())
    factor = None
    if match:
        unit = match[2].lower()
        factor = (_BINARY if match[3] else _DECIMAL).get(unit)
    if match is None or factor is None:
        errors.append(f"{option} {text!r}: a size such as 40GB, 64GiB, 512MB, or a number of MB")
        return None
    return round(float(match[1]) * factor)
