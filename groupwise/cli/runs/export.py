"""`groupwise runs export`, `push` and `import`: a run's results for others, and those of other trainers for us."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import typer

from groupwise.cli.options import AsJson, flag, option
from groupwise.cli.output import write_json
from groupwise.cli.printing import (
    RUNS,
    RunsDir,
    command_to_show,
    commands_to_read,
    print_next,
    print_pairs,
    run_names,
)

Policy = Annotated[
    str,
    typer.Argument(
        metavar="RUN[@STEP]",
        help="Name of a run, or path of its folder.",
        autocompletion=run_names,
    ),
]


def export(
    run: Policy,
    to: Annotated[
        Literal["adapter", "merged", "gguf", "jsonl", "parquet"] | None,
        option(
            None,
            "adapter, merged (one model) and gguf (for llama.cpp) are weights; jsonl and parquet are what the run "
            "recorded.",
        ),
    ] = None,
    output: Annotated[Path | None, option("DIR", "Folder to create.", "--output", "-o")] = None,
    html: Annotated[
        Path | None,
        option(
            "FILE",
            "In place of --to and --output: one HTML file with plots, rollouts and settings, which opens anywhere.",
        ),
    ] = None,
    dir: RunsDir = RUNS,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        option(None, "Number format of a merged model; auto: that of its base."),
    ] = "auto",
    converter: Annotated[
        Path | None, option("FILE", "llama.cpp's convert_hf_to_gguf.py, for gguf.")
    ] = None,
    force: Annotated[
        bool, flag("Replace the output folder if it is not empty.", "--force")
    ] = False,
    trust_remote_code: Annotated[
        bool,
        flag(
            "Allow the base model's own code to run, as the run's config does.",
            "--trust-remote-code",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a run's weights, or what it recorded, to a folder for other programs, or its page to one HTML file."""
    from groupwise.core.errors import UsageError

    if html is not None:
        if to or output or converter or trust_remote_code or dtype != "auto":
            raise UsageError(
                "--html writes one file for people: of the other options only --dir, --force and --json go with it."
            )
        from groupwise.cli.web import DASHBOARD_PACKAGES
        from groupwise.core.extras import require_packages

        require_packages("The dashboard", "web", *DASHBOARD_PACKAGES)
        from groupwise.dashboard.runs.one_file import write_one_file

        written = write_one_file(run, html, runs_dir=dir, force=force)
        facts = {"file": str(written), "bytes": written.stat().st_size}
        if as_json:
            write_json(facts)
            return
        print_pairs([*facts.items()])
        command = f"python -m webbrowser {shlex.quote(str(written))}"
        print_next((command, "look at it, here or wherever you copy it to"))
        return
    if to is None or output is None:
        raise UsageError(
            "Give --to FORMAT and --output FOLDER (such as --to jsonl --output exported), or --html FILE."
        )
    from groupwise.training.review.export import export as write

    summary = write(
        run,
        to,
        output,
        runs_dir=dir,
        dtype=dtype,
        converter=converter,
        force=force,
        trust_remote_code=trust_remote_code,
    ).summary
    if as_json:
        write_json(summary)
    else:
        print_pairs([*{**summary, "files": ", ".join(summary["files"])}.items()])
        print_next(_command_after_export(to, output))


def _command_after_export(to: str, output: Path) -> tuple[str, str]:
    """A command that uses what was exported."""
    if to in ("jsonl", "parquet"):
        options = ", lines=True" if to == "jsonl" else ""
        reader, file = ("read_json" if to == "jsonl" else "read_parquet"), output / f"rollouts.{to}"
        program = f'import pandas; print(pandas.{reader}({json.dumps(str(file))}{options})[["completion", "reward"]])'
        return f"python -c {shlex.quote(program)}", "its rollouts as a table of pandas"
    return f"cat {shlex.quote(str(output / 'README.md'))}", "how other programs load it"


def push(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Name of a run, or path of its folder.")
    ],
    dir: RunsDir = RUNS,
    overwrite: Annotated[
        bool, flag("Replace what a branch on the hub holds.", "--overwrite")
    ] = False,
    revision: Annotated[
        str | None, option("BRANCH", "Branch for the final weights, in place of run.hub.revision.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Upload a run's pending checkpoints, then its final weights, to the hub (run.hub)."""
    from groupwise.training.review.push import push as upload

    urls = upload(run, runs_dir=dir, overwrite=overwrite, revision=revision)
    if as_json:
        write_json({"uploaded": urls})
    else:
        print_pairs([("uploaded", url) for url in urls])
        repo, _, branch = urlsplit(urls[-1]).path.strip("/").partition("/tree/")
        command = f"hf download {repo}" + (f" --revision {branch}" if branch else "")
        print_next((command, "fetch it on another machine"))


def import_(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="The output_dir of a TRL run with log_completions=True, or a Parquet or JSON lines file.",
        ),
    ],
    name: Annotated[
        str | None, option("NAME", "Name of the new run; default: that of SOURCE.")
    ] = None,
    reward: Annotated[
        list[str] | None, option("COLUMN", "Column that holds a reward. May be repeated.")
    ] = None,
    dir: RunsDir = RUNS,
    as_json: AsJson = False,
) -> None:
    """Make a run from the completions that another trainer has logged, to look at it here."""
    from groupwise.training.review.import_completions import import_completions

    made = import_completions(source, name=name, rewards=reward or (), runs_dir=dir)
    summary = {**asdict(made), "folder": str(made.folder), "rewards": list(made.rewards)}
    if as_json:
        write_json(summary)
    else:
        print_pairs([*(summary | {"rewards": ", ".join(made.rewards)}).items()])
        print_next(command_to_show(made.folder), *commands_to_read(made.folder))
