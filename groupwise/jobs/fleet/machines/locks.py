"""Locks of environments: the files that name every release to install.

Without a file the lock is made from this installation: groupwise with the chosen extras and all their requirements, in the releases that
are installed here. A build of torch is not a release: `2.13.0+cpu` here is `2.13.0` in the lock, and the index of a machine's pip decides
which build it gets. A requirement of an extra that is not installed here is in the lock as groupwise states it, with its bounds, and pip
chooses: a control machine need not have torch.

A lock file has the format of `pip freeze`, `pip-compile` and `uv export`: `name==version`, markers, hashes. It is read strictly: lines
that would make pip look elsewhere (options, folders, `-e`) are refused, and so are lines that leave the choice of a release to pip.
groupwise is never installed by name, always as the wheel that is packed here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from groupwise.core.errors import UsageError
from groupwise.jobs.fleet.machines.packing import NAME, PACKAGE, installation

REQUIREMENT = re.compile(
    r"(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)\s*(?:\[(?P<extras>[^\]]*)\])?\s*(?P<wanted>[^;]*?)\s*(?:;\s*(?P<marker>.*))?"
)
OF_EXTRA = re.compile(r"""extra\s*==\s*['"]([^'"]+)['"]""")
EXTRA_CLAUSE = re.compile(r"""(?<!\s)\s*(?:\band\s+)?extra\s*==\s*['"][^'"]+['"]""")
PINNED = re.compile(r"===?\s*[A-Za-z0-9][A-Za-z0-9.!+_-]*")
FROM_ADDRESS = re.compile(r"@\s*(?:https|git\+https|git\+ssh)://\S+")
HASH = re.compile(r"\s--hash[=\s]\s*(\S+)")
SHA256_HASH = re.compile(r"sha(?:256:[0-9a-f]{64}|384:[0-9a-f]{96}|512:[0-9a-f]{128})")
WHEEL = re.compile(r"(?P<name>[^-]+)-(?P<version>[^-]+)(?:-\d[^-]*)?-[^-]+-[^-]+-[^-]+\.whl")


@dataclass(frozen=True, slots=True)
class Lock:
    """The lines that pip is to install."""

    lines: tuple[str, ...]
    hashed: bool = False
    """True if every line has its hashes; pip then accepts nothing else."""
    left_to_pip: tuple[str, ...] = ()
    """Names that are not pinned, since they are not installed here."""

    @property
    def text(self) -> str:
        """The lock as pip reads it."""
        return "".join(f"{line}\n" for line in self.lines)


def normal(name: str) -> str:
    """A distribution's name in the form in which all its spellings are equal."""
    return re.sub(r"[-_.]+", "-", name).lower()


def name_of_wheel(path: Path) -> str:
    """The distribution in a wheel. Raises UsageError if the file name is not that of a wheel."""
    match = WHEEL.fullmatch(path.name)
    if match is None:
        raise UsageError(
            f"{path}: this is not the name of a wheel (name-version-python-abi-platform.whl)."
        )
    return normal(match["name"])


# ---------------------------------------------------------------------------------------------------------------------------------------
# From this installation
# ---------------------------------------------------------------------------------------------------------------------------------------


def lock_of_this_installation(
    extras: Sequence[str], also: Sequence[str] = (), without: Collection[str] = ()
) -> Lock:
    """Lock the requirements of groupwise with these extras, and the distributions `also`, as installed here. `without`: these come as
    wheels."""
    groupwise = installation()
    known_extras = [normal(extra) for extra in groupwise.metadata.get_all("Provides-Extra") or ()]
    for extra in extras:
        if normal(extra) not in known_extras:
            raise UsageError(
                f"--extra {extra}: groupwise has no such extra; there are: {', '.join(sorted(known_extras))}."
            )
    roots: list[tuple[str, Distribution, Sequence[str]]] = [
        (NAME, groupwise, [*map(normal, extras)])
    ]
    for name in also:
        try:
            roots.append((normal(name), distribution(name), ()))
        except PackageNotFoundError:
            raise UsageError(
                f"--with {name}: it is not installed here, so there is no release to name; install it, or give its file: --wheel."
            ) from None
    uninstalled: dict[str, str] = {}  # requirements of groupwise itself that are not installed here
    for requirement in _requirements_of(groupwise, {"", *map(normal, extras)}):
        if requirement.name in without or requirement.name == NAME:
            continue
        try:
            distribution(requirement.name)
        except PackageNotFoundError:
            uninstalled[requirement.name] = requirement.line
    pins = {
        name: _pinned_line(name, package)
        for name, package in _with_requirements(roots).items()
        if name != NAME and name not in without
    }
    lines = (*sorted(pins.values()), *(uninstalled[name] for name in sorted(uninstalled)))
    return Lock(lines, left_to_pip=tuple(sorted(uninstalled)))


def _with_requirements(
    roots: Iterable[tuple[str, Distribution, Iterable[str]]],
) -> dict[str, Distribution]:
    """These distributions with their extras, and all their requirements that are installed."""
    distributions: dict[str, Distribution] = {}
    visited: set[tuple[str, str]] = set()  # distribution and extra; the empty extra means none
    queue = list(roots)
    while queue:
        name, package, extras = queue.pop()
        distributions[name] = package
        new_extras = [extra for extra in ("", *extras) if (name, extra) not in visited]
        visited.update((name, extra) for extra in new_extras)
        for requirement in _requirements_of(package, new_extras):
            with suppress(PackageNotFoundError):  # for another system or Python; or pip adds it
                queue.append((requirement.name, distribution(requirement.name), requirement.extras))
    return distributions


