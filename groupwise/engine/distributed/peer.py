"""A rank with its own model: `python -m groupwise.engine.distributed.peer`, or one of the processes that torchrun has started.

It receives its setup over its connection, forms a process group with the other ranks if they learn together, and then answers calls as
every rank does (`groupwise.engine.distributed.rank`). It ends when its connection ends, even in the middle of a computation.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from typing import Any, NoReturn

from groupwise.core.errors import GroupwiseError, UsageError, WorkerLostError
from groupwise.core.processes.process_tree import signal_when_parent_ends
from groupwise.core.rendezvous import KEY_FILE
from groupwise.engine.distributed.handshake import (
    HANDSHAKE_TIMEOUT,
    UnknownCallerError,
    client_handshake,
    read_attempt_secret,
)
from groupwise.engine.distributed.messages import (
    CallFailure,
    MessageChannel,
    RankSetup,
    Ready,
    picklable_error,
)
from groupwise.engine.distributed.rank import CallServer, send_log
from groupwise.engine.distributed.rpc import RESUME_HINT
from groupwise.engine.distributed.torchrun import TorchrunRank, enable_keepalive, visible_gpu
from groupwise.engine.distributed.zygote import make

CONNECT_TIMEOUT = 60.0
"""Seconds for which a rank retries to connect to the first one."""
RETRY_SECONDS = 0.2
ADDRESS_KEY = "groupwise/line"
"""Key in torchrun's store for the address of the first rank and, if the ranks were given no secret, a token in its place."""


def main(parent: int, descriptor: int) -> NoReturn:
    """Serve the process `parent` over the inherited socket `descriptor`."""
    for number in (signal.SIGINT, signal.SIGTERM):  # as in the zygote
        signal.signal(number, signal.SIG_IGN)
    if sys.platform.startswith("linux"):
        signal_when_parent_ends(signal.SIGKILL, parent)
    serve(MessageChannel(socket.socket(fileno=descriptor)))


def run_torchrun_rank(launch: TorchrunRank) -> NoReturn:
    """Act as the rank that torchrun has started this process for."""
    os.environ.update(visible_gpu(launch.local_rank))
    if launch.machines == 1 and sys.platform.startswith("linux"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    from groupwise.engine.learner.collective import read_published

    status = 1
    try:
        channel = _call_first_rank(read_published(ADDRESS_KEY).split(), launch.rank)
        for number in (signal.SIGINT, signal.SIGTERM):  # the first rank decides when to end
            signal.signal(number, signal.SIG_IGN)
        serve(channel)
    except GroupwiseError as error:
        sys.stderr.write(f"{error}\n")
        status = error.exit_code
    except BaseException:  # noqa: BLE001 — the process must exit as a rank, not return into the command
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _call_first_rank(address: list[str], rank: int) -> MessageChannel:
    """Channel to the first rank, after each side has verified the other. Raises UsageError, WorkerLostError."""
    host, port, *token = address
    secret = read_attempt_secret()
    if secret is None and not token:
        raise UsageError(
            f"The first process of this job has a secret that the others are expected to know, and {KEY_FILE} is not set here. Give all of "
            "them the same file, or none."
        )
    # The first rank accepts one caller at a time, so the connection is retried while it may be busy with others.
    deadline = time.monotonic() + CONNECT_TIMEOUT
    while True:
        connection = None
        try:
            connection = socket.create_connection((host, int(port)), HANDSHAKE_TIMEOUT)
            seal = client_handshake(connection, secret or token[0].encode(), rank)
            enable_keepalive(connection)
            return MessageChannel(connection, seal)
        except OSError as error:
            if connection is not None:
                connection.close()
            if isinstance(error, UnknownCallerError) or time.monotonic() > deadline:
                raise WorkerLostError(
                    f"Learner {rank + 1} could not join the first one at {host}:{port}: {error}. {RESUME_HINT}"
                ) from error
        time.sleep(RETRY_SECONDS)


def serve(channel: MessageChannel) -> NoReturn:
    """Act as the rank that the setup from the other end describes."""
    try:
        setup: RankSetup = channel.receive()
        sockets = channel.taken_over()
        send_log(channel if setup.sends_log else None, setup.setup.log_level)
        try:
            hosted = _meet_and_make(setup, sockets)
        except BaseException as error:  # noqa: BLE001 — any error is reported to the main process
            channel.send(CallFailure(0, picklable_error(error)))
            with suppress(EOFError):
                channel.receive()
            os._exit(1)
        channel.send(Ready((os.getpid(),)))
        asyncio.run(CallServer(hosted, channel, setup.heartbeat_interval).serve_forever())
    except EOFError:
        os._exit(1)
    except BaseException:  # noqa: BLE001 — after any error the process must end at once
        traceback.print_exc()
    os._exit(1)


def _meet_and_make(peer: RankSetup, sockets: list[socket.socket]) -> Any:
    """Join the process group, if the ranks learn together, and make the hosted object."""
    from groupwise.engine.learner import collective
    from groupwise.engine.models.config import ModelConfig
    from groupwise.engine.models.tokenizer import resolve

    # Convert a model that needs conversion on this machine before the ranks form their process group: within a group,
    # transformers' `save_pretrained` writes files in rank 0 only.
    described = peer.setup.arguments.get("config")
    if described is not None:
        resolve(ModelConfig.model_validate(described["model"]))
    if peer.announced_address is not None:
        collective.publish_value(ADDRESS_KEY, peer.announced_address)
    if peer.rendezvous is not None:
        listening = sockets[0].detach() if sockets else None
        device = peer.setup.arguments["layout"]["device"]
        host, port = peer.rendezvous
        collective.join_process_group(peer.rank, peer.count, host, port, device, listening)
    hosted = make(peer.setup)
    hosted.join(peer.rank)
    return hosted


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
