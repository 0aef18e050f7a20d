"""Assembles the runner: its pieces in `runner/` are written and checked as modules, and sent to machines as one file.

A machine needs only Python 3.8 or later, and finds the runner by the hash of its text. The piece `requests` and all pieces that it
imports, directly or not, are written to one file, each after the pieces that it needs, so the text depends on nothing else. The pieces'
imports of each other are left out, and so is code that only a type checker reads."""

from __future__ import annotations

import ast
import functools
import hashlib
import symtable
from dataclasses import dataclass
from pathlib import Path

PIECES = Path(__file__).with_name("runner")
"""The folder of the pieces; `protocol.py` describes what they do together."""
ENTRY = "requests"
"""The piece that answers a request; it imports all others, directly or not."""
HEAD = "# The runner, put together from the modules of groupwise/jobs/hosts/runner/.\n"
PACKAGE = f"{__package__}.{PIECES.name}."


@dataclass(frozen=True, slots=True)
class RunnerText:
    """The text that is sent to machines, and its hash."""

    source: str
    sha256: str


@functools.cache
def runner_text() -> RunnerText:
    """The runner of this release."""
    source = assemble(PIECES)
    return RunnerText(source, hashlib.sha256(source.encode("utf-8")).hexdigest())


def assemble(folder: Path) -> str:
    """One module with the definitions of all pieces; a comment above each piece names its file.

    Raises ValueError if two pieces define the same name, because one file can have it only once."""
    modules = {"from __future__ import annotations"}
    bodies: dict[str, str] = {}
    owners: dict[str, str] = {}

    def add(piece: str) -> None:
        """Add the pieces that `piece` imports, then the piece itself."""
        if piece in bodies:
            return
        above, imports, body = _read_piece(folder / f"{piece}.py")
        for other in above:
            add(other)
        modules.update(imports)
        bodies[piece] = f"# --- {piece}.py ---\n\n{body}"
        for symbol in symtable.symtable(body, piece, "exec").get_symbols():
            name = symbol.get_name()
            if symbol.is_assigned() and owners.setdefault(name, piece) != piece:
                raise ValueError(f"{piece}.py and {owners[name]}.py both define {name}")

    add(ENTRY)
    return "\n\n\n".join(["\n".join([HEAD, *sorted(modules)]), *bodies.values(), ""])


def _read_piece(path: Path) -> tuple[list[str], list[str], str]:
    """Read a piece: the pieces that it imports, its imports of the standard library, and all its other lines.

    Raises ValueError if it renames an import from another piece, or imports single names from elsewhere."""
    pieces: list[str] = []
    imports: list[str] = []
    text = path.read_text("utf-8")
    lines = text.splitlines()
    for node in reversed(ast.parse(text).body):
        if isinstance(node, ast.ImportFrom):
            module = "." * node.level + str(node.module)
            if module.startswith(PACKAGE):
                pieces.append(module.removeprefix(PACKAGE))
                if any(name.asname for name in node.names):
                    raise ValueError(f"{path}: {ast.unparse(node)}: no name may change")
            elif module not in ("__future__", "typing"):  # these are needed by type checkers only
                raise ValueError(
                    f"{path}: {ast.unparse(node)}: the line would be left out, and the names missing: write `import {module}`, "
                    f"or import a piece as {PACKAGE}…"
                )
        elif isinstance(node, ast.Import):
            imports.append(ast.unparse(node))
        elif not isinstance(node, ast.If) or ast.unparse(node.test) != "TYPE_CHECKING":
            continue
        del lines[node.lineno - 1 : node.end_lineno]
    return pieces[::-1], imports, "\n".join(lines).strip()
