"""Consumed batches on disk: runs/NAME/dumps/step-000001.pb, one `Dump` message each."""

from collections.abc import Sequence
from pathlib import Path

from services.runtime.errors import UserError
from services.wire import codec
from services.wire.types import Group


def write_dump(folder: Path, step: int, groups: Sequence[Group]) -> Path:
    """Written beside and renamed, so that a reader never sees half a batch."""
    folder.mkdir(exist_ok=True)
    path = folder / f"step-{step:06d}.pb"
    partial = path.with_suffix(".partial")
    partial.write_bytes(codec.encode_dump(step, groups))
    return partial.rename(path)


def read_dump(path: Path) -> tuple[int, list[Group]]:
    """The step and the groups it consumed. Raises UserError for a file that is no dump."""
    try:
        return codec.decode_dump(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path} is not a dump of a consumed batch: {error}") from None
