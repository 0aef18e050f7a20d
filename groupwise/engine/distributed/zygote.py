"""Makes the object that all ranks host, once, and is then forked into them: `python -m groupwise.engine.distributed.zygote`.

It is a fresh interpreter, so the user's script is not run again. It computes in one thread, because a fork would lose all others. Until
it receives its setup it answers questions, which saves the main process from importing the same modules. The ranks share with it, and so
with each other, all memory that they do not write to: the weights of the model. Afterwards it becomes
their supervisor (`groupwise.engine.distributed.rank_supervisor`), a small program.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from gc import collect, disable, enable, freeze
from importlib import import_module
from typing import Any

from groupwise.core.plugins import load
from groupwise.core.processes.process_tree import NO_GPU, signal_when_parent_ends
from groupwise.engine.distributed.messages import (
    Call,
    CallFailure,
    CallResult,
    MessageChannel,
    Ready,
    Setup,
    picklable_error,
)
from groupwise.engine.distributed.rank import run_rank, send_log
from groupwise.engine.distributed.rank_supervisor import become_supervisor, kill_at_end


def main(parent: int, descriptor: int, modules: Sequence[str]) -> None:
    """Import the modules, then serve the process `parent` over the inherited socket `descriptor`."""
    # A batch queue signals all processes of a job; only the main process decides when to end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal_when_parent_ends(signal.SIGKILL, parent)
    # The modules stay loaded, so exclude their objects from garbage collection.
    disable()
    for module in modules:
        import_module(module)
    freeze()
    enable()
    channel = MessageChannel(socket.socket(fileno=descriptor))
    setup = _answer_until_setup(channel)
    os.environ.update(NO_GPU)  # ranks compute on the CPU; GPU drivers do not survive a fork
    channels = [MessageChannel(sock) for sock in channel.taken_over()]
    send_log(channel, setup.log_level)
    try:
        hosted = make(setup)
    except BaseException as error:  # noqa: BLE001 — any error is reported to the main process
        channel.send(CallFailure(0, picklable_error(error)))
        return
    ranks = _fork_ranks(hosted, channel, channels, setup.log_level)
    connection = socket.socket(fileno=os.dup(channel.fileno()))
    threading.Thread(target=kill_at_end, args=(connection, ranks), daemon=True).start()
    channel.send(Ready(ranks))
    hosted.leave()
    become_supervisor(channel.fileno(), ranks)


def _answer_until_setup(channel: MessageChannel) -> Setup:
    """Answer questions (`Call`s) until the setup arrives, and return it."""
    send_log(channel, logging.INFO)
    while isinstance(message := channel.receive(), Call):
        try:
            function = load(message.name, kind="function").object
            channel.send(CallResult(message.number, function(*message.arguments)))
        except Exception as error:  # noqa: BLE001 — belongs to the caller
            channel.send(CallFailure(message.number, picklable_error(error)))
    return message


def make(setup: Setup) -> Any:
    """Make the object to host."""
    sys.path.extend(folder for folder in setup.sys_path if folder not in sys.path)
    return load(setup.factory, kind="factory").object(**setup.arguments)


def _fork_ranks(
    hosted: Any, channel: MessageChannel, channels: Sequence[MessageChannel], log_level: int
) -> tuple[int, ...]:
    """Fork a rank for each connection; returns their process ids."""
    collect()
    freeze()  # a garbage collection in a rank would write to every object, and so copy the shared memory
    zygote = os.getpid()
    ranks: list[int] = []
    for rank, rank_channel in enumerate(channels):
        process = os.fork()
        if process == 0:
            for other in (channel, *channels):
                if other is not rank_channel:
                    other.close()
            run_rank(rank, hosted, rank_channel, zygote, log_level)
        ranks.append(process)
    for forked in channels:
        forked.close()
    return tuple(ranks)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
