"""The processes of one machine of several: `python -m groupwise.learner.node --processes N -- COMMAND…`, the same on each machine.

torchrun starts COMMAND so many times here, and tells each process which of all it is. Where the machines meet is said by whoever placed
the job, in the environment (NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, GROUPWISE_RENDEZVOUS), as `groupwise launch ssh` and a fleet do.
Slurm begins a job on its first machine alone: there this program has srun begin it on all of them, and they meet at the first one.

Exit code: that of the first process that failed; 75 where one was killed, since the same command begun again goes on.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from groupwise.errors import EX_TEMPFAIL
from groupwise.hosts.meeting import KEY, KEY_FILE, new_secret, port_of

MACHINES = "SLURM_JOB_NUM_NODES"
CORES = "SLURM_CPUS_PER_TASK"
BEGUN_BY_SRUN = "GROUPWISE_BEGUN_BY_SRUN"
PATIENCE = 1800
"""Seconds that the first machine waits for the others: their environments may have to be made."""
SAVING = 50
"""Seconds that processes have after TERM; whoever placed the job kills after 60."""
OTHERS_PATIENCE = 60
"""Seconds that srun leaves the machines after the first of them has ended."""
EX_USAGE = 64


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where this machine stands among all."""

    rank: int
    count: int
    host: str
    port: int
    name: str
    """Of this attempt of the job."""


def main(arguments: Sequence[str]) -> NoReturn:
    """Be this machine's part; never returns."""
    parser = argparse.ArgumentParser(prog="python -m groupwise.learner.node")
    parser.add_argument("--processes", default="1", help="here, or gpu: one for each GPU")
    parser.add_argument("command", nargs="+")
    known = parser.parse_args(arguments)
    if int(os.environ.get(MACHINES, "1")) > 1 and BEGUN_BY_SRUN not in os.environ:
        begin_on_all(int(os.environ[MACHINES]), arguments)
    meeting = found_in(os.environ)
    if meeting is None:
        sys.stderr.write(
            "Nothing says where the machines of this job meet: NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT are expected in the "
            "environment, or a job of Slurm with several nodes. `groupwise launch ssh|slurm --nodes N` and gangs of a fleet set them.\n"
        )
        sys.exit(EX_USAGE)
    sys.exit(run(meeting, known.processes, known.command))


def begin_on_all(count: int, arguments: Sequence[str]) -> NoReturn:
    """Become srun, which begins this program once on each node."""
    own = [sys.executable, "-m", "groupwise.learner.node", *arguments]
    step = [f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"]
    if cores := os.environ.get(CORES):  # srun does not take it over from the job (since 22.05)
        step.append(f"--cpus-per-task={cores}")
    ends = (f"--wait={OTHERS_PATIENCE}", "--export=ALL")
    os.environ[BEGUN_BY_SRUN] = "1"
    os.environ[KEY_FILE] = give_secret()
    os.execvp("srun", ["srun", *step, *ends, *own])


def give_secret() -> str:
    """To all machines of this job, which share the working folder. The path of the file."""
    path = os.path.abspath(KEY)
    with suppress(FileNotFoundError):
        os.unlink(path)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(new_secret())
    return path


def found_in(environment: Mapping[str, str]) -> Meeting | None:
    """What the environment says; None: nothing."""
    if BEGUN_BY_SRUN in environment:
        name = environment.get("GROUPWISE_ATTEMPT") or f"slurm.{environment['SLURM_JOB_ID']}"
        return Meeting(
            int(environment["SLURM_NODEID"]),
            int(environment["SLURM_NNODES"]),
            environment["SLURM_LAUNCH_NODE_IPADDR"],
            port_of(name),
            name,
        )
    words = ("NODE_RANK", "NNODES", "MASTER_ADDR", "MASTER_PORT")
    if not all(environment.get(word) for word in words):
        return None
    rank, count, host, port = (environment[word] for word in words)
    name = environment.get("GROUPWISE_RENDEZVOUS") or "job"
    return Meeting(int(rank), int(count), host, int(port), name)


def run(meeting: Meeting, processes: str, command: Sequence[str]) -> int:
    """Start the command by torchrun, and wait until it has ended here. Its exit code."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args
    from torch.distributed.run import run as torchrun

    words = [
        f"--nnodes={meeting.count}",
        f"--node-rank={meeting.rank}",
        f"--nproc-per-node={processes}",
        f"--master-addr={meeting.host}",
        f"--master-port={meeting.port}",
        f"--rdzv-id={meeting.name}",
        f"--rdzv-conf=timeout={PATIENCE}",
        f"--shutdown-timeout={SAVING}",
        "--no-python",
        *command,
    ]
    try:
        torchrun(parse_args(words))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode
        sys.stderr.write(
            f"Process {rank} of the job was ended by signal {-failure.exitcode}; the others cannot go on without it.\n"
        )
        return EX_TEMPFAIL
    except SignalException as told:
        return 128 + int(told.sigval)
    return 0


if __name__ == "__main__":
    main(sys.argv[1:])
