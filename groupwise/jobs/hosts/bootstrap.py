"""The program that answers every call on a machine. It contains no user input.

`BOOTSTRAP` prints `READY`, reads a request from standard input and does nothing until its length and hash match. Then it searches the
machine's root for the runner whose hash the request contains. If that is missing, it answers `{"need": "runner"}`, and the driver repeats
the request with the text in the field `source`. It stores the text (and the compiled code, which halves the time of a call), and calls its
function `answer_request` (`runner/requests.py`). A full disk does not prevent this: the runner is then executed from memory.

Over SSH a machine's login shell starts it, and that may be any: csh ends a quoted text at the end of its line, a restricted shell has no
`exec` and no `/` in the names of programs. So the command line is a few words that mean the same to all of them, and the bootstrap comes as
the first line of standard input.

The machine's `python3` runs it, whichever version that is, so its syntax is that of old versions: below 3.8 it answers with a refusal."""

from __future__ import annotations

READY = b"GROUPWISE-READY\n"
"""Printed before the request is read."""

BOOTSTRAP = r"""
import os, sys
try:
    os.write(1, b"GROUPWISE-READY\n")
except OSError:
    pass
sys.path[:] = [p for p in sys.path if p]
import hashlib, json, marshal, re

def sha(data):
    return hashlib.sha256(data).hexdigest()

def answer(body):
    text = json.dumps(body).encode("ascii")
    head = "GROUPWISE-ANSWER 1 %d %s 0\n" % (len(text), sha(text))
    sys.stdout.buffer.write(head.encode("ascii") + text)
    sys.stdout.buffer.flush()
    os._exit(0)

def refuse(code, message):
    answer({"error": {"code": code, "message": message}})

def read(path):
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""

def keep(path, data):
    new = "%s.%d.new" % (path, os.getpid())
    try:
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(new, path)
    except OSError:
        try:
            os.unlink(new)
        except OSError:
            pass

def request():
    head = re.match(b"GROUPWISE ([0-9]{1,6}) ([0-9]{1,9}) ([0-9a-f]{64})\n$", stdin.readline(200))
    if not head:
        refuse("truncated", "the request has no header line")
    if int(head.group(1)) != 1:
        refuse("protocol", "this is protocol 1, the request is of " + head.group(1).decode("ascii"))
    text = stdin.read(int(head.group(2)))
    if sha(text).encode("ascii") != head.group(3):
        refuse("truncated", "length or hash of the request do not agree with its header")
    return json.loads(text.decode("utf-8"))

def runner(body):
    want, source = str(body["runner"]), str(body.pop("source", "")).encode("utf-8")
    if not re.match("[0-9a-f]{64}$", want):
        refuse("bad_request", "runner: a sha256 in hex is expected")
    root = os.path.join(os.path.expanduser("~"), os.path.expanduser(body["root"]))
    path = os.path.join(root, "runners", want + ".py")
    here = read(path)
    if sha(here) != want:
        if not source:
            answer({"need": "runner"})
        if sha(source) != want:
            refuse("bad_runner", "the runner sent along is not the one that is named")
        here = source
        keep(path, here)
    cache = "%s.%s-%x.bin" % (path, sys.implementation.cache_tag, sys.hexversion)
    kept = read(cache)
    if kept[:32] == hashlib.sha256(kept[32:]).digest():
        return marshal.loads(kept[32:]), path
    code = compile(here, path, "exec", dont_inherit=True)
    data = marshal.dumps(code)
    keep(cache, hashlib.sha256(data).digest() + data)
    return code, path

stdin = sys.stdin.buffer
os.umask(0o077)
if sys.version_info < (3, 8):
    refuse("no_python", "python3 is %d.%d there; the runner needs 3.8 or later" % sys.version_info[:2])
try:
    body = request()
    code, path = runner(body)
    space = {"__name__": "groupwise_runner", "__file__": path}
    exec(code, space)
except Exception as error:
    refuse("bootstrap", "%s in the bootstrap" % type(error).__name__)
space["answer_request"](body, stdin)
"""
"""The text for `python3 -c`."""

FLAGS = ("-I", "-S", "-X", "utf8")
"""Isolated mode (ignores the current folder and PYTHON* variables), no site packages (faster), and UTF-8 in any locale."""

COMMANDS = tuple(
    f"{python} {' '.join(FLAGS)} -c 'import sys;exec(sys.stdin.buffer.readline())'"
    for python in ("python3", "/usr/bin/python3", "/usr/local/bin/python3")
)
"""The only command lines that are ever sent to a machine: one of them, the first unless its PATH has no `python3`."""

BOOTSTRAP_LINE = f"exec({BOOTSTRAP!a})\n".encode("ascii")
"""What `COMMANDS` read first."""
