"""Prints findings: a line for each, with its meaning and remedy below; without colours and folding if not in a terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from groupwise.cli.output import has_colours
from groupwise.cli.printing import fold
from groupwise.core.findings import Finding, Level, Report
from groupwise.core.terminal.text import clean

_COLOURS: dict[Level, str] = {
    "ok": "green",
    "warning": "yellow",
    "problem": "red",
    "skipped": "bright_black",
}
_LEVEL = 9
"""Width of a line's first word, including the space after it."""
_NAME = 24
_INDENT = " " * (_LEVEL + _NAME)


def show_finding(finding: Finding) -> None:
    """Print one finding, with its remedy unless its level is ok."""
    level = typer.style(f"{finding.level:<{_LEVEL}}", fg=_COLOURS[finding.level])
    remedy = f"→ {finding.remedy}" if finding.remedy and finding.level != "ok" else ""
    texts = [finding.measured, *(text for text in (finding.meaning, remedy) if text)]
    lines = [line for text in texts for line in fold(text, len(_INDENT))]
    first_line = f"{level}{clean(finding.name):<{_NAME - 1}}"
    if len(finding.name) < _NAME or not sys.stdout.isatty():
        first_line += f" {lines.pop(0)}"
    _echo(first_line)
    for line in lines:
        _echo(_INDENT + line)


def show_verdict(report: Report) -> None:
    """Print the report's verdict as the last line."""
    level: Level = "problem" if report.exit_code else "ok"
    _echo(f"\n{typer.style(report.verdict, fg=_COLOURS[level])}")


def show_title(text: str) -> None:
    """Print a heading with an empty line before it."""
    _echo(f"\n{text}")


def show_text(text: str) -> None:
    """Print untrusted text, cleaned and indented."""
    for line in clean(text).split("\n"):
        _echo(f"  {line}".rstrip())


def show_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns: the first column left-aligned, the others right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        first, *other_cells = row
        cells = [f"{first:<{widths[0]}}"]
        cells += [f"{text:>{width}}" for text, width in zip(other_cells, widths[1:], strict=True)]
        _echo(f"  {'  '.join(cells)}".rstrip())


def reward_rows(table: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The table of the rewards that each kind of completion earned, as text."""
    parts = list(dict.fromkeys(name for row in table for name in row["parts"]))
    head = ["completion", "count", "failed", "reward", *(clean(name) for name in parts)]
    return [
        head,
        *(
            [
                row["completion"],
                str(row["count"]),
                str(row["failed"]),
                _format_number(row["reward"]),
                *(_format_number(row["parts"].get(name)) for name in parts),
            ]
            for row in table
        ),
    ]


def _format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _echo(text: str) -> None:
    """Print a line, with its colours if the terminal may have them."""
    typer.echo(text, color=has_colours(sys.stdout))
