"""The callback `success_cache`: chooses the prompts that the replay buffer keeps, instead of `data.replay`."""

from __future__ import annotations

from collections.abc import Sequence

from groupwise.core.settings.view import View
from groupwise.core.types import Group
from groupwise.tasks.data.success import ConfiguredPart, successes
from groupwise.training.callbacks.base import Callback, RunHandle

PART = "success_cache: part"
"""The parameter's name in messages."""


class SuccessCache(Callback):
    """Puts into the replay buffer each prompt for which a completion earned `threshold` or more, with the group's mean reward.

    `part` names the reward part that the threshold applies to; by default, the first whose name contains accuracy, or else the total. For
    prompts that are in the buffer already, the run itself updates the reward, even if it is below the threshold.
    """

    def __init__(self, threshold: float = 0.999, part: str | None = None) -> None:
        self.threshold = threshold
        self.part = part
        self._sought = ConfiguredPart(PART, part)

    def check(self, config: View) -> None:
        """Raise ValueError if there is no replay buffer, or if the buffer already chooses prompts itself."""
        replay = config["data"].get("replay")
        if replay is None:
            raise ValueError(
                "it fills the replay buffer, but there is none. Set data.replay to {success_threshold: null}; supervised runs have "
                "no such buffer."
            )
        if replay["success_threshold"] is not None:
            raise ValueError(
                f"data.replay.success_threshold is {replay['success_threshold']}, so the buffer chooses prompts by itself. Set it "
                "to null, or leave this callback out."
            )

    def on_groups(self, run: RunHandle, groups: Sequence[Group], rejected: Sequence[Group]) -> None:
        """Keep the prompts for which a completion reached the threshold."""
        all_groups = (*groups, *rejected)
        if text := self._sought.missing(all_groups):
            run.say(text)
        run.keep_for_replay(
            group.draw for group in all_groups if successes(group, self.threshold, self.part)[0]
        )
