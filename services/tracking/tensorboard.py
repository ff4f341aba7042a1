"""TensorBoard: event files in runs/NAME/tensorboard."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields
from time import time as now

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from atoll.tracking.tracker import SampleRow, TrackedRun


class TensorBoardTracker:
    def start(self, run: TrackedRun) -> None:
        self._last: int | None = None  # step that this process has logged
        self._writer = EventFileWriter(str(run.folder / "tensorboard"))
        config = json.dumps(run.config, indent=2)
        self._write(Event(step=0, wall_time=now(), summary=text_pb("config", f"```json\n{config}\n```")))

    def log(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        if self._last is None or step <= self._last:  # TensorBoard then forgets this step and later ones
            start = SessionLog(status=SessionLog.START)
            self._write(Event(step=step, wall_time=time, session_log=start))
        self._last = step
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(Event(step=step, wall_time=time, summary=Summary(value=values)))

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        lines = [
            "| " + " | ".join(field.name for field in fields(SampleRow)) + " |",
            "|---" * len(fields(SampleRow)) + "|",
            *("| " + " | ".join(map(_cell, astuple(row))) + " |" for row in rows),
        ]
        self._write(Event(step=step, wall_time=now(), summary=text_pb("samples", "\n".join(lines))))

    def finish(self) -> None:
        self._writer.close()

    def _write(self, event: Event) -> None:
        self._writer.add_event(event)
        self._writer.flush()


def _cell(value: object) -> str:
    """As a cell of a Markdown table."""
    return str(value).replace("|", r"\|").replace("\n", "<br>")
