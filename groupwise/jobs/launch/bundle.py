"""Selects the files of a project that travel to another machine: those git would take, without secrets and files made by runs.

Of a folder that git does not know, everything but what tools make (environments, caches). What stays behind is told with its reason, since
the program may miss it elsewhere. The files travel by their hashes (`groupwise.jobs.hosts.files`): a machine that has one gets it no more.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, cast

from groupwise.core.errors import UsageError
from groupwise.core.settings.credentials import holds_secret
from groupwise.jobs.clouds.folder import INCOMING, NOTE
from groupwise.jobs.hosts.files import MOST_FILES
from groupwise.jobs.launch.results import MARKER, RESULT
from groupwise.runs.folder import RECORD

LARGEST = 2 << 30
"""Bytes of a bundle: what is larger is data, which is fetched where it is used."""
MAX_FILES_LISTED = 10
"""Files that a message lists."""
MADE = {
    (RECORD, "config.json"): "the folder of a run",
    (MARKER,): "what came back of launched jobs",
    (RESULT,): "what came back of a launched job",
    (f"{INCOMING}/{NOTE}",): "what came back of a launched job",
    ("pyvenv.cfg",): "an environment of Python",
}
"""Folders by files that lie in them: names such as `env` say nothing."""
MADE_BY_TOOLS = (
    *(".git", ".hg", ".svn", "node_modules", "__pycache__", "*.egg-info"),
    *(".ipynb_checkpoints", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".tox"),
)
"""Folders to skip in a project without git, because tools make them again elsewhere."""
SECRET_FILES = tuple(
    ".env .env.* *.env .envrc .netrc _netrc .pypirc .npmrc .yarnrc.yml .git-credentials .htpasswd .pgpass .my.cnf .s3cfg .boto "
    ".dockercfg .dockerconfigjson .terraformrc .vault-token .modal.toml .rclone.conf rclone.conf kubeconfig *.kubeconfig *.tfstate "
    "*.tfstate.* secrets.yaml secrets.yml secrets.toml secrets.json *.pem *.key *.p12 *.pfx *.ppk *.kdbx *.keystore *.jks *.asc *.gpg "
    "*.ovpn id_rsa* id_dsa* id_ecdsa* id_ed25519* credentials credentials.json client_secret*.json kaggle.json "
    "application_default_credentials.json service-account*.json service_account*.json .env-* .env_* *.env.* credentials.csv "
    "credentials.toml rootkey.csv accesskeys.csv .hf_token hf_token *.tfvars *.tfvars.json .secrets.* secret.yaml secret.yml *.pem.* "
    "*.key.* .bash_history .zsh_history .python_history".split()
)
SECRET_FOLDERS = tuple(
    ".aws .docker .ssh .gnupg .kube .azure .gcloud gcloud .env .secrets .vault .password-store".split()
)
SHOW_HOW = ("*.example", "*.sample", "*.template", "*.pub")
"""Files whose names look secret, and that only show how the secret ones are written."""
PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----")
RULES_LEFT_OUT = frozenset(
    "BasicAuthDetector IPPublicDetector IbmCloudIamDetector IbmCosHmacDetector SoftlayerDetector CloudantDetector".split()
)
"""Rules of detect-secrets that go by words around a value, and so find code; passwords in URLs are found by `holds_secret`."""
ALLOWLISTED = "pragma: allowlist secret"
"""A line with this comment holds no secret; detect-secrets has the same comment."""
PLACEHOLDER = re.compile(
    r"(?<=://)[^\s/?#@:]{0,100}:(?:pass(?:word|wd)?|pw|secret|token|key|x+|\*+|\.+|changeme|example)@",
    re.IGNORECASE,
)
"""A password in a URL that is none."""
PIECE, OVERLAP = 1000, 400
"""Long lines are searched in pieces of so many characters, because some rules take quadratic time; no token is longer than the overlap."""
LONG_RUN = re.compile(rb"([A-Za-z0-9+/_-]{400})[A-Za-z0-9+/_-]+")
"""A picture in a notebook, for example: longer than any token, and its first characters say enough."""
SEARCHED = 16 << 20
"""Bytes of a file in which credentials are looked for: what people write is shorter."""
SHORTEST_SECRET = 8
"""Letters of a value that is looked for: shorter ones stand in files by chance."""
LOOKED_AT = 32 << 20
"""Bytes of a file in which what looks like a credential is looked for."""
LONGEST_HEAD = 65_536
"""Bytes by which a text is told from other data."""
CONTROLS = tuple(bytes([each]) for each in (*range(1, 9), *range(14, 27), *range(28, 32)))
"""Characters of which a text has none, or nearly none."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Files of a project."""

    root: Path
    files: dict[str, Path]
    """Files that travel, by their paths there."""
    left_out: dict[str, str]
    """Files that stay here, with the reason; a folder ends with a slash."""
    size: int
    """Bytes."""


