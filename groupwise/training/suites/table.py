"""The suites that have names, and what lighteval calls them.

`all` is every one of them. A suite's value is the share of questions that are answered rightly, `pass@1`, whatever lighteval calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from groupwise.core.errors import UsageError
from groupwise.core.plugins import nearest

ALL = "all"


@dataclass(frozen=True, slots=True)
class Suite:
    """One of them."""

    task: str
    """Its task in lighteval 0.13."""
    metric: str
    """What the share of right answers is called there, without the parameters that may follow it."""
    repeatable: bool = True
    """Whether lighteval can have a question answered several times; of code it takes one answer, though its metric says 16."""


SUITES = {
    "math_500": Suite("math_500", "pass@k"),
    "aime24": Suite("aime24", "pass@k"),
    "aime25": Suite("aime25", "pass@k"),
    "gpqa_diamond": Suite("gpqa:diamond", "gpqa_pass@k"),
    "lcb": Suite("lcb:codegeneration", "codegen_pass@1", repeatable=False),
    "lcb_v4": Suite("lcb:codegeneration_v4", "codegen_pass@1", repeatable=False),
}
"""`lcb` and `lcb_v4` are the parts `v4_v5` and `v4` of LiveCodeBench."""


def chosen_suites(names: Sequence[str], samples: int = 1) -> tuple[str, ...]:
    """The names with `all` spelt out, each once. Raises UsageError for names that there are not, and what cannot be asked so often."""
    wanted = dict.fromkeys(
        one for name in names for one in (SUITES if name == ALL else (name,))
    )  # in the order given
    for name in wanted:
        if name not in SUITES:
            near = nearest(name, list(SUITES))
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise UsageError(
                f"There is no suite {name!r}.{hint} There are {', '.join(SUITES)}, and {ALL}."
            )
        if samples > 1 and not SUITES[name].repeatable:
            raise UsageError(
                f"{name} takes one answer to each problem, not {samples}: lighteval runs its tests on one. Leave the number of samples out "
                "for it, and ask the other suites by a command of their own."
            )
    return tuple(wanted)
