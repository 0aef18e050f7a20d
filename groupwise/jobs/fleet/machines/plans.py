"""What is to be in an environment of a machine, worked out before any machine is asked: the lock, the wheels, where pip looks, and the
name that follows from all of it. What was given and cannot work is refused here.

A name and password of a package index stand in no argument list, neither here nor on the machine, and not in the name: they come by
reference (`--secret PIP_INDEX_URL=env:NAME`) and travel beside the spec, as secrets of jobs do.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from groupwise.core.errors import UsageError
from groupwise.jobs.fleet.machines.locks import (
    Lock,
    lock_of_this_installation,
    name_of_wheel,
    read_lock,
)
from groupwise.jobs.fleet.machines.packing import NAME, Packed, installation, pack
from groupwise.jobs.fleet.secrets import AllowedSecrets, SecretMissing
from groupwise.jobs.fleet.text_validation import text_problems
from groupwise.jobs.hosts.files import BlobStore, hash_of
from groupwise.jobs.hosts.spec import FileEntry, JobSpec, problems

DIGITS = 20
"""Digits of the hash in a name: enough to tell environments of one machine apart, and short, since scripts begin with their path."""
NEWER_PYTHONS = ("python3", "python3.13", "python3.12", "python3.11", "python3.14")
"""Tried after the one that runs here: the lock is of releases that run with that."""
WAY = 1
"""How environments are made; another way is another number, and so another name."""
USUAL_EXTRAS = ("train",)
"""Extras that the training kinds of jobs need."""
TIME_SECONDS = 7200.0
"""A CUDA build of torch is three gigabytes, and the line may be slow."""


@dataclass(frozen=True)
class Plan:
    """The planned contents of an environment. Not slotted: its hashes are worked out once."""

    packed: Packed
    """groupwise itself."""
    lock: Lock
    wheels: tuple[Path, ...] = ()
    """Installed as they are, without what they need."""
    wheelhouse: tuple[Path, ...] | None = None
    """If given, pip takes wheels from here and contacts no index."""
    pythons: tuple[str, ...] = ()
    """Interpreters to try on the machine, the first first; none given: the usual ones."""
    index_url: str | None = None
    extra_index_urls: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables of pip's process."""
    secrets: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    time_seconds: float = TIME_SECONDS

    @cached_property
    def name(self) -> str:
        """The environment's name: equal for equal contents."""
        asked = {
            "made": WAY,
            "groupwise": self.packed.sha256,
            "lock": self.lock.text,
            "wheels": [self.hashes[path] for path in self.wheels],
            "wheelhouse": None
            if self.wheelhouse is None
            else [[path.name, self.hashes[path]] for path in self.wheelhouse],
            "pythons": self.candidates,
            "indexes": [self.index_url, *self.extra_index_urls],
        }
        canonical = json.dumps(asked, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:DIGITS]

    @cached_property
    def hashes(self) -> dict[Path, str]:
        """Hashes of the files that are sent."""
        return {path: hash_of(path) for path in (*self.wheels, *(self.wheelhouse or ()))}

    @property
    def candidates(self) -> tuple[str, ...]:
        """Interpreters, the first first."""
        ours = "python{}.{}".format(*sys.version_info[:2])
        return self.pythons or tuple(dict.fromkeys((ours, *NEWER_PYTHONS)))

    @property
    def job(self) -> str:
        """The name of the build job for the machine's runner."""
        return f"prepare-{self.name}"

    def order(self, folder: str) -> dict[str, Any]:
        """The order as `builder.py` reads it."""
        return {
            "folder": folder,
            "name": self.name,
            "pythons": list(self.candidates),
            "least": list(least_python()),
            "groupwise": self.packed.file_name,
            "wheel_sha256": self.packed.sha256,
            "wheels": [path.name for path in self.wheels],
            "pins": len(self.lock.lines),
            "hashed": self.lock.hashed,
            "offline": self.wheelhouse is not None,
            "index_url": self.index_url,
            "extra_index_urls": list(self.extra_index_urls),
            "secrets": sorted(self.secrets),
        }


def sent_files(plan: Plan, folder: str, store: BlobStore) -> dict[str, FileEntry]:
    """Files sent to a machine whose environments are in `folder`, put into the store: the builder, and all that it reads."""
    found = with_builder(
        store,
        {
            "order.json": as_bytes(plan.order(folder)),
            "lock.txt": plan.lock.text.encode(),
            f"wheels/{plan.packed.file_name}": plan.packed.data,
        },
    )
    for inside, paths in (("wheels", plan.wheels), ("wheelhouse", plan.wheelhouse or ())):
        for path in paths:
            found[f"{inside}/{path.name}"] = _kept(path, plan.hashes[path], store)
    return found


def with_builder(store: BlobStore, files: Mapping[str, bytes]) -> dict[str, FileEntry]:
    """Small files, and the program that all of them are for."""
    builder = Path(__file__).with_name("builder.py").read_bytes()
    every = {"builder.py": builder, **files}
    return {name: FileEntry(store.put(data), 0o644, len(data)) for name, data in every.items()}


def as_bytes(document: Mapping[str, Any]) -> bytes:
    """A document as it travels: the same for what is the same."""
    return json.dumps(document, sort_keys=True).encode()


def _kept(path: Path, sha256: str, store: BlobStore) -> FileEntry:
    """A wheel in the store; one that is there is not copied again."""
    if not store.missing([sha256]):
        return FileEntry(sha256, 0o644, path.stat().st_size)
    return store.put_file(path)


def least_python() -> tuple[int, ...]:
    """The oldest that groupwise runs with, as its metadata say."""
    said = installation().metadata.get_all("Requires-Python") or [">=3.11"]
    found = re.search(r">=\s*(\d+)\.(\d+)", said[0])
    assert found is not None, f"Requires-Python of groupwise is {said}"
    return tuple(map(int, found.groups()))


