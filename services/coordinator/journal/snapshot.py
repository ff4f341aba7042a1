"""The journal inside a checkpoint, journal.bin: payloads one by one, then the index.

Written and read in parts of some MiB, so that neither the coordinator nor the store ever holds all of it.
"""

import asyncio
import struct
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import IO, Final

from google.protobuf.message import DecodeError

from atoll.coordinator.journal import scripts
from atoll.runtime.errors import DamagedCheckpointError, UserError
from atoll.runtime.store import Store
from atoll.wire.codec.journal import decode_journal_record, encode_journal_index, encode_journal_payload
from atoll.wire.types import JournalIndex

PART: Final = 1000  # samples or payloads named in one call
PART_BYTES: Final = 4 << 20  # of payloads in one call

_MAGIC: Final = b"atoll journal 2\n"
_LENGTH: Final = struct.Struct("<Q")


Payload = tuple[str, bytes | None]  # number, content: None if it was released in the meantime


class JournalSnapshot:
    """The journal at one moment; its payloads are read while it is written."""

    def __init__(self, store: Store, index: JournalIndex) -> None:
        self._store = store
        self._index = index

    async def write(self, path: Path) -> None:
        """The file that `Journal.restore` reads, on disk. A sample whose payload was released in the
        meantime is one to be generated again."""
        index, gone = self._index, set()
        with path.open("wb") as file:
            file.write(_MAGIC)
            async for part in payloads_of(self._store, await asyncio.to_thread(_numbers, index)):
                gone |= await asyncio.to_thread(_write_payloads, file, part)
            if gone:
                index = await asyncio.to_thread(_without, index, gone)
            await asyncio.to_thread(_write_record, file, encode_journal_index(index))


async def payloads_of(store: Store, numbers: Sequence[str]) -> AsyncIterator[list[Payload]]:
    """Payloads by number, some MiB at a time."""
    done = 0
    while done < len(numbers):
        part = numbers[done : done + PART]
        answers = await store.write(scripts.PAYLOADS, scripts.TABLES, " ".join(part), PART_BYTES)
        yield list(zip(part, answers, strict=False))
        done += len(answers)


def _write_payloads(file: IO[bytes], part: Iterable[Payload]) -> set[str]:
    """Returns those that have gone."""
    gone = set()
    for number, payload in part:
        if payload is None:
            gone.add(number)
        else:
            _write_record(file, encode_journal_payload(number, payload))
    return gone


def _write_record(file: IO[bytes], record: bytes) -> None:
    file.write(_LENGTH.pack(len(record)))
    file.write(record)


def _read_records(path: Path) -> Iterator[tuple[str, bytes] | JournalIndex]:
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
    if content and len(content) == _LENGTH.unpack(header)[0]:
        with suppress(DecodeError):
            return decode_journal_record(content)
    raise DamagedCheckpointError(f"{path} is damaged: it ends within a record")


def read_parts(path: Path) -> Iterator[list[str | bytes] | JournalIndex]:
    """Payloads as number, content, number, ..., some MiB in one part; the index at the end.

    Raises DamagedCheckpointError for a file that is cut off, UserError for something else.
    """
    part: list[str | bytes] = []
    size = 0
    for record in _read_records(path):
        if isinstance(record, JournalIndex):
            yield part
            yield record
            return
        part += record
        size += len(record[1])
        if size >= PART_BYTES:
            yield part
            part, size = [], 0


def _numbers(index: JournalIndex) -> list[str]:
    """The payloads that an index needs."""
    return list(dict.fromkeys(entry.split()[1] for _, entry in entries_of(index.finished, 5)))


def _without(index: JournalIndex, gone: set[str]) -> JournalIndex:
    """Samples whose payload has gone are to be generated again, as the next attempt."""
    issued, finished = [index.issued.decode()], []
    for name, entry in entries_of(index.finished, 5):
        number, payload, last, _ = entry.split()
        if payload in gone:
            issued.append(f"{name} {number} {int(last) + 1} {int(last) + 1}")
        else:
            finished.append(f"{name} {entry}")
    return replace(index, issued=" ".join(issued).encode(), finished=" ".join(finished).encode())


def entries_of(table: bytes, width: int) -> Iterator[tuple[str, str]]:
    """Sample and entry of an index's table, whose lines have `width` words."""
    words = iter(table.decode().split())
    while line := tuple(islice(words, width)):
        yield line[0], " ".join(line[1:])