def bundle(
    root: Path, secrets: Mapping[str, str] | None = None, take: Sequence[str] = ()
) -> Bundle:
    """What travels of the project in `root`.

    `secrets`: values of environment variables that travel apart. `take`: files and folders of it that travel although git ignores them or
    a run made them, and files that look like credentials. Raises UsageError where a secret stands in a file or something that looks like
    one does, for a folder that is none, and for what is too large or too much.
    """
    if not root.is_dir():
        raise UsageError(f"{root} is no folder, so there is no project to take along.")
    files: dict[str, Path] = {}
    left_out: dict[str, str] = {}
    wanted = {path for each in take for path in _taken(root, each)}
    named = {Path(os.path.normpath(each)).as_posix() for each in take}
    for path in dict.fromkeys([*_of_project(root), *sorted(wanted)]):
        if path not in wanted and (around := _around(root, path)) is not None:
            left_out[around[0]] = around[1]
        elif reason := _why_not(root, path, wanted=path in wanted, named=path in named):
            left_out[path] = reason
        else:
            files[path] = root / path
    sizes = {path: file.stat().st_size for path, file in files.items()}
    _refuse_too_much(root, sizes)
    _refuse_secrets(files, secrets or {})
    _refuse_what_looks_secret({path: file for path, file in files.items() if path not in wanted})
    return Bundle(root, files, left_out, sum(sizes.values()))


# ---------------------------------------------------------------------------------------------------------------------------------------
# What there is
# ---------------------------------------------------------------------------------------------------------------------------------------


def _of_project(root: Path) -> Iterator[str]:
    """Paths of files and links, those of submodules among them."""
    known = _of_git(root)
    if known is None:
        yield from _all_below(root)
        return
    for path in known:
        place = root / path
        if place.is_dir() and not place.is_symlink():  # a repository within this one
            yield from (f"{path.rstrip('/')}/{each}" for each in _of_project(place))
        elif os.path.lexists(place):  # else it was deleted, and git was not told
            yield path


def _taken(root: Path, given: str) -> list[str]:
    """The files named by the user, by their paths in the project."""
    place = root / given
    inside = os.path.relpath(os.path.abspath(place), os.path.abspath(root))
    if inside == ".." or inside.startswith("../"):
        raise UsageError(
            f"--take {given}: this is outside of the project in {root}, of which a job has a copy. Copy it into the project."
        )
    if not place.exists():
        raise UsageError(f"--take {given}: there is no such file or folder in {root}.")
    if place.is_file():
        return [Path(inside).as_posix()]
    found = [Path(folder, name) for folder, _, names in os.walk(place) for name in names]
    return sorted(path.relative_to(root).as_posix() for path in found)


def _of_git(root: Path) -> list[str] | None:
    """Tracked files, and others that are not ignored; None for a folder that is not git's."""
    command = [
        "git",
        *("-c", "core.fsmonitor=false"),  # which would be a program that the project names
        "-C",
        str(root),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
        "--deduplicate",
    ]
    is_gits = any((each / ".git").exists() for each in (root, *root.resolve().parents))
    try:
        found = subprocess.run(command, capture_output=True, check=False)
    except OSError:
        if is_gits:
            raise UsageError(
                f"{root} is a project of git, and there is no git here to say which of its files are ignored. Install git."
            ) from None
        return None
    if found.returncode != 0:
        if is_gits:
            said = found.stderr.decode(errors="replace").strip()
            raise UsageError(f"git does not say which files of {root} are its own: {said}")
        return None
    return [os.fsdecode(each) for each in found.stdout.split(b"\0") if each]


def _all_below(root: Path) -> Iterator[str]:
    for folder, inside, names in os.walk(root):
        inside[:] = sorted(each for each in inside if not _is_one_of(each, MADE_BY_TOOLS))
        links = [each for each in inside if Path(folder, each).is_symlink()]
        yield from (
            Path(folder, each).relative_to(root).as_posix() for each in sorted([*names, *links])
        )


# ---------------------------------------------------------------------------------------------------------------------------------------
# What does not travel
# ---------------------------------------------------------------------------------------------------------------------------------------


def _around(root: Path, path: str) -> tuple[str, str] | None:
    """The folder in which it lies with all around it that does not travel, and why."""
    above = reversed(Path(path).parents[:-1])  # from the top; the last is the project
    marks = ((folder, mark) for folder in above for mark in MADE)
    found = next(
        (
            (each, mark)
            for each, mark in marks
            if all((root / each / name).is_file() for name in mark)
        ),
        None,
    )
    return None if found is None else (f"{found[0].as_posix()}/", MADE[found[1]])


def _why_not(root: Path, path: str, *, wanted: bool, named: bool) -> str:
    """Empty for what travels. `wanted`: the user wants it, even if a run made it; `named`: this very file, whatever is in it."""
    if not named and (reason := _secret_by_name(path)):
        return reason
    place = root / path
    if reason := _why_not_followed(root, place, wanted=wanted):
        return reason
    if not place.is_file():
        return "a link to a folder" if place.is_dir() else "no file"
    if not named and PRIVATE_KEY.match(_beginning(place, 4096).lstrip()):
        return "a private key"
    return ""


def _secret_by_name(path: str) -> str:
    *folders, name = path.split("/")
    if any(each.lower() in SECRET_FOLDERS for each in folders):
        return "in a folder of credentials"
    if _is_one_of(name, SECRET_FILES) and not _is_one_of(name, SHOW_HOW):
        return "credentials, by its name"
    return ""


