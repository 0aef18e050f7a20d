"""Loads user code: a file, a module, an attribute of either, or a registered name.

    load("path/to/task.py")            a file; its folder is importable while it runs and afterwards
    load("my_package.tasks.chess")     a module, from the installed packages or the working directory
    load("my_package.tasks:Chess")     an attribute; a class is instantiated without arguments
    load("sort_words", builtins=…)     a name: built-in first, then an installed entry point

A file runs again each time it is loaded, under a module name derived from its full path: two files called
`task.py` are two modules. Every failure becomes one `TaskError` for people: what was searched for in which order,
what exists nearby, or the traceback reduced to the user's own frames (`explain`).
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import logging
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from groupwise.core.errors import TaskError

logger = logging.getLogger(__name__)

_OTHER_PIP_NAMES = {
    "PIL": "pillow",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python",
    "dotenv": "python-dotenv",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
"""Import names of packages whose name on PyPI is different."""

MAX_NAMES = 20
"""Names that a message lists at most."""
_PACKAGE_FOLDER = str(Path(__file__).resolve().parents[1])
_LIBRARY_FOLDERS = tuple(
    str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "purelib", "platlib")
)
_user_folders: set[str] = set()
"""Folders of the files loaded so far; see `_forget_namesakes`."""


@dataclass(frozen=True, slots=True)
class LoadedPlugin:
    """Loaded user code, and how another process loads the same."""

    object: Any
    """The module, or the requested attribute (if that is a class, an instance of it)."""
    module: ModuleType
    spec: str
    """The spec with which `load` returns the same object in another process: an absolute path or a module, with the attribute."""
    file: str | None


def load(
    spec: str,
    *,
    kind: str = "task",
    builtins: Mapping[str, str] | None = None,
    entry_points: str | None = None,
    instantiate: bool = True,
    hint: str = "",
) -> LoadedPlugin:
    """Load `spec`; the module docstring describes its forms.

    `kind` is the word for the loaded object in messages. `builtins` maps bare names to modules; `entry_points` is the group of entry
    points that installed packages register. A class is instantiated unless `instantiate` is false. `hint` ends the message if nothing is
    found. Raises TaskError.
    """
    target, attribute = _split_spec(spec)
    file = Path(target).expanduser()
    if _is_path(target) or file.is_file():
        return _resolve_plugin(
            _load_file(file, spec, kind), str(file.resolve()), attribute, kind, instantiate
        )
    builtins = builtins or {}
    if attribute is None and target in builtins:
        return _resolve_plugin(_import_module(builtins[target], kind), builtins[target], None, kind)
    announced = _entry_points(entry_points)
    if attribute is None and target in announced:
        target, attribute = _split_spec(announced[target])
    if _module_exists(target):
        return _resolve_plugin(_import_module(target, kind), target, attribute, kind, instantiate)
    message = _unknown_plugin_message(spec, target, kind, builtins, announced)
    raise TaskError(f"{message}\n{hint}" if hint else message)


def missing(spec: str, *, kind: str, builtins: Mapping[str, str], entry_points: str) -> str | None:
    """The message with which `load` would reject a spec, as far as that is known without running code; else None.

    Whether a dotted module or an attribute exists is known only after the packages around it have run.
    """
    target, _ = _split_spec(spec)
    file = Path(target).expanduser()
    if _is_path(target) or file.is_file():
        return None if file.is_file() else _missing_file_message(file, spec, kind)
    announced = _entry_points(entry_points)
    if "." in target or target in builtins or target in announced or _module_exists(target):
        return None
    return _unknown_plugin_message(spec, target, kind, builtins, announced)


def trains_when_imported(source: str | bytes) -> str | None:
    """The statement of a module that would start training on import, e.g. `line 40: trainer.train()`; None if there is none.

    `model.train()` does not count: it switches PyTorch to training mode. None also if the source is not Python.
    """
    try:
        outer: list[ast.AST] = list(reversed(ast.parse(source).body))
    except (SyntaxError, ValueError, RecursionError):
        return None
    while outer:
        node = outer.pop()
        if isinstance(node, ast.Call):
            trained, _, verb = ast.unparse(node.func).rpartition(".")
            trains = verb == "train" and trained != "" and not trained.endswith("model")
            if trains:
                return f"line {node.lineno}: {ast.unparse(node):.60}"
        if isinstance(node, ast.If) and runs_as_script(node.test):
            outer += reversed(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            outer += reversed(list(ast.iter_child_nodes(node)))
    return None


def called_name(call: ast.Call) -> str:
    """The name of what is called, without the object or module that it belongs to; empty if it has none."""
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def runs_as_script(test: ast.expr) -> bool:
    """True for the condition `__name__ == "__main__"`, which is false on import."""
    return sorted(ast.unparse(test).split(" == ")) == ["'__main__'", "__name__"]


def _warn_of_training(source: bytes, file: str | Path, kind: str) -> None:
    if statement := trains_when_imported(source):
        logger.warning(
            "The %s file %s trains when it is imported (%s), which happens now, in each process that needs it. Put that below "
            '`if __name__ == "__main__":`, or the functions into a file of their own.',
            kind,
            file,
            statement,
        )


def explain(error: BaseException) -> str:
    """The error as the user wants to see it: the user's own frames only, with their lines, and which package to install."""
    all_frames = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in all_frames if _is_users_file(frame.filename)] or all_frames[-1:]
    if isinstance(error, SyntaxError):
        frames = []  # the message names file and line, and no code of the file has run
    lines = [
        f"  {frame.filename}:{frame.lineno} in {frame.name}\n    {frame.line}" for frame in frames
    ]
    lines.append(
        "  " + "".join(traceback.format_exception_only(error)).strip().replace("\n", "\n  ")
    )
    if hint := _import_hint(error):
        lines.append(f"  {hint}")
    return printable("\n".join(lines))


