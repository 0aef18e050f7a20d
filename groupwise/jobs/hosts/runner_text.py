"""Puts the runner together: its pieces in `runner/` are written and checked as modules, and sent to machines as one file.

A machine has Python 3.8 or later and nothing else, and finds the runner by the hash of its text. So the pieces that `requests` imports,
and those that they import, are written one below the other, each after the ones it needs: the text depends on nothing but theirs. What is
left out is what one file does not need: their imports from each other, and what only a type checker reads."""

from __future__ import annotations

import ast
import functools
import hashlib
import symtable
from dataclasses import dataclass
from pathlib import Path

PIECES = Path(__file__).with_name("runner")
"""The folder of the pieces; `protocol.py` says what they do together."""
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
    """One module with everything that the pieces define; a comment above each piece names its file.

    Raises ValueError if two pieces define the same name: in one file it has one meaning."""
    modules = {"from __future__ import annotations"}
    bodies: dict[str, str] = {}
    owners: dict[str, str] = {}

    def add(piece: str) -> None:
        """Add the pieces that this one imports, then this one."""
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
    """The pieces that a piece imports, its imports of the standard library, and all its other lines.

    Raises ValueError if it renames what it imports from another piece."""
    pieces: list[str] = []
    imports: list[str] = []
    text = path.read_text("utf-8")
    lines = text.splitlines()
    for node in reversed(ast.parse(text).body):
        if isinstance(node, ast.ImportFrom):
            # The rest is `__future__` and `typing`.
            if str(node.module).startswith(PACKAGE):
                pieces.append(str(node.module).removeprefix(PACKAGE))
                if any(name.asname for name in node.names):
                    raise ValueError(f"{path}: {ast.unparse(node)}: no name may change")
        elif isinstance(node, ast.Import):
            imports.append(ast.unparse(node))
        elif not isinstance(node, ast.If) or ast.unparse(node.test) != "TYPE_CHECKING":
            continue
        del lines[node.lineno - 1 : node.end_lineno]
    return pieces[::-1], imports, "\n".join(lines).strip()