@dataclass(frozen=True, slots=True)
class PrepareOptions:
    """Options as typed by the user."""

    extras: Sequence[str] = ()
    also: Sequence[str] = ()
    lock: Path | None = None
    wheels: Sequence[Path] = ()
    wheelhouse: Path | None = None
    python: str | None = None
    index_url: str | None = None
    extra_index_urls: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    secrets: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variable → reference."""
    time_seconds: float = TIME_SECONDS


def plan_of(asked: PrepareOptions) -> Plan:
    """The plan. Raises UsageError with what cannot work."""
    _check(asked)
    wheels = tuple(path.absolute() for path in asked.wheels)
    given = _names(wheels)
    if asked.lock is not None:
        lock = read_lock(asked.lock, given)
    else:
        lock = lock_of_this_installation(asked.extras or USUAL_EXTRAS, asked.also, given)
    return Plan(
        packed=pack(),
        lock=lock,
        wheels=wheels,
        wheelhouse=None if asked.wheelhouse is None else _wheelhouse(asked.wheelhouse),
        pythons=() if asked.python is None else (asked.python,),
        index_url=asked.index_url,
        extra_index_urls=tuple(asked.extra_index_urls),
        environment=dict(asked.environment),
        secrets=_values(asked.secrets),
        time_seconds=asked.time_seconds,
    )


def _check(asked: PrepareOptions) -> None:
    if asked.lock is not None and (asked.extras or asked.also):
        raise UsageError(
            "--lock names all that is installed; --extra and --with are for a lock that is made here."
        )
    urls = [*([asked.index_url] if asked.index_url else []), *asked.extra_index_urls]
    if asked.wheelhouse is not None and (urls or asked.secrets):
        raise UsageError(
            "with --wheelhouse nobody is asked for packages: --index-url, --extra-index-url and --secret have no effect."
        )
    for url in urls:
        _check_address(url)
    if asked.index_url is not None and "PIP_INDEX_URL" in {*asked.secrets, *asked.environment}:
        raise UsageError("--index-url and PIP_INDEX_URL both say where pip looks; give one.")
    if asked.extra_index_urls and "PIP_EXTRA_INDEX_URL" in {*asked.secrets, *asked.environment}:
        raise UsageError(
            "--extra-index-url and PIP_EXTRA_INDEX_URL both say where pip looks; give one."
        )
    _check_python(asked.python)
    spec = JobSpec(("pip",), environment=asked.environment, secrets=tuple(asked.secrets))
    _refuse([*problems(spec), *text_problems(dict(asked.environment), "--env")])


def _check_address(url: str) -> None:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise UsageError(f"{url[:200]}: this is no address: {error}.") from None
    if "@" in parts.netloc:
        raise UsageError(
            "an address of a package index has a name or a password in it. Everybody on this machine can read the arguments of a command: "
            "give the whole address as the variable PIP_INDEX_URL or PIP_EXTRA_INDEX_URL: `vm prepare --secret PIP_INDEX_URL=env:NAME`, "
            "or a line of the file of `launch --env-file`. Images of Modal are made without either: --wheelhouse."
        )
    if parts.scheme not in ("https", "http", "file") or " " in url:
        raise UsageError(
            f"{url[:200]}: the address of a package index is wanted, as https://pypi.org/simple."
        )


def _check_python(python: str | None) -> None:
    """A name is looked up on the machine's PATH."""
    if python is None:
        return
    relative = "/" in python and not python.startswith(("/", "~/"))
    if not python or relative or python.startswith("-"):
        raise UsageError(
            f"--python {python}: the name of a program of the machine (python3.12), or its whole path there (/opt/python/bin/python3)."
        )
    _refuse(list(text_problems(python, "--python")))


def _refuse(found: Iterable[str]) -> None:
    told = list(found)
    if told:
        raise UsageError("; ".join(told))


def _names(wheels: Sequence[Path]) -> set[str]:
    """Names of the distributions that come as files. Raises UsageError."""
    found: dict[str, Path] = {}
    for path in wheels:
        if not path.is_file():
            raise UsageError(f"--wheel {path}: there is no such file.")
        name = name_of_wheel(path)
        if name == NAME:
            raise UsageError(
                f"--wheel {path}: groupwise is packed from this installation; run the one that the machine is to have."
            )
        if name in found:
            raise UsageError(f"--wheel: {path.name} and {found[name].name} are both {name}.")
        found[name] = path
    return set(found)


def _wheelhouse(folder: Path) -> tuple[Path, ...]:
    """Its wheels, but for ours."""
    if not folder.is_dir():
        raise UsageError(f"--wheelhouse {folder}: there is no such folder.")
    found = sorted(path.absolute() for path in folder.glob("*.whl") if path.is_file())
    if not found:
        raise UsageError(
            f"--wheelhouse {folder}: there is no wheel in it. `groupwise fleet vm prepare VM --dry-run > lock.txt`, then "
            f"`pip wheel -r lock.txt -w {folder}`, fills it with what a machine like this one needs."
        )
    return tuple(path for path in found if name_of_wheel(path) != NAME)


def _values(references: Mapping[str, str]) -> dict[str, str]:
    """Read the values here, because the user at this terminal may read them; patterns are only for remote submitters."""
    for reference in references.values():
        if re.search(r"[*?\[]", reference):
            raise UsageError(f"--secret …={reference}: a variable or a file is wanted, no pattern.")
    try:
        return AllowedSecrets(tuple(references.values())).read(references)
    except SecretMissing as missing:
        raise UsageError(f"{missing}.") from None
