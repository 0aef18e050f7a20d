"""Copies out of a Python script the functions that a run needs of it, for `groupwise init --from`.

Importing a script may start its training, and imports TRL in each process that scores, so the config does not name its rewards where they
are. They are copied into a new module, with the imports, constants and functions that they use. What the script does to the rows of its
dataset (`map`, `filter`, `rename_column`) becomes the function `process_row` of that module, for `data.preprocessing_pipeline`. Rows that
the script makes itself are returned by the hooks of a task, `get_rl_dataset` and `get_eval_dataset`, and the module is then a task file.
Calls that seed random numbers are copied with the code of the rows, so that each process makes the same ones. So are statements that change
in place what that code uses, such as `rows.append(row)` and `random.shuffle(rows)` (foreign_changes.py). Nothing of the script is run.
"""

from __future__ import annotations

import ast
import builtins
import itertools
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from groupwise.core.plugins import called_name, runs_as_script, trains_when_imported
from groupwise.training.init.foreign_changes import ChangesInPlace

ROW = "process_row"
"""Name of the function that does to one row what the script does to all of them; see `free_name`."""
MAKE_ROWS = "rows_of_script"
"""Name of the function with the statements that make the script's rows."""
_HARMLESS = {"desc", "num_proc", "load_from_cache_file", "keep_in_memory", "writer_batch_size"}
"""Arguments of `map` and `filter` that do not change the rows."""


_DEFINITIONS = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)


def copy_functions(
    source: str,
    names: Sequence[str],
    changes: Sequence[ast.Call] = (),
    hooks: Mapping[str, str] | None = None,
) -> str | None:
    """The source of a module with these functions of a script, with `process_row` if there are `changes` of a dataset, and with `hooks`.

    `hooks` maps the name of a task's hook to the expression of the script that it returns. None if that cannot be copied: a name is not
    defined at the top of the script or where it makes its trainer, a change needs more than its row, or what is needed reads the command
    line, would train as well, or is not valid in a module.
    """
    tree, lines = ast.parse(source), source.split("\n")
    row = _row_function(free_name(ROW, source), changes) if changes else None
    if changes and row is None:
        return None
    hooks = hooks or {}
    arguments: set[str] = set()
    statements = _statements_of_script(tree.body, arguments)
    bound = {node: set(_bound_names(node)) for node in statements}
    defined = set[str]().union(*bound.values())
    # What is changed after the trainer has its rows does not matter to them.
    changes_in_place = ChangesInPlace(statements)
    makers = [index for index, node in enumerate(statements) if _makes_trainer(node)]
    for node in statements[: makers[-1] if makers else None]:
        bound[node] |= changes_in_place.of(node) & defined

    def can_copy(names: set[str]) -> bool:
        if not names - vars(builtins).keys() <= defined:
            return False
        chosen, used = _needed_statements(names, bound)
        return not (used & (arguments - defined) or any(map(_reads_command_line, chosen)))

    returned = [ast.parse(expression, mode="eval").body for expression in hooks.values()]
    needed_by_rewards = {*names, *(_used_names(row) if row else ())}
    needed = needed_by_rewards.union(*map(_used_names, returned))
    if not can_copy(needed):
        return None
    chosen, _ = _needed_statements(needed, bound)
    seeds = [node for node in statements if (hooks or row) and _sets_seed(node)]
    if any(map(_imports_random, chosen)) and not all(can_copy(_used_names(node)) for node in seeds):
        return None
    seeds = [node for node in seeds if can_copy(_used_names(node))]
    needed_by_seeds = set[str]().union(*map(_used_names, seeds))
    chosen |= _needed_statements(needed_by_seeds, bound)[0]
    # What makes the rows alone is called when they are wanted; workers that import the module for its rewards do without.
    at_top = {node for node in chosen if isinstance(node, _DEFINITIONS)}
    at_top |= {*filter(_is_needed_anyway, statements)}
    at_import = _needed_at_import(needed_by_rewards, chosen, at_top, bound)
    if any(map(_imports_random, at_import)):
        at_import |= {*seeds, *_needed_statements(needed_by_seeds, bound)[0]}
    at_import |= at_top
    parts = [_text(node, lines) for node in statements if node in at_import]
    if hooks:
        makes = [node for node in statements if node in chosen - at_import or node in seeds]
        name = free_name(MAKE_ROWS, source)
        # A `return` among them would compile in the function, and end it without the rows.
        if _reads_unbound(makes) or not _compiles("\n".join(map(ast.unparse, makes))):
            return None
        parts += _rows_by_hooks(name, dict(zip(hooks, returned, strict=True)), makes)
    text = "\n\n\n".join([*parts, *([ast.unparse(row)] if row else [])]) + "\n"
    return text if _compiles(text) and not trains_when_imported(text) else None


