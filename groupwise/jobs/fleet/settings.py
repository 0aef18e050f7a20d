"""The settings of a fleet: its folder, and how often its roles check for changes.

A fleet is identified by one folder, which holds the database (SQLite in the folder, unless a PostgreSQL URL is set), logs, artefacts and
the store of files. `GROUPWISE_FLEET` names the folder, and so does `--fleet`; without either it is `~/.groupwise/fleet`. Both may also
name the address of a fleet's HTTP API: then there is nothing else to set here, because the operator of the API has done so.

The defaults are overridden by `fleet.yaml` in the folder, that by environment variables (`GROUPWISE_FLEET_POLL_SECONDS=5`), and those by
options of the command line. None of them needs a password: `database` may leave it to PGPASSWORD or a `.pgpass` file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar
from urllib.parse import urlsplit

from pydantic import AfterValidator

from groupwise.core.errors import ConfigError
from groupwise.core.settings.overrides import lay_environment_over
from groupwise.core.settings.schema import Strict, keys_of, setting
from groupwise.core.settings.tree import Tree, read_yaml
from groupwise.core.settings.validation import validate
from groupwise.jobs.fleet import secrets
from groupwise.jobs.fleet.secrets import AllowedSecrets

VARIABLE = "GROUPWISE_FLEET"
"""Names the folder of the fleet, or the address of its API."""
ENVIRONMENT = "GROUPWISE_FLEET_"
"""Prefix of the environment variables that are settings."""
FILE = "fleet.yaml"
"""File in the folder with the permanent settings."""
DEFAULT_FOLDER = "~/.groupwise/fleet"
DEFAULT_NATS = "nats://localhost:4222"
"""Default address of NATS for a fleet with several processes."""
OFF = "off"
MAX_SECONDS = 86_400.0
"""Longest pause between two looks, one day: a typing error must not stop a role for good."""
MAX_HOURS = 87_600.0
"""Ten years."""
DATABASE_FILE = "fleet.db"

_ADDRESS = re.compile(r"https?://", re.IGNORECASE)


def _check_patterns(patterns: tuple[str, ...]) -> tuple[str, ...]:
    problems = [problem for pattern in patterns for problem in secrets.pattern_problems(pattern)]
    if problems:
        raise ValueError("; ".join(problems))
    return patterns


def _check_nats(url: str | None) -> str | None:
    """Check the URL at start-up: waiting for a server that never comes would look the same as a typing error. Messages contain no part that
    may be secret."""
    for server in () if url is None or url == OFF else url.split(","):
        if not _is_nats(server.strip()):
            visible_url = (
                "one with a user or a token in it" if "@" in server else repr(server.strip())
            )
            raise ValueError(
                f"{visible_url} is not a URL of NATS; it is nats://host:4222 or tls://host:4222, several with a comma between, or `{OFF}`"
            )
    return url


def _is_nats(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("nats", "tls") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number
        return False


class FleetSettings(Strict):
    """Each key is set in `fleet.yaml`, or in the environment as GROUPWISE_FLEET_<KEY>."""

    refused: ClassVar[Mapping[str, str]] = {
        "folder": f"the folder is where {FILE} lies; {VARIABLE} or --fleet names it",
        "api_key": "keys may not be in the settings; GROUPWISE_API_KEY holds the one that a client sends",
    }

    database: str | None = setting(
        None,
        f"URL of the database, as postgresql://user@host/groupwise; null: SQLite, {DATABASE_FILE} in the folder.",
        min_length=1,
    )
    nats_url: Annotated[str | None, AfterValidator(_check_nats)] = setting(
        None,
        "URL of NATS, which wakes dispatchers and receives the ends of jobs; `off`: no NATS; null: none for an embedded fleet, "
        f"{DEFAULT_NATS} otherwise. No job is lost if NATS is away.",
        min_length=1,
    )
    poll_seconds: float = setting(
        15.0, "Seconds between two looks at a machine.", gt=0, le=MAX_SECONDS
    )
    sweep_seconds: float = setting(
        2.0,
        "Seconds between two looks at the queue, for jobs that no message announced.",
        gt=0,
        le=MAX_SECONDS,
    )
    requeue_seconds: float = setting(
        60.0,
        "Seconds between two comparisons of all attempts with their machines.",
        gt=0,
        le=MAX_SECONDS,
    )
    lease_seconds: float = setting(
        25.0,
        "Seconds of silence of a dispatcher after which another one takes over its attempts; at most 120.",
        ge=1,
        le=120,
    )
    trust_on_first_use: bool = setting(
        False,
        "Whether the first host key that a machine shows is pinned without anybody confirming it.",
    )
    ship_logs: str | None = setting(
        None,
        "Where lines of logs go besides their files, as JSON lines: `stdout`, the path of a file, or an http(s) URL; null: nowhere.",
        min_length=1,
    )
    webhooks_to_private: bool = setting(
        False,
        "Whether webhooks may reach addresses that are not of the public internet: any submitter could then reach what runs there.",
    )
    allowed_secrets: Annotated[tuple[str, ...], AfterValidator(_check_patterns)] = setting(
        secrets.DEFAULT_PATTERNS,
        "Which variables and files of the control machine jobs may name as secrets: env:NAME and file:PATH, `*` for any name; paths of "
        "files start in the fleet's folder, unless absolute. No link is followed out of the folder that is named.",
    )
    keep_completed_hours: float = setting(
        24.0,
        "Hours for which the working folder of a successful attempt stays on its machine, at least 1.",
        ge=1,
        le=MAX_HOURS,
    )
    keep_failed_hours: float = setting(
        72.0,
        "Hours for which the folders of all other attempts stay there, so that people can look into them, at least 1.",
        ge=1,
        le=MAX_HOURS,
    )
    keep_checkpoints: int = setting(
        2,
        "Number of copied checkpoints of each job that are kept, the newest ones; the one that an attempt continues from stays as "
        "long as the attempt.",
        ge=1,
        le=10_000,
    )
    concurrency: int = setting(
        64,
        "Machines that a poller looks at, or a dispatcher compares with the database, at the same time. Machines that did not answer have "
        "as many places of their own, at most 64. Work on a job is not counted.",
        ge=1,
        le=10_000,
    )


@dataclass(frozen=True, slots=True)
class FleetPlace:
    """A fleet that this machine can reach directly: its folder and its settings."""

    folder: Path
    """The absolute path of its folder."""
    settings: FleetSettings

    @property
    def database_url(self) -> str:
        """The URL of the database, in SQLAlchemy's format."""
        return self.settings.database or f"sqlite:///{self.folder / DATABASE_FILE}"

    @property
    def is_embedded(self) -> bool:
        """True if the database is a file of this machine: then there is one dispatcher, and nothing to migrate by hand."""
        return self.database_url.startswith("sqlite")

    @property
    def nats_url(self) -> str | None:
        """The URL of NATS; None: the fleet uses none."""
        url = self.settings.nats_url
        if url is None and not self.is_embedded:
            return DEFAULT_NATS
        return None if url == OFF else url

    @property
    def secrets(self) -> AllowedSecrets:
        """The secrets of this machine that jobs may be given."""
        return AllowedSecrets(self.settings.allowed_secrets, self.folder)

    @property
    def logs(self) -> Path:
        """Folder of logs: `<job>.log` is the newest log of a job, `<job>/<epoch>.log` that of one attempt."""
        return self.folder / "logs"

    @property
    def artefacts(self) -> Path:
        """Folder of artefacts: `<job>/<epoch>/…`."""
        return self.folder / "artefacts"

    @property
    def blobs(self) -> Path:
        """Folder of blobs: files sent with jobs, and mirrored checkpoints, named by hash."""
        return self.folder / "blobs"

    @property
    def growing(self) -> tuple[Path, ...]:
        """Folders of the control machine that jobs fill; each may be on a separate disk."""
        return self.logs, self.artefacts, self.blobs

    def keep_private(self) -> None:
        """Create the folder, readable by this user only, also remove other users' rights to existing folders, and set the umask
        accordingly."""
        os.umask(0o077)
        self.folder.mkdir(parents=True, exist_ok=True)
        for folder in (self.folder, *self.growing):
            if folder.is_dir() and folder.stat().st_mode & 0o077:
                folder.chmod(0o700)