def printable(text: str) -> str:
    """`text` with lone surrogates escaped, which no encoding can write; it can then be stored and sent."""
    return text.encode(errors="backslashreplace").decode()


def nearest(name: str, candidates: Iterable[str]) -> list[str]:
    """The most similar of the candidates, at most three, best first."""
    return difflib.get_close_matches(name, sorted(candidates), n=3, cutoff=0.6)


def _split_spec(spec: str) -> tuple[str, str | None]:
    """Split `module:attribute`; a colon that is part of a path (`C:/task.py`) stays in the path."""
    target, colon, attribute = spec.rpartition(":")
    if colon and target and all(part.isidentifier() for part in attribute.split(".")):
        return target, attribute
    return spec, None


def _is_path(target: str) -> bool:
    return target.endswith(".py") or "/" in target or "\\" in target


def _resolve_plugin(
    module: ModuleType, source: str, attribute: str | None, kind: str, instantiate: bool = True
) -> LoadedPlugin:
    target: Any = module
    for name in attribute.split(".") if attribute else ():
        if not hasattr(target, name):
            public = [
                attribute_name
                for attribute_name in dir(target)
                if not attribute_name.startswith("_")
            ]
            close = nearest(name, public)
            hint = f" Did you mean {' or '.join(f'`{n}`' for n in close)}?" if close else ""
            raise TaskError(
                f"{source} has no `{name}`, which should be the {kind}.{hint} It has: {_list_names(public)}."
            )
        target = getattr(target, name)
    if inspect.isclass(target) and instantiate:
        try:
            inspect.signature(target).bind()
        except TypeError as error:
            raise TaskError(
                f"{source}: class `{target.__name__}` is instantiated without arguments, but its constructor "
                f"does not allow that ({error}). Give its parameters defaults, or name an instance of it instead."
            ) from error
        target = run_user_code(
            target, what=f"{source}: class `{target.__name__}` failed while it was instantiated"
        )
    spec = f"{source}:{attribute}" if attribute else source
    return LoadedPlugin(target, module, spec, getattr(module, "__file__", None))


def run_user_code(call: Callable[[], Any], *, what: str) -> Any:
    """The result of `call`. Its exceptions become a TaskError that starts with `what` and shows the user's frames."""
    try:
        return call()
    except TaskError:
        raise
    except (
        Exception,
        SystemExit,
    ) as error:  # any user code may run here, scripts that exit included
        raise TaskError(f"{what}:\n{explain(error)}") from error


def _load_file(file: Path, spec: str, kind: str) -> ModuleType:
    if not file.is_file():
        raise TaskError(_missing_file_message(file, spec, kind))
    path = file.resolve()
    name = f"groupwise_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    loader = importlib.machinery.SourceFileLoader(name, str(path))
    module = importlib.util.module_from_spec(
        importlib.machinery.ModuleSpec(name, loader, origin=str(path))
    )
    module.__file__ = str(path)
    previous = sys.modules.get(name)
    sys.modules[name] = module
    try:
        # Run it with its folder first in sys.path, as Python does for a script; afterwards the folder stays at the end.
        folder = str(path.parent)
        _forget_namesakes(folder)
        _user_folders.add(folder)
        sys.path.insert(0, folder)

        def run() -> None:
            # Compiled here and not by the loader, whose cache would miss an edit within the same second.
            source = path.read_bytes()
            _warn_of_training(source, path, kind)
            exec(compile(source, str(path), "exec"), module.__dict__)

        try:
            run_user_code(run, what=f"The {kind} file {path} cannot be loaded")
        finally:
            with suppress(ValueError):  # the file may have changed the path itself
                sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)
    except BaseException:
        if previous is None:
            del sys.modules[name]
        else:
            sys.modules[name] = previous
        raise
    return module


