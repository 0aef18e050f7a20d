"""Stands in for a training: does what its one argument says, and writes down all of it where the fleet cannot reach.

It travels with its job as a file and needs nothing but Python. What happens goes to `<history>/<job>.<epoch>.<rank>.jsonl`, a line each,
flushed to the disk before anything else happens:

    start    job epoch rank vm gpus members pid resumed [share_mb]    the command has begun
    step     step wrote                  it is alive, and has printed so many bytes
    saved    step                        a checkpoint of that step is complete
    term     -                           SIGTERM came; nobody but the fleet sends it
    stop     code wrote                  it is about to exit with that code
    child    pid                         a grandchild that has left its session is alive
    clash    over holder                 somebody else holds the same GPU or runs the same member at this very moment

Who holds what is known by locks on files of the history, which the kernel opens at the instant of a death: no clock is asked.

The argument is JSON: history, and `plays`, one for each attempt, the last one for all that follow:

    steps 10, pause 0.05     work; it goes on from the step of RESUME_FROM
    code 0                   its exit code; 137 is SIGKILL to itself, as from the kernel
    term "exit"              what SIGTERM does: exit (143), graceful (exits with 0), ignore
    save 0                   a checkpoint after each so many steps
    child null               a setsid grandchild: "dies" at TERM, or "stays" until KILL
    log "text", chunk 80     what it prints with each step: text or binary, and how many bytes
"""

import fcntl
import hashlib
import json
import os
import signal
import socket
import sys
import time

LEAST = {
    "steps": 10, "pause": 0.05, "code": 0, "term": "exit", "save": 0, "child": None, "log": "text",
    "chunk": 80, "share_mb": None,
}  # fmt: skip


