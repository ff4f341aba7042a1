"""Whose run a folder contains."""

import os
import secrets
from pathlib import Path

from atoll.runtime.errors import UserError
from atoll.runtime.telemetry import METRICS_FILE


def check_folder(folder: Path, *, resume: bool) -> None:
    """A folder belongs to the run that recorded a step in it; a failed start does not claim it.

    Raises UserError if it is another run's, or cannot be written to.
    """
    taken = contains_run(folder)
    if taken and not resume:
        raise UserError(
            f"{folder} already contains a run: resume it (--resume), choose another name "
            f"(--set run.name=NAME), or delete the folder"
        )
    if resume and not taken:
        raise UserError(f"--resume: {folder} contains no run; start without --resume")
    existing = next(place for place in (folder, *folder.absolute().parents) if os.path.exists(place))
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        problem = "is not writable" if existing.is_dir() else "is not a folder"
        raise UserError(f"{existing} {problem}: the run writes to {folder}; set run.dir to another folder")


def contains_run(folder: Path) -> bool:
    rows = folder / METRICS_FILE
    return rows.exists() and rows.stat().st_size > 0


def run_id(folder: Path) -> str:
    """Identifies the run in this folder among runs of the same name in a shared store."""
    path = folder / "run.id"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".partial")
        new.write_text(secrets.token_hex(8))
        new.rename(path)
    return path.read_text()
