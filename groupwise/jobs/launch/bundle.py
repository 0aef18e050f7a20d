"""Selects the files of a project that are sent to another machine: those that git would track, without secrets and files made by runs.

`groupwise launch` and `groupwise fleet submit --project-dir` both call `bundle`. Git itself reads the ignore files, also in a folder that
is not a repository. Untracked environments and caches are never sent. Links are followed inside the project. Each file that is left out is
listed with the reason, since the program may miss it on the other machine. Files are identified by their hashes
(`groupwise.jobs.hosts.files`), so only those that the machine lacks are sent.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from groupwise.core import atomic_files
from groupwise.core.cache import cache_folder
from groupwise.core.errors import GroupwiseError, UsageError
from groupwise.core.extras import require_packages
from groupwise.core.settings.credentials import holds_secret
from groupwise.core.terminal.quantities import byte_size, counted
from groupwise.core.terminal.text import one_line
from groupwise.jobs.clouds.folder import INCOMING, NOTE
from groupwise.jobs.hosts.files import MAX_FILES, walk
from groupwise.jobs.hosts.runner.protocol import is_utf8
from groupwise.jobs.launch.results import MARKER, RESULT
from groupwise.runs.schema import RECORD

MAX_BUNDLE_BYTES = 2 << 30
"""Most bytes of a bundle. Larger files are data, which should be downloaded where they are used."""
MAX_FILES_LISTED = 10
"""Most files that a refusal lists."""
MAX_NAMED = 3
"""Most files of one kind that the summary names."""
EXCLUDED_MARKERS = {
    (RECORD, "config.json"): "the folder of a run",
    (MARKER,): "what came back of launched jobs",
    (RESULT,): "what came back of a launched job",
    (f"{INCOMING}/{NOTE}",): "what came back of a launched job",
    ("pyvenv.cfg",): "an environment of Python",
    ("conda-meta/history",): "an environment of conda",
    ("CACHEDIR.TAG",): "a cache, by its CACHEDIR.TAG",
}
"""Folders that are left out, recognized by files in them: names such as `env` are not reliable."""
MADE_BY_TOOLS = tuple(
    ".git .hg .svn .venv node_modules __pycache__ *.egg-info .cache .ipynb_checkpoints .pytest_cache .mypy_cache .ruff_cache .hypothesis "
    ".tox .nox models--* datasets--*".split()
)
"""Names of environments and caches, which tools create again; the last two are folders of the hub's cache. Sent only if git tracks them."""
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""The first bytes of a file that git stores as a pointer in place of its contents."""
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
TEXT_CHECK_BYTES = 65_536
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
    sizes: dict[str, int]
    """Sizes in bytes of the files that are sent."""
    lfs_pointers: tuple[str, ...] = ()
    """Files whose contents Git LFS has not fetched."""
    unmatched: tuple[str, ...] = ()
    """Patterns of --exclude that match nothing."""

    @property
    def size(self) -> int:
        """Total size in bytes."""
        return sum(self.sizes.values())

    def largest(self, count: int = MAX_NAMED) -> list[str]:
        """The largest files."""
        return sorted(self.sizes, key=lambda path: -self.sizes[path])[:count]

    def summary(self) -> Iterator[str]:
        """Lines for the user: how much is sent, and what is not."""
        largest = ", ".join(f"{one_line(p)} {byte_size(self.sizes[p])}" for p in self.largest())
        yield (
            f"sends {counted(len(self.files), 'file')} of {self.root}, {byte_size(self.size)}"
            + f" (the largest: {largest})" * bool(largest)
        )
        by_reason: dict[str, list[str]] = {}
        for path, reason in self.left_out.items():
            by_reason.setdefault(reason, []).append(path)
        for reason, paths in [*by_reason.items()][:MAX_FILES_LISTED]:
            yield f"  {_some(paths)} {'is' if len(paths) == 1 else 'are'} not sent: {reason}"
        if len(by_reason) > MAX_FILES_LISTED:
            yield f"  and others for {len(by_reason) - MAX_FILES_LISTED} more reasons"
        if self.lfs_pointers:
            yield f"  {_some(self.lfs_pointers)}: pointers of Git LFS, without contents; `git lfs pull` gets those"
        for pattern in self.unmatched:
            yield f"  --exclude {pattern} matches no file that would be sent"


def bundle(
    root: Path,
    secrets: Mapping[str, str] | None = None,
    take: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> Bundle:
    """Select the files of the project in `root` that are sent.

    `secrets`: environment variables with secret values, which are sent separately. `take`: files and folders of the project that are
    sent although git ignores them, a run made them, or they look like credentials. `exclude`: patterns of files and folders that are
    not sent, unless `take` names that very file. Raises UsageError if a file contains a secret or something that looks like one, if
    `root` is not a folder, and if the files are too large or too many.
    """
    if not root.is_dir():
        raise UsageError(f"{root} is not a folder, so there is no project to send.")
    left_out: dict[str, str] = {}
    selected = {path for name in take for path in _files_to_take(root, name)}
    named_paths = {Path(os.path.normpath(name)).as_posix() for name in take}
    found = dict.fromkeys([*_project_files(root, left_out), *sorted(selected)])
    selection = _Selection(root, found, selected, named_paths, tuple(exclude), left_out)
    for path, real_path in _with_linked_folders(root, found, left_out):
        selection.add(path, real_path)
    sizes = selection.sizes
    for path in sorted(named_paths & left_out.keys()):
        raise UsageError(f"--file {path} cannot travel: {left_out[path]}.")
    project = Bundle(
        root,
        {path: root / path for path in sizes},
        left_out,
        sizes,
        tuple(selection.lfs_pointers),
        tuple(pattern for pattern in exclude if pattern not in selection.matched),
    )
    remedy = "Leave out what is not needed by --exclude or .gitignore"
    if project.size > MAX_BUNDLE_BYTES:
        listed = _file_lines(
            (path, byte_size(sizes[path])) for path in project.largest(MAX_FILES_LISTED)
        )
        raise UsageError(
            f"{root} holds {byte_size(project.size)} in {len(sizes)} files, and at most {byte_size(MAX_BUNDLE_BYTES)} are sent. {remedy}, "
            f"and let the task fetch its data where it runs. The largest:{listed}"
        )
    if len(sizes) > MAX_FILES:
        raise UsageError(
            f"{root} holds {len(sizes)} files, and at most {MAX_FILES} are sent. {remedy}, or pack them into one."
        )
    _refuse_secrets(project.files, secrets or {})
    _refuse_what_looks_secret(
        {path: file for path, file in project.files.items() if path not in selected}
    )
    return project


def path_in_project(root: Path, name: str) -> str | None:
    """The path in the project of a file or folder that is named from the current folder; None: it is outside of the project."""
    path = Path(os.path.abspath(Path(name).expanduser()))
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else None


# ---------------------------------------------------------------------------------------------------------------------------------------
# Files of the project
# ---------------------------------------------------------------------------------------------------------------------------------------


def _project_files(root: Path, left_out: dict[str, str], prefix: str = "") -> Iterator[str]:
    """Paths of the project's files and links, including those in submodules."""
    for path in _git_files(root):
        target = root / path
        if not target.is_dir() or target.is_symlink():
            if os.path.lexists(target):  # otherwise it was deleted, but not by `git rm`
                yield prefix + path
            continue
        inner = f"{prefix}{path.rstrip('/')}/"  # a nested repository
        if any(target.iterdir()):
            yield from _project_files(target, left_out, inner)
        else:
            left_out[inner] = (
                "a submodule that is not checked out: git submodule update --init --recursive"
            )


