"""Counts to 20 with a checkpoint every 5 steps; continues where an earlier attempt stopped."""

import hashlib
import json
import os
import sys
from pathlib import Path

output = Path(os.environ["GROUPWISE_OUTPUT"])
begin = 0
if resume := os.environ.get("RESUME_FROM"):
    begin = json.loads((Path(resume) / "state.json").read_text())["step"]
    print(f"goes on after step {begin}")


def save(step):
    """Write a checkpoint, so that a reader finds all of it or nothing."""
    folder = output / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    state = json.dumps({"step": step}).encode()
    (folder / "state.json").write_bytes(state)
    files = {"state.json": {"size": len(state), "sha256": hashlib.sha256(state).hexdigest()}}
    new = folder / "manifest.json.new"
    new.write_text(json.dumps({"step": step, "files": files}))
    new.rename(folder / "manifest.json")  # last, and whole


for step in range(begin + 1, 21):
    print(f"step {step}", flush=True)
    if step % 5 == 0:
        save(step)
    if step == int(os.environ.get("FAIL_AT", "0")) and os.environ["ATTEMPT"] == "0":
        sys.exit("fails, to show what follows")