@dataclass(frozen=True, slots=True)
class _Requirement:
    name: str
    extras: tuple[str, ...]
    line: str
    """The requirement, without the marker for the extra it belongs to."""


def _requirements_of(package: Distribution, extras: Collection[str]) -> Iterator[_Requirement]:
    """Requirements of these extras; the empty extra means requirements without one."""
    for text in package.requires or ():
        match = REQUIREMENT.fullmatch(text.strip())
        if match is None:
            continue  # old distributions may have invalid metadata; pip reports that
        marker = match["marker"] or ""
        required_by = {normal(extra) for extra in OF_EXTRA.findall(marker)} or {""}
        if required_by.intersection(extras):
            names = (match["extras"] or "").split(",")
            extras_of_it = tuple(normal(name.strip()) for name in names if name.strip())
            yield _Requirement(normal(match["name"]), extras_of_it, _without_extra(match))


def _without_extra(match: re.Match[str]) -> str:
    """A requirement without the extra that it belongs to."""
    extras = f"[{match['extras']}]" if match["extras"] else ""
    marker = re.sub(r"^\s*and\s+", "", EXTRA_CLAUSE.sub("", match["marker"] or "")).strip()
    return f"{match['name']}{extras}{match['wanted']}" + (f" ; {marker}" if marker else "")


def _pinned_line(name: str, package: Distribution) -> str:
    """The line of one distribution: its release, or the address if it came from no index. Raises UsageError if that is a local folder."""
    try:
        origin = json.loads(package.read_text("direct_url.json") or "null")
    except ValueError:
        origin = None
    if origin is None:
        return f"{name}=={package.version.partition('+')[0]}"
    url, vcs = str(origin.get("url", "")), origin.get("vcs_info")
    if vcs and url.startswith(("https://", "ssh://")):
        return f"{name} @ {vcs['vcs']}+{url}@{vcs['commit_id']}"
    if url.startswith("https://") and "archive_info" in origin:
        return f"{name} @ {url}"
    raise UsageError(
        f"{name} {package.version} was installed here from {url or 'somewhere'}, where a machine cannot get it. Give it as a file "
        f"(`pip wheel --no-deps {url.removeprefix('file://') or name}`, then --wheel FILE), or a lock in which it has a release: --lock."
    )


# ---------------------------------------------------------------------------------------------------------------------------------------
# From a file
# ---------------------------------------------------------------------------------------------------------------------------------------


def read_lock(path: Path, without: Collection[str] = ()) -> Lock:
    """Read a lock file. Raises UsageError with the invalid line. `without`: distributions that come as wheels."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--lock {path}: it cannot be read: {error}") from None
    return parse_lock(text, str(path), without)


def parse_lock(text: str, source: str, without: Collection[str] = ()) -> Lock:
    """Parse the text of a lock file; `source` is its name in errors."""
    lines: list[str] = []
    hashed: list[bool] = []
    for number, line in _logical_lines(text):
        location = f"{source}:{number}"
        line_kept = _check_line(line, location, {NAME, *without})
        if line_kept is not None:
            lines.append(line_kept)
            hashed.append("--hash=" in line_kept)
            if hashed[0] != hashed[-1]:
                raise UsageError(
                    f"{location}: some lines have hashes and others have none; with hashes pip needs them for all: {line_kept.split()[0]}"
                )
    return Lock(tuple(lines), hashed=bool(hashed) and hashed[0])


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines without comments, joined where a backslash continues them, blank ones left out; each with the number of its first line."""
    logical_line, first_number = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        first_number = first_number if logical_line else number
        line = re.sub(r"(^|\s)#.*$", "", line)
        if line.rstrip().endswith("\\"):
            logical_line += line.rstrip()[:-1] + " "
            continue
        logical_line += line
        if logical_line.strip():
            yield first_number, logical_line.strip()
        logical_line = ""
    if logical_line.strip():
        yield first_number, logical_line.strip()


def _check_line(line: str, location: str, skipped: Collection[str]) -> str | None:
    """Check a line and return it in pip's form; None for distributions that come as wheels."""
    if line.startswith("-"):
        option, _, value = line.partition(" ")
        folder = Path(value.strip().removeprefix("file://"))
        is_groupwise = value.strip().endswith(f"#egg={NAME}") or folder == PACKAGE.parent
        # Groupwise itself, as `pip freeze` writes it.
        if is_groupwise and option in (
            "-e",
            "--editable",
        ):
            return None
        raise UsageError(
            f"{location}: {line[:80]!r}: options are not read from a lock: --index-url and --extra-index-url are options of this command, "
            "and what is installed from a folder (-e) goes as a file: --wheel."
        )
    hashes = HASH.findall(line)
    for hash_option in hashes:
        if not SHA256_HASH.fullmatch(hash_option):
            raise UsageError(
                f"{location}: --hash={hash_option[:80]}: as --hash=sha256:… is wanted."
            )
    match = REQUIREMENT.fullmatch(HASH.sub("", line).strip())
    if match is not None and normal(match["name"]) in skipped:
        return None
    if match is None or not (
        PINNED.fullmatch(match["wanted"]) or FROM_ADDRESS.fullmatch(match["wanted"])
    ):
        raise UsageError(
            f"{location}: {line[:120]!r}: each line of a lock names one release, as `torch==2.13.0`. `pip freeze`, `pip-compile` and "
            "`uv export --format requirements.txt` write such a file."
        )
    return " ".join([_without_extra(match), *(f"--hash={hash_option}" for hash_option in hashes)])
