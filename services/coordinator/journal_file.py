"""journal.bin of a checkpoint: payloads one by one, then the index, so that no end ever holds all of it."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

from google.protobuf.message import DecodeError

from services.runtime.errors import UserError
from services.wire import codec
from services.wire.types import JournalIndex

_MAGIC: Final = b"atoll journal 2\n"
_LENGTH: Final = struct.Struct("<Q")


def write_magic(file: IO[bytes]) -> None:
    file.write(_MAGIC)


def write_record(file: IO[bytes], record: bytes) -> None:
    file.write(_LENGTH.pack(len(record)))
    file.write(record)


def read_records(path: Path) -> Iterator[tuple[str, bytes] | JournalIndex]:
    """Payloads with their numbers, then the index. Raises UserError for a file that is cut off or other."""
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise UserError(
                f"{path} is not a journal that this version of Atoll reads: continue the run with the "
                "version that wrote it, or start a new run"
            )
        while True:
            record = _read_record(path, file)
            yield record
            if isinstance(record, JournalIndex):
                return


def _read_record(path: Path, file: IO[bytes]) -> tuple[str, bytes] | JournalIndex:
    header = file.read(_LENGTH.size)
    content = file.read(_LENGTH.unpack(header)[0]) if len(header) == _LENGTH.size else b""
    try:
        if content and len(content) == _LENGTH.unpack(header)[0]:
            return codec.decode_journal_record(content)
    except DecodeError:
        pass
    raise UserError(f"{path} is damaged: it ends within a record; continue from an earlier checkpoint")
