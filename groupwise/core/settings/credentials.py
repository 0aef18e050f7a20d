"""Finds keys and values that look like credentials. Configs are stored with their runs and shared, so they must not contain secrets.

A key is judged by its name, in the sections whose keys users choose freely; a value by its form, everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from groupwise.core.settings.schema import KeyPath
    from groupwise.core.settings.tree import Tree

_SECRET = re.compile(
    r"^token$|(^|_)(api_?key|passwd|password|secret|secret_key)$"
    r"|(^|_)(access|api|auth|bearer|hf|hub|wandb)_token$",
    re.IGNORECASE,
)
_KEY_IN_TEXT = re.compile(r"(?<![\w-])([\w-]++)[\"']?\s*+[:=]")
_IN_URL = re.compile(
    r"https?://(?![${<])[^\s/?#@]+@"  # a user name without a password may be a token
    r"|[a-z][a-z0-9+.-]{0,30}://[^\s/?#@:]*:(?![${<])[^\s/?#@]+@",
    re.IGNORECASE,
)
_HEADER = re.compile(
    r"^\s*Bearer\s+(?![${<])\S{6,}\s*$"
    r"|authorization[\"']?\s*[:=]\s*[\"']?(?:Bearer|Basic)\s+(?![${<…])\S"
    r"|\bBearer\s+(?=\S*\d)[\w.~+/=-]{16,}",
    re.IGNORECASE,
)
_KEY = re.compile(
    r"(?<![\w-])(?:sk-[\w-]{6,}|hf_[A-Za-z0-9]{6,}(?![\w/-])|(?:gw|tml)-[a-z0-9]{1,32}-[\w-]{30,})"
)


def is_secret(key: str) -> bool:
    """True if the value of this key is a credential, which no message may show."""
    return _SECRET.search(key) is not None


def holds_secret(text: str) -> bool:
    """True if a text is or contains something with the form of a credential: a service's key, a header, a password in a URL."""
    if _IN_URL.search(text) or _HEADER.search(text):
        return True
    for key in _KEY.findall(text):
        # Unlike `sk-learn-intelex` and `hf_transformers`, a real key is random.
        if any(letter.isdigit() or letter.isupper() for letter in key[3:]):
            return True
    for url in (word for word in text.split() if "://" in word):
        query = url.partition("://")[2].partition("?")[2].partition("#")[0]
        pairs = (part.partition("=") for part in query.split("&"))
        if any(is_secret(name) and value and value[0] not in "${<" for name, _, value in pairs):
            return True
    return False


def names_secret(text: str) -> bool:
    """True if a text, such as a list of callbacks, sets a credential's key or contains a credential; no message may then show it."""
    return holds_secret(text) or any(is_secret(key) for key in _KEY_IN_TEXT.findall(text))


def secrets_in(tree: Tree, *free: str) -> list[str]:
    """A problem for each value that looks like a credential, and for each key with a credential's name in the sections `free`.

    Keys of other sections come from a schema, which has none for credentials.
    """
    return _secrets(tree, tree.values, (), free)


def _secrets(tree: Tree, value: Any, at: KeyPath, free: tuple[str, ...]) -> list[str]:
    if isinstance(value, list):
        items = cast("list[Any]", value)
        return [problem for item in items for problem in _secrets(tree, item, at, free)]
    if isinstance(value, str) and holds_secret(value):
        return [
            f"{tree.origin(at)}: {'.'.join(at)} holds what looks like a secret (a user name or password in a URL, a header with a token, "
            "or a key that begins with sk- or hf_); secrets may not be in a config, which is stored with the run. Leave it out, set it "
            "as an environment variable and read it from there."
        ]
    if not isinstance(value, Mapping):
        return []
    problems: list[str] = []
    for key, inner in cast("Mapping[str, Any]", value).items():
        path = (*at, key)
        if isinstance(inner, str) and at[:1] and at[0] in free and is_secret(key):
            problems.append(f"{tree.origin(path)}: {explain_secret(path)}")
        else:
            problems += _secrets(tree, inner, path, free)
    return problems


def explain_secret(path: KeyPath) -> str:
    """Says what to do instead of writing a credential into a config."""
    return (
        f"{'.'.join(path)} looks like a secret; secrets may not be in a config, which is stored with the run. "
        "Set it as an environment variable and read it from there."
    )
