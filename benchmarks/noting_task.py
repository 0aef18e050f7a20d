"""The quickstart's questions, with a reward that notes when it is first called: by then something has been sampled.

The file `task.note` gets the seconds of the system's monotonic clock, which all processes of a Linux machine share. Nothing of
Groupwise is imported, so that TRL can train on it, too.
"""

import runpy
import time
from pathlib import Path

QUICKSTART = Path(__file__).resolve().parents[1] / "examples" / "01_first_task" / "task.py"


def get_rl_dataset(config):
    """Rows to train on."""
    return runpy.run_path(str(QUICKSTART))["get_rl_dataset"](config)


def get_reward_funcs(config, tokenizer):
    """One function, which teaches nothing."""
    note = Path(config["task"]["note"])

    def noting(completions, **kwargs):
        if not note.exists():
            note.write_text(repr(time.monotonic()))
        return [0.0] * len(completions)

    return [noting]
