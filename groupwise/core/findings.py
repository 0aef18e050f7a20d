"""The results of `groupwise check`, `doctor`, `init` and `fleet doctor`: one `Finding` per check, and the `Report` of all.

Each command fills a `Findings`, which passes each finding to a callback at once; `groupwise.cli.findings` prints them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from groupwise.core.terminal.text import clean

Level = Literal["ok", "warning", "problem", "skipped"]
"""`warning`: it works, but deserves a look. `problem`: training or jobs would fail, or not do what was intended. `skipped`: it could not
be checked."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    name: str
    """A few words, the same in every run: `log-probability gap`."""
    level: Level
    measured: str
    """The observation, with its numbers."""
    meaning: str = ""
    """Its consequence."""
    remedy: str = ""
    """The remedy."""
    data: dict[str, Any] = field(default_factory=dict[str, Any])
    """The numbers in `measured`, for programs."""


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """All findings about one subject. Printed, or as the value of a notebook's cell, it is a text with a line for each."""

    subject: str
    findings: tuple[Finding, ...]
    code: str
    """`error.code` in the JSON output of a report with problems."""
    details: dict[str, Any] = field(default_factory=dict[str, Any])
    """Output in addition to the findings: rendered prompts, tables."""

    def of_level(self, level: Level) -> tuple[Finding, ...]:
        """The findings of one level."""
        return tuple(finding for finding in self.findings if finding.level == level)

    def __repr__(self) -> str:
        lines = [self.subject]
        for finding in self.findings:
            lines.append(f"{finding.level:<8} {finding.name}: {finding.measured}")
            if finding.level != "ok":
                texts = (finding.meaning, finding.remedy and f"→ {finding.remedy}")
                lines += [f"{'':<9}{text}" for text in texts if text]
        return clean("\n".join([*lines, self.verdict]))

    @property
    def exit_code(self) -> int:
        """1 if there is a problem; warnings do not count."""
        return 1 if self.of_level("problem") else 0

    @property
    def verdict(self) -> str:
        """One line: `1 problem, 2 warnings`, or that there is none."""
        counts = {level: len(self.of_level(level)) for level in ("problem", "warning")}
        parts = [f"{count} {name}{'s' * (count > 1)}" for name, count in counts.items() if count]
        skipped = len(self.of_level("skipped"))
        parts += [f"{skipped} could not be checked"] if skipped else []
        return ", ".join(parts) or "no problems found"

    @property
    def summary(self) -> dict[str, Any]:
        """The report as plain data for `--json`."""
        problems = [finding.name for finding in self.of_level("problem")]
        return {
            "subject": self.subject,
            "state": "failed" if problems else "ok",
            "problems": len(problems),
            "warnings": len(self.of_level("warning")),
            "findings": [
                {
                    "name": finding.name,
                    "level": finding.level,
                    "measured": finding.measured,
                    "meaning": finding.meaning,
                    "remedy": finding.remedy,
                    "data": finding.data,
                }
                for finding in self.findings
            ],
            **self.details,
            **(
                {"error": {"code": self.code, "message": f"problems: {', '.join(problems)}"}}
                if problems
                else {}
            ),
        }


OnFinding = Callable[[Finding], None]


class Findings:
    """Collects findings, and passes each to the callback at once."""

    def __init__(self, on_finding: OnFinding | None = None) -> None:
        self._on_finding = on_finding
        self.found: list[Finding] = []

    def add(self, *findings: Finding) -> None:
        """Add findings in this order."""
        for finding in findings:
            self.found.append(finding)
            if self._on_finding is not None:
                self._on_finding(finding)

    def extend(self, findings: Iterable[Finding]) -> None:
        """`add` for an iterable: each finding is reported as soon as it is produced."""
        for finding in findings:
            self.add(finding)
