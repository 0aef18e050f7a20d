"""Plans the environment of a machine before any machine is contacted: the lock, the wheels, the package indexes, and the name that follows
from all of it. Options that cannot work are refused here.

The user name and password of a package index appear in no argument list, neither here nor on the machine, and not in the environment's
name: they are given by reference (`--secret PIP_INDEX_URL=env:NAME`) and sent separately from the spec, as secrets of jobs are.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
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
"""Digits of the hash in a name: enough to distinguish environments of one machine, and short, since shebang lines contain their path."""
NEWER_PYTHONS = ("python3", "python3.13", "python3.12", "python3.11", "python3.14")
"""Interpreters that are tried after the version that runs here, with which the locked releases are known to run."""
WAY = 1
"""Version of the build procedure; a new number gives all environments new names."""
USUAL_EXTRAS = ("train",)
"""Extras that the training kinds of jobs need."""
TIME_SECONDS = 7200.0
"""Time limit of a build in seconds: a CUDA build of torch is three gigabytes, and the network may be slow."""


@dataclass(frozen=True)
class Plan:
    """The planned contents of an environment. Not slotted: its hashes are computed once and cached."""

    packed: Packed
    """groupwise itself."""
    lock: Lock
    wheels: tuple[Path, ...] = ()
    """Wheels that are installed without their requirements."""
    wheelhouse: tuple[Path, ...] | None = None
    """Wheels that are sent to the machine: pip then uses only these, and contacts no index."""
    pythons: tuple[str, ...] = ()
    """Interpreters to try on the machine, in this order; empty: the default ones."""
    index_url: str | None = None
    extra_index_urls: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables of pip's process."""
    secrets: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    time_seconds: float = TIME_SECONDS

    @cached_property
    def name(self) -> str:
        """The environment's name: equal for equal contents."""
        contents = {
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
        canonical = json.dumps(contents, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:DIGITS]

    @cached_property
    def hashes(self) -> dict[Path, str]:
        """Hashes of the files that are sent."""
        return {path: hash_of(path) for path in (*self.wheels, *(self.wheelhouse or ()))}

    @property
    def candidates(self) -> tuple[str, ...]:
        """Interpreters in the order in which they are tried."""
        ours = "python{}.{}".format(*sys.version_info[:2])
        return self.pythons or tuple(dict.fromkeys((ours, *NEWER_PYTHONS)))

    @property
    def job(self) -> str:
        """The name of the build job for the machine's runner."""
        return f"prepare-{self.name}"

    def order(self, folder: str) -> dict[str, Any]:
        """The order as `builder.py` reads it."""
        requirements = installation().metadata.get_all("Requires-Python") or [">=3.11"]
        minimum = re.search(r">=\s*(\d+)\.(\d+)", requirements[0])
        assert minimum is not None, f"Requires-Python of groupwise is {requirements}"
        return {
            "folder": folder,
            "name": self.name,
            "pythons": list(self.candidates),
            "least": [int(part) for part in minimum.groups()],
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
    """Put the files for a machine whose environments are in `folder` into the store: the builder, and all that it reads."""
    entries = with_builder(
        store,
        {
            "order.json": as_bytes(plan.order(folder)),
            "lock.txt": plan.lock.text.encode(),
            f"wheels/{plan.packed.file_name}": plan.packed.data,
        },
    )
    for subfolder, paths in (("wheels", plan.wheels), ("wheelhouse", plan.wheelhouse or ())):
        for path in paths:
            sha256 = plan.hashes[path]
            if store.missing([sha256]):
                entry = store.put_file(path)
            else:
                entry = FileEntry(sha256, 0o644, path.stat().st_size)
            entries[f"{subfolder}/{path.name}"] = entry
    return entries


def with_builder(store: BlobStore, files: Mapping[str, bytes]) -> dict[str, FileEntry]:
    """Put small files and the builder, which reads them, into the store."""
    builder = Path(__file__).with_name("builder.py").read_bytes()
    all_files = {"builder.py": builder, **files}
    return {name: FileEntry(store.put(data), 0o644, len(data)) for name, data in all_files.items()}


def as_bytes(document: Mapping[str, Any]) -> bytes:
    """A document as JSON: equal documents give equal bytes."""
    return json.dumps(document, sort_keys=True).encode()


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


def plan_of(options: PrepareOptions) -> Plan:
    """Make the plan. Raises UsageError for options that cannot work."""
    _check_options(options)
    wheels = tuple(path.absolute() for path in options.wheels)
    by_name: dict[str, Path] = {}
    for path in wheels:
        if not path.is_file():
            raise UsageError(f"--wheel {path}: there is no such file.")
        name = name_of_wheel(path)
        if name == NAME:
            raise UsageError(
                f"--wheel {path}: groupwise is packed from this installation; run the one that the machine is to have."
            )
        if name in by_name:
            raise UsageError(f"--wheel: {path.name} and {by_name[name].name} are both {name}.")
        by_name[name] = path
    names = set(by_name)
    if options.lock is not None:
        lock = read_lock(options.lock, names)
    else:
        lock = lock_of_this_installation(options.extras or USUAL_EXTRAS, options.also, names)
    # This user may read the named variables and files anyway; the allowed patterns are only for remote submitters.
    references = options.secrets
    for reference in references.values():
        if re.search(r"[*?\[]", reference):
            raise UsageError(
                f"--secret …={reference}: a variable or a file is expected, no pattern."
            )
    try:
        secrets = AllowedSecrets(tuple(references.values())).read(references)
    except SecretMissing as missing:
        raise UsageError(f"{missing}.") from None
    return Plan(
        packed=pack(),
        lock=lock,
        wheels=wheels,
        wheelhouse=None if options.wheelhouse is None else _wheels_in(options.wheelhouse),
        pythons=() if options.python is None else (options.python,),
        index_url=options.index_url,
        extra_index_urls=tuple(options.extra_index_urls),
        environment=dict(options.environment),
        secrets=secrets,
        time_seconds=options.time_seconds,
    )


def _check_options(options: PrepareOptions) -> None:
    """Raise UsageError if an option is wrong, or has no effect together with another."""
    if options.lock is not None and (options.extras or options.also):
        raise UsageError(
            "--lock names all that is installed; --extra and --with are for a lock that is made here."
        )
    urls = [*([options.index_url] if options.index_url else []), *options.extra_index_urls]
    if options.wheelhouse is not None and (urls or options.secrets):
        raise UsageError(
            "with --wheelhouse no index is contacted: --index-url, --extra-index-url and --secret have no effect."
        )
    for url in urls:
        _check_address(url)
    variables = {*options.secrets, *options.environment}
    if options.index_url is not None and "PIP_INDEX_URL" in variables:
        raise UsageError("--index-url and PIP_INDEX_URL both say where pip looks; give one.")
    if options.extra_index_urls and "PIP_EXTRA_INDEX_URL" in variables:
        raise UsageError(
            "--extra-index-url and PIP_EXTRA_INDEX_URL both say where pip looks; give one."
        )
    python = options.python
    if python is not None:
        relative = "/" in python and not python.startswith(("/", "~/"))
        if not python or relative or python.startswith("-"):
            raise UsageError(
                f"--base-python {python}: the name of a program there (python3.12), or its whole path (/opt/python/bin/python3)."
            )
    spec = JobSpec(("pip",), environment=options.environment, secrets=tuple(options.secrets))
    wrong = [*text_problems(python or "", "--base-python"), *problems(spec)]
    wrong += text_problems(dict(options.environment), "--env")
    if wrong:
        raise UsageError("; ".join(wrong))


def _check_address(url: str) -> None:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise UsageError(f"{url[:200]}: this is not an address: {error}.") from None
    if "@" in parts.netloc:
        raise UsageError(
            "an address of a package index has a name or a password in it. Everybody on this machine can read the arguments of a command: "
            "give the whole address as the variable PIP_INDEX_URL or PIP_EXTRA_INDEX_URL: `vm prepare --secret PIP_INDEX_URL=env:NAME`, "
            "or a line of the file of `launch --env-file`. Images of Modal are made without either: --wheelhouse."
        )
    if parts.scheme not in ("https", "http", "file") or " " in url:
        raise UsageError(
            f"{url[:200]}: the address of a package index is expected, as https://pypi.org/simple."
        )


def _wheels_in(folder: Path) -> tuple[Path, ...]:
    """The wheels in a wheelhouse, except that of groupwise. Raises UsageError if there is none."""
    if not folder.is_dir():
        raise UsageError(f"--wheelhouse {folder}: there is no such folder.")
    wheels = sorted(path.absolute() for path in folder.glob("*.whl") if path.is_file())
    if not wheels:
        raise UsageError(
            f"--wheelhouse {folder}: there is no wheel in it. `groupwise fleet vm prepare VM --dry-run > lock.txt`, then "
            f"`pip wheel -r lock.txt -w {folder}`, fills it with what a machine like this one needs."
        )
    return tuple(path for path in wheels if name_of_wheel(path) != NAME)
