"""Locks of environments: the files that name every release to install.

Without a file the lock is made from this installation: groupwise with the chosen extras and all their requirements, in the releases that
are installed here. A build of torch is no release: `2.13.0+cpu` here is `2.13.0` in the lock, and the index of a machine's pip decides
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
    found = WHEEL.fullmatch(path.name)
    if found is None:
        raise UsageError(
            f"{path}: this is not the name of a wheel (name-version-python-abi-platform.whl)."
        )
    return normal(found["name"])


# ---------------------------------------------------------------------------------------------------------------------------------------
# From this installation
# ---------------------------------------------------------------------------------------------------------------------------------------


def lock_of_this_installation(
    extras: Sequence[str], also: Sequence[str] = (), without: Collection[str] = ()
) -> Lock:
    """Lock the requirements of groupwise with these extras, and the distributions `also`, as installed here. `without`: these come as
    wheels."""
    own = installation()
    there = [normal(extra) for extra in own.metadata.get_all("Provides-Extra") or ()]
    for extra in extras:
        if normal(extra) not in there:
            raise UsageError(
                f"--extra {extra}: groupwise has no such extra; there are: {', '.join(sorted(there))}."
            )
    roots: list[tuple[str, Distribution, Sequence[str]]] = [(NAME, own, [*map(normal, extras)])]
    for name in also:
        try:
            roots.append((normal(name), distribution(name), ()))
        except PackageNotFoundError:
            raise UsageError(
                f"--with {name}: it is not installed here, so there is no release to name; install it, or give its file: --wheel."
            ) from None
    left: dict[str, str] = {}  # requirements of groupwise itself that are not installed here
    for needed in _needs(own, {"", *map(normal, extras)}):
        if needed.name in without or needed.name == NAME:
            continue
        try:
            distribution(needed.name)
        except PackageNotFoundError:
            left[needed.name] = needed.line
    pins = {
        name: _pin(name, each)
        for name, each in _with_requirements(roots).items()
        if name != NAME and name not in without
    }
    lines = (*sorted(pins.values()), *(left[name] for name in sorted(left)))
    return Lock(lines, left_to_pip=tuple(sorted(left)))


def _with_requirements(
    roots: Iterable[tuple[str, Distribution, Iterable[str]]],
) -> dict[str, Distribution]:
    """These distributions with their extras, and all their requirements that are installed."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()  # distribution and extra; the empty extra means none
    waiting = list(roots)
    while waiting:
        name, each, extras = waiting.pop()
        found[name] = each
        new = [extra for extra in ("", *extras) if (name, extra) not in seen]
        seen.update((name, extra) for extra in new)
        for needed in _needs(each, new):
            with suppress(PackageNotFoundError):  # for another system or Python; or pip adds it
                waiting.append((needed.name, distribution(needed.name), needed.extras))
    return found


@dataclass(frozen=True, slots=True)
class _Needed:
    name: str
    extras: tuple[str, ...]
    line: str
    """The requirement, without the marker for the extra it belongs to."""


def _needs(each: Distribution, extras: Collection[str]) -> Iterator[_Needed]:
    """Requirements of these extras; the empty extra means requirements without one."""
    for text in each.requires or ():
        found = REQUIREMENT.fullmatch(text.strip())
        if found is None:
            continue  # old distributions may have invalid metadata; pip reports that
        marker = found["marker"] or ""
        of = {normal(extra) for extra in OF_EXTRA.findall(marker)} or {""}
        if of.intersection(extras):
            words = (found["extras"] or "").split(",")
            extras_of_it = tuple(normal(word.strip()) for word in words if word.strip())
            yield _Needed(normal(found["name"]), extras_of_it, _without_extra(found))


def _without_extra(found: re.Match[str]) -> str:
    """A requirement without the extra that it belongs to."""
    extras = f"[{found['extras']}]" if found["extras"] else ""
    marker = re.sub(r"^\s*and\s+", "", EXTRA_CLAUSE.sub("", found["marker"] or "")).strip()
    return f"{found['name']}{extras}{found['wanted']}" + (f" ; {marker}" if marker else "")


def _pin(name: str, each: Distribution) -> str:
    """The line of one distribution: its release, or the address if it came from no index. Raises UsageError if that is a local folder."""
    try:
        origin = json.loads(each.read_text("direct_url.json") or "null")
    except ValueError:
        origin = None
    if origin is None:
        return f"{name}=={each.version.partition('+')[0]}"
    url, vcs = str(origin.get("url", "")), origin.get("vcs_info")
    if vcs and url.startswith(("https://", "ssh://")):
        return f"{name} @ {vcs['vcs']}+{url}@{vcs['commit_id']}"
    if url.startswith("https://") and "archive_info" in origin:
        return f"{name} @ {url}"
    raise UsageError(
        f"{name} {each.version} was installed here from {url or 'somewhere'}, where a machine cannot get it. Give it as a file "
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
        where = f"{source}:{number}"
        line_kept = _check_line(line, where, {NAME, *without})
        if line_kept is not None:
            lines.append(line_kept)
            hashed.append("--hash=" in line_kept)
            if hashed[0] != hashed[-1]:
                raise UsageError(
                    f"{where}: some lines have hashes and others have none; with hashes pip wants them for all: {line_kept.split()[0]}"
                )
    return Lock(tuple(lines), hashed=bool(hashed) and hashed[0])


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines without comments, joined where a backslash continues them, blank ones left out; each with the number of its first line."""
    whole, first = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        first = first if whole else number
        line = re.sub(r"(^|\s)#.*$", "", line)
        if line.rstrip().endswith("\\"):
            whole += line.rstrip()[:-1] + " "
            continue
        whole += line
        if whole.strip():
            yield first, whole.strip()
        whole = ""
    if whole.strip():
        yield first, whole.strip()


def _check_line(line: str, where: str, skipped: Collection[str]) -> str | None:
    """Check a line and return it in pip's form; None for distributions that come as wheels."""
    if line.startswith("-"):
        option, _, what = line.partition(" ")
        folder = Path(what.strip().removeprefix("file://"))
        own = what.strip().endswith(f"#egg={NAME}") or folder == PACKAGE.parent
        if own and option in ("-e", "--editable"):  # groupwise itself, as `pip freeze` writes it
            return None
        raise UsageError(
            f"{where}: {line[:80]!r}: options are not read from a lock: --index-url and --extra-index-url are options of this command, "
            "and what is installed from a folder (-e) goes as a file: --wheel."
        )
    hashes = HASH.findall(line)
    for each in hashes:
        if not SHA256_HASH.fullmatch(each):
            raise UsageError(f"{where}: --hash={each[:80]}: as --hash=sha256:… is wanted.")
    found = REQUIREMENT.fullmatch(HASH.sub("", line).strip())
    if found is not None and normal(found["name"]) in skipped:
        return None
    if found is None or not (
        PINNED.fullmatch(found["wanted"]) or FROM_ADDRESS.fullmatch(found["wanted"])
    ):
        raise UsageError(
            f"{where}: {line[:120]!r}: each line of a lock names one release, as `torch==2.13.0`. `pip freeze`, `pip-compile` and "
            "`uv export --format requirements.txt` write such a file."
        )
    return " ".join([_without_extra(found), *(f"--hash={each}" for each in hashes)])
