"""`Resources`: the requirements of a job, read from command-line words, stored as JSON, compared by a hash.

A submitter gives them in words (`parse`: `--gpus 2`, `--gpus vm-3:0,1`) or as JSON; admission settles open values and
stores the result with the job; placement reads it. Jobs of one project with equal resources have one `shape`: placement looks for room once
for all of them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from groupwise.api.schemas.fail_fast import FailFast
from groupwise.api.schemas.fleet import MAX_GPUS
from groupwise.core.errors import UsageError
from groupwise.core.settings.field_errors import field_errors
from groupwise.core.terminal.quantities import counted
from groupwise.jobs.hosts.answers import vendor_of

MAX_MACHINES = 1024
MAX_MB = 2**31 - 1
"""The largest value of a database column: 2 million GB."""

Megabytes = Annotated[int, Field(gt=0, le=MAX_MB)]
Name = Annotated[str, Field(min_length=1, max_length=256)]

_COUNT = re.compile(r"\d+")
_PROFILE = r"(?:\d+c\.)?\d+g\.\d+gb(?:[+.][a-z.]+)?"
"""Profile of a MIG device: `3g.20gb`, `1c.3g.20gb`, `1g.10gb+me`."""
_UUID = re.compile(rf"(?:GPU|MIG)-(?!{_PROFILE}$).+", re.IGNORECASE)
_MODEL_WORD = re.compile(rf"{_PROFILE}|[^\W_]+")
_GIGABYTES = re.compile(r"(\d+)gi?b?")
_VARIANTS = frozenset({"ti", "super", "d", "xt", "xtx", "ada", "laptop"})
"""Words that make another card of the same number: an `RTX 4070 Ti` is not an `RTX 4070`."""


class Resources(FailFast, BaseModel):
    """What one job needs. Numbers count for each of its machines."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    gpus: Annotated[int, Field(ge=0, le=MAX_GPUS)] | None = None
    """GPUs on each machine; 0 means a CPU slot. None: admission chooses 0 for a command, 1 for a job of a kind if the fleet has a GPU."""
    named: Annotated[tuple[int | str, ...], Field(strict=False)] = ()
    """These GPUs and no others: indices on `vm`, or UUIDs."""
    vm: Name | None = None
    """This machine and no other."""
    gpu_model: Name | None = None
    """Words of the model's name, in any case: `a100`, `RTX4090`, `H100-80GB`, `MIG-3g.20gb`; `fits_model` says which model has them."""
    gpu_memory_mb: Megabytes | None = None
    """Least memory of a GPU."""
    share_mb: Megabytes | None = None
    """Memory of one GPU that is shared with others; without it GPUs are given whole."""
    machines: Annotated[int, Field(ge=1, le=MAX_MACHINES)] = 1
    """A gang: all at once, or none."""
    cpus: Annotated[int, Field(ge=1, le=MAX_GPUS * 64)] | None = None
    ram_mb: Megabytes | None = None
    disk_mb: Megabytes | None = None
    """Free on the machine's disk before it starts."""
    labels: dict[str, str] = {}
    """Labels that a machine must have."""
    oversubscribe: bool = False
    """Use a CPU slot beyond those of the machine, so that a command of `fleet exec` runs on a full or drained one too."""
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


