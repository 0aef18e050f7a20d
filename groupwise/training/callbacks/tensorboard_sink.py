"""The sink `tensorboard`: event files in `tensorboard/` of the run's folder, which `tensorboard --logdir runs` finds.

tensorboard's own writer is used, because torch's would import torch. An event file is append-only, and a killed process leaves it
incomplete; so the files are written again from the record when the run starts or is resumed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from groupwise.core.settings.view import View
from groupwise.training.callbacks.sinks import NOTHING, MetricsRow, ReportedRun, State

FOLDER = "tensorboard"
STRING = 7
"""DT_STRING, the data type of text in tensorboard's tensors."""


class TensorBoardSink:
    """Writes scalars by steps done, and the config as text."""

    package = "tensorboard"

    def __init__(self) -> None:
        self._writer: Any = None
        self._event: Any = None
        """The class of event messages."""

    def check(self, config: View) -> None:
        """Do nothing: only the package is needed."""

    def begin(self, run: ReportedRun) -> int:
        """Delete old event files and start a new one."""
        # Typed as Any: it has no type hints.
        messages = import_module("tensorboard.compat.proto.event_pb2")
        writer_module = import_module("tensorboard.summary.writer.event_file_writer")
        folder = run.folder / FOLDER
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self._event = messages.Event
        self._writer = writer_module.EventFileWriter(str(folder))
        # A running tensorboard still shows the old curves; a session that starts at step 0 makes it drop them.
        session_log = messages.SessionLog(status=messages.SessionLog.START)
        self._writer.add_event(messages.Event(step=0, session_log=session_log))
        config = json.dumps(run.config.to_dict(), indent=2, ensure_ascii=False)
        event = messages.Event(step=0)
        summary = event.summary.value.add(tag="config/text_summary")
        summary.metadata.plugin_data.plugin_name = "text"
        summary.tensor.dtype = STRING
        summary.tensor.tensor_shape.dim.add(size=1)
        summary.tensor.string_val.append(f"```json\n{config}\n```".encode())
        self._writer.add_event(event)
        return NOTHING

    def write_row(self, row: MetricsRow) -> None:
        """Write one event with all values, and one for each finding, at the finding's own steps."""
        self._add_event(row.finished_at, row.steps, row.values)
        for finding in row.findings:
            self._add_event(row.finished_at, finding.steps, finding.values)
        self._writer.flush()

    def _add_event(self, wall_time: float, steps: int, values: Mapping[str, float]) -> None:
        event = self._event(wall_time=wall_time, step=steps)
        for name, value in values.items():
            event.summary.value.add(tag=name, simple_value=value)
        self._writer.add_event(event)

    def end(self, state: State) -> None:
        """Close the file."""
        self._writer.close()
