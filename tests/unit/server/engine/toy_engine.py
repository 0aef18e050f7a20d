"""The engine that tests of the engine's process serve: it can fail in every way."""

import asyncio
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

from groupwise.core.errors import ConfigError, RunError

FACTORY = f"{Path(__file__).resolve()}:make"
SLEEPER = "import time; time.sleep(1000)"


class KnownHereError(RunError):
    """Of a module that the other side cannot import under this name."""


class ToyEngine:
    def __init__(self):
        self.given_up = 0
        self.log = logging.getLogger("groupwise.toy_engine")
        self.gate = asyncio.Event()

    async def echo(self, value):
        return value

    async def process(self):
        return os.getpid()

    async def wait(self):
        await self.gate.wait()

    async def let_go(self):
        self.gate.set()

    async def sample(self):
        """Of the methods that are cancelled."""
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.given_up += 1
            raise

    async def probe(self):
        """As `sample`, but does not let itself be cancelled."""
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.given_up += 1

    async def times_given_up(self):
        return self.given_up

    async def block(self):
        threading.Event().wait()

    async def fail(self, error):
        raise error

    async def fail_here(self):
        raise KnownHereError("odd")

    async def divide(self, by):
        return 1 / by

    async def unsendable(self):
        return lambda: 0

    async def say(self, text):
        self.log.info("said %s", text)

    async def show(self, text):
        print(text, flush=True)

    async def die(self, code, text):
        os.write(2, text.encode())
        os._exit(code)

    async def start_children(self):
        """A child in this group, one in a session of its own, and the child of that one."""
        return self._children()

    def _children(self):
        grandchild = (
            f"import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', {SLEEPER!r}]); "
            "print(p.pid, flush=True); time.sleep(1000)"
        )
        near = subprocess.Popen([sys.executable, "-c", SLEEPER])
        far = subprocess.Popen(
            [sys.executable, "-c", grandchild], stdout=subprocess.PIPE, start_new_session=True
        )
        return [near.pid, far.pid, int(far.stdout.readline())]

    async def hold_the_socket(self):
        """Fork a child that keeps every descriptor open."""
        child = os.fork()
        if child == 0:
            while True:
                threading.Event().wait(1000)
        return child

    async def environment(self, name):
        return os.environ.get(name)

    async def modules(self):
        return sorted(sys.modules)

    async def close(self):
        if os.environ.get("TOY_CLOSE") == "hangs":
            await asyncio.Event().wait()
        if os.environ.get("TOY_CLOSE") == "fails":
            raise ConfigError("cannot be closed")


def make():
    if word := os.environ.get("TOY_FAILS"):
        raise ConfigError(word)
    if os.environ.get("TOY_HANGS"):
        threading.Event().wait()
    logging.getLogger("groupwise.toy_engine").warning("made")
    return ToyEngine()
