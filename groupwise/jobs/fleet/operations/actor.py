"""The actor that calls an operation: a user at the command line, or the holder of a key of its API.

Every operation takes an `Actor`. Its name is recorded in the events of its changes. It can see its projects: for the actor, a job of
another project does not exist, and no answer reveals it. Machines belong to no project, and only an actor bound to no project changes them.
"""

from __future__ import annotations

from dataclasses import dataclass

from groupwise.api.schemas.problems import Refusal


@dataclass(frozen=True, slots=True)
class Actor:
    """The caller's name, and the projects it may see."""

    name: str
    """Name in events: `user:ada`, `key:k7f2`."""
    projects: frozenset[str] | None = None
    """None: all projects."""
    is_operator: bool = True
    """False for keys of the API, except those with the role `admin` and without projects."""

    def may_see(self, project: str) -> bool:
        """True if the actor may know of jobs of the project."""
        return self.projects is None or project in self.projects

    def require_all_projects(self, what: str) -> None:
        """Raise `forbidden` if the actor is bound to projects; `what` is the refused operation: `drain a machine`."""
        if self.projects is not None:
            project_names = ", ".join(sorted(self.projects)) or "none"
            raise Refusal(
                "forbidden",
                f"To {what} concerns jobs of every project, but {self.name} is bound to: {project_names}. "
                "A key without projects may do it.",
            )

    def require_operator_to_oversubscribe(self) -> None:
        """Raise `forbidden` if the actor may not run a command on a full or drained machine."""
        if not self.is_operator:
            raise Refusal(
                "forbidden",
                "Only a key with the role admin and without projects may run a command on a full or drained machine (oversubscribe), as "
                "`groupwise fleet exec` does. `groupwise fleet submit --vm VM --gpus 0` waits for a free slot.",
            )
