"""Reads the settings of a GRPO training from a Python file without running any of it.

The file is interpreted statement by statement as far as its values are plain: literals, arithmetic on them, names, dicts that are
merged or unpacked, attributes that are set later. A value that only running the file would give becomes an `Unread` with its line; so
does a value that depends on a condition. Bodies of functions come last, when all names of the module are known.

Two settings come from what the file does instead of what it sets: the data, from the `load_dataset` that the trainer's rows start from,
and the system prompt, from the messages that the file creates.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

from groupwise.core.plugins import runs_as_script


@dataclass(frozen=True, slots=True)
class Unread:
    """A value that could not be read, as source text."""

    written: str
    line: int = 0
    """Line in a Python file; 0 for other files."""
    why: str = "only running the file tells what `{}` is"
    remedy: str = "Write a literal value there, or edit the written config"
    of_library: bool = False
    """True if it calls a function of TRL or open-r1."""

    @property
    def explanation(self) -> str:
        """Why the value could not be read, for a message about its key."""
        at = f"line {self.line}: " if self.line else ""
        return at + self.why.replace("{}", f"{self.written:.60}")


@dataclass(slots=True, eq=False)
class Made:
    """The result of a call whose arguments are settings."""

    kind: str
    line: int
    given: dict[str, Any]


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
LOADED = "load_dataset"
DATASET_ARGUMENTS = ("path", "name", "data_dir", "data_files", "split")
"""The first positional arguments of `load_dataset`."""
FILE_FORMATS = ("json", "csv", "parquet", "text")
"""The names of `load_dataset` for the formats of `data_files`."""
OTHER_SET = "`{}` is no split of the set that is trained on"
HELD_OUT = "data.dataset_test_split and data.test_split_size say what is held out"
BY_COLUMNS = (
    "data.prompt_column, data.answer_column and data.columns name columns; rows that are made otherwise a task file brings "
    "(get_rl_dataset)"
)
BY_A_TASK = "A task file brings rows that Python makes (get_rl_dataset), or data.dataset_name names a file with them"

OTHERS_OWN = re.compile(r"Tokenizer|Processor|Dataset|Generation|AutoConfig|Peft|Classification")
"""Classes whose `from_pretrained` does not load the trained model."""

LARGEST_EXPONENT, LARGEST_BASE, LONGEST = 64, 10**9, 10_000
"""Limits on exponents, bases of powers, and lengths of texts: larger ones would fill the memory and are no config values."""

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b, ast.Sub: lambda a, b: a - b, ast.Mult: lambda a, b: a * b, ast.FloorDiv: lambda a, b: a // b,
    ast.Div: lambda a, b: a / b, ast.Pow: lambda a, b: a**b,
}  # fmt: skip


MOST_ODD_LINES = 9
"""Number of lines with invalid syntax for this Python version above which the file does not count as Python."""


def of_python(text: str) -> dict[str, Any]:
    """The settings under the names in the file. Raises SyntaxError or ValueError if it is not Python."""
    # Shell and IPython lines, which occur in exported notebooks.
    lines = re.sub(r"(?m)^([ \t]*)[!%].*$", r"\1pass", text).split("\n")
    odd: dict[str, Any] = {}
    first: SyntaxError | None = None
    while True:
        try:
            tree = ast.parse("\n".join(lines))
        except SyntaxError as error:
            first = first or error
            at = min(error.lineno or len(lines), len(lines))
            line = lines[at - 1]
            if not line.strip() or len(odd) == MOST_ODD_LINES:
                raise first from None
            odd.setdefault(
                f"line {at}", Unread(line.strip(), 0, "`{}` is no Python of this version")
            )
            # Replace the line: a statement by `pass`, a line within a statement by an empty one.
            indent = line[: len(line) - len(line.lstrip())]
            lines[at - 1] = "" if line.strip() == "pass" else f"{indent}pass"
        else:
            reader = _Reader()
            reader.read(tree.body)
            found = reader.settings()
            if found.get("system_prompt") is None:
                found |= reader.system_prompt(tree)
            if first is not None and not found:
                raise first
            return found | odd


def of_notebook(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The settings of a notebook's cells, without cells in another language."""
    texts = ["".join(each["source"]) for each in cells if each.get("cell_type") == "code"]
    other = re.compile(r"\s*%%(?!capture|time)")
    return of_python("\n".join(each for each in texts if not other.match(each)))


