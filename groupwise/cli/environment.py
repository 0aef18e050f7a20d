"""Options for the Python environment that jobs run in: of `groupwise fleet vm prepare`, and of `groupwise launch` elsewhere than here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from groupwise.cli.options import option
from groupwise.core.errors import UsageError

if TYPE_CHECKING:
    from groupwise.jobs.fleet.machines.plans import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentOptions:
    """The packages of an environment to create: this version of groupwise, and the releases installed here."""

    base_python: Annotated[
        str | None,
        option(
            "PYTHON",
            "Remote Python interpreter to create the environment with; default: the version used here.",
        ),
    ] = None
    extra: Annotated[
        list[str],
        option("EXTRA", "Extra of groupwise to install; default: train. May be repeated."),
    ] = field(default_factory=list[str])
    also: Annotated[
        list[str],
        option(
            "NAME", "Another package, in the release installed here. May be repeated.", "--with"
        ),
    ] = field(default_factory=list[str])
    lock: Annotated[
        Path | None,
        option(
            "FILE",
            "Pinned requirements to install, in the format of pip freeze; hashes are allowed.",
        ),
    ] = None
    wheelhouse: Annotated[
        Path | None,
        option("DIR", "Install only from the wheels in this folder, which is uploaded."),
    ] = None
    index_url: Annotated[str | None, option("URL", "Package index for pip, instead of PyPI.")] = (
        None
    )

    def plan(self, **more: Any) -> Plan:
        """The environment to build. `more`: further fields of `PrepareOptions`. Raises UsageError for options that cannot work."""
        from groupwise.jobs.fleet.machines.plans import PrepareOptions, plan_of

        return plan_of(
            PrepareOptions(
                extras=self.extra,
                also=self.also,
                lock=self.lock,
                wheelhouse=self.wheelhouse,
                python=self.base_python,
                index_url=self.index_url,
                **more,
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteEnvironmentOptions(EnvironmentOptions):
    """The environment of a job on another machine: a new one, or an existing one."""

    python: Annotated[
        str | None,
        option(
            "PYTHON",
            "Remote Python interpreter with groupwise installed; default: create an environment.",
        ),
    ] = None

    @property
    def is_given(self) -> bool:
        """True if an option describes an environment to build."""
        build_options = (
            self.base_python,
            self.extra,
            self.also,
            self.lock,
            self.wheelhouse,
            self.index_url,
        )
        return any(build_options)

    def plan_unless_there(self) -> Plan | None:
        """The environment to build at the place; None: `python` has groupwise already. Raises UsageError."""
        if self.python is None:
            return self.plan()
        if self.is_given:
            raise UsageError(
                "--python names an environment that is there; --base-python, --extra, --with, --lock, --wheelhouse and --index-url are for "
                "one that is made."
            )
        return None
