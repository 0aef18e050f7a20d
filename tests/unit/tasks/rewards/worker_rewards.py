"""Reward functions that behave badly in every way, and the factories that workers make them with."""

import ctypes
import gc
import importlib
import os
import signal
import socket
import sys
import time
from pathlib import Path

from groupwise.core.reward_call.request import GroupScore, MemberScore, unscored_group
from groupwise.tasks.rewards.rubric import Rubric


def fine(completions, **kwargs):
    return [float(len(text)) for text in completions]


def note_process(folder):
    (Path(folder) / str(os.getpid())).touch()


def hangs(completions, folder, **kwargs):
    note_process(folder[0])
    time.sleep(600)


def ignores_signals(completions, folder, **kwargs):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    hangs(completions, folder)


async def blocks_the_loop(completions, folder, **kwargs):
    hangs(completions, folder)


def holds_the_interpreter(completions, folder, **kwargs):
    note_process(folder[0])
    ctypes.PyDLL(None).sleep(600)  # keeps the interpreter's lock, like a runaway regular expression


def raising(error):
    raise error


ACTS = {
    "exits": lambda: os._exit(7),
    "crashes": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "is_killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "runs_out_of_memory": lambda: raising(MemoryError()),
    "raises_half_a_character": lambda: raising(ValueError("half: \ud83d")),
    "interrupts": lambda: raising(KeyboardInterrupt()),
    "presses_ctrl_c": lambda: os.killpg(0, signal.SIGINT),
    "comes_back_twice": os.fork,
}
"""What rewards of these names do before they answer, if they still can."""


def acting(name):
    def reward(completions, **kwargs):
        ACTS[name]()
        return [1.0] * len(completions)

    reward.__name__ = name
    return reward


def returns_half_a_character(completions, **kwargs):
    return ["\ud83d"] * len(completions)


def notes_half_a_character(completions, log_metric, log_extra, **kwargs):
    log_metric("half \ud83d", 1.0)
    log_extra("\ud83d", [{"\ud83d": ["\ud83d"], "long": 10**5000}] * len(completions))
    return [1.0] * len(completions)


def naps_once(completions, nap, **kwargs):
    time.sleep(nap[0])
    return [1.0] * len(completions)


async def naps_a_third_time(completions, nap, **kwargs):
    return naps_once(completions, nap)


def start_family(folder):
    """A child, one in a session of its own, and a daemon whose parent is gone."""
    for own_session, daemon in ((False, False), (True, False), (True, True)):
        if os.fork() == 0:
            if own_session:
                os.setsid()
            if daemon and os.fork():
                os._exit(0)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            note_process(folder)
            time.sleep(600)
    while len(list(Path(folder).iterdir())) < 3:
        time.sleep(0.001)


def leaves_family_and_hangs(completions, folder, **kwargs):
    start_family(folder[0])
    hangs(completions, folder)


def leaves_family_and_exits(completions, folder, **kwargs):
    start_family(folder[0])
    os._exit(7)


def leaves_family_and_answers(completions, folder, **kwargs):
    start_family(folder[0])
    note_process(folder[0])
    return [1.0] * len(completions)


def spams(completions, **kwargs):
    for _ in range(20):
        os.write(1, b"x" * 1_000_000)
        os.write(2, b"line\n" * 200_000)
    return [1.0] * len(completions)


def talks(completions, **kwargs):
    sys.stdout.write("said to stdout\n")
    os.write(2, b"said to stderr\n")
    assert sys.stdin.read() == ""
    return [1.0] * len(completions)


def scribbles_on_the_line(completions, **kwargs):
    for descriptor in range(3, 50):
        try:
            os.write(descriptor, b"\xff" * 100)
        except OSError:
            continue
    return [1.0] * len(completions)


def closes_the_line(completions, **kwargs):
    for descriptor in range(3, 50):
        try:
            line = socket.socket(fileno=descriptor)
        except OSError:
            continue
        line.shutdown(socket.SHUT_WR)
    time.sleep(600)


def tells_environment(completions, log_extra, names, **kwargs):
    log_extra("found", [{name: os.environ.get(name) for name in names[0]}] * len(completions))
    log_extra("collects", [gc.isenabled() and gc.get_freeze_count() > 0] * len(completions))
    log_extra("torch", ["torch" in sys.modules] * len(completions))
    scores = [int(Path(f"/proc/{of}/oom_score_adj").read_text()) for of in (os.getppid(), "self")]
    log_extra("ends_first", [scores[0] < scores[1]] * len(completions))
    return [1.0] * len(completions)


def imports_what_is_beside(completions, **kwargs):
    beside = importlib.import_module("groupwise_test_beside")
    return [beside.BESIDE] * len(completions)


def keeps_order(completions, file, **kwargs):
    with open(file[0], "a") as out:
        out.write(f"{completions[0]}\n")
    return [1.0] * len(completions)


def metrics(prompts, completions, rows):
    if "boom" in prompts:
        raise KeyError("boom")
    if "hang" in prompts:
        time.sleep(600)
    if "half" in prompts:
        raise ValueError("half: \ud83d")
    return {"n": len(rows), "bad": float("nan"), "shown": (1, 2)}


class Scorer:
    """Scores by the functions of this file that the column `functions` names."""

    compute_metrics = staticmethod(metrics)

    async def score(self, request, started):
        names = request.columns["functions"][0]
        if names == ("miscounts",):
            return unscored_group(1, "scored", "")
        if names == ("gives_what_cannot_be_written",):
            notes = {"value": object(), "half": "\ud83d"}
            member = MemberScore("scored", notes=notes)
            return GroupScore((member,) * len(request.completions))
        rewards = [acting(name) if name in ACTS else globals()[name] for name in names]
        return await Rubric(rewards).score(request, started)


def make():
    return Scorer()


def make_badly():
    raise ValueError("cannot be made")


def crash_at_start(log):
    with open(log, "a") as out:
        out.write("started\n")
    sys.stdout.write("last words\n")
    sys.stdout.flush()
    os._exit(9)


def hang_at_start():
    time.sleep(600)
