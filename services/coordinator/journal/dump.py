"""Dumps of consumed batches: runs/NAME/dumps/step-000001.pb, one `Dump` message each.

These are of the path to the run's current version; batches of steps that a restart repeats are kept beside
them, as left-000001-1.pb.
"""

from collections.abc import Sequence
from pathlib import Path

from atoll.runtime.errors import UserError
from atoll.wire.codec.journal import decode_dump, encode_dump
from atoll.wire.types import Group, Version


def write_dump(folder: Path, step: int, version: Version, groups: Sequence[Group]) -> Path:
    """Writes a temporary file and renames it, so that readers never see half a batch."""
    folder.mkdir(exist_ok=True)
    path = folder / f"step-{step:06d}.pb"
    partial = path.with_suffix(".partial")
    partial.write_bytes(encode_dump(step, version, groups))
    return partial.rename(path)


def set_dumps_aside(folder: Path, after: int) -> None:
    """Sets aside dumps of later steps when a run continues after step `after`."""
    for path in sorted(folder.glob("step-*.pb")):
        step = path.stem.removeprefix("step-")
        if int(step) > after:
            number = 1 + sum(1 for _ in folder.glob(f"left-{step}-*.pb"))
            path.rename(folder / f"left-{step}-{number}.pb")


def read_dump(path: Path) -> tuple[int, list[Group]]:
    """The step and the groups it consumed. Raises UserError for a file that is no dump."""
    step, _, groups = _read(path)
    return step, groups


def last_dump(folder: Path) -> tuple[int, Version] | None:
    """The step and the version of the last one; None if there is none."""
    if not (paths := dumps(folder)):
        return None
    step, version, _ = _read(paths[-1])
    return step, version


def dumps(folder: Path) -> list[Path]:
    """In the order of their steps."""
    return sorted(folder.glob("step-*.pb"))


def _read(path: Path) -> tuple[int, Version, list[Group]]:
    try:
        return decode_dump(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path} is not a dump of a consumed batch: {error}") from None
