"""Options of commands, declared once: as the fields of dataclasses, which the commands receive.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class JobFilter:
        name: Annotated[str | None, option("NAME", "Only jobs of this name.")] = None

    @command(app, "stop", "cancel")
    def stop(ids: JobIds, job_filter: JobFilter) -> None: ...

A parameter that is annotated with such a dataclass expands into one option per field. Help shows the first name of a command and the
first long name of an option; the others are deprecated names, which still work. An option is also accepted with underscores: `--dry_run`.
"""

from __future__ import annotations

import gc
import inspect
import os
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from groupwise.core.errors import UsageError

AnyCommand = TypeVar("AnyCommand", bound=Callable[..., None])
TYPED_WORDS = "groupwise.typed_words"
"""Key of `Context.meta`: the words after the command's name, as they were typed."""


class WrappingGroup(TyperGroup):
    """A group whose help wraps long summaries of commands, where click would cut them off."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    (name, found.get_short_help_str(limit=1000))
                    for name, found in commands
                    if found is not None and not found.hidden
                ]
            )


def option(metavar: str | None, help: str, *names: str, **settings: Any) -> Any:
    """An option with a value. Without `names` it has that of its parameter; `settings` are others of `typer.Option`."""
    return typer.Option(*names, metavar=metavar, help=help, **settings)


def flag(help: str, *names: str) -> Any:
    """An option without a value. `--no-…` turns it off, unless its name is given."""
    return typer.Option(*names, help=help)


AsJson = Annotated[
    bool, flag("Print the result as JSON; everything else goes to stderr.", "--json")
]
Follow = Annotated[
    bool, flag("Print the log as it grows, until the job has ended.", "--follow", "-f")
]
DryRun = Annotated[bool, flag("Show what would be done without doing it.", "--dry-run")]


def _project_dir(text: str) -> Path:
    """Parse --project-dir; links stay in the path."""
    project = Path(os.path.abspath(Path(text).expanduser()))
    if not project.is_dir():
        raise UsageError(
            f"--project-dir {text}: {project} is not a folder, so there is no project to send."
        )
    return project


ProjectDir = Annotated[
    Path | None,
    option(
        "DIR",
        "Project to upload into the job's working folder: what git would track, links followed. A --file in it keeps its place, "
        "and is sent even if git ignores it. Default: the current folder for `launch`, no project for `fleet submit`.",
        "--project-dir",
        parser=_project_dir,
    ),
]
Exclude = Annotated[
    list[str],
    option(
        "GLOB",
        "Files and folders of the project to leave out, by name (*.ckpt, data/) or path (out/*.bin). May be repeated.",
        "--exclude",
    ),
]


def _no_type(ctx: Any) -> None:
    """In place of `TyperArgument.display_type_rich`."""


def _usage(param: Any) -> Callable[[Any], list[str]]:
    """In place of `TyperArgument.get_usage_pieces`, which puts braces around what is required: `{RUN}`. A metavar may say itself what is
    optional or repeated."""
    name = param.display_name_raw
    if not (name.startswith("[") and name.endswith("]")):
        repeated = "" if param.nargs == 1 or name.endswith("...") else "..."
        name = (name if param.required else f"[{name}]") + repeated
    return lambda ctx: [name]


class Command(TyperCommand):
    """A command that accepts deprecated names of its options and hides them from --help. An option that has one value must be given under
    one name."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.alias_params: list[Any] = []
        for param in self.params:
            if param.param_type_name == "argument":  # help shows `RUN`, not `RUN <str>`
                vars(param)["display_type_rich"] = _no_type
                vars(param)["get_usage_pieces"] = _usage(param)
            names = [name for name in param.opts if name.startswith("--")]
            underscored = [f"--{name[2:].replace('-', '_')}" for name in names]
            for name in dict.fromkeys((*names, *underscored)):
                if name == names[0]:
                    continue
                alias = copy(param)
                alias.opts, alias.secondary_opts = [name], []
                param.opts = [other for other in param.opts if other != name]
                self.alias_params.append(alias)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta.setdefault(TYPED_WORDS, tuple(args))
        return super().parse_args(ctx, args)

    def make_parser(self, ctx: Any) -> Any:
        parser: Any = super().make_parser(ctx)
        for alias in self.alias_params:
            alias.add_to_parser(parser, ctx)
        parse = parser.parse_args

        def parse_args(args: list[str]) -> Any:
            opts, rest, order = parse(args=args)
            spelled: dict[str, str] = {}
            for param in order:
                name = param.opts[0]
                other = spelled.setdefault(param.name, name)
                if other != name and not param.multiple:
                    raise UsageError(f"{other} and {name} are the same option: give one of them.")
            return opts, rest, order

        parser.parse_args = parse_args
        return parser


def command(
    app: typer.Typer,
    name: str,
    *aliases: str,
    cls: type[Command] = Command,
    hidden: bool = False,
    context_settings: dict[str, Any] | None = None,
) -> Callable[[AnyCommand], AnyCommand]:
    """Register a function as a command under its name, and as a hidden command under each deprecated name.

    Returns the function unchanged, so it can still be called directly.
    """

    def register(function: AnyCommand) -> AnyCommand:
        expanded = _with_options(function)
        for alias in (name, *aliases):
            app.command(
                alias, cls=cls, hidden=hidden or alias != name, context_settings=context_settings
            )(expanded)
        return function

    return register


def _with_options(function: Callable[..., None]) -> Callable[..., None]:
    """A wrapper of the function in which each dataclass parameter is replaced by one option per field."""
    option_classes: dict[str, Any] = {}
    options: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        if is_dataclass(parameter.annotation):
            option_classes[name] = parameter.annotation
            options += _options_of(parameter.annotation)
        else:
            options.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    def wrapper(**values: Any) -> None:
        dataclass_args = {
            name: option_class(
                **{field.name: values.pop(field.name) for field in fields(option_class)}
            )
            for name, option_class in option_classes.items()
        }
        gc.freeze()  # what was imported stays, and to collect it takes 40 ms
        gc.enable()  # the program starts without it
        function(**values, **dataclass_args)

    # typer takes its parameters from the signature; the annotation of `values` is not one of them.
    vars(wrapper)["__signature__"] = inspect.Signature(options)
    wrapper.__annotations__ = {}
    wrapper.__doc__ = function.__doc__
    return wrapper


def _options_of(option_class: Any) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(option_class, include_extras=True)
    for field in fields(option_class):
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=hints[field.name],
        )
