"""Dumps of a run's samples: consumed groups and validation answers, one `Dump` message per file.

    runs/NAME/dumps/step-000007.pb           the batch of step 7
    runs/NAME/dumps/val-SET/step-000010.pb   the answers to validation set SET after step 10

These are of the path to the run's current version; dumps of steps that a restart repeats are kept beside
them, as left-000007-1.pb.
"""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal
from urllib.parse import quote, unquote

from atoll.runtime.errors import AtollError, UserError
from atoll.wire.codec.journal import decode_dump, encode_dump
from atoll.wire.types import Group, Version

log = logging.getLogger(__name__)

DUMPS: Final = "dumps"  # folder in the run's
RECENT: Final = 10  # training steps whose batches are kept with keep = "recent"
VALIDATION: Final = "val-"


class DumpFolder:
    """Writes the dumps of one run, in threads."""

    def __init__(
        self, folder: Path, keep: Literal["recent", "all", "none"], *, required: bool = False
    ) -> None:
        """`keep`: which batches; answers are all kept but with "none". `required`: a dump that cannot be
        written ends the run, as with "all"; otherwise that is a warning in the log."""
        self._folder = folder
        self._keep = keep
        self._required = required or keep == "all"

    async def write_batch(self, step: int, version: Version, groups: Sequence[Group]) -> None:
        """What `step` consumes, at `version`. Raises AtollError if it is required and cannot be written."""
        await self._write(self._folder, step, version, groups)

    async def write_answers(self, name: str, step: int, version: Version, groups: Sequence[Group]) -> None:
        """To the validation set `name`. Raises AtollError if they are required and cannot be written."""
        await self._write(answers_folder(self._folder, name), step, version, groups)

    async def _write(self, folder: Path, step: int, version: Version, groups: Sequence[Group]) -> None:
        if self._keep == "none":
            return
        try:
            if self._keep == "recent" and folder == self._folder:
                await asyncio.to_thread(_remove, folder, step - RECENT)  # first, since it makes room
            await asyncio.to_thread(write_dump, folder, step, version, groups)
        except OSError as error:
            reason = f"step {step}: its samples cannot be written to {folder}: {error}"
            if self._required:
                raise AtollError(f"{reason}; fix the cause, then continue with --resume") from error
            log.warning("%s; the run continues without them", reason)


def write_dump(folder: Path, step: int, version: Version, groups: Sequence[Group]) -> Path:
    """Writes a temporary file and renames it, so that readers never see half a batch. Raises OSError, as on
    a full disk, and leaves nothing then."""
    folder.mkdir(exist_ok=True, parents=True)
    path = _path(folder, step)
    partial = path.with_suffix(".partial")
    try:
        with partial.open("wb") as file:
            file.writelines(encode_dump(step, version, groups))
    except OSError:
        partial.unlink()
        raise
    return partial.rename(path)


def set_dumps_aside(folder: Path, after: int) -> None:
    """Sets aside dumps of later steps when a run continues after step `after`."""
    for path in sorted(folder.rglob("step-*.pb")):
        if _step(path) > after:
            step = path.stem.removeprefix("step-")
            number = 1 + sum(1 for _ in path.parent.glob(f"left-{step}-*.pb"))
            path.rename(path.parent / f"left-{step}-{number}.pb")


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
    return sorted(folder.glob("step-*.pb"), key=_step)


def dumps_by_step(folder: Path) -> dict[int, Path]:
    """In the order of their steps."""
    return {_step(path): path for path in dumps(folder)}


def answers_folder(folder: Path, name: str) -> Path:
    """Of validation set `name`, in the folder of a run's dumps."""
    return folder / f"{VALIDATION}{quote(name, safe='')}"


def answered_sets(folder: Path) -> list[str]:
    """Names of the validation sets with answers, in the folder of a run's dumps."""
    return [unquote(path.name.removeprefix(VALIDATION)) for path in sorted(folder.glob(f"{VALIDATION}*"))]


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.pb"


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def _remove(folder: Path, step: int) -> None:
    for path in (_path(folder, step), *folder.glob(f"left-{step:06d}-*.pb")):
        path.unlink(missing_ok=True)


def _read(path: Path) -> tuple[int, Version, list[Group]]:
    try:
        return decode_dump(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path} is not a dump of a consumed batch: {error}") from None