def free_name(wanted: str, source: str) -> str:
    """The wanted name; if the script uses it already, it gets a number: `process_row_2`."""
    numbered = (f"{wanted}_{number}" for number in itertools.count(2))
    names = itertools.chain([wanted], numbered)
    return next(name for name in names if not re.search(rf"\b{name}\b", source))


def _needed_statements(
    names: set[str], bound: Mapping[ast.stmt, set[str]]
) -> tuple[set[ast.stmt], set[str]]:
    """The statements that bind these names or what those statements use, and all names in use; `bound`: what each statement binds."""
    chosen, used = set[ast.stmt](), set(names)
    while added := [node for node, own in bound.items() if own & used and node not in chosen]:
        chosen |= set(added)
        used |= {name for node in added for name in _used_names(node)}
    return chosen, used


def _needed_at_import(
    names: set[str],
    chosen: set[ast.stmt],
    at_top: set[ast.stmt],
    bound: Mapping[ast.stmt, set[str]],
) -> set[ast.stmt]:
    """The statements that must run before these names and the functions `at_top` can be used.

    All that binds one name, as `rows = load()` and `rows = rows.map(f)` do, stays together.
    """
    functions = [node for node in at_top if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    found, _ = _needed_statements(names | _names_used_by(functions), bound)
    while again := _binding(_names_bound_by(found | at_top), chosen - found - at_top):
        found |= again | _needed_statements(_names_used_by(again), bound)[0]
    return found


def _compiles(text: str) -> bool:
    """False if a statement is not allowed where it stands now, as a `return` of the function that made the trainer."""
    try:
        compile(text, "<copied>", "exec")
    except SyntaxError:
        return False
    return True


def _binding(names: set[str], statements: Iterable[ast.stmt]) -> set[ast.stmt]:
    """The statements that bind one of these names."""
    return {node for node in statements if names.intersection(_bound_names(node))}


def _names_bound_by(statements: Iterable[ast.stmt]) -> set[str]:
    return {name for node in statements for name in _bound_names(node)}


def _names_used_by(statements: Iterable[ast.stmt]) -> set[str]:
    return set[str]().union(*map(_used_names, statements))


def _reads_unbound(body: Sequence[ast.stmt]) -> bool:
    """True if a function with this body would read a local variable before it is bound."""
    missing = _names_bound_by(body)
    for node in body:
        own = set(_bound_names(node))
        # A compound statement, such as a loop, may bind a name before it reads it.
        read_first = missing - (own if hasattr(node, "body") else set())
        if _used_names(node) & read_first:
            return True
        missing -= own
    return False


def _rows_by_hooks(
    name: str, returned: Mapping[str, ast.expr], makes: list[ast.stmt]
) -> Iterator[str]:
    """The source of each hook. If the rows are made by statements, these go into a function before them, `name`, which runs once."""
    if makes:
        (function,) = ast.parse(f"@functools.cache\ndef {name}():\n    pass").body
        assert isinstance(function, ast.FunctionDef)
        values = ast.Tuple([*returned.values()], ast.Load())
        function.body = [*makes, ast.Return(values)]
        yield "import functools"
        yield ast.unparse(function)
    for number, (hook, value) in enumerate(returned.items()):
        rows = f"{name}()[{number}]" if makes else ast.unparse(value)
        yield f"def {hook}(config):\n    return {rows}"


def _statements_of_script(body: Sequence[ast.stmt], arguments: set[str]) -> list[ast.stmt]:
    """The statements that run when the script does: its own, and last those of the block or function that makes the trainer.

    Adds the names of that function's arguments to `arguments`.
    """
    outer: list[ast.stmt] = []
    inner: list[ast.stmt] = []
    for node in body:
        if isinstance(node, ast.If) and runs_as_script(node.test):
            inner += _statements_of_script(node.body, arguments)
        elif isinstance(node, ast.FunctionDef) and _makes_trainer(node):
            arguments |= {child.arg for child in ast.walk(node.args) if isinstance(child, ast.arg)}
            inner += _statements_of_script(node.body, arguments)
        else:
            outer.append(node)
    return outer + inner


def _makes_trainer(node: ast.stmt) -> bool:
    """True for a statement that makes the trainer, or that holds one which does."""
    return any(
        isinstance(child, ast.Call) and called_name(child).endswith("GRPOTrainer")
        for child in ast.walk(node)
    )


def _reads_command_line(node: ast.stmt) -> bool:
    """True for a statement whose value depends on how the script is called."""
    return any(
        isinstance(child, ast.Call) and called_name(child).startswith("parse_")
        for child in ast.walk(node)
        if not isinstance(node, ast.FunctionDef)
    )


def _sets_seed(node: ast.stmt) -> bool:
    """True for a call that seeds random numbers, e.g. `random.seed(42)`, `torch.manual_seed(0)` or `set_seed(1)`."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and "seed" in called_name(node.value).lower().split("_")
    )


def _imports_random(node: ast.stmt) -> bool:
    """True for an import of a module that draws random numbers."""
    return isinstance(node, ast.Import | ast.ImportFrom) and bool(
        re.search(r"\b(random|numpy|torch)\b", ast.unparse(node))
    )


def _row_function(name: str, changes: Iterable[ast.Call]) -> ast.FunctionDef | None:
    """The function of this name that makes each change in turn; None if one cannot be made to a row by itself."""
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
    (function,) = ast.parse(f"def {name}(columns):\n{body}\n    return columns").body
    assert isinstance(function, ast.FunctionDef)
    return function


def _is_needed_anyway(node: ast.stmt) -> bool:
    """True for imports from `__future__` and of all names of a module."""
    return isinstance(node, ast.ImportFrom) and (
        node.module == "__future__" or node.names[0].name == "*"
    )


def _text(node: ast.stmt, lines: Sequence[str]) -> str:
    """A statement as it is written, with its decorators and comments; as the parser has it if it cannot be moved to the left like that."""
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    text = "\n".join(lines[first - 1 : node.end_lineno])
    if node.col_offset == 0:
        return text
    text = textwrap.dedent(text)
    with suppress(SyntaxError):
        if ast.dump(ast.parse(text)) == ast.dump(ast.Module([node], [])):
            return text
    return ast.unparse(node)


def _bound_names(node: ast.stmt) -> Iterator[str]:
    """The names of the module that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
        return
    within = _comprehension_variables(node)
    for child in ast.walk(node):
        if isinstance(child, ast.alias):
            yield (child.asname or child.name).partition(".")[0]
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield from () if child in within else (child.id,)
        elif isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield child.name


def _used_names(node: ast.AST) -> set[str]:
    """The names that a statement reads or declares `global`, and does not bind as an argument or a variable of its own functions."""
    shared = {
        name for child in ast.walk(node) if isinstance(child, ast.Global) for name in child.names
    }
    own = {child.arg for child in ast.walk(node) if isinstance(child, ast.arg)}
    own |= {name.id for name in _comprehension_variables(node)}
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
    } - own | shared


def _comprehension_variables(node: ast.AST) -> set[ast.Name]:
    """The names that comprehensions bind, which exist only inside them."""
    targets = [child.target for child in ast.walk(node) if isinstance(child, ast.comprehension)]
    return {name for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
