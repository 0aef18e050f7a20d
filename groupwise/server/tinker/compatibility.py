"""The table of Tinker client methods that work against this server. Refusals and the documentation page are made from it.

The table is `compatibility.json`, the text of the page `compatibility.md`. `python -m groupwise.server.tinker.compatibility` prints the
page. A method whose name ends in `_async` behaves like the one without the suffix.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.core.errors import UsageError

CLIENT_VERSION = "0.38.0"
COOKBOOK = Path(__file__).with_name("cookbook.json")
"""Results of the tests of the cookbook's recipes. The tests write this file and then the page."""


class Unsupported(UsageError):
    """The client has this method, but the server does not support it."""

    code = "unsupported"


@dataclass(frozen=True, slots=True)
class Method:
    """A public method of the client."""

    owner: str
    name: str
    works: bool
    note: str = ""
    """Differences from the original, or the reason for refusing it."""
    routes: tuple[tuple[str, str], ...] = ()
    """HTTP method and path of the requests of a refused method; `*` matches one path segment."""


_TABLE: dict[str, list[dict[str, Any]]] = json.loads(
    Path(__file__).with_name("compatibility.json").read_text(encoding="utf-8")
)
METHODS = tuple(
    Method(routes=tuple((verb, path) for verb, path in row.pop("routes", ())), **row)
    for row in _TABLE["methods"]
)
"""All methods; a test compares the table with the installed client."""
INTERNAL = tuple(
    (route["method"], route["path"], route["reason"]) for route in _TABLE["internal_routes"]
)
"""Routes that the client calls only if the server enables them; this server does not."""

_TEXT = Path(__file__).with_name("compatibility.md").read_text(encoding="utf-8")
EXAMPLES: list[tuple[str, str]] = re.findall(
    r"^## (.+)\n\n```python\n([^`]+)```$", _TEXT, re.MULTILINE
)
"""Complete programs, by title."""


def refused_route(method: str, path: str) -> Unsupported | None:
    """Why a route of the protocol is refused; None if the protocol has no such route."""
    owners = [
        f"{entry.owner}.{entry.name}"
        for entry in METHODS
        if any(_fits(route, method, path) for route in entry.routes)
    ]
    if owners:
        reason = next(entry.note for entry in METHODS if f"{entry.owner}.{entry.name}" == owners[0])
        return Unsupported(f"{' and '.join(owners)}: not supported by this server; {reason}.")
    for internal_method, route, reason in INTERNAL:
        if _fits((internal_method, route), method, path):
            return Unsupported(f"{method} {route} is not supported by this server: {reason}.")
    return None


def page() -> str:
    """The documentation page, in Markdown."""
    cookbook = json.loads(COOKBOOK.read_text())
    values = {
        "version": CLIENT_VERSION,
        "release": cookbook["release"],
        "recipes": "\n".join(_recipe_row(recipe) for recipe in cookbook["recipes"]),
        "methods": "\n".join(
            _methods_of(owner) for owner in dict.fromkeys(m.owner for m in METHODS)
        ),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda name: values[name[1]], _TEXT)


def _recipe_row(recipe: dict[str, Any]) -> str:
    passes = "yes" if recipe["passes"] else "no"
    return f"| `{recipe['recipe']}` | {passes} | {recipe['seen']} | {recipe['seconds']} |"


def _methods_of(owner: str) -> str:
    rows = [
        f"| `{entry.name}` | {'yes' if entry.works else 'no'} | {entry.note} |"
        for entry in METHODS
        if entry.owner == owner
    ]
    return "\n".join((f"\n## {owner}\n", "| method | works | |", "|---|---|---|", *rows))


def _fits(route: tuple[str, str], method: str, path: str) -> bool:
    pattern = re.escape(route[1]).replace(r"\*\*", ".+").replace(r"\*", "[^/]+")
    return route[0] == method and re.fullmatch(pattern, path.rstrip("/")) is not None


if __name__ == "__main__":
    sys.stdout.write(page())