def _files_to_take(root: Path, selected: str) -> list[str]:
    """Paths in the project of the files that the user selected with --file."""
    target = root / selected
    relative = os.path.relpath(os.path.abspath(target), os.path.abspath(root))
    if relative == ".." or relative.startswith("../"):
        raise UsageError(
            f"--file {selected}: this is outside of the project in {root}, and only the project is sent. Copy it into the project."
        )
    if not target.exists():
        raise UsageError(f"--file {selected}: there is no such file or folder in {root}.")
    path, project = Path(relative), root.resolve()
    real = (
        (project / path).resolve()
        if target.is_dir()
        else (project / path.parent).resolve() / path.name
    )
    if real == project / path:
        return walk(root, root / path) if target.is_dir() else [path.as_posix()]
    if not real.is_relative_to(project):
        raise UsageError(
            f"--file {selected}: a link leads out of the project in {root}, to {real}. Copy it into the project."
        )
    # The files themselves, and the link through which they were named.
    link = next(above for above in reversed([path, *path.parents]) if (root / above).is_symlink())
    return [link.as_posix(), *_files_to_take(root, real.relative_to(project).as_posix())]


def _git_files(root: Path) -> list[str]:
    """The files that git tracks, and the untracked ones that git does not ignore and no tool has made. If the folder is in no repository,
    or its repository ignores it, all files count as untracked."""
    in_repository = any((folder / ".git").exists() for folder in (root, *root.resolve().parents))
    try:
        files = _ls_files(root, "--cached") if in_repository else []
        if files or (in_repository and _git(root, "check-ignore", "-q", ".").returncode != 0):
            return files
        with tempfile.TemporaryDirectory() as empty:
            _git(root, "init", "--quiet", "--bare", empty)
            return _ls_files(root, git=("--git-dir", empty, "--work-tree", "."))
    except FileNotFoundError:
        if in_repository or (root / ".gitignore").exists():
            raise UsageError(
                f"{root} is a project of git, and there is no git here to say which of its files are ignored. Install git."
            ) from None
        return walk(root, root, lambda name: _matches_any(name, MADE_BY_TOOLS))


