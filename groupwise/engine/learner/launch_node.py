"""Starts the processes of one machine of several: `python -m groupwise.engine.learner.launch_node --processes N -- COMMAND…`.

The command line is the same on each machine. torchrun starts COMMAND N times on this machine, and gives each process its rank among all.
The launcher that placed the job sets the rendezvous address in the environment (NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT,
GROUPWISE_RENDEZVOUS), as `groupwise launch ssh` and a fleet do. Slurm starts a job only on its first machine. This program then has srun
start it on all of them, and they meet at the first one. On Ray, which allocates the machines (`jobs/hosts/ray_gang.py`), it writes a file
with the command for the other machines, and prints their output.

Exit code: that of the first process that failed; 75 if a process was killed, because the same command resumes when it is started again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import NoReturn

from groupwise.core.errors import EX_TEMPFAIL
from groupwise.core.rendezvous import KEY, KEY_FILE, new_secret, port_of, rendezvous_variables

MACHINES = "SLURM_JOB_NUM_NODES"
CORES = "SLURM_CPUS_PER_TASK"
STARTED_BY_SRUN = "GROUPWISE_BEGUN_BY_SRUN"
"""Environment variable with the path of the file that signals srun's tasks to end; it is set only in these tasks."""
TERM_FILE = ".groupwise-told"
"""Name of that file, in the working folder, which all nodes share."""
RENDEZVOUS_TIMEOUT = 1800
"""Seconds that the first machine waits for the others: they may first have to install their environments."""
SAVE_SECONDS = 50
"""Seconds that processes have after TERM to save; the launcher that placed the job kills them after 60."""
OTHERS_TIMEOUT = 60
"""Seconds that srun gives the other machines after the first of them has ended."""
NODES, HOST, ORDER = "RAY_GROUPWISE_NODES", "RAY_GROUPWISE_HOST", "RAY_GROUPWISE_ORDER"
"""Environment variables: number of machines, host of the first one, file with the command for the others. `jobs/hosts/ray_gang.py` uses
the same names."""
POLL_SECONDS = 1.0
"""Seconds between two reads of other machines' output, or of the file that signals the end."""
EX_USAGE = 64


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """This machine's rank among all, and the rendezvous address."""

    rank: int
    count: int
    host: str
    port: int
    name: str
    """Name of this attempt of the job; the rendezvous id of torchrun."""


def main(arguments: Sequence[str]) -> NoReturn:
    """Start this machine's processes, or those of all machines; never returns."""
    parser = argparse.ArgumentParser(prog="python -m groupwise.engine.learner.launch_node")
    parser.add_argument("--processes", default="1", help="here, or gpu: one for each GPU")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    meeting = read_rendezvous(os.environ)
    if STARTED_BY_SRUN in os.environ:
        Thread(
            target=end_on_signal_file, args=[Path(os.environ[STARTED_BY_SRUN])], daemon=True
        ).start()
    if meeting is None and ORDER in os.environ:
        sys.exit(run_on_ray(os.environ, arguments, options.processes, options.command))
    if meeting is None and int(os.environ.get(MACHINES, "1")) > 1:
        sys.exit(run_on_all_nodes(int(os.environ[MACHINES]), arguments))
    if meeting is None:
        sys.stderr.write(
            "Nothing says where the machines of this job meet: NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT are expected in the "
            "environment, or a job of Slurm with several nodes. `groupwise launch ssh|slurm|ray --machines N` and gangs set them.\n"
        )
        sys.exit(EX_USAGE)
    sys.exit(run(meeting, options.processes, options.command))


