"""API keys: how one is made, stored, presented and checked.

A key reads `gw-<id>-<secret>`. The operator makes one (`new_key`), gives it to a caller, and keeps one line of it in the key
file: id, role, and the SHA-256 of id and secret. So the file reveals no key. The prefix before the id is not checked: the `tinker`
client sends only keys that start with `tml-`, and the same key is valid with that prefix instead of `gw-`. Without a key file, one
plain key of any form may come from the environment; its role is admin.

A check takes the same steps whether the id is known or not, and compares hashes in constant time. No repr, message or log contains a
key or a hash.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from groupwise.api.schemas.idempotency import AnswerKey
from groupwise.api.schemas.problems import Refusal
from groupwise.core.errors import ConfigError, UsageError

VARIABLE = "GROUPWISE_API_KEY"
"""The environment variable with the server's plain key, and with the client's key."""
PREFIX = "gw"
PREFIXES = (PREFIX, "tml")
"""Prefixes of keys."""
HEADERS = ("api-key", "x-api-key")
"""Headers that hold a key by itself; `authorization` holds one after `Bearer`."""
SHORTEST_PLAIN = 16
"""Minimum length of a plain key."""
LONGEST = 512
"""Maximum length of a key; longer ones are refused without hashing them."""
SECRET_BYTES = 32
ID_BYTES = 5

_KEY = re.compile(rf"(?:{'|'.join(PREFIXES)})-(?P<id>[a-z0-9]{{1,32}})-(?P<secret>[A-Za-z0-9_-]+)")
_ID = re.compile(r"[a-z0-9]{1,32}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NOBODY = hashlib.sha256(secrets.token_bytes(SECRET_BYTES)).digest()
"""Stands in for the hash of an unknown id; no key matches it."""


class Role(IntEnum):
    """The rights of a caller; each role has those of the roles below it."""

    READ = 1
    """Look: status, events, models."""
    TRAIN = 2
    """Ask for completions, post rewards, take steps."""
    ACT = 2
    """The same in a fleet: submit jobs, cancel and retry them."""
    ADMIN = 3
    """Start and stop runs."""

    @classmethod
    def by_name(cls, name: str) -> Role | None:
        """The role with this name in key files; None if there is none."""
        return cls.__members__.get(name.upper()) if name == name.lower() else None

    @property
    def word(self) -> str:
        """The role's name in key files and messages."""
        return self.name.lower()


WORDS: Mapping[Role, str] = {role: role.word for role in Role}
"""The roles by the names that a training server uses."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request, as its key identifies it."""

    key_id: str
    """Names the caller in logs and separates idempotency keys; `local` if the server has no keys."""
    role: Role
    projects: frozenset[str] | None = None
    """The projects whose jobs the key may touch; None: all. A training server knows no projects."""
    answer_key: AnswerKey | None = None
    """The request's idempotency key; None: every repetition is carried out."""

    def require(self, role: Role, words: Mapping[Role, str] = WORDS) -> None:
        """Raise `forbidden` unless the caller's role is at least this one. `words`: what the server calls the roles."""
        if self.role < role:
            raise Refusal(
                "forbidden",
                f"The key {self.key_id} has the role {words[self.role]}; this route needs {words[role]}.",
            )


LOCAL = Caller("local", Role.ADMIN)
"""The caller of every request to a server without keys, which listens to this machine only."""
PLAIN_ID = "environment"
"""The id of the plain key."""


@dataclass(frozen=True, slots=True)
class StoredKey:
    """The part of a key that the server stores."""

    id: str
    role: Role
    digest: bytes = field(repr=False)
    projects: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class NewKey:
    """A new key. It is shown once, to its user; the server stores only a hash."""

    id: str
    digest: bytes = field(repr=False)
    """The SHA-256 of its id and secret."""
    key: str = field(repr=False)
    line: str = field(repr=False)
    """Its line in the key file."""


