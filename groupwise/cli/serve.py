"""`groupwise serve`: the training server."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from groupwise.cli.options import option

if TYPE_CHECKING:
    from groupwise.server.settings import ServerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingOptions:
    """Settings that have an option; the names of the fields are theirs."""

    output_dir: Annotated[
        str | None, option("DIR", "Folder for everything that the server stores.")
    ] = None
    host: Annotated[str | None, option("ADDRESS", "Address to listen at; default: 127.0.0.1.")] = (
        None
    )
    port: Annotated[
        int | None, option("PORT", "Port to listen at; 0: any free port. Default: 8000.")
    ] = None
    model_dir: Annotated[
        str | None,
        option("DIR", "Folder of models; clients may name its sub-folders. Default: models."),
    ] = None
    key_file: Annotated[str | None, option("FILE", "File with one line per API key.")] = None


def serve(
    *,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="key=value",
            help="Override settings, e.g. max_event_streams=8",
            show_default=False,
        ),
    ] = None,
    options: SettingOptions,
    config: Annotated[
        Path | None, option("S.yaml", "All settings, as a YAML file.", "--config", "-c")
    ] = None,
    start_with: Annotated[
        Path | None,
        option(
            "settings.yaml",
            "Start this training at once, unless one is active: the body of POST /start, as YAML.",
        ),
    ] = None,
    new_key: Annotated[
        str | None, option("ROLE", "Make a key (read, train or admin), print it once, and exit.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Serve a model that clients train with their own prompts and rewards.

    Settings can also be environment variables, e.g. GROUPWISE_SERVE_PORT; the API key is GROUPWISE_API_KEY.
    """
    if api_key is not None:
        from groupwise.core.errors import UsageError
        from groupwise.server.settings import KEY_ADVICE

        raise UsageError(
            "A key on the command line can be read by every user of the machine, so that --api-key is not taken. Instead, "
            + KEY_ADVICE
        )
    if new_key is not None:
        _print_new_key(new_key)
        return
    import os

    from groupwise.core.extras import require_packages

    packages, advice = ("fastapi", "uvicorn", "jinja2"), " Clients need none of them."
    require_packages("The server", "server", *packages, advice=advice)
    from groupwise.server.settings import read_settings

    options_given = {name: value for name, value in asdict(options).items() if value is not None}
    settings = read_settings(config, os.environ, options_given, tuple(words or ()))
    _run_server(settings, start_with)


def _run_server(settings: ServerConfig, start_with: Path | None) -> None:
    import os

    from groupwise.server.serve import read_start, serve
    from groupwise.server.settings import read_keys

    keys = read_keys(settings, os.environ)
    request = None if start_with is None else read_start(start_with)
    pages = None
    if settings.dashboard:
        from groupwise.dashboard.mounted import mount_dashboard

        pages = mount_dashboard(settings, keys)
    raise typer.Exit(serve(settings, keys, request, in_front=pages))


def _print_new_key(role_name: str) -> None:
    from groupwise.api.schemas.keys import Role, new_key
    from groupwise.core.errors import UsageError

    role = Role.by_name(role_name)
    if role is None:
        roles = ", ".join(role.word for role in Role)
        raise UsageError(f"--new-key {role_name}: there is no such role; the roles are {roles}.")
    key = new_key(role)
    typer.echo(f"key   {key.key}")
    typer.echo(f"line  {key.line}")
    typer.echo(
        "The key is for the caller and is not shown again. The line is for the server's key file; it does not contain the key.",
        err=True,
    )