def run_on_all_nodes(count: int, arguments: Sequence[str]) -> int:
    """Run this program once on each node, by srun. Returns its exit code.

    TERM would make srun kill all tasks at once. So srun runs in its own session, and this process passes TERM to the tasks in a file.
    """
    command = [sys.executable, "-m", "groupwise.engine.learner.launch_node", *arguments]
    step = [f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"]
    if cores := os.environ.get(CORES):  # srun does not inherit it from the job (since 22.05)
        step.append(f"--cpus-per-task={cores}")
    ends = (f"--wait={OTHERS_TIMEOUT}", "--export=ALL")
    term_file = Path(TERM_FILE).absolute()
    term_file.write_text("")
    os.environ[STARTED_BY_SRUN] = str(term_file)
    os.environ[KEY_FILE] = write_secret()
    numbers = (signal.SIGTERM, signal.SIGINT)  # INT: if the command was typed by hand
    handlers = {
        number: signal.signal(number, lambda *_: term_file.write_text("TERM")) for number in numbers
    }
    try:
        code = subprocess.Popen(["srun", *step, *ends, *command], start_new_session=True).wait()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return code if code >= 0 else EX_TEMPFAIL


def end_on_signal_file(path: Path) -> None:
    """Send this process TERM once the file has content. The file exists from the start: network disks may show a new one late."""
    while True:
        with suppress(OSError):  # of a network disk; the next read may succeed
            if path.read_text():
                break
        time.sleep(POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


def write_secret() -> str:
    """Generate a secret for all machines of this job, which share the working folder. Returns the path of its file."""
    path = os.path.abspath(KEY)
    with suppress(FileNotFoundError):
        os.unlink(path)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(new_secret())
    return path


def run_on_ray(
    environment: Mapping[str, str], arguments: Sequence[str], processes: str, command: Sequence[str]
) -> int:
    """Act as the first of the machines that Ray allocated: write the command for the others, and run here. Returns the exit code."""
    count, path = int(environment[NODES]), Path(environment[ORDER])
    variables = rendezvous_variables(0, count, environment[HOST], environment["GROUPWISE_ATTEMPT"])
    os.environ[KEY_FILE] = variables[KEY_FILE] = write_secret()
    order = {
        "arguments": [sys.executable, "-m", "groupwise.engine.learner.launch_node", *arguments],
        "environment": {**environment, **variables},
        "folder": str(Path.cwd()),
    }
    repeater = OutputRepeater([Path(f"{path}.{rank}.log") for rank in range(1, count)])
    try:
        # Renamed into place, so no other machine reads half a file; readable by this user alone.
        temporary = path.with_name(f"{path.name}.new")
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(json.dumps(order).encode())
        temporary.rename(path)
        meeting = read_rendezvous({**environment, **variables})
        assert meeting is not None, "the variables say it"
        return run(meeting, processes, command)
    finally:
        path.unlink(missing_ok=True)
        repeater.end()


class OutputRepeater:
    """Prints the output that other machines write to shared files, as it arrives."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._printed = dict.fromkeys(paths, 0)
        """Bytes of each file that have been printed."""
        self._over = Event()
        self._thread = Thread(target=self._follow, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Print the remaining output, then stop."""
        self._over.set()
        self._thread.join()

    def _follow(self) -> None:
        while True:
            over = self._over.wait(POLL_SECONDS)
            for path, offset in self._printed.items():
                data = b""
                with suppress(OSError), path.open("rb") as file:  # it may not exist yet
                    file.seek(offset)
                    data = file.read()
                self._printed[path] = offset + len(data)
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
            if over:
                return


def read_rendezvous(environment: Mapping[str, str]) -> Rendezvous | None:
    """This machine's rank and the rendezvous address from the environment; None if it has none."""
    if STARTED_BY_SRUN in environment:
        name = environment.get("GROUPWISE_ATTEMPT") or f"slurm.{environment['SLURM_JOB_ID']}"
        return Rendezvous(
            int(environment["SLURM_NODEID"]),
            int(environment["SLURM_NNODES"]),
            environment["SLURM_LAUNCH_NODE_IPADDR"],
            port_of(name),
            name,
        )
    variables = ("NODE_RANK", "NNODES", "MASTER_ADDR", "MASTER_PORT")
    if not all(environment.get(variable) for variable in variables):
        return None
    rank, count, host, port = (environment[variable] for variable in variables)
    name = environment.get("GROUPWISE_RENDEZVOUS") or "job"
    return Rendezvous(int(rank), int(count), host, int(port), name)


def run(meeting: Rendezvous, processes: str, command: Sequence[str]) -> int:
    """Start the command by torchrun, and wait until it has ended on this machine. Returns its exit code."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, parse_args
    from torch.distributed.run import run as torchrun

    # torch 2.11 has no such option, and kills after 30 seconds what has not ended.
    has_timeout = "--shutdown-timeout" in get_args_parser().format_help()
    options = [
        f"--nnodes={meeting.count}",
        f"--node-rank={meeting.rank}",
        f"--nproc-per-node={processes}",
        f"--master-addr={meeting.host}",
        f"--master-port={meeting.port}",
        f"--rdzv-id={meeting.name}",
        f"--rdzv-conf=timeout={RENDEZVOUS_TIMEOUT}",
        *([f"--shutdown-timeout={SAVE_SECONDS}"] if has_timeout else []),
        "--no-python",
        *command,
    ]
    try:
        torchrun(parse_args(options))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode
        sys.stderr.write(
            f"Process {rank} of the job was ended by signal {-failure.exitcode}; the others cannot go on without it.\n"
        )
        return EX_TEMPFAIL
    except SignalException as received:
        return 128 + int(received.sigval)
    return 0


if __name__ == "__main__":
    main(sys.argv[1:])
