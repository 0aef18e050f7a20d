"""The virtual environments of environments that play by themselves, one for each name, below the cache.

    ~/.cache/groupwise/environments/NAME/
        made.json       what was asked for, the kind, and the folder in use
        lock.txt        every package with its version and, from an index, its hash
        <folder>/       the virtual environment

They are apart from each other and from ours, because their pins contradict. `lock.txt` installs the same again (`--locked`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from groupwise.core import atomic_files
from groupwise.core.cache import cache_folder
from groupwise.core.errors import UsageError
from groupwise.core.plugins import nearest
from groupwise.core.virtual_environments import LOCK, add_packages, exclusive, make
from groupwise.tasks.external.kinds import KINDS

MADE, LOCKED = "made.json", "lock.txt"
OF_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_TARGET", "PIP_PREFIX", "PIP_USER")
"""Variables of this environment that would lead an installation astray."""
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True)
class Installed:
    """An environment that is there."""

    name: str
    kind: str
    requirements: tuple[str, ...]
    """What was asked for."""
    folder: str
    content: str | None = None
    """Digest of the local folder that was installed; None: it was none."""

    @property
    def home(self) -> Path:
        """Its folder below the cache."""
        return _home() / self.name

    @property
    def python(self) -> Path:
        """Its Python."""
        return self.home / self.folder / "bin" / "python"

    @property
    def lock(self) -> Path:
        """Its packages with versions and hashes."""
        return self.home / LOCKED

    def version_of(self, package: str) -> str | None:
        """The version of a package in it."""
        pattern = re.compile(rf"^{re.escape(package)}==(\S+)", re.MULTILINE)
        match = pattern.search(self.lock.read_text(encoding="utf-8"))
        return match[1] if match else None


def install(
    requirement: str,
    *,
    kind: str,
    name: str | None = None,
    extras: Sequence[str] = (),
    locked: Path | None = None,
    again: bool = False,
    say: bool = True,
) -> Installed:
    """Make the environment of a requirement: a package of the index, a local folder, or a git address. An existing one of the same is kept.

    A folder is the same wherever it lies while its files are; one with other files replaces it. `extras`: further requirements.
    `locked`: a lock.txt whose versions are installed. Raises UsageError.
    """
    name = _checked_name(name or name_of(requirement))
    source, content = Path(requirement).expanduser(), None
    if source.is_dir():
        requirement, content = str(source.resolve()), _digest(source)
    requirements = (requirement, *extras, KINDS[kind].library, *KINDS[kind].programs)
    with exclusive(_home() / name):
        existing = find(name)
        if existing is not None and not again and locked is None:
            are_folders = content is not None and existing.content is not None
            source_before, *others_before = existing.requirements
            is_same = (
                existing.kind == kind
                and others_before == list(requirements[1:])
                and (are_folders or source_before == requirement)
            )
            if is_same and existing.content == content:
                return existing
            if not is_same:
                raise UsageError(
                    f"There is an environment {name} already, of {existing.requirements[0]}. Give another name (--name), reinstall it "
                    f"(--again), or remove it: groupwise environments remove {name}"
                )
        target = Path(tempfile.mkdtemp(prefix="venv-", dir=_home() / name))
        try:
            _install_into(target, requirements, locked, say)
            lock = _lock_of(target)
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise
        made = Installed(name, kind, requirements, target.name, content)
        atomic_files.write_file(made.lock, lock.encode())
        atomic_files.write_json(made.home / MADE, asdict(made))
        for entry in made.home.iterdir():
            if entry.is_dir() and entry.name != target.name:
                shutil.rmtree(entry, ignore_errors=True)
        return made


def _install_into(
    target: Path, requirements: Sequence[str], locked: Path | None, say: bool
) -> None:
    report = target / "report.json"
    variables = {name: value for name, value in os.environ.items() if name not in OF_OURS}
    install_packages: dict[str, Any] = {
        "what": requirements[0],
        "say": say,
        "environment": variables,
    }
    if locked is None:
        make(target, [f"--report={report}", *requirements], **install_packages)
        return
    # pip checks the hashes of all packages of a call or of none, and folders and git addresses have none.
    lines = locked.read_text(encoding="utf-8").splitlines()
    hashed = [line for line in lines if "--hash=" in line]
    (target / LOCKED).write_text("\n".join(hashed), encoding="utf-8")
    make(
        target,
        [f"--report={report}", "--no-deps", "-r", str(target / LOCKED)],
        **install_packages,
    )
    if others := [line for line in lines if line.strip() and line not in hashed]:
        add_packages(target, ["--no-deps", *others], **install_packages)


def _lock_of(target: Path) -> str:
    """The packages of an environment as requirements, with the hashes of those that came from an index."""
    hashes = _hashes(target / "report.json")
    lines: list[str] = []
    for folder in sorted(target.glob("lib/python*/site-packages/*.dist-info")):
        name, _, version = folder.name.removesuffix(".dist-info").partition("-")
        origin = folder / "direct_url.json"
        if origin.is_file():
            lines.append(f"{name} @ {_address(json.loads(origin.read_text(encoding='utf-8')))}")
        else:
            digest = hashes.get(_plain_name(name))
            suffix = f" --hash={digest}" if digest else ""
            lines.append(f"{_plain_name(name)}=={version}{suffix}")
    return "\n".join(lines) + "\n"


def _hashes(report: Path) -> dict[str, str]:
    """`sha256:…` of each package that pip downloaded; empty if uv installed."""
    if not report.is_file():
        return {}
    content = cast("dict[str, Any]", json.loads(report.read_text(encoding="utf-8")))
    report.unlink()
    hashes: dict[str, str] = {}
    for entry in content["install"]:
        digest = entry["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256")
        if digest:
            hashes[_plain_name(entry["metadata"]["name"])] = f"sha256:{digest}"
    return hashes


def _digest(folder: Path) -> str:
    """Digest of the files of a folder (SHA-256, hex, 16 digits), without hidden ones, what Python compiled and what building left."""
    digest = hashlib.sha256()
    for path in atomic_files.files_below(folder):
        parts = path.relative_to(folder).parts
        is_made = any(part.startswith((".", "__pycache__")) for part in parts)
        is_made = is_made or parts[0] == "build" or parts[0].endswith(".egg-info")
        if not is_made:
            digest.update(f"{parts}".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _address(origin: Mapping[str, Any]) -> str:
    """Where a package that is not from an index came from, with its commit."""
    url = str(origin["url"])
    if vcs := origin.get("vcs_info"):
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    if subfolder := origin.get("subdirectory"):
        url = f"{url}#subdirectory={subfolder}"
    return url


def find(name: str) -> Installed | None:
    """An environment by its name; None if there is none."""
    try:
        record: dict[str, Any] = json.loads((_home() / name / MADE).read_bytes())
        record["requirements"] = tuple(record["requirements"])
        made = Installed(**record)
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return made if made.python.is_file() and made.lock.is_file() else None


def list_installed() -> list[Installed]:
    """All environments, by name."""
    folders = sorted(_home().iterdir()) if _home().is_dir() else []
    found = [find(folder.name) for folder in folders if folder.is_dir()]
    return [made for made in found if made is not None]


def remove(name: str) -> None:
    """Remove an environment. Raises UsageError if there is none."""
    require(name)
    folder = _home() / name
    with exclusive(folder):
        for entry in folder.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != LOCK:
                entry.unlink()
        (folder / LOCK).unlink()  # last: until then no other process makes this environment
    with suppress(OSError):  # another process makes it again
        folder.rmdir()


def require(name: str, kind: str | None = None) -> Installed:
    """An environment by its name. Raises UsageError that says what there is, and how to make it."""
    made = find(_checked_name(name))
    if made is not None:
        return made
    names = [each.name for each in list_installed()]
    close = nearest(name, names)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    advice = f"groupwise environments install {name}" + (f" --kind {kind}" if kind else "")
    raise UsageError(
        f"There is no environment {name}.{hint} There are: {', '.join(names) or 'none'}. If a package of that name is in the index, "
        f"install it: {advice}. Or give a folder or a git address with --name {name}."
    )


def name_of(requirement: str) -> str:
    """The name that an environment of this requirement gets: that of its package. Raises UsageError if the requirement does not say it."""
    folder = Path(requirement).expanduser()
    if folder.is_dir():
        try:
            project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
            return _plain_name(project["project"]["name"])
        except (OSError, ValueError, KeyError, TypeError):
            raise UsageError(
                f"{folder} has no pyproject.toml with a project name, so it cannot be installed. An environment is a package."
            ) from None
    before, at, _ = requirement.partition("@")
    if "/" in requirement and not (at and "/" not in before):
        subfolder = requirement.partition("#subdirectory=")[2]
        last = (subfolder or requirement.partition("#")[0].partition("@")[0]).rstrip("/")
        return _plain_name(last.rpartition("/")[2].removesuffix(".git"))
    match = _NAME.match(requirement)
    if match is None:
        raise UsageError(
            f"{requirement!r} names no package, no folder that exists, and no git address (git+https://…)."
        )
    return _plain_name(match[0])


def _checked_name(name: str) -> str:
    if _NAME.fullmatch(name):
        return name
    raise UsageError(f"{name!r} is not a name of an environment: letters, digits, dots and dashes.")


def _plain_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _home() -> Path:
    return cache_folder("environments")