@lru_cache(maxsize=4096)
def fits_model(wanted: str | None, model: str | None, memory_mb: int | None) -> bool:
    """True if a job that asks for the model `wanted`, or for none, may get a GPU of this model.

    Each word of `wanted` must be one of the name, in any order, or several of them joined: `RTX4090` is `NVIDIA GeForce RTX 4090`. Letters
    may lack their number (`A100-SXM` is `A100-SXM4-80GB`) and AMD's MI numbers their letter (`MI300` is `MI300X`). Nothing else is left
    out: `L4` is neither `L40` nor `L40S`, `RTX4070` no `RTX 4070 Ti`. A size that the name does not say is compared with the memory.

    A MIG device is found only by its profile or the word MIG, and does not have the size of its card.
    """
    words, wanted_words = model_words(model or ""), model_words(wanted or "")
    if "mig" in words:
        words = [word for word in words if not _GIGABYTES.fullmatch(word)]
    elif "hbm3" in words:  # an H100 SXM5 calls itself `NVIDIA H100 80GB HBM3`
        words.append("sxm5")
    if ("mig" in words) != ("mig" in wanted_words):
        return False
    spans = [(i, j) for i in range(len(words)) for j in range(i + 1, min(i + 4, len(words)) + 1)]
    sizes = [word for word in words if _GIGABYTES.fullmatch(word)]
    found: set[str] = set()
    for word in wanted_words:
        size = _GIGABYTES.fullmatch(word)
        if size and not sizes:
            mb = int(size[1]) * 2**30 // 10**6  # vendors count in GiB
            if abs((memory_mb or 0) - mb) >= 0.1 * mb:
                return False
            continue
        rest = "[a-z]?" if re.fullmatch(r"mi\d+", word) else r"\d*" if word[-1].isalpha() else ""
        name = rf"{size[1]}gi?b?" if size else re.escape(word) + rest
        matches = [words[i:j] for i, j in spans if re.fullmatch(name, "".join(words[i:j]))]
        if not matches:
            return False
        found.update(matches[0])
    names_a_number = any(re.search(r"\d", word) for word in found)
    return not (names_a_number and _VARIANTS.intersection(words) - found)


def model_words(name: str) -> list[str]:
    """The words of a GPU's name in small letters; `mig` is one of them if it has the profile of a MIG device."""
    words = [word.replace("+", ".") for word in _MODEL_WORD.findall(name.casefold())]
    has_profile = any(re.fullmatch(_PROFILE, word) for word in words)
    return [*words, "mig"] if has_profile and "mig" not in words else words


def problems(resources: Resources) -> list[str]:
    """Values that are valid by themselves but contradict each other, as messages for the submitter."""
    messages = _problems_of_named_gpus(resources)
    count, most = resources.gpus, max(resources.gpus or 0, len(resources.named))
    if resources.share_mb and (count not in (None, 1) or most > 1):
        messages.append("a share is one of one GPU: leave gpus out, or ask for whole GPUs")
    is_mig = [name for name in resources.named if str(name).startswith("MIG-")]
    if most > 1 and (is_mig or "mig" in model_words(resources.gpu_model or "")):
        messages.append("CUDA shows a process only one MIG device: ask for one, or for whole GPUs")
    min_memory, share = resources.gpu_memory_mb, resources.share_mb
    if count == 0 and (resources.gpu_model or min_memory or share or resources.named):
        messages.append("gpus is 0, so nothing can be said of the GPUs: leave one of the two out")
    if resources.oversubscribe and (resources.vm is None or count != 0):
        messages.append(
            "oversubscribe is for a command on one machine without GPUs: say vm, and gpus 0"
        )
    if resources.machines > 1 and (resources.vm or resources.named):
        messages.append("a job on several machines cannot name one, nor GPUs of it: use labels")
    if resources.machines > 1 and resources.share_mb:
        messages.append("a job on several machines gets whole GPUs: leave the share out")
    return messages


def _problems_of_named_gpus(resources: Resources) -> list[str]:
    named, messages = resources.named, list[str]()
    indices = [name for name in named if isinstance(name, int)]
    if any(index < 0 for index in indices):
        messages.append("the index of a GPU is 0 or more")
    if indices and resources.vm is None:
        messages.append("a GPU that is named by its index needs the machine too: --gpus VM:0,1")
    if len(set(named)) < len(named):
        messages.append("a GPU is named twice")
    if named and resources.gpus not in (None, len(named)):
        messages.append(f"{counted(len(named), 'GPU')} named, but gpus says {resources.gpus}")
    if len({vendor_of(name) for name in named if isinstance(name, str)}) > 1:
        messages.append("a job gets GPUs of NVIDIA or of AMD: name those of one vendor")
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
    gpu_memory: int | None = None,
    share: int | None = None,
    machines: int = 1,
    cpus: int | None = None,
    ram: int | None = None,
    disk: int | None = None,
    labels: Sequence[str] = (),
) -> Resources:
    """The resources of the command line's options; UsageError lists all their problems.

    `gpus` is a count, `VM:0,1`, `VM:GPU-uuid` or `GPU-uuid,GPU-uuid`; sizes are in MB.
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
        "gpu_memory_mb": gpu_memory,
        "share_mb": share,
        "machines": machines,
        "cpus": cpus,
        "ram_mb": ram,
        "disk_mb": disk,
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