def _forget_namesakes(folder: str) -> None:
    """Unload modules that came from the folders of other files if this folder has a file of the same name.

    Otherwise `import helpers` would silently give the second task the helpers of the first.
    """
    other_folders = _user_folders - {folder}
    for name, module in sys.modules.copy().items() if other_folders else ():
        origin = getattr(module, "__file__", None)
        owner = os.path.dirname(origin) if isinstance(origin, str) else None
        if owner in other_folders and Path(folder, f"{name}.py").is_file():
            del sys.modules[name]


def _module_exists(target: str) -> bool:
    if not all(part.isidentifier() for part in target.split(".")):
        return False
    # The console script, unlike `python -m`, does not put the working directory on sys.path. Add it last: it then hides no package.
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)
    parent = target.rpartition(".")[0]
    if parent and not _module_exists(parent):
        return False
    what = f"The module `{parent}` cannot be imported"
    return run_user_code(lambda: _find_spec(target), what=what) is not None


def _find_spec(target: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(target)
    except ModuleNotFoundError as error:
        if target.startswith(f"{error.name}."):  # the parent is a plain module, not a package
            return None
        raise
    except ValueError:  # `__main__` and hand-made modules have no spec
        return None


def _import_module(name: str, kind: str) -> ModuleType:
    what = f"The {kind} module `{name}` cannot be imported"

    def run() -> ModuleType:
        spec = _find_spec(name) if name not in sys.modules else None
        if spec is not None and spec.origin and spec.origin.endswith(".py"):
            _warn_of_training(Path(spec.origin).read_bytes(), spec.origin, kind)
        return importlib.import_module(name)

    return run_user_code(run, what=what)


def _entry_points(group: str | None) -> dict[str, str]:
    if group is None:
        return {}
    return {point.name: point.value for point in importlib.metadata.entry_points(group=group)}


def _missing_file_message(file: Path, spec: str, kind: str) -> str:
    folder = next(parent for parent in file.absolute().parents if parent.is_dir())
    files = sorted(path.name for path in folder.glob("*.py"))
    close = nearest(file.name, files)
    hint = f" Did you mean {' or '.join(str(folder / name) for name in close)}?" if close else ""
    reason = "is a folder: name the Python file in it" if file.is_dir() else "is not a file"
    listed_folder = file if file.is_dir() else folder
    files = sorted(path.name for path in listed_folder.glob("*.py"))
    return (
        f"The {kind} file `{spec}` was not found: {file.absolute()} {reason}.{hint} "
        f"Python files in {listed_folder}: {_list_names(files)}."
    )


def _unknown_plugin_message(
    spec: str, target: str, kind: str, builtins: Mapping[str, str], announced: Mapping[str, str]
) -> str:
    files = {path.stem: path.name for path in Path.cwd().glob("*.py")}
    close = [files.get(name, name) for name in nearest(target, [*builtins, *announced, *files])]
    attempts = [
        f"a file {Path(target).absolute()}",
        *([f"a built-in {kind}"] if builtins else []),
        *([f"an entry point of an installed package (there are: {_list_names(announced)})"]),
        f"a module `{target}` to import",
    ]
    lines = [
        f"No {kind} `{spec}` was found. Tried in this order:",
        *(f"  {number}. {what}" for number, what in enumerate(attempts, 1)),
    ]
    if close:
        lines.append(f"Did you mean {' or '.join(f'`{name}`' for name in close)}?")
    if builtins:
        lines.append(f"Built-in: {_list_names(builtins)}.")
    lines.append("Give path/to/file.py, package.module, module:attribute or one of these names.")
    return "\n".join(lines)


def _list_names(names: Iterable[str]) -> str:
    ordered = sorted(names)
    suffix = f" and {len(ordered) - MAX_NAMES} more" if len(ordered) > MAX_NAMES else ""
    return ", ".join(ordered[:MAX_NAMES]) + suffix if ordered else "none"


def _is_users_file(name: str) -> bool:
    """True for code that belongs neither to a library nor to this package, except the package's tasks."""
    if name.startswith("<frozen "):
        return False
    path = str(Path(name).resolve())
    if path.startswith(_PACKAGE_FOLDER):
        return f"{_PACKAGE_FOLDER}/tasks" in path and not path.endswith(
            ("contract.py", "environment.py")
        )
    return not path.startswith(_LIBRARY_FOLDERS)


def _import_hint(error: BaseException) -> str | None:
    if isinstance(error, ImportError) and "no known parent package" in str(error):
        return "A task file is not a package: write `import helpers` for the file helpers.py in the same folder."
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    package = error.name.partition(".")[0]
    if package in sys.modules:
        return f"`{package}` is there, but has no module `{error.name}`."
    siblings = [path.stem for folder in sorted(_user_folders) for path in Path(folder).glob("*.py")]
    close = nearest(package, siblings)
    sibling = f" Or was the file {close[0]}.py beside the task meant?" if close else ""
    name = _OTHER_PIP_NAMES.get(package, package)
    return f"`{package}` is not installed here: {sys.executable} -m pip install {name}.{sibling}"