@dataclass(frozen=True, slots=True)
class FleetAddress:
    """A fleet that is reached by its HTTP API."""

    url: str


def find(
    option: str | None,
    environment: Mapping[str, str],
    options: Mapping[str, Any] | None = None,
) -> FleetPlace | FleetAddress:
    """Find the fleet: named by `option` (--fleet), else by the environment, else the default folder of this user.

    `options` are the given options of the command line, by settings key. Raises ConfigError with all problems.
    """
    name = option or environment.get(VARIABLE) or DEFAULT_FOLDER
    if _ADDRESS.match(name):
        return FleetAddress(name.rstrip("/"))
    folder = Path(name).expanduser().absolute()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(
            f"{name} is a file. {VARIABLE} and --fleet name the folder of a fleet, or the http(s) address of its API."
        )
    return FleetPlace(folder, read_settings(folder / FILE, environment, options or {}))


def read_settings(
    file: Path, environment: Mapping[str, str], options: Mapping[str, Any]
) -> FleetSettings:
    """Read the settings file, if it exists, and apply environment and options. Raises ConfigError."""
    tree = read_yaml(file) if file.exists() else Tree("settings")
    settings_keys = keys_of(FleetSettings)
    text_keys = frozenset(
        key for key in settings_keys if settings_keys[key].annotation == str | None
    )
    lay_environment_over(tree, environment, FleetSettings, ENVIRONMENT, as_text=text_keys)
    for key, value in options.items():
        tree.values[key] = value
        tree.origins[(key,)] = f"--{key.replace('_', '-')}"
    return validate(FleetSettings, tree)
