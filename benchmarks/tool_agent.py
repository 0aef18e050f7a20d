"""How fast an `openai` agent with a tool learns on the bundled model: `python -m benchmarks.tool_agent`.

Does what a newcomer does: starts `groupwise serve` in an empty folder, runs `examples/08_openai_agent/tool_agent.py` beside it until it
ends, and stops the server. Seconds count from the start of the server, so the first step includes loading the model and asking about the
held-out items. One seed takes about ten minutes on two CPU cores. `--store` keeps the numbers with the name of the machine and draws
the curve of the documentation; the same command with more `--seeds` goes on with those that are missing.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

from benchmarks.learning import ROOT, Curve, Study, step_values, temporary
from benchmarks.serving import running_server
from benchmarks.step import RESULTS, machine, slug

EXAMPLE = ROOT / "examples" / "08_openai_agent" / "tool_agent.py"
NAME = "tool-agent"
"""Name of the run, of the picture and of the stored numbers."""


SETTINGS = ("STEPS", "QUESTIONS", "ATTEMPTS", "TURNS", "LENGTH", "LEARNING_RATE", "DEMONSTRATED")
"""Constants of the example that are stored beside the numbers; runs with others are not compared."""


def main() -> None:
    """Run the seeds that are missing, print, and draw if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--store", action="store_true", help="keep numbers and picture")
    arguments = parser.parse_args()
    file = RESULTS / f"{NAME}-{slug(machine())}.json"
    constants = runpy.run_path(str(EXAMPLE))
    settings = {name.lower(): constants[name] for name in SETTINGS}
    study = Study.opened(settings, file if arguments.store else None)
    study.run({NAME: learn}, arguments.seeds, None)
    for seed, curve in sorted(study.curves[NAME].items()):
        before, after = curve["held_out"]
        print(
            f"seed {seed}: held-out reward {before:.2f} before, {after:.2f} after; {curve['minutes'][0]:.1f} minutes; largest mean gap "
            f"between the log-probabilities of sampler and learner in a step {max(curve['gap']):.4f}"
        )
    if arguments.store:
        study.draw(NAME, ["seconds"])


def learn(seed: int) -> Curve:
    """One run of the example beside a server of its own. Raises SystemExit if it fails."""
    rewards: list[float] = []
    held_out: list[float] = []
    ends = [time.monotonic()]
    with temporary() as name, running_server(Path(name)) as url:
        command = [sys.executable, str(EXAMPLE), "--seed", str(seed)]
        environment = {**os.environ, "GROUPWISE_URL": url}
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                if match := re.fullmatch(r"(step|held-out).* reward (\d\.\d\d)\n", line):
                    if match[1] == "step":
                        ends.append(time.monotonic())
                    (rewards if match[1] == "step" else held_out).append(float(match[2]))
        if process.returncode:
            raise SystemExit(f"{EXAMPLE} ended with {process.returncode}")
        minutes = (time.monotonic() - ends[0]) / 60
        gap = step_values(Path(name) / "served" / "runs" / NAME, "sampling/logprob_gap")
    seconds = [end - begin for begin, end in pairwise(ends)]
    return {
        "reward": rewards,
        "seconds": seconds,
        "gap": gap,
        "held_out": held_out,
        "minutes": [minutes],
    }


if __name__ == "__main__":
    main()