def _ls_files(root: Path, *options: str, git: Sequence[str] = ()) -> list[str]:
    patterns = (f"--exclude={pattern}" for pattern in MADE_BY_TOOLS)
    options = ("-z", *options, "--others", "--exclude-standard", "--deduplicate", *patterns)
    result = _git(root, *git, "ls-files", *options)
    if result.returncode != 0:
        message = result.stderr.decode(errors="replace").strip()
        raise UsageError(f"git does not say which files of {root} are its own: {message}")
    return [os.fsdecode(name) for name in result.stdout.split(b"\0") if name]


def _git(root: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    # A hook of git sets variables that name another repository than the project's.
    others = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")
    environment = {name: value for name, value in os.environ.items() if name not in others}
    # Git would otherwise run a program that the project's config names.
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(root), *words]
    return subprocess.run(command, env=environment, capture_output=True, check=False)


def _with_linked_folders(
    root: Path, found: Mapping[str, None], left_out: dict[str, str]
) -> Iterator[tuple[str, str]]:
    """Each path with itself; for a link to a folder of the project, the paths below the link, each with the path of the same file there.
    Only those files of the folder are sent that are sent from their own place."""
    project = root.resolve()
    targets: dict[str, str] = {}
    for path in found:
        file = root / path
        if (
            file.is_symlink()
            and file.is_dir()
            and (target := file.resolve()).is_relative_to(project)
        ):
            targets[path] = target.relative_to(project).as_posix()

    def expand(path: str, inside: frozenset[str]) -> Iterator[tuple[str, str]]:
        target = targets.get(path)
        if target is None:
            yield path, path
            return
        if target == "." or path.startswith(f"{target}/") or target in inside:
            left_out[path] = "a link that leads back to itself"
            return
        below = [other for other in found if other.startswith(f"{target}/")]
        if not below:
            left_out[path] = f"a link to {target}/, from which no file is sent"
        for other in below:
            for name, real_path in expand(other, inside | {target}):
                yield path + name[len(target) :], real_path

    expanded = itertools.chain.from_iterable(expand(path, frozenset()) for path in found)
    # Links to folders with links to folders may lead to any number of files.
    return itertools.islice(expanded, len(found) + MAX_FILES + 1)


# ---------------------------------------------------------------------------------------------------------------------------------------
# Files that are left out
# ---------------------------------------------------------------------------------------------------------------------------------------


