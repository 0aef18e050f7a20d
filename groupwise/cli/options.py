"""Options of commands, declared once: as the fields of dataclasses, which the commands receive.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class JobFilter:
        name: Annotated[str | None, typer.Option(metavar="N", help="Only jobs of this name.")] = None

    @command(app, "stop", "cancel")
    def stop(ids: JobIds, chosen: JobFilter) -> None: ...

A parameter that is annotated with such a dataclass expands into one option per field. Help shows the first name of a command and the
first long name of an option; the others are deprecated names, which still work.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand

from groupwise.core.errors import UsageError

AnyCommand = TypeVar("AnyCommand", bound=Callable[..., None])
AsJson = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON; everything else goes to stderr.")
]
Follow = Annotated[
    bool, typer.Option("--follow", "-f", help="Print the log as it grows, until the job has ended.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show what would be done without doing it.")
]


class Command(TyperCommand):
    """A command that accepts deprecated names of its options and hides them from --help. An option that has one value must be given under
    one name."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.older: list[Any] = []
        for each in self.params:
            names = [name for name in each.opts if name.startswith("--")]
            for name in names[1:]:
                older = copy(each)
                older.opts, older.secondary_opts = [name], []
                each.opts = [other for other in each.opts if other != name]
                self.older.append(older)

    def make_parser(self, ctx: Any) -> Any:
        parser: Any = super().make_parser(ctx)
        for each in self.older:
            each.add_to_parser(parser, ctx)
        parse = parser.parse_args

        def parse_args(args: list[str]) -> Any:
            opts, rest, order = parse(args=args)
            spelled: dict[str, str] = {}
            for each in order:
                name = each.opts[0]
                other = spelled.setdefault(each.name, name)
                if other != name and not each.multiple:
                    raise UsageError(f"{other} and {name} are the same option: give one of them.")
            return opts, rest, order

        parser.parse_args = parse_args
        return parser


def command(
    app: typer.Typer,
    name: str,
    *older: str,
    cls: type[Command] = Command,
    hidden: bool = False,
    context_settings: dict[str, Any] | None = None,
) -> Callable[[AnyCommand], AnyCommand]:
    """Register a function as a command under its name, and as a hidden command under each deprecated name.

    Returns the function unchanged, so it can still be called directly.
    """

    def register(function: AnyCommand) -> AnyCommand:
        expanded = _with_options(function)
        for each in (name, *older):
            app.command(
                each, cls=cls, hidden=hidden or each != name, context_settings=context_settings
            )(expanded)
        return function

    return register


def _with_options(function: Callable[..., None]) -> Callable[..., None]:
    """A wrapper of the function in which each dataclass parameter is replaced by one option per field."""
    groups: dict[str, Any] = {}
    options: list[inspect.Parameter] = []
    for name, each in inspect.signature(function, eval_str=True).parameters.items():
        if is_dataclass(each.annotation):
            groups[name] = each.annotation
            options += _options_of(each.annotation)
        else:
            options.append(each.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    def called(**values: Any) -> None:
        made = {
            name: group(**{each.name: values.pop(each.name) for each in fields(group)})
            for name, group in groups.items()
        }
        function(**values, **made)

    # typer takes its parameters from the signature; the annotation of `values` is not one of them.
    vars(called)["__signature__"] = inspect.Signature(options)
    called.__annotations__ = {}
    called.__doc__ = function.__doc__
    return called


def _options_of(group: Any) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for each in fields(group):
        default = inspect.Parameter.empty if each.default is MISSING else each.default
        if each.default_factory is not MISSING:
            default = each.default_factory()
        yield inspect.Parameter(
            each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[each.name]
        )
