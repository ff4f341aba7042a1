"""Starts a run from another run's checkpoint: `atoll run FILE --fork-from RUN[@STEP]`."""

import os
import shutil
from pathlib import Path

from atoll.cli.launch import active_runs
from atoll.coordinator.journal.checkpoints import Checkpoints
from atoll.coordinator.journal.ledger import LEDGER
from atoll.coordinator.loop import WARMUP_EXPORT
from atoll.runtime.errors import UserError
from atoll.runtime.telemetry import METRICS_FILE


def parse_fork(text: str) -> tuple[Path, int | None]:
    """RUN or RUN@STEP. Raises UserError."""
    name, at, step = text.partition("@")
    if at and not step.isdecimal():
        raise UserError(f"--fork-from {text}: expected RUN or RUN@STEP, such as mine@100")
    return active_runs.run_folder(name), int(step) if at else None


def fork(source: Path, step: int | None, folder: Path) -> int:
    """Makes `folder`, which holds no run, that of a run stopped after `step` of `source` (None: after its
    newest checkpoint), with its history until then. Returns the step; a resume continues from it.

    Files that are never changed are hard links where the disk allows it. Raises UserError if there is no such
    checkpoint.
    """
    active_runs.check_is_run(source)
    saved, copies = (Checkpoints(run / "checkpoints", keep=1) for run in (source, folder))
    there = saved.steps()
    if not there or (step is not None and step not in there):
        steps = ", ".join(map(str, there)) or "none"
        raise UserError(f"--fork-from: {source} has no checkpoint of step {step}; it has: {steps}")
    step = there[-1] if step is None else step
    best = saved.load(step)[0].best
    for name in ("checkpoints", WARMUP_EXPORT):  # of a start that failed
        shutil.rmtree(folder / name, ignore_errors=True)
    for number in {step} | ({best.step} & set(there) if best else set()):
        shutil.copytree(saved.path(number), copies.path(number), copy_function=_link)
    if (source / WARMUP_EXPORT).exists():  # where the reference begins
        shutil.copytree(source / WARMUP_EXPORT, folder / WARMUP_EXPORT, copy_function=_link)
    for name in (LEDGER, METRICS_FILE):  # to which the run appends; a resume drops later rows
        shutil.copyfile(source / name, folder / name)
    return step


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk
        shutil.copyfile(source, target)
