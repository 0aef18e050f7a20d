"""Reads the settings of a GRPO training from a Python file without running any of it.

The file is interpreted statement by statement as far as its values are plain: literals, arithmetic on them, names, dicts that are
merged or unpacked, attributes that are set later. A value that only running the file would give becomes an `Unread` with its line; so
does a value that depends on a condition. Bodies of functions come last, when all names of the module are known.

Some settings come from what the file does instead of what it sets: the data, from the `load_dataset` that the trainer's rows start from and
what is then done with them, and the system prompt, from the messages that the file creates.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from groupwise.core.plugins import called_name, runs_as_script
from groupwise.core.terminal.text import shorten
from groupwise.tasks.data.sources import ENDINGS
from groupwise.training.init.foreign_functions import ROW, copy_functions, free_name

USUAL_REMEDY = "Write a literal value there, or edit the written config"


@dataclass(frozen=True, slots=True)
class Unread:
    """A value that could not be read, as source text."""

    written: str
    line: int = 0
    """Line in a Python file; 0 for other files."""
    why: str = "only running the file tells what `{}` is"
    remedy: str = USUAL_REMEDY
    of_library: bool = False
    """True if it calls a function of TRL or open-r1."""

    @property
    def explanation(self) -> str:
        """Why the value could not be read, for a message about its key."""
        prefix = f"line {self.line}: " if self.line else ""
        return prefix + self.why.replace("{}", shorten(self.written, 60))


@dataclass(slots=True, eq=False)
class ParsedCall:
    """The result of a call whose arguments are settings."""

    kind: str
    line: int
    arguments: dict[str, Any]


CALLS: dict[str, tuple[str, ...]] = {
    "GRPOTrainer": (
        *("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class"),
        *("reward_processing_classes", "callbacks", "optimizers"),
    ),
    "GRPOConfig": ("output_dir",),
    "LoraConfig": (),
    "from_pretrained": ("model_name_or_path",),
    "get_peft_model": ("model", "peft_config"),
    "ModelConfig": ("model_name_or_path",),
    "ScriptArguments": ("dataset_name",),
    "BitsAndBytesConfig": (),
    "SamplingParams": (),
}
"""Calls whose arguments are read, with the names of their first positional ones."""
DATASET_LOADER = "load_dataset"
DATASET_ARGUMENTS = ("path", "name", "data_dir", "data_files", "split")
"""The first positional arguments of `load_dataset`."""
FILE_FORMATS = ("json", "csv", "parquet", "text")
"""The names of `load_dataset` for the formats of `data_files`."""
OTHER_DATASET_REASON = "`{}` has rows of another file or dataset than those that are trained on"
OTHER_DATASET_REMEDY = (
    "If both are files, put them into one folder as train.jsonl and test.jsonl, and set data.dataset_name=FOLDER "
    "data.dataset_test_split=test; else leave data out, and return both from get_rl_dataset and get_eval_dataset of a task file"
)
COMMAND_REMEDY = "If its values come from the command line, give as --from the .sh file with the command, or the YAML of its --config"
CONDITION_REASON = "its value depends on a condition, or changes in a loop"
CALLBACK_REMEDY = (
    "Write its class into a file, and under callbacks: FILE.py:CLASS (docs/how-to/callbacks.md)"
)
HELD_OUT_REMEDY = "data.dataset_test_split and data.test_split_size say what is held out"
BOTH_REMEDY = "Return both from get_rl_dataset and get_eval_dataset of a task file"
COLUMNS_REMEDY = (
    "If it only renames columns or makes a chat of a question, data.prompt_column, data.answer_column, data.columns and "
    "data.prompt_format=chat do the same; else write a function of one row into a file, for data.preprocessing_pipeline=FILE.py:FUNCTION"
)
CHOICE_REMEDY = "process_row leaves out the rows for which it returns None, and data.max_prompt_length those with longer prompts"
TASK_REMEDY = "A task file brings rows that Python makes (get_rl_dataset), or data.dataset_name names a file with them"

NON_MODEL_CLASSES = re.compile(
    r"Tokenizer|Processor|Dataset|Generation|AutoConfig|Peft|Classification"
)
"""Classes whose `from_pretrained` does not load the trained model."""

LARGEST_EXPONENT, LARGEST_BASE, LONGEST = 64, 10**9, 10_000
"""Limits on exponents, bases of powers, and lengths of texts: larger ones would fill the memory and are not config values."""

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b, ast.Sub: lambda a, b: a - b, ast.Mult: lambda a, b: a * b, ast.FloorDiv: lambda a, b: a // b,
    ast.Div: lambda a, b: a / b, ast.Pow: lambda a, b: a**b,
}  # fmt: skip

_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: lambda a, b: a == b, ast.NotEq: lambda a, b: a != b, ast.Is: lambda a, b: a is b, ast.IsNot: lambda a, b: a is not b,
}  # fmt: skip


MAX_SKIPPED_LINES = 9
"""Number of lines with invalid syntax for this Python version above which the file does not count as Python."""


OWN_FUNCTIONS = "own_functions"
"""Not a setting of the run, but the source of a module with copies of the script's own functions (foreign_functions.py)."""
FLAG_USES = "flag_uses"
"""Not a setting either, but what the script does with each flag of its own."""
CHOICES_OF_ROWS = ("select", "take")
"""Methods of a dataset that leave rows out."""
ROWS, HELD_OUT_ROWS = "get_rl_dataset", "get_eval_dataset"
"""The hooks of a task that return rows which the file makes itself."""
SPLIT = "train_test_split"
DATA_KEYS = {
    "dataset_name": "path", "dataset_config": "name", "dataset_train_split": "split", "dataset_revision": "revision", SPLIT: SPLIT,
}  # fmt: skip
"""Our keys for the arguments of `load_dataset`."""
CHANGES_OF_NO_ROW = ("shuffle", SPLIT, "remove_columns", *CHOICES_OF_ROWS)
"""Methods of a dataset after which each row is as before, or only without columns that rewards need not read."""