class _Selection:
    """Decides for each file whether it is sent, and collects the sizes of those that are and the reasons for the others."""

    def __init__(
        self,
        root: Path,
        found: Mapping[str, None],
        selected: set[str],
        named_paths: set[str],
        exclude: Sequence[str],
        left_out: dict[str, str],
    ) -> None:
        """`found`: files that may travel; `selected`: the user selected these, even if a run made them; `named_paths`: the user named these
        very files, so their content is not checked."""
        self._root, self._project, self._exclude = root, root.resolve(), exclude
        self._found = found
        self._selected, self._named_paths, self._left_out = selected, named_paths, left_out
        self.sizes: dict[str, int] = {}
        self.lfs_pointers: list[str] = []
        self.matched: set[str] = set()
        self._excluded_folder = cache(self._find_excluded_folder)

    def add(self, path: str, real_path: str) -> None:
        """Send this file, or note why it is left out. `real_path`: its path without links to folders."""
        if path not in self._named_paths:
            # By the place of its content, too: what is left out there does not travel through a link.
            content = Path(os.path.realpath(self._root / real_path))
            places = {path, real_path}
            if content.is_relative_to(self._project):
                places.add(content.relative_to(self._project).as_posix())
            for pattern in self._exclude:
                if any(_matches(place, pattern) for place in places):
                    self.matched.add(pattern)
                    self._left_out[path] = f"--exclude {pattern}"
                    return
        folder = os.path.dirname(real_path)
        if real_path not in self._selected and (excluded := self._excluded_folder(folder)):
            self._left_out[excluded[0]] = excluded[1]
            return
        try:
            reason = self._exclusion_reason(path, real_path)
        except OSError as error:
            reason = f"it cannot be read: {error.strerror}"
        if reason:
            self._left_out[path] = reason

    def _exclusion_reason(self, path: str, real_path: str) -> str:
        """Why a file is not sent; empty if it is."""
        is_named = path in self._named_paths
        if not is_named and (reason := _secret_by_name(real_path) or _secret_by_name(path)):
            return reason
        if not is_utf8(path):
            return "its name is not UTF-8"
        file = self._root / real_path
        if file.is_symlink() and (reason := self._link_problem(path, file)):
            return reason
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            return "no file"
        head = _read_head(file, 4096)
        if not is_named and PRIVATE_KEY.match(head.lstrip()):
            return "a private key"
        if head.startswith(LFS_POINTER) and status.st_size < 1024:
            self.lfs_pointers.append(path)
        self.sizes[path] = status.st_size
        return ""

    def _link_problem(self, path: str, link: Path) -> str:
        """Why a link to a file is not followed; empty if it is. The content of its target would be sent, under the link's name."""
        try:
            target = link.resolve()
        except RuntimeError:
            return "a link that leads back to itself"
        if not target.is_relative_to(self._project):
            return "a link to what is outside of the project"
        real = target.relative_to(self._project).as_posix()
        if reason := _secret_by_name(real):
            return f"a link to {real}: {reason}"
        excluded = self._excluded_folder(os.path.dirname(real))
        if path not in self._selected and excluded is not None:
            return f"a link into {excluded[0]}: {excluded[1]}"
        if not target.exists():
            return "a link to nothing"
        is_found = real in self._found or path in self._selected
        return "" if is_found else f"a link to {real}, which does not travel"

    def _find_excluded_folder(self, folder: str) -> tuple[str, str] | None:
        """The topmost of a folder and its parents that is left out as a whole, and the reason; None if there is none."""
        if not folder:
            return None
        if above := self._excluded_folder(os.path.dirname(folder)):
            return above
        for marker, reason in EXCLUDED_MARKERS.items():
            if all((self._project / folder / name).is_file() for name in marker):
                return f"{folder}/", reason
        return None


def _matches(path: str, pattern: str) -> bool:
    """True if a pattern of --exclude matches the file or a folder that it is in: by its name; by its path if the pattern has a slash."""
    parts = path.split("/")
    core = pattern.strip("/")
    candidates = (
        parts
        if "/" not in pattern.rstrip("/")
        else ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]
    )
    if pattern.endswith("/"):
        candidates = candidates[:-1]
    return any(fnmatchcase(candidate, core) for candidate in candidates)


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
            "files of the project hold the values of secrets, which others could read on the other machine. Take them out, or "
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
        "files of the project have lines that look like credentials, which others could read on the other machine:"
        + "".join(f"\n  {line}" for line in listed)
        + f"\nTake the credentials out, leave the files out (--exclude PATTERN, or .gitignore), write `{ALLOWLISTED}` into "
        "lines that hold none, or send the files as they are: --file PATH."
    )


def _looks_secret(file: Path) -> bool:
    """True if a text file contains a string in the format of a credential."""
    # Removes the NUL bytes of UTF-16.
    data = _read_head(file, CREDENTIAL_SEARCH_BYTES).replace(b"\0", b"")
    head = data[:TEXT_CHECK_BYTES]
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
    """detect-secrets' patterns for tokens of services. They are kept on disk, because its rules import clients of those services."""
    require_packages("--project-dir", "launch", "detect_secrets", advice=" Nothing was sent.")
    note = cache_folder("launch") / f"secret-patterns-{version('detect-secrets')}.json"
    try:
        rules: list[tuple[str, str, int]] = json.loads(note.read_text("utf-8"))
    except (OSError, ValueError):
        from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class
        from detect_secrets.plugins.base import RegexBasedDetector

        rules = [
            (kind.__name__, rule.pattern, rule.flags)
            for kind in get_mapping_from_secret_type_to_class().values()
            if issubclass(kind, RegexBasedDetector)
            for rule in cast("Any", kind()).denylist
        ]
        with suppress(OSError, GroupwiseError):
            note.parent.mkdir(parents=True, exist_ok=True)
            atomic_files.write_json(note, rules)
    return tuple(
        re.compile(pattern, flags) for kind, pattern, flags in rules if kind not in RULES_LEFT_OUT
    )


def _some(paths: Sequence[str]) -> str:
    """The first few paths, and how many more there are."""
    shown = ", ".join(map(one_line, paths[:MAX_NAMED]))
    return f"{shown} and {len(paths) - MAX_NAMED} more" if len(paths) > MAX_NAMED else shown


def _file_lines(entries: Iterable[Sequence[str]]) -> str:
    return "".join(f"\n  {path}: {detail}" for path, detail in entries)