def printed(name, kind, begin, end):
    """What an attempt prints from byte to byte. It follows from its name alone, so that anybody can tell what must stand in its log."""
    length = 32 if kind == "binary" else 65
    pieces = []
    for number in range(begin // length, -(-end // length)):
        digest = hashlib.sha256(f"{name}/{number}".encode()).digest()
        pieces.append(digest if kind == "binary" else digest.hex().encode() + b"\n")
    first = begin % length
    return b"".join(pieces)[first : first + end - begin]


class Trainer:
    def __init__(self, argument):
        given = json.loads(argument)
        plays = given["plays"]
        self.play = dict(LEAST, **plays[min(int(os.environ["ATTEMPT"]), len(plays) - 1)])
        self.history = given["history"]
        self.rank = int(os.environ.get("NODE_RANK", "0"))
        self.members = int(os.environ.get("NNODES", "1"))
        self.attempt = os.environ["GROUPWISE_ATTEMPT"]
        self.job, _, epoch = self.attempt.rpartition(".")
        self.epoch = int(epoch)
        self.vm = socket.gethostname()
        visible = os.environ["CUDA_VISIBLE_DEVICES"]
        self.gpus = [f"GPU-{self.vm}-{n}" for n in visible.split(",") if n]
        self.name = f"{self.attempt}.{self.rank}"
        path = os.path.join(self.history, self.name + ".jsonl")
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self.wrote = 0
        self.termed = False
        self.locks = []

    def tell(self, what, **facts):
        who = {"job": self.job, "epoch": self.epoch, "rank": self.rank, "vm": self.vm}
        record = {**facts, "what": what, "at": time.monotonic(), **who}
        os.write(self.file, (json.dumps(record) + "\n").encode())
        os.fsync(self.file)

    def run(self):
        signal.signal(signal.SIGTERM, self.asked_to_end)
        begun_at, resumed = self.resume()
        share = self.play["share_mb"]
        facts = {"share_mb": share} if share else {}
        self.tell(
            "start",
            gpus=self.gpus,
            members=self.members,
            pid=os.getpid(),
            resumed=resumed,
            play=self.play,
            **facts,
        )
        self.claim()
        if self.play["child"]:
            self.leave_a_child()
        for step in range(begun_at + 1, self.play["steps"] + 1):
            self.step(step)
        self.end()

    def claim(self):
        """Nobody else may have these now. The locks go with the last process that has them, a grandchild too."""
        how = fcntl.LOCK_SH if self.play["share_mb"] else fcntl.LOCK_EX
        self.take("gpu", self.gpus, how)
        self.take("job", [f"{self.job}.{self.rank}"], fcntl.LOCK_EX)

    def take(self, kind, names, how):
        for name in names:
            path = os.path.join(self.history, f"lock-{kind}-{name}")
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            self.locks.append(lock)
            try:
                fcntl.flock(lock, how | fcntl.LOCK_NB)
            except OSError:
                holder = os.pread(lock, 200, 0).decode().partition("\n")[0]
                self.tell("clash", over=f"{kind} {name}", holder=holder)
                continue
            os.pwrite(lock, (self.name + "\n").encode(), 0)

    def step(self, step):
        time.sleep(self.play["pause"])
        self.print(self.play["chunk"])
        self.tell("step", step=step, wrote=self.wrote)
        if self.play["save"] and step % self.play["save"] == 0:
            self.save(step)

    def print(self, size):
        data = printed(self.name, self.play["log"], self.wrote, self.wrote + size)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # what is written is counted
        while data:
            data = data[os.write(1, data) :]
        self.wrote += size
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])

    def save(self, step):
        folder = os.path.join(os.environ["GROUPWISE_OUTPUT"], f"step-{step}")
        os.makedirs(folder, exist_ok=True)
        weights = hashlib.sha256(f"{self.job} of step {step}".encode()).digest() * 100
        self.write(os.path.join(folder, "weights"), weights)
        files = {
            "weights": {"sha256": hashlib.sha256(weights).hexdigest(), "size": len(weights)},
        }
        manifest = json.dumps({"step": step, "files": files}).encode()
        self.write(os.path.join(folder, "manifest.json"), manifest)
        self.tell("saved", step=step)

    def write(self, path, data):
        with open(path + ".new", "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(path + ".new", path)

    def resume(self):
        """The step to go on from, and that of the checkpoint that was given, -1 if it is not whole."""
        folder = os.environ.get("RESUME_FROM")
        if not folder:
            return 0, None
        try:
            with open(os.path.join(folder, "manifest.json"), "rb") as file:
                manifest = json.loads(file.read())
            for name, entry in manifest["files"].items():
                with open(os.path.join(folder, name), "rb") as file:
                    assert hashlib.sha256(file.read()).hexdigest() == entry["sha256"]
            name = "{} of step {}".format(self.job, manifest["step"])
            with open(os.path.join(folder, "weights"), "rb") as file:
                assert file.read(32) == hashlib.sha256(name.encode()).digest()
        except (OSError, ValueError, KeyError, AssertionError):
            return 0, -1
        return manifest["step"], manifest["step"]

    def leave_a_child(self):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # it is not a trainer
        if os.fork():
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
            return
        os.setsid()
        if os.fork():
            os._exit(0)
        stays = self.play["child"] == "stays"
        signal.signal(signal.SIGTERM, signal.SIG_IGN if stays else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(nothing, fd)
        while True:
            self.tell("child", pid=os.getpid())
            time.sleep(0.1)

    def asked_to_end(self, *_):
        self.tell("term")
        self.termed = True
        if self.play["term"] == "exit":
            self.stop(143)
        if self.play["term"] == "graceful":
            self.stop(0)

    def end(self):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        output = os.environ["GROUPWISE_OUTPUT"]
        os.makedirs(output, exist_ok=True)
        self.write(os.path.join(output, f"result-{self.rank}.txt"), self.name.encode())
        self.stop(self.play["code"])

    def stop(self, code):
        self.tell("stop", code=-9 if code == 137 else code, wrote=self.wrote)
        if code == 137:
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(code)


if __name__ == "__main__":
    Trainer(sys.argv[1]).run()