def _why_not_followed(root: Path, place: Path, *, wanted: bool) -> str:
    """Of what is a link, or lies behind one: by its content it would travel as what it leads to, under a name that says nothing of it."""
    try:
        target, within = place.resolve(), root.resolve()
    except RuntimeError:
        return "a link that leads round in a circle"
    if not target.is_relative_to(within):
        return "a link to what is outside of the project"
    real = target.relative_to(within).as_posix()
    if real == place.relative_to(root).as_posix():
        return ""
    if reason := _secret_by_name(real):
        return f"a link to {real}: {reason}"
    around = None if wanted else _around(within, real)
    return "" if around is None else f"a link into {around[0]}: {around[1]}"


def _is_one_of(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name.lower(), each) for each in patterns)


def _beginning(file: Path, length: int) -> bytes:
    with file.open("rb") as stream:
        return stream.read(length)


def _refuse_too_much(root: Path, sizes: Mapping[str, int]) -> None:
    total = sum(sizes.values())
    if total > LARGEST:
        largest = sorted(sizes, key=lambda path: -sizes[path])[:MAX_FILES_LISTED]
        shown = _listed((path, f"{sizes[path] / 1e6:.0f} MB") for path in largest)
        raise UsageError(
            f"{root} holds {total / 1e9:.1f} GB in {len(sizes)} files, and at most {LARGEST / 1e9:.1f} GB travel. Name what is not "
            f"needed in .gitignore, and let the task fetch its data where it runs. The largest:{shown}"
        )
    if len(sizes) > MOST_FILES:
        raise UsageError(
            f"{root} holds {len(sizes)} files, and at most {MOST_FILES} travel: name what is not needed in .gitignore, or pack "
            "them into one."
        )


def _refuse_secrets(files: Mapping[str, Path], secrets: Mapping[str, str]) -> None:
    """A value that travels apart shall stand in no file that does not."""
    wanted = {
        name: value.encode() for name, value in secrets.items() if len(value) >= SHORTEST_SECRET
    }
    found = [
        (path, name)
        for path, file in (files.items() if wanted else ())
        for data in (_beginning(file, SEARCHED).replace(b"\0", b""),)
        for name, value in wanted.items()
        if value in data
    ]
    if found:
        raise UsageError(
            "files of the project hold the values of secrets, and would take them to a place where others may read them. Take them out, or "
            f"name the files in .gitignore:{_listed((path, f'the value of {name}') for path, name in found[:MAX_FILES_LISTED])}"
        )


def _refuse_what_looks_secret(files: Mapping[str, Path]) -> None:
    found = [path for path, file in files.items() if _looks_secret(file)]
    if found:
        raise UsageError(
            "files of the project have lines that look like credentials, and would take them to a place where others may read them:"
            + "".join(f"\n  {path}" for path in found[:MAX_FILES_LISTED])
            + (
                f"\n  and {len(found) - MAX_FILES_LISTED} more"
                if len(found) > MAX_FILES_LISTED
                else ""
            )
            + f"\nTake the credentials out, name the files in .gitignore, write `{ALLOWLISTED}` into lines that hold none, or let the "
            "files travel as they are: --take PATH."
        )


def _looks_secret(file: Path) -> bool:
    """True if a text contains something in the form of a credential."""
    data = _text_of(_beginning(file, LOOKED_AT))
    if data is None:
        return False
    shortened = LONG_RUN.sub(rb"\1", data)
    lines = shortened.decode(errors="replace").split("\n")
    text = "\n".join(line for line in lines if ALLOWLISTED not in line)
    if PRIVATE_KEY.search(text.encode()) is not None or holds_secret(PLACEHOLDER.sub("", text)):
        return True
    of_short_lines = max(map(len, lines)) <= PIECE
    starts = (0,) if of_short_lines else range(0, len(text), PIECE)
    length = len(text) if of_short_lines else PIECE + OVERLAP
    return any(rule.search(text, at, at + length) for at in starts for rule in _rules())


def _text_of(data: bytes) -> bytes | None:
    """A text without NULs, of which UTF-16 has one beside each letter; None for what is none, as a picture or weights."""
    found = data.replace(b"\0", b"")
    strange = sum(found[:LONGEST_HEAD].count(each) for each in CONTROLS)
    return found if strange * 100 <= len(found[:LONGEST_HEAD]) else None


@cache
def _rules() -> tuple[re.Pattern[str], ...]:
    """Those of detect-secrets for the tokens of services."""
    from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class
    from detect_secrets.plugins.base import RegexBasedDetector

    rules: list[Any] = [
        rule
        for kind in get_mapping_from_secret_type_to_class().values()
        if issubclass(kind, RegexBasedDetector) and kind.__name__ not in RULES_LEFT_OUT
        for rule in cast("Any", kind()).denylist
    ]
    return tuple(rules)


def _listed(lines: Iterable[Sequence[str]]) -> str:
    return "".join(f"\n  {path}: {told}" for path, told in lines)
