"""Reads the log of a vLLM server to find why the server ended, or what it is doing.

vLLM runs in several processes. The one that fails writes its traceback first; the others then write theirs, which only say that it failed
("See root cause above"), and some write shutdown messages after that. So the first error counts, not the last line; of exceptions that
were raised while an earlier one was handled, in the same traceback, the last one, which explains the earlier ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

PREFIX = re.compile(
    r"^(?:\x1b\[[0-9;]*m)*(?:\((?P<process>[\w -]+ pid=\d+)\)(?:\x1b\[[0-9;]*m)*\s?)?"
    r"(?:(?P<level>[A-Z]+) \d\d-\d\d [\d:.]+ \[[^\]]*\] ?)?"
)
"""The start of a line in vLLM's log: the process; in messages also the level, the time and the place in the code."""
TRACEBACK = "Traceback (most recent call last):"
HARMLESS = frozenset({"DEBUG", "INFO", "WARNING"})
"""Levels of messages whose tracebacks end nothing."""
WITHOUT_TRACEBACK = re.compile(r"(: error: |No module named |Error: |Killed)")
CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
MESSAGE = 160
"""Most characters of a message that tells how a start goes."""
LINES, LENGTH = 6, 400
"""Number of lines of an error, and characters of each, that are shown."""
REMEDIES = {
    "CPU Generator does not use offset": (
        "Without a GPU vLLM cannot divide a prompt whose request has a seed, and does so if the prompts that arrive together have more "
        "than --max-num-batched-tokens tokens. Set sampler.seeded=false, or lower sampler.concurrency."
    ),
    "No module named 'vllm": (
        "sampler.vllm_python must be the Python of an environment that has vLLM 0.12 or newer, such as /opt/vllm/bin/python."
    ),
    "AuxOutput Connector requires Model Runner V2": (
        "With sampler.routing_replay vLLM 0.31 and newer need their second model runner, which is the usual one on a GPU, and needs Triton "
        "elsewhere. Take what excludes it out of the environment (VLLM_USE_V2_MODEL_RUNNER=0), or leave the key out."
    ),
    "Routed-experts capture is not supported": (
        "This vLLM cannot say which experts its kernels choose for this model. Leave sampler.routing_replay out."
    ),
    "unrecognized arguments": (
        "vLLM 0.12 or newer is needed in the environment of sampler.vllm_python, and 0.16 or newer if all weights are trained (lora: null)."
    ),
}
"""What the user can do about errors that no restart mends, by a part of their text."""


def known_remedy(cause: str) -> str:
    """What to do about an error that no restart mends; empty for others."""
    return next((remedy for text, remedy in REMEDIES.items() if text in cause), "")


def last_message(log: str) -> str:
    """The last line with words; of a progress bar, which is drawn over and over in one line, its newest state."""
    lines = (PREFIX.sub("", line).strip() for line in reversed(log.splitlines()))
    return next((line for line in lines if any(map(str.isalpha, line))), "no output")[:MESSAGE]


def root_cause(log: str) -> str:
    """The first error of a log; its last lines if it has none, `no output` if it is empty."""
    lines = [
        ((match["process"], match["level"]), line[match.end() :].rstrip())
        for line in log.splitlines()
        if (match := PREFIX.match(line))
    ]
    for number, (source, text) in enumerate(lines):
        if text == TRACEBACK and source[1] not in HARMLESS:
            return _error_after(text for other, text in lines[number + 1 :] if other == source)
    texts = [text[:LENGTH] for _, text in lines if text]
    named = next((text for text in texts if WITHOUT_TRACEBACK.search(text)), None)
    return named or "\n".join(texts[-LINES:]) or "no output"


def _error_after(lines: Iterable[str]) -> str:
    """The exception that ends a traceback: the first line that is not indented, and what belongs to its message."""
    error: list[str] = []
    ended = False
    for line in lines:
        if line in CHAINED:
            error, ended = [], False
        elif error and line and (ended or line == TRACEBACK):
            break
        elif error and not line:
            ended = True
        elif error or (line and not line[0].isspace() and line != TRACEBACK):
            error.append(line[:LENGTH])
    return "\n".join(error[:LINES])
