"""Selects the files of a project that are sent to another machine: those that git would track, without secrets and files made by runs.

From a folder without git, all files are sent except those that tools create (environments, caches). Files that are left out are listed
with the reason, since the program may miss them on the other machine. Files are identified by their hashes
(`groupwise.jobs.hosts.files`): a machine is sent only those that it lacks.
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
"""Most bytes of a bundle. Larger files are data, which should be downloaded where they are used."""
MAX_FILES_LISTED = 10
"""Most files that a message lists."""
EXCLUDED_MARKERS = {
    (RECORD, "config.json"): "the folder of a run",
    (MARKER,): "what came back of launched jobs",
    (RESULT,): "what came back of a launched job",
    (f"{INCOMING}/{NOTE}",): "what came back of a launched job",
    ("pyvenv.cfg",): "an environment of Python",
}
"""Folders that are left out, recognized by files in them: names such as `env` are not reliable."""
MADE_BY_TOOLS = (
    *(".git", ".hg", ".svn", "node_modules", "__pycache__", "*.egg-info"),
    *(".ipynb_checkpoints", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".tox"),
)
"""Folders to skip in a project without git, because tools create them again."""
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
EXAMPLE_NAMES = ("*.example", "*.sample", "*.template", "*.pub")
"""Names that match SECRET_FILES, but belong to examples or public keys."""
PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----")
RULES_LEFT_OUT = frozenset(
    "BasicAuthDetector IPPublicDetector IbmCloudIamDetector IbmCosHmacDetector SoftlayerDetector CloudantDetector".split()
)
"""Rules of detect-secrets that match words around a value, and therefore ordinary code; `holds_secret` finds passwords in URLs."""
ALLOWLISTED = "pragma: allowlist secret"
"""A line with this comment is not searched for secrets; detect-secrets uses the same comment."""
PLACEHOLDER = re.compile(
    r"(?<=://)[^\s/?#@:]{0,100}:(?:pass(?:word|wd)?|pw|secret|token|key|x+|\*+|\.+|changeme|example)@",
    re.IGNORECASE,
)
"""Placeholders for a password in a URL."""
PIECE, OVERLAP = 1000, 400
"""Long lines are searched in pieces of this many characters, because some rules take quadratic time. The overlap is longer than any
token."""
LONG_RUN = re.compile(rb"([A-Za-z0-9+/_-]{400})[A-Za-z0-9+/_-]+")
"""A run of characters longer than any token, such as a picture in a notebook; only its first characters are searched."""
SECRET_SEARCH_BYTES = 16 << 20
"""Most bytes of a file that are searched for the values of secrets: files written by people are shorter."""
SHORTEST_SECRET = 8
"""Length of the shortest value that is searched for: shorter ones appear in files by chance."""
CREDENTIAL_SEARCH_BYTES = 32 << 20
"""Most bytes of a file that are searched for text that looks like a credential."""
LONGEST_HEAD = 65_536
"""How many bytes at the start of a file are used to decide whether it is a text."""
CONTROLS = tuple(bytes([code]) for code in (*range(1, 9), *range(14, 27), *range(28, 32)))
"""Control characters, which are rare in texts."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """The files of a project that are sent."""

    root: Path
    files: dict[str, Path]
    """Files that are sent, by their paths on the machine."""
    left_out: dict[str, str]
    """Files that are not sent, with the reason; names of folders end with a slash."""
    size: int
    """Total size in bytes."""


def bundle(
    root: Path, secrets: Mapping[str, str] | None = None, take: Sequence[str] = ()
) -> Bundle:
    """Select the files of the project in `root` that are sent.

    `secrets`: environment variables with secret values, which are sent separately. `take`: files and folders of the project that are
    sent although git ignores them, a run made them, or they look like credentials. Raises UsageError if a file contains a secret or
    something that looks like one, if `root` is no folder, and if the files are too large or too many.
    """
    if not root.is_dir():
        raise UsageError(f"{root} is no folder, so there is no project to take along.")
    files: dict[str, Path] = {}
    left_out: dict[str, str] = {}
    selected = {path for name in take for path in _files_to_take(root, name)}
    named_paths = {Path(os.path.normpath(name)).as_posix() for name in take}
    for path in dict.fromkeys([*_project_files(root), *sorted(selected)]):
        if path not in selected and (excluded := _excluded_parent(root, path)) is not None:
            left_out[excluded[0]] = excluded[1]
        elif reason := _exclusion_reason(
            root, path, is_selected=path in selected, is_named=path in named_paths
        ):
            left_out[path] = reason
        else:
            files[path] = root / path
    sizes = {path: file.stat().st_size for path, file in files.items()}
    total = sum(sizes.values())
    if total > LARGEST:
        largest = sorted(sizes, key=lambda path: -sizes[path])[:MAX_FILES_LISTED]
        listed = _file_lines((path, f"{sizes[path] / 1e6:.0f} MB") for path in largest)
        raise UsageError(
            f"{root} holds {total / 1e9:.1f} GB in {len(sizes)} files, and at most {LARGEST / 1e9:.1f} GB travel. Name what is not "
            f"needed in .gitignore, and let the task fetch its data where it runs. The largest:{listed}"
        )
    if len(sizes) > MOST_FILES:
        raise UsageError(
            f"{root} holds {len(sizes)} files, and at most {MOST_FILES} travel: name what is not needed in .gitignore, or pack "
            "them into one."
        )
    _refuse_secrets(files, secrets or {})
    _refuse_what_looks_secret({path: file for path, file in files.items() if path not in selected})
    return Bundle(root, files, left_out, sum(sizes.values()))


# ---------------------------------------------------------------------------------------------------------------------------------------
# Files of the project
# ---------------------------------------------------------------------------------------------------------------------------------------


def _project_files(root: Path) -> Iterator[str]:
    """Paths of the project's files and links, including those in submodules."""
    tracked = _git_files(root)
    if tracked is None:
        for folder, inside, names in os.walk(root):
            inside[:] = sorted(name for name in inside if not _matches_any(name, MADE_BY_TOOLS))
            links = [name for name in inside if Path(folder, name).is_symlink()]
            yield from (
                Path(folder, name).relative_to(root).as_posix() for name in sorted([*names, *links])
            )
        return
    for path in tracked:
        target = root / path
        if target.is_dir() and not target.is_symlink():  # a nested repository
            yield from (f"{path.rstrip('/')}/{name}" for name in _project_files(target))
        elif os.path.lexists(target):  # otherwise it was deleted without telling git
            yield path


