"""Copies out of a Python script the functions that a run needs of it, for `groupwise init --from`.

Importing a script that trains would start that training, so the config cannot name its rewards where they are. They are copied into a new
module, with the imports, constants and functions that they use. What the script does to the rows of its dataset (`map`, `filter`,
`rename_column`) becomes the function `process_row` of that module, for `data.preprocessing_pipeline`. Nothing of the script is run.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator, Sequence

from groupwise.core.plugins import trains_when_imported

ROW = "process_row"
"""Name of the function that does to one row what the script does to all of them."""
_HARMLESS = {"desc", "num_proc", "load_from_cache_file", "keep_in_memory", "writer_batch_size"}
"""Arguments of `map` and `filter` that do not change the rows."""


def copy_functions(
    source: str, names: Sequence[str], changes: Sequence[ast.Call] = ()
) -> str | None:
    """The source of a module with these functions of a script and, if there are `changes` of a dataset, with `process_row`.

    None if that cannot be copied: a name is not defined at the top of the script, a change needs more than its row, or what is needed would
    train as well.
    """
    tree, lines = ast.parse(source), source.split("\n")
    row = _row_function(changes) if changes else None
    if changes and row is None:
        return None
    definitions = [(node, set(_bound_names(node))) for node in tree.body]
    defined = set[str]().union(*(bound for _, bound in definitions))
    needed = {*names, *(_used_names(row) if row else ())} - vars(builtins).keys()
    if not needed <= defined or ROW in defined:
        return None
    chosen: set[ast.stmt] = set()
    while added := [node for node, bound in definitions if bound & needed and node not in chosen]:
        chosen |= set(added)
        needed |= {name for node in added for name in _used_names(node)}
    statements = [node for node in tree.body if node in chosen or _is_needed_anyway(node)]
    parts = [_text(node, lines) for node in statements] + ([ast.unparse(row)] if row else [])
    text = "\n\n\n".join(parts) + "\n"
    return None if trains_when_imported(text) else text


def _row_function(changes: Iterable[ast.Call]) -> ast.FunctionDef | None:
    """`process_row`: each change in turn; None if one cannot be made to a row by itself."""
    lines: list[str] = []
    for call in changes:
        assert isinstance(call.func, ast.Attribute)
        options = {keyword.arg: keyword.value for keyword in call.keywords}
        arguments = [ast.unparse(argument) for argument in call.args]
        if call.func.attr in ("map", "filter"):
            function = options.pop("function", None)
            arguments += [ast.unparse(function)] if function else []
            removed = options.pop("remove_columns", None)
            if len(arguments) != 1 or not options.keys() <= _HARMLESS:
                return None
            is_lambda = arguments[0].startswith("lambda")
            result = f"({arguments[0]})(columns)" if is_lambda else f"{arguments[0]}(columns)"
            if call.func.attr == "filter":
                lines += [f"if not {result}:", "    return None"]
            elif removed is None or not isinstance(removed, ast.List):
                lines.append(f"columns = {{**columns, **{result}}}")
            else:
                kept = f"name: value for name, value in columns.items() if name not in {ast.unparse(removed)}"
                lines.append(f"columns = {{**{{{kept}}}, **{result}}}")
        elif call.func.attr == "rename_column" and len(arguments) == 2:
            lines.append(f"columns[{arguments[1]}] = columns.pop({arguments[0]})")
        else:
            return None
    body = "\n".join(f"    {line}" for line in lines)
    (function,) = ast.parse(f"def {ROW}(columns):\n{body}\n    return columns").body
    assert isinstance(function, ast.FunctionDef)
    return function


def _is_needed_anyway(node: ast.stmt) -> bool:
    """True for imports from `__future__` and of all names of a module."""
    return isinstance(node, ast.ImportFrom) and (
        node.module == "__future__" or node.names[0].name == "*"
    )


def _text(node: ast.stmt, lines: Sequence[str]) -> str:
    """A statement as it is written, with its decorators and comments."""
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    return "\n".join(lines[first - 1 : node.end_lineno])


def _bound_names(node: ast.stmt) -> Iterator[str]:
    """The names of the module that a statement defines or changes."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
        return
    for child in ast.walk(node):
        if isinstance(child, ast.alias):
            yield (child.asname or child.name).partition(".")[0]
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id
        elif isinstance(child, ast.Attribute | ast.Subscript) and isinstance(child.ctx, ast.Store):
            owner = child.value
            yield owner.id if isinstance(owner, ast.Name) else ""
        elif isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield child.name


def _used_names(node: ast.AST) -> set[str]:
    """The names that a statement reads and does not bind as an argument or a variable of its own functions."""
    own = {child.arg for child in ast.walk(node) if isinstance(child, ast.arg)}
    if isinstance(node, ast.FunctionDef | ast.Lambda):
        own |= {
            child.id
            for child in ast.walk(node)
            if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store)
        }
    return {
        child.id
        for child in ast.walk(node)
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Load)
    } - own
