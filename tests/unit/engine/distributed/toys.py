"""The object that worker processes host in tests that need no model."""

import asyncio
import logging
import os
import sys
from pathlib import Path
from types import ModuleType

from groupwise.core.errors import ConfigError

FACTORY = f"{Path(__file__).resolve()}:make"
HANGS = "signal:pause"


class Toy:
    """Remembers, waits, fails and gets stuck as it is told."""

    def __init__(self, word="shared"):
        self.word = word
        self.rank = None
        self.given_up = 0
        self.log = logging.getLogger("groupwise.toys")

    def join(self, rank):
        self.rank = rank
        self.log.warning("joined")

    def leave(self):
        self.log.warning("left")

    def who(self):
        return self.rank, os.getpid()

    def add(self, *numbers):
        return sum(numbers)

    async def wait(self):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.given_up += 1
            raise

    def stuck(self):
        return sum(range(10**15))  # never lets another thread have its turn

    def fail(self, error):
        raise error

    def unsendable(self):
        return lambda: 0

    def unreadable_error(self):
        module = sys.modules["known_here_alone"] = ModuleType("known_here_alone")
        error = type("Odd", (Exception,), {"__module__": module.__name__})
        vars(module)["Odd"] = error
        raise error("odd")

    def environment(self, name):
        return os.environ.get(name)

    def lone_error(self):
        class Odd(Exception):
            pass

        raise Odd("in a class of its own")


def make(error=None, last_words=None, **given):
    if error is not None:
        raise ConfigError(error)
    if last_words is not None:
        print(last_words, flush=True)
        os._exit(3)
    logging.getLogger("groupwise.toys").warning("made")
    return Toy(**given)