@dataclass(slots=True)
class _Reader:
    names: dict[str, Any] = field(default_factory=dict[str, Any])
    imported: dict[str, str] = field(default_factory=dict[str, str])
    """Imported functions as `module:function`, and those of this file as `:function`."""
    made: list[Made] = field(default_factory=list[Made])
    flags: dict[str, Any] = field(default_factory=dict[str, Any])
    """Defaults of command-line options."""
    flags_read: set[str] = field(default_factory=set[str])
    unsure: int = 0
    """Number of conditions and loops around the current statement."""
    later: list[ast.FunctionDef | ast.AsyncFunctionDef] = field(
        default_factory=list[ast.FunctionDef | ast.AsyncFunctionDef]
    )

    # Statements

    def read(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            self._statement(statement)
        whole = self.names
        while self.later:
            function = self.later.pop(0)
            self.names = dict(whole)
            for argument in ast.walk(function.args):
                if isinstance(argument, ast.arg):
                    self.names[argument.arg] = Unread(argument.arg, argument.lineno)
            for statement in function.body:
                self._statement(statement)
        self.names = whole

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Assign(targets, value):
                found = self.value(value)
                for target in targets:
                    self._bind(target, found)
            case ast.AnnAssign(target, ast.expr() as value):
                self._bind(target, self.value(value))
            case ast.AugAssign(target, operator, value):
                self._bind(target, self.value(ast.BinOp(_read(target), operator, value)))
            case ast.Import() | ast.ImportFrom():
                self._import(node)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self.imported[node.name] = f":{node.name}"
                self.later.append(node)
            case ast.ClassDef(body=body):
                self.later += [
                    each
                    for each in body
                    if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
                ]
            case ast.If(test, body, orelse):
                decided = True if runs_as_script(test) else self.value(test)
                if isinstance(decided, bool):
                    self._block(body if decided else orelse)
                else:
                    with self._perhaps():
                        self._block([*body, *orelse])
            case _:
                self._other(node)

    def _other(self, node: ast.stmt) -> None:
        """Visit the statements and values inside any other statement."""
        repeated = isinstance(node, ast.For | ast.AsyncFor | ast.While | ast.Match)
        with self._perhaps(repeated):
            if isinstance(node, ast.For | ast.AsyncFor):
                self._bind(node.target, Unread(ast.unparse(node.target), node.lineno))
            for name, part in ast.iter_fields(node):
                for each in cast("list[Any]", part if isinstance(part, list) else [part]):
                    with self._perhaps(isinstance(each, ast.ExceptHandler) or name == "orelse"):
                        if isinstance(each, ast.stmt):
                            self._statement(each)
                        elif isinstance(each, ast.expr):
                            self.value(each)
                        elif isinstance(each, ast.withitem):
                            self.value(each.context_expr)
                        elif isinstance(each, ast.ExceptHandler | ast.match_case):
                            self._block(each.body)

    def _block(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            self._statement(statement)

    @contextmanager
    def _perhaps(self, so: bool = True) -> Generator[None]:
        self.unsure += so
        yield
        self.unsure -= so

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        module = "" if isinstance(node, ast.Import) else node.module or ""
        for each in node.names:
            name = f"{module}:{each.name}" if module else each.name
            self.imported[each.asname or each.name] = name

    def _bind(self, target: ast.expr, value: Any) -> None:
        match target:
            case ast.Name(name):
                self._put(self.names, name, value, target, new_is_sure=True)
            case ast.Attribute(ast.Name(owner), name) if isinstance(
                made := self.names.get(owner), Made
            ):
                self._put(made.given, name, value, target)
            case ast.Subscript(ast.Name(owner), ast.Constant(str(name))) if isinstance(
                before := self.names.get(owner), dict
            ):
                self._put(cast("dict[str, Any]", before), name, value, target)
            case ast.Tuple(entries) | ast.List(entries):
                several = cast("list[Any]", value) if isinstance(value, list) else []
                fits = len(several) == len(entries)
                for at, entry in enumerate(entries):
                    first = value if at == 0 and isinstance(value, Made) else _unread(entry)
                    self._bind(entry, several[at] if fits else first)
            case _:
                pass

    def _put(
        self,
        into: dict[str, Any],
        name: str,
        value: Any,
        node: ast.expr,
        *,
        new_is_sure: bool = False,
    ) -> None:
        """Set a name to a value. Under a condition it becomes `Unread`, unless it had that value before, or is new and `new_is_sure`."""
        before = into.get(name)
        new = name not in into and new_is_sure
        if self.unsure and not new and not (name in into and before == value):
            value = Unread(
                name, node.lineno, "its value depends on a condition, or changes in a loop"
            )
        into[name] = value

    # Values

    def value(self, node: ast.expr) -> Any:
        """A plain value (which may contain unread ones), a `Made`, or an `Unread`."""
        match node:
            case ast.Constant(value):
                return value
            case ast.Name(name):
                return self.names.get(name, _unread(node))
            case ast.Attribute(ast.Name("SchedulerType"), name):
                return name.lower()
            case ast.Attribute(owner, name):
                return self._attribute(node, self.value(owner), name)
            case ast.List() | ast.Tuple() | ast.Dict() | ast.Subscript():
                return self._container(node)
            case ast.UnaryOp(operator, operand):
                return self._unary(node, operator, self.value(operand))
            case ast.BinOp(left, operator, right):
                return self._operation(node, self.value(left), operator, self.value(right))
            case ast.JoinedStr(parts):
                texts = [
                    self.value(each.value if isinstance(each, ast.FormattedValue) else each)
                    for each in parts
                ]
                plain = all(isinstance(each, str | int | float) for each in texts)
                return "".join(map(str, texts)) if plain else _unread(node)
            case ast.Call():
                return self._call(node)
            case _:
                return _unread(node)

    def _attribute(self, node: ast.expr, owner: Any, name: str) -> Any:
        if isinstance(owner, Made):
            return owner.given.get(name, _unread(node))
        if isinstance(owner, Unread) and "parse" in owner.written and name in self.flags:
            self.flags_read.add(name)
            return self.flags[name]
        return _unread(node)

    def _unary(self, node: ast.expr, operator: ast.unaryop, value: Any) -> Any:
        if isinstance(operator, ast.USub) and _is_number(value):
            return -value
        if isinstance(operator, ast.Not) and isinstance(value, bool):
            return not value
        return _unread(node)

    def _container(self, node: ast.List | ast.Tuple | ast.Dict | ast.Subscript) -> Any:
        match node:
            case ast.List(entries) | ast.Tuple(entries):
                return [self.value(each) for each in entries]
            case ast.Dict(keys, values):
                return self._dict(keys, values)
            case ast.Subscript(owner, key_node):
                container, key = self.value(owner), self.value(key_node)
                if isinstance(container, Made) and container.kind == LOADED:
                    cut = "train_test_split" in container.given.get("changes", ())
                    split = container.given.get("split") if cut else key
                    return Made(LOADED, node.lineno, {**container.given, "split": split})
                inside = (
                    isinstance(container, dict) and isinstance(key, str | int) and key in container
                )
                return cast("dict[Any, Any]", container)[key] if inside else _unread(node)

    def _dict(self, keys: Sequence[ast.expr | None], values: Sequence[ast.expr]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in zip(keys, values, strict=True):
            if key is None:
                self._unpack(found, value)
            else:
                name = self.value(key)
                plain = isinstance(name, str | int | float)
                found[str(name) if plain else ast.unparse(key)] = self.value(value)
        return found

    def _unpack(self, into: dict[str, Any], node: ast.expr) -> None:
        """Add what `**` unpacks: its keys if they are known, else one key that stores the unread expression."""
        mapping = self.value(node)
        if isinstance(mapping, Made):
            mapping = mapping.given
        if isinstance(mapping, dict):
            into |= cast("dict[str, Any]", mapping)
        else:
            into[f"**{ast.unparse(node):.60}"] = _unread(node)

    def _operation(self, node: ast.expr, one: Any, operator: ast.operator, other: Any) -> Any:
        numbers = _is_number(one) and _is_number(other)
        huge = isinstance(operator, ast.Pow) and not (
            numbers and abs(one) < LARGEST_BASE and abs(other) <= LARGEST_EXPONENT
        )
        if numbers and not huge and type(operator) in _OPERATORS:
            with suppress(ArithmeticError):
                return _OPERATORS[type(operator)](one, other)
        if isinstance(operator, ast.Add) and isinstance(one, str | list):
            first, second = cast("Any", one), other
            if type(first) is type(second) and len(first) + len(second) < LONGEST:
                return first + second
        if isinstance(operator, ast.BitOr) and isinstance(one, dict) and isinstance(other, dict):
            return cast("dict[str, Any]", one) | cast("dict[str, Any]", other)
        return _unread(node)

    def _call(self, node: ast.Call) -> Any:
        called = _last_name(node.func)
        if isinstance(node.func, ast.Attribute):
            owner = self.value(node.func.value)
            if isinstance(owner, dict | list) and called in ("update", "append", "extend"):
                owner_value = cast("Any", owner)
                if called == "update":
                    for name, value in self._merge_arguments(node).items():
                        self._put(owner_value, name, value, node)
                elif isinstance(owner_value, list):
                    items = [self.value(each) for each in node.args]
                    more = items if called == "append" else items[0] if items else []
                    sure = isinstance(more, list) and not self.unsure
                    cast("list[Any]", owner_value).extend(
                        cast("list[Any]", more) if sure else [_unread(node)]
                    )
                return None
            if isinstance(owner, Made) and owner.kind == LOADED:
                return self._changed_dataset(owner, called, node)
        if called == LOADED:
            return self._loaded_dataset(node)
        kind = next((each for each in CALLS if called.endswith(each)), None)
        if kind == "from_pretrained" and OTHERS_OWN.search(ast.unparse(node.func)):
            return _unread(node)
        if kind is not None:
            made = Made(kind, node.lineno, self._arguments(node, CALLS[kind]))
            self.made.append(made)
            return made
        return self._call_of_python(node, called)

    def _loaded_dataset(self, node: ast.Call) -> Any:
        """A dataset, or a list of datasets if several splits are loaded at once."""
        given = self._arguments(node, DATASET_ARGUMENTS)
        if given.get("path") in FILE_FORMATS and "data_files" in given:
            given |= {"path": given.pop("data_files"), "name": None}
        splits = given.get("split")
        if not isinstance(splits, list):
            self.made.append(made := Made(LOADED, node.lineno, given))
            return made
        each_split = cast("list[Any]", splits)
        several = [Made(LOADED, node.lineno, given | {"split": each}) for each in each_split]
        self.made += several[:1]
        return several

    def _changed_dataset(self, owner: Made, called: str, node: ast.Call) -> Made:
        """The same dataset with one more recorded change. `shuffle` is not recorded, because a run shuffles its rows itself."""
        given = dict(owner.given)
        size = self._arguments(node, ("test_size",)).get("test_size")
        if called == "train_test_split" and isinstance(size, float):
            given["test_split_size"] = size
        if called != "shuffle":
            given["changes"] = [*given.get("changes", ()), called]
        return Made(LOADED, node.lineno, given)

    def _call_of_python(self, node: ast.Call, called: str) -> Any:
        """Evaluate the Python built-ins that create or change settings."""
        match called, node.args:
            case "setattr", [whose, ast.Constant(str(name)), value]:
                target = ast.Attribute(whose, name, ast.Store(), lineno=node.lineno)
                self._bind(target, self.value(value))
            case "dict", _:
                return self._merge_arguments(node)
            case "add_argument", [*_, ast.Constant(str(name))] if name.startswith("--"):
                given = self._arguments(ast.Call(node.func, [], node.keywords), ())
                if _is_plain(given.get("default", _unread(node))):
                    self.flags[name[2:].replace("-", "_")] = given["default"]
            case "replace", [_]:
                given = self._arguments(node, ("",))
                before = given.pop("")
                if isinstance(before, Made):
                    self.made.remove(before)
                    made = Made(before.kind, node.lineno, before.given | given)
                    self.made.append(made)
                    return made
            case "copy" | "deepcopy", [only]:
                held = self.value(only)
                return dict(cast("dict[str, Any]", held)) if isinstance(held, dict) else held
            case _:
                for each in [*node.args, *(keyword.value for keyword in node.keywords)]:
                    self.value(each)
        return _unread(node)

    def _merge_arguments(self, node: ast.Call) -> dict[str, Any]:
        """Merge the arguments of `dict(…)` and `update(…)`: dicts and keywords."""
        found: dict[str, Any] = {}
        for each in node.args:
            self._unpack(found, each)
        keywords = ast.Call(node.func, [], node.keywords, lineno=node.lineno)
        return found | self._arguments(keywords, ())

    def _arguments(self, node: ast.Call, positions: Sequence[str]) -> dict[str, Any]:
        given: dict[str, Any] = {}
        for number, each in enumerate(node.args):
            known = number < len(positions) and not isinstance(each, ast.Starred)
            name = positions[number] if known else f"{_last_name(node.func)} argument {number + 1}"
            given[name] = self.value(each) if known else _unread(each)
        for keyword in node.keywords:
            if keyword.arg is None:
                self._unpack(given, keyword.value)
            else:
                given[keyword.arg] = self.value(keyword.value)
        return given

    # The result

    def settings(self) -> dict[str, Any]:
        """The settings of the last trainer. Settings that no trainer uses come from the last call of each kind (for models, the first)."""
        found: dict[str, Any] = {}
        reached: list[Made] = []
        trainers = [each for each in self.made if each.kind == "GRPOTrainer"]
        if trainers:
            self._take(found, trainers[-1], reached)
        for kind in CALLS:
            of_kind = [each for each in self.made if each.kind == kind]
            if kind == "SamplingParams" or not of_kind:
                continue
            if kind == "from_pretrained" and isinstance(found.get("model"), str):
                continue
            if not any(each.kind == kind for each in reached):
                chosen = of_kind[0] if kind == "from_pretrained" else of_kind[-1]
                self._take(found, chosen, reached)
            last_line = max(each.line for each in reached if each.kind == kind)
            others = [str(each.line) for each in of_kind if each not in reached]
            if kind in ("GRPOConfig", "GRPOTrainer") and others:
                why = f"that of line {last_line} is read instead"
                found[f"{kind} of line {', '.join(others[:9])}"] = Unread(kind, 0, why)
        if self.flags_read:
            why = "what it gives is not known, and of {} the defaults are taken"
            found["command line"] = Unread(", ".join(sorted(self.flags_read)), 0, why)
        return found

    def _take(self, found: dict[str, Any], made: Made, reached: list[Made]) -> None:
        """Take the settings of an object and of its arguments; a known value takes precedence over an unread one."""
        if made in reached:
            return
        reached.append(made)
        if made.kind == "LoraConfig" or (made.kind == "get_peft_model" and "r" in made.given):
            found["lora_call"] = made.kind
        # `eval_dataset` comes last, because it is compared with the training dataset.
        for name in sorted(made.given, key="eval_dataset".__eq__):
            value = made.given[name]
            if name in ("train_dataset", "eval_dataset"):
                take = self._take_dataset if name == "train_dataset" else self._take_held_out
                if value is not None:
                    take(found, value)
                continue
            if isinstance(value, Made):
                self._take(found, value, reached)
                continue
            value = self._rewards(value) if name == "reward_funcs" else value
            if made.kind == "SamplingParams" and name in ("seed", "max_tokens", "n"):
                name = f"vllm_sampling_params.{name}"
            if name != "reward_funcs" and not _is_plain(value):
                value = value if isinstance(value, Unread) else Unread(_as_source(value), made.line)
                found.setdefault(name, value)
            else:
                found[name] = value

    def _take_dataset(self, found: dict[str, Any], value: Any) -> None:
        """Take the dataset from which the trainer's rows were loaded, and report its transformations, which are not taken over."""
        if not isinstance(value, Made) or value.kind != LOADED:
            line = value.line if isinstance(value, Unread) else 0
            found["train_dataset"] = Unread(_as_source(value), line, remedy=BY_A_TASK)
            loads = [each for each in self.made if each.kind == LOADED]
            if len({str(each.given.get("path")) for each in loads}) != 1:
                return
            # A function makes the rows; assume that it uses the only dataset that the file loads.
            value = Made(LOADED, line, {**loads[0].given, "changes": [_as_source(value)]})
        path = value.given.get("path")
        if not isinstance(path, str):
            found["train_dataset"] = Unread(_as_source(path), value.line, remedy=BY_A_TASK)
            return
        found["dataset_name"] = path
        for key, theirs in (
            ("dataset_config", "name"),
            ("dataset_train_split", "split"),
            ("dataset_revision", "revision"),
            ("test_split_size", "test_split_size"),
        ):
            if (given := value.given.get(theirs)) is not None:
                found[key] = given
        if changes := value.given.get("changes"):
            why = f"`{{}}` changes the rows of {path} there, and here they are taken as they are"
            source = ", ".join(dict.fromkeys(changes))
            found["train_dataset"] = Unread(source, value.line, why, BY_COLUMNS)

    def _take_held_out(self, found: dict[str, Any], value: Any) -> None:
        """Take the evaluation rows if they are a split of the training dataset."""
        if not isinstance(value, Made) or value.kind != LOADED:
            line = value.line if isinstance(value, Unread) else 0
            found["eval_dataset"] = Unread(_as_source(value), line, remedy=HELD_OUT)
            return
        path, split = value.given.get("path"), value.given.get("split")
        if path != found.get("dataset_name") or not isinstance(split, str):
            source = _as_source([path, split])
            found["eval_dataset"] = Unread(source, value.line, OTHER_SET, HELD_OUT)
        elif "test_split_size" not in found:
            found.setdefault("dataset_test_split", split)

    def system_prompt(self, tree: ast.Module) -> dict[str, Any]:
        """The system prompt in the file's messages, if all of them have the same one."""
        prompts: dict[str, Any] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Dict):
                keys = [each.value if isinstance(each, ast.Constant) else "" for each in node.keys]
                message = dict(zip(keys, node.values, strict=True))
                role, content = message.get("role"), message.get("content")
                if isinstance(role, ast.Constant) and role.value == "system" and content:
                    prompts[ast.unparse(content)] = self.value(content)
        if not prompts:
            return {}
        first = next(iter(prompts.values()))
        plain = len(prompts) == 1 and isinstance(first, str)
        why = "the messages of the file have `{}` as their system prompt"
        return {"system_prompt": first if plain else Unread(", ".join(prompts), 0, why)}

    def _rewards(self, value: Any) -> Any:
        """Reward functions by name: `:function` for one of this file, `module:function` for one of another, and the bare name for those of
        TRL and open-r1.
        """
        several = cast("list[Any]", value) if isinstance(value, list) else [value]
        return [self._reward(each) for each in several]

    def _reward(self, value: Any) -> Any:
        called = isinstance(value, Unread) and re.match(
            r"(?:(?:functools\.)?partial\()?([\w.]+)", value.written
        )
        if not called:
            return value
        first, _, rest = called[1].partition(".")
        module = self.imported.get(first, first if rest else self.imported.get("*", ""))
        module = module.replace("*", first)
        of_library = re.match(r"(trl|open_r1)\b", module) is not None
        if called[1] != value.written:
            return replace(value, of_library=of_library)
        if of_library:
            return called[1].rpartition(".")[2] if rest else module.rpartition(":")[2]
        if rest:
            return f"{module.replace(':', '.')}:{rest}" if first in self.imported else value
        return module or f":{first}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, cast("list[Any]", value)))
    if isinstance(value, dict):
        return all(map(_is_plain, cast("dict[str, Any]", value).values()))
    return not isinstance(value, Unread | Made)


def _as_source(value: Any) -> str:
    """A value as source text."""
    if isinstance(value, list):
        return f"[{', '.join(map(_as_source, cast('list[Any]', value)))}]"
    if isinstance(value, dict):
        pairs = cast("dict[str, Any]", value).items()
        return f"{{{', '.join(f'{key!r}: {_as_source(each)}' for key, each in pairs)}}}"
    if isinstance(value, Made):
        return f"{value.kind}(…)"
    return value.written if isinstance(value, Unread) else repr(value)


def _unread(node: ast.expr) -> Unread:
    return Unread(ast.unparse(node), getattr(node, "lineno", 0))


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _read(target: ast.expr) -> ast.expr:
    """An assignment target as an expression that reads it."""
    return ast.parse(ast.unparse(target), mode="eval").body
