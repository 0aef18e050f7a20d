"""The first error of a server's log is found, among what its other processes say of it."""

from __future__ import annotations

import pytest

from groupwise.engine.sampler.servers.server_log import known_remedy, last_message, root_cause

ERROR = "(EngineCore pid=7) ERROR 11-28 11:33:01 [core.py:1100] "
HARMLESS = "\n".join(
    ERROR.replace("ERROR", "WARNING") + line
    for line in ("Traceback (most recent call last):", "  frame", "ImportError: no matter")
)
LAST = """
(APIServer pid=5) Traceback (most recent call last):
(APIServer pid=5)   File "api.py", line 1, in main
(APIServer pid=5) RuntimeError: Engine core initialization failed. See root cause above.
"""


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["Traceback (most recent call last):", "  frame", "ValueError: too large"], "ValueError: too large"),
        (["Traceback (most recent call last):", "  frame", "ValidationError: 2 errors", "  one", "  two", "", "bye"],
         "ValidationError: 2 errors\n  one\n  two"),
        (["Traceback (most recent call last):", "  frame", "KeyError: 3", "",
          "During handling of the above exception, another exception occurred:", "",
          "Traceback (most recent call last):", "  frame", "ValueError: no such layer"], "ValueError: no such layer"),
        (["EngineCore failed to start.", "Traceback (most recent call last):", "  frame", "OSError: lost"], "OSError: lost"),
    ],
)  # fmt: skip
def test_the_first_error_counts(lines, found):
    assert root_cause("\n".join(lines) + LAST) == found
    logged = "\n".join(ERROR + line for line in lines)
    assert root_cause(f"{HARMLESS}\n{logged}{LAST}") == found
    assert root_cause(f"{logged.replace('EngineCore', 'VllmWorker-0')}{LAST}") == found


def test_without_a_traceback_the_line_that_names_an_error_counts():
    usage = "usage: vllm serve\nvllm serve: error: unrecognized arguments: --max-loras=2\nbye"
    assert "needed" in known_remedy(root_cause(usage))
    assert known_remedy(root_cause("one\ntwo")) == ""
    assert root_cause("one\n\ntwo\n") == "one\ntwo"
    assert root_cause("") == "no output"


@pytest.mark.parametrize(
    ("log", "found"),
    [
        (f"{ERROR}first\n(EngineCore pid=7) INFO 11-28 11:33:01 [a.py:1] Loading weights\n", "Loading weights"),
        ("one\nCapturing CUDA graphs:  3%|▎ | 1/35\rCapturing CUDA graphs:  6%|▌ | 2/35", "Capturing CUDA graphs:  6%|▌ | 2/35"),
        ("one\n  ▄▄▄ █ █\n\n", "one"),
        ("", "no output"),
    ],
)  # fmt: skip
def test_the_last_message_is_the_newest_line_with_words(log, found):
    assert last_message(log) == found
