"""Secrets of jobs: which variables and files of the control machine a job may be given, and their values.

A job names its secrets (`env:HF_TOKEN`, `file:/etc/groupwise/secrets/token`) and the dispatcher reads them where it runs, with its own
rights. So the fleet's operator defines by patterns (`allowed_secrets` of the settings) which secrets jobs may have; a submitter only
chooses among them. The patterns are checked twice: when a job is admitted, for an immediate answer, and when a value is read, since a row
may have changed since, and a link may lead out of its folder. No message of either check ever holds a value.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

SETTING = "allowed_secrets"
VARIABLES = ("env:HF_TOKEN", "env:WANDB_API_KEY", "env:OPENAI_API_KEY")
FOLDER = "file:secrets/*"
"""Files directly in the folder `secrets` of the fleet's folder."""
DEFAULT_PATTERNS = (*VARIABLES, FOLDER)
MAX_BYTES = 64 * 1024
"""Maximum bytes of a value: it becomes an environment variable."""

_VARIABLE = re.compile(r"[A-Za-z_*?][A-Za-z0-9_*?]*")
_WILD = re.compile(r"[*?\[]")

Secrets = Callable[[Mapping[str, str]], Mapping[str, str]]
"""Function from variable → reference to variable → value."""


class SecretMissing(Exception):
    """A reference leads nowhere, or to a place that is not allowed; the message names it, and never a value."""


def pattern_problems(pattern: str) -> list[str]:
    """Problems of one of the operator's patterns, as messages."""
    kind, _, target = pattern.partition(":")
    if kind == "env" and _VARIABLE.fullmatch(target):
        return []
    if kind == "file" and target and _has_plain_parts(target.removeprefix("/")):
        return []
    return [
        f"{pattern!r} is not a pattern of secrets: write env:NAME or file:PATH, with `*` for any letters of a name or of one part of a path"
    ]


def _has_plain_parts(path: str) -> bool:
    """True if no part of the path is empty, `.` or `..`."""
    return "\0" not in path and all(part not in ("", ".", "..") for part in path.split("/"))


@dataclass(frozen=True, slots=True)
class AllowedSecrets:
    """The secrets that jobs of one fleet may name."""

    patterns: Sequence[str] = VARIABLES
    folder: Path | None = None
    """The fleet's folder: relative patterns of files start there."""

    def problems(self, references: Mapping[str, str]) -> list[str]:
        """Reasons why a job may not have some of these secrets, judged by the text of the references alone."""
        return [
            f"secret {name}: {refusal}"
            for name, reference in references.items()
            if (refusal := self._refusal_reason(reference)) is not None
        ]

    def read(self, references: Mapping[str, str]) -> dict[str, str]:
        """Read the values; a newline at the end of a file is removed. Raises SecretMissing."""
        return {name: self._read_secret(name, reference) for name, reference in references.items()}

    def _refusal_reason(self, reference: str) -> str | None:
        kind, _, target = reference.partition(":")
        if kind == "env" and any(fnmatchcase(reference, pattern) for pattern in self.patterns):
            return None
        if (
            kind == "file"
            and target.startswith("/")
            and _has_plain_parts(target[1:])
            and self._matching_patterns(target)
        ):
            return None
        allowed = ", ".join(self.patterns) or "nothing"
        location = "" if self.folder is None else f" in {self.folder}/fleet.yaml"
        return (
            f"{reference[:200]!r} is not among what jobs of this fleet may be given: {allowed}. The fleet's operator adds it to "
            f"{SETTING}{location}, and restarts its processes."
        )

    def _matching_patterns(self, path: str) -> list[str]:
        """The patterns of absolute paths that match a path."""
        targets = (p.removeprefix("file:") for p in self.patterns if p.startswith("file:"))
        patterns = (
            target if target.startswith("/") else f"{self.folder}/{target}"
            for target in targets
            if target.startswith("/") or self.folder is not None
        )
        return [pattern for pattern in patterns if _matches(path, pattern)]

    def _read_secret(self, name: str, reference: str) -> str:
        if (refusal := self._refusal_reason(reference)) is not None:
            raise SecretMissing(f"secret {name}: {refusal}")
        kind, _, source = reference.partition(":")
        value = os.environ.get(source) if kind == "env" else self._read_secret_file(name, source)
        if value is None or "\0" in value:
            raise SecretMissing(
                f"secret {name} is to be read from {reference}, and there is no text that can be read on the control machine"
            )
        return value

    def _read_secret_file(self, name: str, path: str) -> str | None:
        """Content of a file; None if it cannot be read. Links are followed only within the folder that a pattern names."""
        try:
            real_path = os.path.realpath(path, strict=True)
            folders = map(_fixed_folder, self._matching_patterns(path))
            if not any(os.path.commonpath((real_path, folder)) == folder for folder in folders):
                raise SecretMissing(
                    f"secret {name}: {path} is a link that leads out of the folder that {SETTING} names; put the file itself there"
                )
            file = os.open(real_path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(file, "rb") as opened:
                if not stat.S_ISREG(os.fstat(file).st_mode):
                    raise OSError("it is not a file")
                data = opened.read(MAX_BYTES + 1)
            if len(data) > MAX_BYTES:
                raise OSError("it is too long for a variable")
            return data.decode().removesuffix("\n")
        except (OSError, ValueError):  # ValueError: not a text, or not a valid path
            return None


DEFAULT_SECRETS = AllowedSecrets()
"""Default for callers that do not know the fleet's settings; it allows no files."""


def _matches(path: str, pattern: str) -> bool:
    """Match part by part: `*` matches one name and never a path."""
    parts, patterns = path.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _fixed_folder(pattern: str) -> str:
    """The folder above the first part with a wildcard; it is the operator's own, and may be a link."""
    parts = pattern.split("/")[:-1]
    fixed_parts = next((n for n, part in enumerate(parts) if _WILD.search(part)), len(parts))
    return os.path.realpath("/".join(parts[:fixed_parts]) or "/")
