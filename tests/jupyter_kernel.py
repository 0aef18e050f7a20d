"""A client for real Jupyter kernels, for tests of notebooks."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from tests.processes import wait_until

ROOT = Path(__file__).parents[1]


class Kernel:
    """A kernel with its client.

    They use Unix sockets, because another process may take a free TCP port before the kernel does.
    """

    def __init__(self, folder: Path, name: str = "python3") -> None:
        """`name`: the kernel's specification."""
        self._sockets = tempfile.mkdtemp()
        self._manager = KernelManager(
            kernel_name=name, transport="ipc", ip=f"{self._sockets}/kernel"
        )
        self._manager.start_kernel(cwd=str(folder))
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=60)
        self.run(f"import sys; sys.path.insert(0, {str(ROOT)!r})")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)
        shutil.rmtree(self._sockets)

    @property
    def pid(self) -> int:
        """The process id."""
        provisioner: Any = self._manager.provisioner
        return provisioner.pid

    def begin(self, code: str) -> str:
        """Run a cell without waiting for it."""
        client: BlockingKernelClient = self._client
        return client.execute(code)

    def outputs(self, cell: str) -> list[dict[str, Any]]:
        """The outputs below a cell when it has finished; an updated display appears once, in its last state."""
        found: list[dict[str, Any]] = []
        displays: dict[str, dict[str, Any]] = {}
        while True:
            message = self._client.get_iopub_msg(timeout=100)
            if message["parent_header"].get("msg_id") != cell:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                return found
            if kind == "update_display_data":
                displays[content["transient"]["display_id"]].update(content)
            elif kind in ("stream", "display_data", "execute_result", "error"):
                found.append({"kind": kind, **content})
                if name := content.get("transient", {}).get("display_id"):
                    displays[name] = found[-1]

    def run(self, code: str) -> list[dict[str, Any]]:
        """Run a cell and return its outputs."""
        return self.outputs(self.begin(code))

    def interrupt(self) -> None:
        """Interrupt as the button does: the whole process group gets the signal."""
        self._manager.interrupt_kernel()


WAITING = """
import time
from pathlib import Path

def waiting(completions, trainer_state, **columns):
    Path("step").write_text(str(trainer_state.global_step))
    while Path("wait").exists() and trainer_state.global_step >= 3:
        time.sleep(0.01)
    return digits(completions)
"""
"""Code of a reward that stops the fourth step while the file `wait` exists."""
TRAIN_WAITING = "state = train_grpo(config, session, reward_functions=[waiting])"


def in_its_fourth_step(kernel: Kernel, folder: Path, seconds: float) -> str:
    """Run a training's cell until its fourth step; fails after `seconds`."""
    step = folder / "step"
    step.unlink(missing_ok=True)
    cell = kernel.begin(TRAIN_WAITING)
    wait_until(lambda: step.exists() and step.read_text() == "3", "the fourth step", seconds)
    return cell


def text(outputs: list[dict[str, Any]]) -> str:
    """All visible text."""
    parts = [
        each.get("text") or each.get("evalue") or "".join(each.get("data", {}).values())
        for each in outputs
    ]
    return "\n".join([*parts, *("\n".join(each.get("traceback", ())) for each in outputs)])
