"""Names of rewards elsewhere (TRL, open-r1, ms-swift, verifiers, well-known notebooks), and ours that do the same.

`meant_by` answers for a name that is none of ours; how a function is usually named (`get_…_reward`, `…_reward_func`) makes no difference.
The table is other_names.toml.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Meant:
    """A guess at the meaning of a name that is none of ours."""

    rewards: tuple[str, ...]
    """Names of our rewards, the likeliest first; empty if there is nothing of the kind."""
    remark: str
    """An explanation of these, or advice if there is none."""
    parameters: tuple[tuple[str, str | float], ...] = ()
    """Parameters by which the first of ours does the same."""

    @property
    def hint(self) -> str:
        """The hint for the message that refuses the name."""
        remark = f"{self.remark[0].upper()}{self.remark[1:]}."
        ours = " or ".join(f"`{reward}`" for reward in self.rewards)
        return f"Did you mean {ours}? {remark}" if ours else remark


@cache
def other_names() -> dict[str, Meant]:
    """Meanings by name, without the parts that `meant_by` takes off."""
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    return {
        name: Meant(
            tuple(each["rewards"]), each["remark"], tuple(each.get("parameters", {}).items())
        )
        for each in tomllib.loads(text)["meaning"]
        for name in each["names"]
    }


_ENDS = re.compile(r"(_rewards?)?(_(func|fn|function)s?)?$|_score$")


def meant_by(name: str, known: Collection[str]) -> Meant | None:
    """The likely meaning of a name, of a function in a module also by its last part; None for a name that says nothing.

    `known` are our own names, which `get_…_reward` and the like may stand for.
    """
    last = re.split(r"[.:/]", name)[-1]
    # `cosine_scaled` of `get_cosine_scaled_reward`.
    for tried in (last, _ENDS.sub("", last.lower().removeprefix("get_"), count=1)):
        if meant := other_names().get(tried):
            return meant
        if tried in known and tried != name:
            return Meant((tried,), "here it has that name")
    return None