class Keyring:
    """The keys that a server accepts."""

    def __init__(self, stored: Iterable[StoredKey] = (), plain: str | None = None) -> None:
        """`plain` is the key from the environment. Raises UsageError if it is too short."""
        self._stored = {key.id: key for key in stored}
        self._plain = _NOBODY if plain is None else hashlib.sha256(_check_plain_key(plain)).digest()
        self._has_plain = plain is not None

    def __repr__(self) -> str:
        return f"Keyring({', '.join(self._stored)}{' + plain' if self._has_plain else ''})"

    def __len__(self) -> int:
        return len(self._stored) + self._has_plain

    def caller(self, presented: str) -> Caller | None:
        """The caller with this key, or None. The time it takes does not depend on what is wrong with the key."""
        if len(presented) > LONGEST:
            return None
        match = _KEY.fullmatch(presented)
        name = match["id"] if match else ""
        stored = self._stored.get(name)
        digest = hashlib.sha256(_hashed_part(name, match["secret"] if match else "")).digest()
        digest_matches = hmac.compare_digest(digest, stored.digest if stored else _NOBODY)
        plain_digest = hashlib.sha256(presented.encode("utf-8", "surrogatepass")).digest()
        plain_matches = hmac.compare_digest(plain_digest, self._plain)
        if digest_matches and stored is not None:
            return Caller(stored.id, stored.role, stored.projects)
        return Caller(PLAIN_ID, Role.ADMIN) if plain_matches and self._has_plain else None

    def caller_of(self, id: str) -> Caller | None:
        """The caller whose key has this id, or None."""
        if id == PLAIN_ID and self._has_plain:
            return Caller(PLAIN_ID, Role.ADMIN)
        stored = self._stored.get(id)
        return None if stored is None else Caller(stored.id, stored.role, stored.projects)

    def seal(self, id: str, text: str) -> str | None:
        """An HMAC of the text with the stored hash of the key as its secret, so it changes with the key; None if no key has this id."""
        if self.caller_of(id) is None:
            return None
        is_plain = id == PLAIN_ID and self._has_plain
        secret = self._plain if is_plain else self._stored[id].digest
        return hmac.new(secret, text.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()


def caller_of(ring: Keyring | None, headers: Mapping[str, str]) -> Caller:
    """The caller who sent these headers. If `ring` is None, the server has no keys. Raises `unauthorised`."""
    if ring is None:
        return LOCAL
    presented = presented_key(headers)
    if presented is None:
        raise Refusal("unauthorised")
    caller = ring.caller(presented)
    if caller is None:
        raise Refusal(
            "unauthorised",
            "The server does not know this key. Ask who runs it for a valid one; "
            f"clients take it from {VARIABLE}.",
        )
    return caller


def presented_key(headers: Mapping[str, str]) -> str | None:
    """The key in these headers; None if there is none."""
    lower_headers = {name.lower(): value.strip() for name, value in headers.items()}
    for name in HEADERS:
        if lower_headers.get(name):
            return lower_headers[name]
    scheme, _, value = lower_headers.get("authorization", "").partition(" ")
    return (value.strip() or None) if scheme.lower() == "bearer" else None


def new_key(role: Role, prefix: str = PREFIX) -> NewKey:
    """Make a new key, and its line for the key file."""
    name, secret = secrets.token_hex(ID_BYTES), secrets.token_hex(SECRET_BYTES)
    digest = hashlib.sha256(_hashed_part(name, secret)).digest()
    return NewKey(name, digest, f"{prefix}-{name}-{secret}", f"{name} {role.word} {digest.hex()}")


def id_in(presented: str) -> str | None:
    """The id in a key, by which stored keys are looked up; None if it does not have the form of a key."""
    match = _KEY.fullmatch(presented) if len(presented) <= LONGEST else None
    return match["id"] if match else None


def read_keys_in(path: Path) -> tuple[StoredKey, ...]:
    """The keys of a key file. Raises ConfigError, also if it cannot be read, or if other users could write to it."""
    try:
        with path.open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read()
    except OSError as error:
        raise ConfigError(f"key_file {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"key_file {path} is not a text file in UTF-8.") from None
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"key_file {path} can be written by others; chmod go-w {path}")
    return read_key_file(text, str(path))


def read_key_file(text: str, source: str) -> tuple[StoredKey, ...]:
    """The keys of a key file: one line `id role sha256` for each, empty lines, and comments after `#`.

    Raises ConfigError with every invalid line; its content is not shown, because it may be a key.
    """
    keys: dict[str, StoredKey] = {}
    problems: list[str] = []
    # Split only at line feeds: an editor shows other separators within a line.
    for number, line in enumerate(text.split("\n"), 1):
        if not (words := line.partition("#")[0].split()):
            continue
        key = _read_line(words)
        if isinstance(key, str):
            problems.append(f"{source}:{number}: {key}")
        elif key.id in keys:
            problems.append(f"{source}:{number}: the id {key.id} is repeated")
        else:
            keys[key.id] = key
    if problems:
        raise ConfigError("\n".join(problems))
    return tuple(keys.values())


def _read_line(words: list[str]) -> StoredKey | str:
    """The key of a line, or what is wrong with it."""
    if len(words) != 3:
        return f"a line is `id role sha256`, but this one has {len(words)} word(s)"
    name, role_name, digest = words
    role = Role.by_name(role_name)
    if not _ID.fullmatch(name):
        return "the first word is not an id: 1 to 32 lower-case letters and digits"
    if name in (LOCAL.key_id, PLAIN_ID):
        return f"the id {name} is that of others, who need no line here"
    if role is None:
        return f"the second word is not a role; there are {', '.join(r.word for r in Role)}"
    if not _DIGEST.fullmatch(digest):
        return "the third word is not an SHA-256: 64 lower-case hex digits"
    return StoredKey(name, role, bytes.fromhex(digest))


def _hashed_part(name: str, secret: str) -> bytes:
    """The bytes of a key that are hashed: everything except its prefix."""
    return f"{name}-{secret}".encode()


def _check_plain_key(key: str) -> bytes:
    if not SHORTEST_PLAIN <= len(key) <= LONGEST:
        raise UsageError(
            f"{VARIABLE} has {len(key)} characters; a key has {SHORTEST_PLAIN} to {LONGEST}. "
            "`python -c 'import secrets; print(secrets.token_urlsafe(32))'` makes a good one."
        )
    if not all("!" <= letter <= "~" for letter in key):
        raise UsageError(
            f"{VARIABLE} has spaces, line ends or characters beyond ASCII in it, which a header cannot hold. Remove them."
        )
    return key.encode()
