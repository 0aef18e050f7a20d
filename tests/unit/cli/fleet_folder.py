"""What the tests of `groupwise fleet` are given of a fleet: exit code and words of a command."""

from collections.abc import Callable

Command = Callable[..., tuple[int, str, str]]
"""Words behind `groupwise fleet` → exit code, standard output, standard error."""