def _files_to_take(root: Path, selected: str) -> list[str]:
    """Paths in the project of the files that the user selected with --file."""
    target = root / selected
    relative = os.path.relpath(os.path.abspath(target), os.path.abspath(root))
    if relative == ".." or relative.startswith("../"):
        raise UsageError(
            f"--file {selected}: this is outside of the project in {root}, of which a job has a copy. Copy it into the project."
        )
    if not target.exists():
        raise UsageError(f"--file {selected}: there is no such file or folder in {root}.")
    if target.is_file():
        return [Path(relative).as_posix()]
    paths = [Path(folder, name) for folder, _, names in os.walk(target) for name in names]
    return sorted(path.relative_to(root).as_posix() for path in paths)


def _git_files(root: Path) -> list[str] | None:
    """Tracked files, and untracked ones that are not ignored; None if the folder does not belong to git."""
    command = [
        "git",
        # Git would otherwise run a program that the project's config names.
        *("-c", "core.fsmonitor=false"),
        "-C",
        str(root),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
        "--deduplicate",
    ]
    is_gits = any((folder / ".git").exists() for folder in (root, *root.resolve().parents))
    try:
        result = subprocess.run(command, capture_output=True, check=False)
    except OSError:
        if is_gits:
            raise UsageError(
                f"{root} is a project of git, and there is no git here to say which of its files are ignored. Install git."
            ) from None
        return None
    if result.returncode != 0:
        if is_gits:
            message = result.stderr.decode(errors="replace").strip()
            raise UsageError(f"git does not say which files of {root} are its own: {message}")
        return None
    return [os.fsdecode(name) for name in result.stdout.split(b"\0") if name]


# ---------------------------------------------------------------------------------------------------------------------------------------
# Files that are left out
# ---------------------------------------------------------------------------------------------------------------------------------------


def _excluded_parent(root: Path, path: str) -> tuple[str, str] | None:
    """The topmost parent folder that is left out as a whole, and the reason; None if there is none."""
    # From the top; the last one, left out, is the project itself.
    for folder in reversed(Path(path).parents[:-1]):
        for marker, reason in EXCLUDED_MARKERS.items():
            if all((root / folder / name).is_file() for name in marker):
                return f"{folder.as_posix()}/", reason
    return None