def of_python(text: str, flags: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The settings under the names in the file. Raises SyntaxError or ValueError if it is not Python.

    `flags`: those that the file is called with; None if that is not known.
    """
    # Shell and IPython lines, which occur in exported notebooks.
    lines = re.sub(r"(?m)^([ \t]*)[!%].*$", r"\1pass", text).split("\n")
    skipped_lines: dict[str, Any] = {}
    first_error: SyntaxError | None = None
    while True:
        try:
            tree = ast.parse("\n".join(lines))
        except SyntaxError as error:
            first_error = first_error or error
            line_number = min(error.lineno or len(lines), len(lines))
            line = lines[line_number - 1]
            if not line.strip() or len(skipped_lines) == MAX_SKIPPED_LINES:
                raise first_error from None
            skipped_lines.setdefault(
                f"line {line_number}", Unread(line.strip(), 0, "`{}` is not Python of this version")
            )
            # Replace the line: a statement by `pass`, a line within a statement by an empty one.
            indent = line[: len(line) - len(line.lstrip())]
            lines[line_number - 1] = "" if line.strip() == "pass" else f"{indent}pass"
        else:
            reader = _Reader(given_flags=flags)
            reader.read(tree.body)
            settings = reader.settings()
            settings |= {FLAG_USES: reader.flag_uses} if flags and reader.flag_uses else {}
            makes_messages = reader.take_functions(settings, "\n".join(lines))
            if not makes_messages and settings.get("system_prompt") is None:
                settings |= reader.system_prompt(tree)
            if first_error is not None and not settings:
                raise first_error
            return settings | skipped_lines


def of_notebook(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The settings of a notebook's cells, without cells in another language."""
    texts = ["".join(cell["source"]) for cell in cells if cell.get("cell_type") == "code"]
    magic_pattern = re.compile(r"\s*%%(?!capture|time)")
    text = "\n".join(source for source in texts if not magic_pattern.match(source))
    return of_python(text)


@dataclass(slots=True)
class _Reader:
    names: dict[str, Any] = field(default_factory=dict[str, Any])
    imported: dict[str, str] = field(default_factory=dict[str, str])
    """Imported functions as `module:function`, and those of this file as `:function`."""
    calls: list[ParsedCall] = field(default_factory=list[ParsedCall])
    flags: dict[str, Any] = field(default_factory=dict[str, Any])
    """Defaults of command-line options."""
    given_flags: Mapping[str, Any] | None = None
    flag_reads: list[str] = field(default_factory=list[str])
    flag_uses: dict[str, str] = field(default_factory=dict[str, str])
    """What the script does with each flag, such as `line 12 reads it`."""
    branches: dict[str, bool] = field(default_factory=dict[str, bool])
    """Conditions that these defaults decide, with their lines, and whether they are true."""
    changed: list[ParsedCall] = field(default_factory=list[ParsedCall])
    """Datasets after each of their changes."""
    row_changes: Sequence[ast.Call] = ()
    """What the file does to the rows of the trainer's dataset."""
    train_rows: str = ""
    """The expression of the trainer's rows."""
    held_out: ParsedCall | None = None
    """The held-out rows, if the file changes them otherwise than those that are trained on."""
    variables: dict[str, str] = field(default_factory=dict[str, str])
    """Names of arguments whose value is a variable in the script, with the name of that variable."""
    chosen: Sequence[str] = ()
    """The methods by which it leaves some of them out."""
    unsure: int = 0
    """Number of conditions and loops around the current statement."""
    later: list[ast.FunctionDef | ast.AsyncFunctionDef] = field(
        default_factory=list[ast.FunctionDef | ast.AsyncFunctionDef]
    )

    # Statements

    def read(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            self._visit_statement(statement)
        module_names = self.names
        while self.later:
            function = self.later.pop(0)
            self.names = dict(module_names)
            for argument in ast.walk(function.args):
                if isinstance(argument, ast.arg):
                    self.names[argument.arg] = Unread(argument.arg, argument.lineno)
            for statement in function.body:
                self._visit_statement(statement)
        self.names = module_names

    def _visit_statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Assign(targets, value):
                bound_value = self.value(value)
                for target in targets:
                    self._bind(target, bound_value)
            case ast.AnnAssign(target, ast.expr() as value):
                self._bind(target, self.value(value))
            case ast.AugAssign(target, operator, value):
                # Parsed again, a target becomes an expression that reads it.
                old = ast.parse(ast.unparse(target), mode="eval").body
                self._bind(target, self.value(ast.BinOp(old, operator, value)))
            case ast.Import() | ast.ImportFrom():
                self._bind_import(node)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self.imported[node.name] = f":{node.name}"
                self.later.append(node)
            case ast.ClassDef(name, body=body):
                self.imported[name] = f":{name}"
                self.later += [
                    member
                    for member in body
                    if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef)
                ]
            case ast.If(test, body, orelse):
                condition = True if runs_as_script(test) else self._condition(test)
                if isinstance(condition, bool):
                    self._visit_block(body if condition else orelse)
                else:
                    with self._conditionally():
                        self._visit_block([*body, *orelse])
            case _:
                self._visit_children(node)

    def _visit_children(self, node: ast.stmt) -> None:
        """Visit the statements and values inside any other statement."""
        is_loop = isinstance(node, ast.For | ast.AsyncFor | ast.While | ast.Match)
        with self._conditionally(is_loop):
            if isinstance(node, ast.For | ast.AsyncFor):
                self._bind(node.target, Unread(ast.unparse(node.target), node.lineno))
            for name, part in ast.iter_fields(node):
                for child in cast("list[Any]", part if isinstance(part, list) else [part]):
                    with self._conditionally(
                        isinstance(child, ast.ExceptHandler) or name == "orelse"
                    ):
                        if isinstance(child, ast.stmt):
                            self._visit_statement(child)
                        elif isinstance(child, ast.expr):
                            self.value(child)
                        elif isinstance(child, ast.withitem):
                            self.value(child.context_expr)
                        elif isinstance(child, ast.ExceptHandler | ast.match_case):
                            self._visit_block(child.body)

    def _visit_block(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            self._visit_statement(statement)

    @contextmanager
    def _conditionally(self, active: bool = True) -> Generator[None]:
        self.unsure += active
        yield
        self.unsure -= active

    def _bind_import(self, node: ast.Import | ast.ImportFrom) -> None:
        module = "" if isinstance(node, ast.Import) else node.module or ""
        for alias in node.names:
            name = f"{module}:{alias.name}" if module else alias.name
            self.imported[alias.asname or alias.name] = name

    def _bind(self, target: ast.expr, value: Any) -> None:
        match target:
            case ast.Name(name):
                self._assign(self.names, name, value, target, new_is_sure=True)
            case ast.Attribute(ast.Name(owner), name) if isinstance(
                call := self.names.get(owner), ParsedCall
            ):
                self._assign(call.arguments, name, value, target)
            case ast.Subscript(ast.Name(owner), ast.Constant(str(name))) if isinstance(
                container := self.names.get(owner), dict
            ):
                self._assign(cast("dict[str, Any]", container), name, value, target)
            case ast.Tuple(entries) | ast.List(entries):
                values = cast("list[Any]", value) if isinstance(value, list) else []
                has_all = len(values) == len(entries)
                for index, entry in enumerate(entries):
                    is_parsed = isinstance(value, Unread) and "parse" in value.written
                    fallback = (
                        cast("Any", value)
                        if is_parsed or (index == 0 and isinstance(value, ParsedCall))
                        else _unread_node(entry)
                    )
                    self._bind(entry, values[index] if has_all else fallback)
            case _:
                pass

    def _assign(
        self,
        target: dict[str, Any],
        name: str,
        value: Any,
        node: ast.expr,
        *,
        new_is_sure: bool = False,
    ) -> None:
        """Set a name to a value. Under a condition it becomes `Unread`, unless it had that value before, or is new and `new_is_sure`."""
        previous = target.get(name)
        is_new = name not in target and new_is_sure
        if self.unsure and not is_new and not (name in target and previous == value):
            value = Unread(name, node.lineno, CONDITION_REASON)
        target[name] = value

    # Values

    def _condition(self, test: ast.expr) -> Any:
        """The value of a condition. If flags decide it, it is remembered for the report."""
        flags_before = len(self.flag_reads)
        condition = self.value(test)
        if isinstance(condition, bool) and len(self.flag_reads) > flags_before:
            written = f"`{ast.unparse(test)}` in line {test.lineno}"
            self.branches[written] = condition
            for flag in self.flag_reads[flags_before:]:
                self.flag_uses[flag] = f"{written} is {condition}"
        return condition

    def value(self, node: ast.expr) -> Any:
        """A plain value (which may contain unread ones), a `ParsedCall`, or an `Unread`."""
        match node:
            case ast.Constant(value):
                return value
            case ast.Name(name):
                return self.names.get(name, _unread_node(node))
            case ast.Attribute(ast.Name("SchedulerType"), name):
                return name.lower()
            case ast.Attribute(owner, name):
                return self._read_attribute(node, self.value(owner), name)
            case ast.List() | ast.Tuple() | ast.Dict() | ast.Subscript():
                return self._read_container(node)
            case ast.UnaryOp(operator, operand):
                return self._read_unary(node, operator, self.value(operand))
            case ast.BinOp(left, operator, right):
                return self._read_operation(node, self.value(left), operator, self.value(right))
            case ast.JoinedStr(parts):
                texts = [
                    self.value(part.value if isinstance(part, ast.FormattedValue) else part)
                    for part in parts
                ]
                is_text = all(isinstance(text, str | int | float) for text in texts)
                return "".join(map(str, texts)) if is_text else _unread_node(node)
            case ast.Call():
                return self._read_call(node)
            case _:
                return self._read_test(node)

    def _read_test(self, node: ast.expr) -> Any:
        """The value of a comparison or of `a if test else b`."""
        if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARISONS:
            sides = [self.value(node.left), *map(self.value, node.comparators)]
            if len(sides) == 2 and all(map(_is_readable, sides)):
                return _COMPARISONS[type(node.ops[0])](*sides)
        if not isinstance(node, ast.IfExp):
            return _unread_node(node)
        condition = self._condition(node.test)
        if isinstance(condition, bool):
            return self.value(node.body if condition else node.orelse)
        for branch in (node.body, node.orelse):  # for the calls in them
            self.value(branch)
        return Unread(ast.unparse(node), node.lineno, CONDITION_REASON)

    def _read_attribute(self, node: ast.expr, owner: Any, name: str) -> Any:
        if isinstance(owner, ParsedCall):
            return owner.arguments.get(name, _unread_node(node))
        if isinstance(owner, Unread) and "parse" in owner.written:
            flags = self.flags | dict(self.given_flags or {})
            if name in flags:
                self.flag_reads.append(name)
                self.flag_uses.setdefault(name, f"line {node.lineno} reads it")
                return flags[name]
        return _unread_node(node)

    def _read_unary(self, node: ast.expr, operator: ast.unaryop, value: Any) -> Any:
        if isinstance(operator, ast.USub) and _is_number(value):
            return -value
        if isinstance(operator, ast.Not) and isinstance(value, bool):
            return not value
        return _unread_node(node)

    def _read_container(self, node: ast.List | ast.Tuple | ast.Dict | ast.Subscript) -> Any:
        match node:
            case ast.List(entries) | ast.Tuple(entries):
                return [self.value(entry) for entry in entries]
            case ast.Dict(keys, values):
                result: dict[str, Any] = {}
                for key, value in zip(keys, values, strict=True):
                    if key is None:
                        self._unpack(result, value)
                    else:
                        name = self.value(key)
                        is_literal = isinstance(name, str | int | float)
                        result[str(name) if is_literal else ast.unparse(key)] = self.value(value)
                return result
            case ast.Subscript(owner, key_node):
                container, key = self.value(owner), self.value(key_node)
                if isinstance(container, ParsedCall) and container.kind == DATASET_LOADER:
                    was_split = SPLIT in container.arguments
                    split = container.arguments.get("split") if was_split else key
                    arguments = {**container.arguments, "split": split, "source": ast.unparse(node)}
                    return ParsedCall(DATASET_LOADER, node.lineno, _file_of_split(arguments))
                has_key = (
                    isinstance(container, dict) and isinstance(key, str | int) and key in container
                )
                return cast("dict[Any, Any]", container)[key] if has_key else _unread_node(node)

    def _unpack(self, target: dict[str, Any], node: ast.expr) -> None:
        """Add what `**` unpacks: its keys if they are known, else one key that stores the unread expression."""
        mapping = self.value(node)
        if isinstance(mapping, ParsedCall):
            mapping = mapping.arguments
        if isinstance(mapping, dict):
            target |= cast("dict[str, Any]", mapping)
        else:
            target[f"**{shorten(ast.unparse(node), 60)}"] = _unread_node(node)

    def _read_operation(self, node: ast.expr, left: Any, operator: ast.operator, right: Any) -> Any:
        numbers = _is_number(left) and _is_number(right)
        is_huge = isinstance(operator, ast.Pow) and not (
            numbers and abs(left) < LARGEST_BASE and abs(right) <= LARGEST_EXPONENT
        )
        if numbers and not is_huge and type(operator) in _OPERATORS:
            with suppress(ArithmeticError):
                return _OPERATORS[type(operator)](left, right)
        if isinstance(operator, ast.Add) and isinstance(left, str | list):
            first, second = cast("Any", left), right
            if type(first) is type(second) and len(first) + len(second) < LONGEST:
                return first + second
        if isinstance(operator, ast.BitOr) and isinstance(left, dict) and isinstance(right, dict):
            return cast("dict[str, Any]", left) | cast("dict[str, Any]", right)
        return _unread_node(node)

    def _read_call(self, node: ast.Call) -> Any:
        function_name = called_name(node)
        if isinstance(node.func, ast.Attribute):
            owner = self.value(node.func.value)
            if isinstance(owner, dict | list) and function_name in ("update", "append", "extend"):
                owner_value = cast("Any", owner)
                if function_name == "update":
                    for name, value in self._merge_arguments(node).items():
                        self._assign(owner_value, name, value, node)
                elif isinstance(owner_value, list):
                    items = [self.value(argument) for argument in node.args]
                    additions = items if function_name == "append" else items[0] if items else []
                    is_certain = isinstance(additions, list) and not self.unsure
                    cast("list[Any]", owner_value).extend(
                        cast("list[Any]", additions) if is_certain else [_unread_node(node)]
                    )
                return None
            if isinstance(owner, ParsedCall) and owner.kind == DATASET_LOADER:
                return self._changed_dataset(owner, function_name, node)
        if function_name == DATASET_LOADER:
            return self._loaded_dataset(node)
        kind = next((suffix for suffix in CALLS if function_name.endswith(suffix)), None)
        if kind == "from_pretrained" and NON_MODEL_CLASSES.search(ast.unparse(node.func)):
            return _unread_node(node)
        if kind is not None:
            call = ParsedCall(kind, node.lineno, self._read_arguments(node, CALLS[kind]))
            self.calls.append(call)
            given = [
                *zip(CALLS[kind], node.args, strict=False),
                *((each.arg, each.value) for each in node.keywords),
            ]
            self.variables |= {
                str(name): value.id for name, value in given if isinstance(value, ast.Name)
            }
            return call
        return self._call_of_python(node, function_name)

    def _loaded_dataset(self, node: ast.Call) -> Any:
        """A dataset, or a list of datasets if several splits are loaded at once."""
        arguments = self._read_arguments(node, DATASET_ARGUMENTS) | {"source": ast.unparse(node)}
        if arguments.get("path") in FILE_FORMATS and "data_files" in arguments:
            arguments |= {"path": arguments.pop("data_files"), "name": None}
        splits = arguments.get("split")
        if not isinstance(splits, list):
            dataset = ParsedCall(DATASET_LOADER, node.lineno, _file_of_split(arguments))
            self.calls.append(dataset)
            return dataset
        datasets = [
            ParsedCall(
                DATASET_LOADER,
                node.lineno,
                _file_of_split(
                    {**arguments, "split": split, "source": f"{ast.unparse(node)}[{index}]"}
                ),
            )
            for index, split in enumerate(cast("list[Any]", splits))
        ]
        self.calls += datasets[:1]
        return datasets

    def _changed_dataset(self, owner: ParsedCall, function_name: str, node: ast.Call) -> ParsedCall:
        """The dataset with one more recorded change. `shuffle` is not recorded, because a run shuffles its rows itself."""
        arguments = {**owner.arguments, "source": ast.unparse(node)}
        if function_name == SPLIT:
            sizes = self._read_arguments(node, ("test_size", "train_size"))
            test, train = sizes.get("test_size"), sizes.get("train_size")
            if test is None:
                test = round(1 - train, 6) if isinstance(train, float) else train or 0.25
            why = "`{}` holds out a number of rows"
            remedy = "Set data.test_split_size to a share of them, as 0.1"
            arguments[SPLIT] = (
                test
                if isinstance(test, float)
                else Unread(f"test_size={_as_source(test)}", node.lineno, why, remedy)
            )
        if function_name == "shuffle":
            return replace(owner, arguments=arguments)
        arguments["changes"] = [*arguments.get("changes", ()), function_name]
        if function_name not in CHANGES_OF_NO_ROW:
            arguments["row_changes"] = [*arguments.get("row_changes", ()), node]
        self.changed.append(dataset := ParsedCall(DATASET_LOADER, node.lineno, arguments))
        return dataset

    def _call_of_python(self, node: ast.Call, function_name: str) -> Any:
        """Evaluate the Python built-ins that create or change settings."""
        match function_name, node.args:
            case "setattr", [whose, ast.Constant(str(name)), value]:
                target = ast.Attribute(whose, name, ast.Store(), lineno=node.lineno)
                self._bind(target, self.value(value))
            case "dict", _:
                return self._merge_arguments(node)
            case "add_callback", [callback]:
                self._add_callback(node, self.value(callback))
            case "add_argument", [*_, ast.Constant(str(name))] if name.startswith("--"):
                self._add_flag(node, name[2:])
            case "replace", [_]:
                arguments = self._read_arguments(node, ("",))
                original = arguments.pop("")
                if isinstance(original, ParsedCall):
                    self.calls.remove(original)
                    call = ParsedCall(original.kind, node.lineno, original.arguments | arguments)
                    self.calls.append(call)
                    return call
            case "copy" | "deepcopy", [only]:
                content = self.value(only)
                return (
                    dict(cast("dict[str, Any]", content)) if isinstance(content, dict) else content
                )
            case _:
                for expression in [*node.args, *(keyword.value for keyword in node.keywords)]:
                    self.value(expression)
        return _unread_node(node)

    def _add_callback(self, node: ast.Call, added: Any) -> None:
        trainer = self.value(node.func.value) if isinstance(node.func, ast.Attribute) else None
        if isinstance(trainer, ParsedCall):
            callbacks: Any = trainer.arguments.get("callbacks") or []
            is_list = isinstance(callbacks, list)
            trainer.arguments["callbacks"] = [*callbacks, added] if is_list else callbacks

    def _add_flag(self, node: ast.Call, name: str) -> None:
        """Remember the default of a command-line option."""
        arguments = self._read_arguments(ast.Call(node.func, [], node.keywords), ())
        action = arguments.get("action")
        if action in ("store_true", "store_false"):
            arguments.setdefault("default", action == "store_false")
        if _is_readable(arguments.get("default", _unread_node(node))):
            flag = str(arguments.get("dest", name)).replace("-", "_")
            self.flags[flag] = arguments["default"]

    def _merge_arguments(self, node: ast.Call) -> dict[str, Any]:
        """Merge the arguments of `dict(…)` and `update(…)`: dicts and keywords."""
        arguments: dict[str, Any] = {}
        for argument in node.args:
            self._unpack(arguments, argument)
        keywords = ast.Call(node.func, [], node.keywords, lineno=node.lineno)
        return arguments | self._read_arguments(keywords, ())

    def _read_arguments(self, node: ast.Call, positions: Sequence[str]) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        for position, argument in enumerate(node.args):
            has_name = position < len(positions) and not isinstance(argument, ast.Starred)
            name = (
                positions[position] if has_name else f"{called_name(node)} argument {position + 1}"
            )
            arguments[name] = self.value(argument) if has_name else _unread_node(argument)
        for keyword in node.keywords:
            if keyword.arg is None:
                self._unpack(arguments, keyword.value)
            else:
                arguments[keyword.arg] = self.value(keyword.value)
        return arguments

    # The result

    def settings(self) -> dict[str, Any]:
        """The settings of the last trainer. Settings that no trainer uses come from the last call of each kind (for models, the first)."""
        settings: dict[str, Any] = {}
        used_calls: list[ParsedCall] = []
        trainers = [call for call in self.calls if call.kind == "GRPOTrainer"]
        if trainers:
            self._take_settings(settings, trainers[-1], used_calls)
        for kind in CALLS:
            calls_of_kind = [call for call in self.calls if call.kind == kind]
            if kind == "SamplingParams" or not calls_of_kind:
                continue
            if kind == "from_pretrained" and isinstance(settings.get("model"), str):
                continue
            if not any(call.kind == kind for call in used_calls):
                chosen_call = calls_of_kind[0] if kind == "from_pretrained" else calls_of_kind[-1]
                self._take_settings(settings, chosen_call, used_calls)
            last_line = max(call.line for call in used_calls if call.kind == kind)
            other_lines = [str(call.line) for call in calls_of_kind if call not in used_calls]
            if kind in ("GRPOConfig", "GRPOTrainer") and other_lines:
                why = f"that of line {last_line} is read instead"
                settings[f"{kind} of line {', '.join(other_lines[:9])}"] = Unread(kind, 0, why)
        if self.flag_reads and self.given_flags is None:
            why = "what it gives is not known, and the defaults are taken of "
            why += ", ".join(sorted({*self.flag_reads}))
            if self.branches:
                branches = [f"{test} is {is_true}" for test, is_true in self.branches.items()]
                why += f". So {', '.join(branches)}"
            remedy = f"{USUAL_REMEDY}, or give the command in a .sh file"
            settings["command line"] = Unread("", 0, why, remedy)
        return settings

    def _take_settings(
        self, settings: dict[str, Any], call: ParsedCall, used_calls: list[ParsedCall]
    ) -> None:
        """Take the settings of an object and of its arguments; a known value takes precedence over an unread one."""
        if call in used_calls:
            return
        used_calls.append(call)
        if call.kind == "LoraConfig" or (call.kind == "get_peft_model" and "r" in call.arguments):
            settings["lora_call"] = call.kind
        # `eval_dataset` comes last, because it is compared with the training dataset.
        for name in sorted(call.arguments, key="eval_dataset".__eq__):
            value = call.arguments[name]
            if name in ("train_dataset", "eval_dataset"):
                take = self._take_dataset if name == "train_dataset" else self._take_held_out
                if value is not None:
                    take(settings, value)
                continue
            if isinstance(value, ParsedCall):
                self._take_settings(settings, value, used_calls)
                continue
            value = self._callbacks(value) if name == "callbacks" else value
            value = self._with_remedy(name, value)
            value = self._reward_names(value) if name == "reward_funcs" else value
            if call.kind == "SamplingParams" and name in ("seed", "max_tokens", "n"):
                name = f"vllm_sampling_params.{name}"
            by_entry = name == "reward_funcs" or (name == "callbacks" and isinstance(value, list))
            if not by_entry and not _is_readable(value):
                value = value if isinstance(value, Unread) else Unread(_as_source(value), call.line)
                settings.setdefault(name, value)
            else:
                settings[name] = value

    def _callbacks(self, value: Any) -> Any:
        """Each callback as an entry of ours, with `:Class` for one of this file, or as an `Unread` that says what to write."""
        if not isinstance(value, list):
            return value
        return [self._callback(callback) for callback in cast("list[Any]", value)]

    def _callback(self, value: Any) -> Any:
        if not isinstance(value, Unread):
            return Unread(_as_source(value), 0, remedy=CALLBACK_REMEDY)
        node = ast.parse(value.written, mode="eval").body
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        if not isinstance(call.func, ast.Name | ast.Attribute):
            return replace(value, remedy=CALLBACK_REMEDY)
        name = self._reward_name(Unread(ast.unparse(call.func), value.line))
        if not isinstance(name, str) or ":" not in name:
            why = "it works only with the trainer of TRL"
            return replace(value, why=why, remedy=CALLBACK_REMEDY)
        parameters = {each.arg or "**": self.value(each.value) for each in call.keywords}
        if call.args or "**" in parameters or not _is_readable(list(parameters.values())):
            given = [
                *(["PARAMETER"] * len(call.args)),
                *(each.arg or "…" for each in call.keywords),
            ]
            values = [*call.args, *(each.value for each in call.keywords)]
            written = ", ".join(
                f"{key}: {ast.unparse(each)}" for key, each in zip(given, values, strict=True)
            )
            module = "FILE.py" if name.startswith(":") else ""
            why = "its arguments have no names, or only running the file tells their values"
            remedy = f"Write under callbacks: {{name: {module}{name}, {written}}}"
            return replace(value, why=why, remedy=remedy)
        return {"name": name, **parameters} if parameters else name

    def _with_remedy(self, name: str, value: Any) -> Any:
        """If the trainer's arguments or its adapter are not known: with what to do, and what is taken in place of the adapter."""
        if not isinstance(value, Unread) or name not in ("args", "peft_config"):
            return value
        lines = [call.line for call in self.calls if call.kind == "LoraConfig"]
        if name == "args":
            remedy = COMMAND_REMEDY
        elif lines:
            remedy = f"lora is taken from the LoraConfig of line {lines[-1]}; if the run has no adapter, set lora: null"
        else:
            remedy = "lora is null, which trains all weights; if the run has an adapter, write lora.r and lora.alpha"
        return replace(value, remedy=remedy)

    def _take_dataset(self, settings: dict[str, Any], value: Any) -> None:
        """Take the dataset from which the trainer's rows were loaded, and report its transformations, which are not taken over."""
        is_call = isinstance(value, ParsedCall) and value.kind == DATASET_LOADER
        self.train_rows = str(value.arguments["source"]) if is_call else _as_source(value)
        if not isinstance(value, ParsedCall) or value.kind != DATASET_LOADER:
            line = value.line if isinstance(value, Unread) else 0
            settings["train_dataset"] = Unread(_as_source(value), line, remedy=TASK_REMEDY)
            loads = [call for call in self.calls if call.kind == DATASET_LOADER]
            if len({str(call.arguments.get("path")) for call in loads}) != 1:
                return
            # A function makes the rows; assume that it uses the only dataset that the file loads, with all that is done to it there.
            changes = {"changes": [_as_source(value)]}
            if self.changed:
                last = max(self.changed, key=lambda one: len(one.arguments["changes"]))
                changes = {key: last.arguments.get(key, []) for key in ("changes", "row_changes")}
            value = ParsedCall(DATASET_LOADER, line, {**loads[0].arguments, **changes})
        path = value.arguments.get("path")
        if not isinstance(path, str):
            source = str(value.arguments["source"])
            settings.setdefault("train_dataset", Unread(source, value.line, remedy=TASK_REMEDY))
            return
        for key, argument_name in DATA_KEYS.items():
            if (argument := value.arguments.get(argument_name)) is not None:
                settings[key] = argument
        if changes := [name for name in value.arguments.get("changes", ()) if name != SPLIT]:
            why = f"`{{}}` changes the rows of {path} there, and here they are taken as they are"
            source = ", ".join(dict.fromkeys(changes))
            settings["train_dataset"] = Unread(source, value.line, why, COLUMNS_REMEDY)
            self.row_changes = value.arguments.get("row_changes", ())
            self.chosen = [change for change in changes if change in CHOICES_OF_ROWS]

    def take_functions(self, settings: dict[str, Any], source: str) -> bool:
        """Copy how the file makes its rows or changes each of them, and its own rewards: importing the file may train, and needs TRL.

        True if what is copied makes the rows' messages.
        """
        rewards = cast("list[Any]", settings.get("reward_funcs") or [])
        own = [str(name)[1:] for name in rewards if str(name).startswith(":")]
        own += _callbacks_to_copy(settings.get("callbacks"), source)
        if self.held_out is not None and self._take_both_sets(settings, source, own, self.held_out):
            return True
        rows, held_out = settings.get("train_dataset"), settings.get("eval_dataset")
        copied = copy_functions(source, own, self.row_changes) if self.row_changes else None
        makes_messages = True
        if copied is not None:
            settings["map"] = f":{free_name(ROW, source)}"
            chosen = ", ".join(self.chosen)
            rest = replace(settings.pop("train_dataset"), written=chosen, remedy=CHOICE_REMEDY)
            settings |= {"train_dataset": rest} if self.chosen else {}
        elif isinstance(rows, Unread) and rows.remedy == TASK_REMEDY:
            written = {ROWS: rows.written}
            if isinstance(held_out, Unread):
                written[HELD_OUT_ROWS] = held_out.written
            # By their variables, what is done to the rows is done once, and what changes them in place is not lost.
            arguments = {ROWS: "train_dataset", HELD_OUT_ROWS: "eval_dataset"}
            hooks = {hook: self.variables.get(arguments[hook], written[hook]) for hook in written}
            copied = copy_functions(source, own, hooks=hooks)
            for name in ("train_dataset", "eval_dataset") if copied else ():
                settings.pop(name, None)
        if copied is None:
            makes_messages = False
            copied = copy_functions(source, own) if own else None
        settings |= {} if copied is None else {OWN_FUNCTIONS: copied}
        return makes_messages

    def _take_both_sets(
        self, settings: dict[str, Any], source: str, own: Sequence[str], held_out: ParsedCall
    ) -> bool:
        """Copy the code of both sets, as `process_row` would change their rows alike; False, and a warning, if it cannot be copied."""
        hooks = {
            ROWS: self.variables.get("train_dataset", self.train_rows),
            HELD_OUT_ROWS: self.variables.get("eval_dataset", str(held_out.arguments["source"])),
        }
        copied = copy_functions(source, own, hooks=hooks)
        if copied is None:
            trained, other = (
                _steps(self.row_changes),
                _steps(held_out.arguments.get("row_changes", ())),
            )
            why = (
                f"`{{}}` has rows that the file changes by {', '.join(other) or 'nothing'}, and those that are trained on by "
                f"{', '.join(trained) or 'nothing'}; here both are changed alike"
            )
            written = str(held_out.arguments["source"])
            settings["eval_dataset"] = Unread(written, held_out.line, why, BOTH_REMEDY)
            return False
        for name in (*DATA_KEYS, "dataset_test_split", "train_dataset"):
            settings.pop(name, None)
        settings[OWN_FUNCTIONS] = copied
        return True

    def _take_held_out(self, settings: dict[str, Any], value: Any) -> None:
        """Take the evaluation rows if they are a split of the training dataset."""
        if not isinstance(value, ParsedCall) or value.kind != DATASET_LOADER:
            line = value.line if isinstance(value, Unread) else 0
            settings["eval_dataset"] = Unread(_as_source(value), line, remedy=HELD_OUT_REMEDY)
            return
        path, split = value.arguments.get("path"), value.arguments.get("split")
        trained_path, trained = settings.get("dataset_name"), settings.get("dataset_train_split")
        if splits := _splits_of_folder(trained_path, path):
            # A file by itself has only the split `train`, of which there may be a part: `train[:9]`.
            settings["dataset_name"] = str(Path(str(path)).parent)
            settings["dataset_train_split"] = f"{splits[0]}{str(trained or '')[len('train') :]}"
            settings["dataset_test_split"] = f"{splits[1]}{str(split or '')[len('train') :]}"
        elif path != trained_path or not isinstance(split, str):
            source = str(value.arguments["source"])
            settings["eval_dataset"] = Unread(
                source, value.line, OTHER_DATASET_REASON, OTHER_DATASET_REMEDY
            )
        elif SPLIT not in settings:
            settings.setdefault("dataset_test_split", split)
        changes = value.arguments.get("row_changes", ())
        if "eval_dataset" not in settings and _steps(changes) != _steps(self.row_changes):
            self.held_out = value

    def system_prompt(self, tree: ast.Module) -> dict[str, Any]:
        """The system prompt in the file's messages, if all of them have the same one."""
        prompts: dict[str, Any] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Dict):
                keys = [
                    key_node.value if isinstance(key_node, ast.Constant) else ""
                    for key_node in node.keys
                ]
                message = dict(zip(keys, node.values, strict=True))
                role, content = message.get("role"), message.get("content")
                if isinstance(role, ast.Constant) and role.value == "system" and content:
                    prompts[ast.unparse(content)] = self.value(content)
        if not prompts:
            return {}
        prompt = next(iter(prompts.values()))
        is_single = len(prompts) == 1 and isinstance(prompt, str)
        why = "the messages of the file have `{}` as their system prompt"
        return {"system_prompt": prompt if is_single else Unread(", ".join(prompts), 0, why)}

    def _reward_names(self, value: Any) -> Any:
        """Reward functions by name: `:function` for one of this file, `module:function` for one of another, and the bare name for those of
        TRL and open-r1.
        """
        rewards = cast("list[Any]", value) if isinstance(value, list) else [value]
        return [self._reward_name(reward) for reward in rewards]

    def _reward_name(self, value: Any) -> Any:
        match = isinstance(value, Unread) and re.match(
            r"(?:(?:functools\.)?partial\()?([\w.]+)", value.written
        )
        if not match:
            return value
        head, _, rest = match[1].partition(".")
        module = self.imported.get(head, head if rest else self.imported.get("*", ""))
        module = module.replace("*", head)
        of_library = re.match(r"(trl|open_r1)\b", module) is not None
        if match[1] != value.written:
            return replace(value, of_library=of_library)
        if of_library:
            return match[1].rpartition(".")[2] if rest else module.rpartition(":")[2]
        if rest:
            return f"{module.replace(':', '.')}:{rest}" if head in self.imported else value
        return module or f":{head}"


def _splits_of_folder(trained: Any, held_out: Any) -> tuple[str, str] | None:
    """The names under which one folder has these two files as splits; None if it does not."""
    if not isinstance(trained, str) or not isinstance(held_out, str):
        return None
    files = Path(trained), Path(held_out)
    first, second = (re.split(r"[.-]", file.name)[0] for file in files)
    folder = files[0].parent
    for split, file in zip((first, second), files, strict=True):
        others = [*folder.glob(f"{split}[.-]*"), *folder.glob(f"data/{split}[.-]*")]
        if [each for each in others if each.suffix in ENDINGS] != [file]:
            return None
    return (first, second) if first != second else None


def _file_of_split(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `load_dataset`; if its `data_files` name a file for each split, with the file of the chosen split."""
    files, split = arguments.get("path"), arguments.get("split")
    if not isinstance(files, dict) or not isinstance(split, str):
        return arguments
    name, bracket, part = split.partition("[")  # a file by itself has only the split `train`
    path = cast("dict[str, Any]", files).get(name, files)
    return {**arguments, "path": path, "split": f"train{bracket}{part}"}


def _steps(changes: Sequence[ast.Call]) -> list[str]:
    """What is done to rows, as text: `map(f)`."""
    return [
        ast.unparse(ast.Call(ast.Name(called_name(call)), call.args, call.keywords))
        for call in changes
    ]


def _callbacks_to_copy(entries: Any, source: str) -> list[str]:
    """The classes of the file among the callbacks. An entry whose class cannot be copied is replaced by an `Unread`."""
    callbacks = cast("list[Any]", entries) if isinstance(entries, list) else []
    own: list[str] = []
    for index, entry in enumerate(callbacks):
        name = entry_name(entry)
        if name.startswith(":") and copy_functions(source, [name[1:]]) is None:
            why = "it is not defined in the file, or cannot be copied"
            callbacks[index] = Unread(name[1:], 0, why, CALLBACK_REMEDY)
        elif name.startswith(":"):
            own.append(name[1:])
    return own


def entry_name(entry: Any) -> str:
    """The name in an entry of ours, which is a name or a section with one; empty for a value that was not read."""
    name = cast("dict[str, Any]", entry).get("name") if isinstance(entry, dict) else entry
    return name if isinstance(name, str) else ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_readable(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_readable, cast("list[Any]", value)))
    if isinstance(value, dict):
        return all(map(_is_readable, cast("dict[str, Any]", value).values()))
    return not isinstance(value, Unread | ParsedCall)


def _as_source(value: Any) -> str:
    """A value as source text."""
    if isinstance(value, list):
        return f"[{', '.join(map(_as_source, cast('list[Any]', value)))}]"
    if isinstance(value, dict):
        pairs = cast("dict[str, Any]", value).items()
        return f"{{{', '.join(f'{key!r}: {_as_source(item)}' for key, item in pairs)}}}"
    if isinstance(value, ParsedCall):
        return f"{value.kind}(…)"
    return value.written if isinstance(value, Unread) else repr(value)


def _unread_node(node: ast.expr) -> Unread:
    return Unread(ast.unparse(node), getattr(node, "lineno", 0))
