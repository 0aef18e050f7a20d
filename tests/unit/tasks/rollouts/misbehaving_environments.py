"""Environments that behave badly in every way, and the factory that workers make them with."""

import os
import signal
import time
from pathlib import Path

from groupwise.tasks.environment import Step
from groupwise.tasks.rollouts.sessions import Sessions


class Counts:
    """Adds up what it hears, and notes its process."""

    def reset(self, folder):
        self.total = 0
        self.folder = Path(folder)
        (self.folder / f"made-{os.getpid()}").touch()

    def step(self, completion):
        self.total += int(completion)
        return Step(f"={self.total};", done=self.total >= 10, reward=float(self.total))

    def reward(self):
        return {"total": self.total}


class Hangs(Counts):
    def reset(self, folder, member=0):
        super().reset(folder)
        self.member = member

    def step(self, completion):
        if self.member == 1 and self.total:
            time.sleep(600)
        return super().step(completion)


class Dies(Hangs):
    def step(self, completion):
        if self.member == 1 and self.total:
            os.kill(os.getpid(), signal.SIGKILL)
        return super(Hangs, self).step(completion)


class Forks(Hangs):
    """Leaves a child behind that holds everything open, and comes back from the fork twice."""

    def step(self, completion):
        if self.member == 1:
            child = os.fork()
            if child == 0 and self.total:
                time.sleep(600)
            (self.folder / f"child-{child}").touch()
        return super(Hangs, self).step(completion)


class Forgets(Dies):
    """Answers otherwise after the loss of its process."""

    def step(self, completion):
        step = super().step(completion)
        again = len(list(self.folder.glob("made-*"))) > 1
        return Step("again;" if again else step.observation, step.done, step.reward)


class Ends:
    def step(self, completion):
        raise SystemExit("no more")


class Spams:
    def step(self, completion):
        print("spam " * 2000 * 100)
        return Step(done=True, reward=1.0)


def make(name):
    return Sessions(KINDS[name])


def make_badly(name):
    raise ValueError("cannot be made")


KINDS = {kind.__name__: kind for kind in (Counts, Hangs, Dies, Forks, Forgets, Ends, Spams)}