def _exclusion_reason(root: Path, path: str, *, is_selected: bool, is_named: bool) -> str:
    """Why a file is not sent; empty if it is. `is_selected`: the user selected it, even if a run made it; `is_named`: the user named this
    very file, so its content is not checked."""
    if not is_named and (reason := _secret_by_name(path)):
        return reason
    file, project = root / path, root.resolve()
    try:
        target = file.resolve()
    except RuntimeError:
        return "a link that leads round in a circle"
    if not target.is_relative_to(project):
        return "a link to what is outside of the project"
    # For a link the content of its target would be sent, under the link's name: so check the target.
    real = target.relative_to(project).as_posix()
    if real != path:
        if reason := _secret_by_name(real):
            return f"a link to {real}: {reason}"
        if not is_selected and (excluded := _excluded_parent(project, real)) is not None:
            return f"a link into {excluded[0]}: {excluded[1]}"
    if not file.is_file():
        return "a link to a folder" if file.is_dir() else "no file"
    if not is_named and PRIVATE_KEY.match(_read_head(file, 4096).lstrip()):
        return "a private key"
    return ""


def _secret_by_name(path: str) -> str:
    *folders, name = path.split("/")
    if any(folder.lower() in SECRET_FOLDERS for folder in folders):
        return "in a folder of credentials"
    if _matches_any(name, SECRET_FILES) and not _matches_any(name, EXAMPLE_NAMES):
        return "credentials, by its name"
    return ""


def _matches_any(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name.lower(), pattern) for pattern in patterns)


def _read_head(file: Path, length: int) -> bytes:
    with file.open("rb") as stream:
        return stream.read(length)


def _refuse_secrets(files: Mapping[str, Path], secrets: Mapping[str, str]) -> None:
    """Raise UsageError if a file contains the value of a secret; secrets are sent separately."""
    values = {
        name: value.encode() for name, value in secrets.items() if len(value) >= SHORTEST_SECRET
    }
    if not values:
        return
    matches: list[tuple[str, str]] = []
    for path, file in files.items():
        data = _read_head(file, SECRET_SEARCH_BYTES).replace(b"\0", b"")
        matches += [
            (path, f"the value of {name}") for name, value in values.items() if value in data
        ]
    if matches:
        raise UsageError(
            "files of the project hold the values of secrets, and would take them to a place where others may read them. Take them out, or "
            f"name the files in .gitignore:{_file_lines(matches[:MAX_FILES_LISTED])}"
        )


def _refuse_what_looks_secret(files: Mapping[str, Path]) -> None:
    paths = [path for path, file in files.items() if _looks_secret(file)]
    if not paths:
        return
    listed = paths[:MAX_FILES_LISTED]
    if len(paths) > len(listed):
        listed.append(f"and {len(paths) - len(listed)} more")
    raise UsageError(
        "files of the project have lines that look like credentials, and would take them to a place where others may read them:"
        + "".join(f"\n  {line}" for line in listed)
        + f"\nTake the credentials out, name the files in .gitignore, write `{ALLOWLISTED}` into lines that hold none, or let the "
        "files travel as they are: --file PATH."
    )


def _looks_secret(file: Path) -> bool:
    """True if a text file contains a string in the format of a credential."""
    data = _read_head(file, CREDENTIAL_SEARCH_BYTES).replace(
        b"\0", b""
    )  # removes the NUL bytes of UTF-16
    head = data[:LONGEST_HEAD]
    if sum(head.count(control) for control in CONTROLS) * 100 > len(head):
        return False  # not a text: a picture or weights
    shortened = LONG_RUN.sub(rb"\1", data)
    lines = shortened.decode(errors="replace").split("\n")
    text = "\n".join(line for line in lines if ALLOWLISTED not in line)
    if PRIVATE_KEY.search(text.encode()) is not None or holds_secret(PLACEHOLDER.sub("", text)):
        return True
    has_short_lines = max(map(len, lines)) <= PIECE
    starts = (0,) if has_short_lines else range(0, len(text), PIECE)
    length = len(text) if has_short_lines else PIECE + OVERLAP
    return any(rule.search(text, at, at + length) for at in starts for rule in _secret_patterns())


@cache
def _secret_patterns() -> tuple[re.Pattern[str], ...]:
    """detect-secrets' patterns for tokens of services."""
    from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class
    from detect_secrets.plugins.base import RegexBasedDetector

    rules: list[Any] = [
        rule
        for kind in get_mapping_from_secret_type_to_class().values()
        if issubclass(kind, RegexBasedDetector) and kind.__name__ not in RULES_LEFT_OUT
        for rule in cast("Any", kind()).denylist
    ]
    return tuple(rules)


def _file_lines(entries: Iterable[Sequence[str]]) -> str:
    return "".join(f"\n  {path}: {detail}" for path, detail in entries)
