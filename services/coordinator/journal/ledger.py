"""runs/NAME/ledger.jsonl: the journal's events, one per line, append-only.

    {"event": "branch", "lineage": "9b1c", "parent": "77aa", "step": 6, "fork": 6, "continues": "77aa",
     "pending": "0/17/0-7 0/18/0-7", "cursor": {...}}
    {"event": "issue", "lineage": "9b1c", "samples": "0/19/0-7", "cursor": {...}}
    {"event": "drop", "lineage": "9b1c", "samples": "0/18/0-7", "reason": "filtered", "step": null}
    {"event": "consume", "lineage": "9b1c", "samples": "0/17/0-7", "step": 7}
    {"event": "commit", "lineage": "9b1c", "step": 7}

"0/17/0-7": samples 0 to 7 of prompt 17 in epoch 0. A drop is written before the store hears of it, all
else after it, so that a crash in between never hides where a sample went: the branch of the next start
names all samples that are pending then, and the cursor behind which none of them was drawn.
`atoll audit` reads it (services/cli/audit.py).
"""

import json
import os
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import IO, Final

from atoll.runtime.errors import AtollError
from atoll.wire.types import SampleId, Version

LEDGER: Final = "ledger.jsonl"


class Ledger:
    """One line and one write for each event, so that a reader never sees two of them mixed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lineage = ""
        self._file: IO[bytes] | None = None  # once there is something to write

    def branch(
        self,
        lineage: str,
        parent: Version | None,
        step: int,
        *,
        continues: str | None,
        cursor: str | None,
        pending: Iterable[str],
    ) -> None:
        """Opens `lineage`, which continues from `step` and `parent` (None: from scratch). `continues`: the
        lineage whose tables in the store it took over; None: they were rebuilt. `pending`: groups' spans."""
        self._lineage = lineage
        self._end_line()
        self._append(
            "branch",
            parent=parent.lineage if parent else None,
            step=step,
            fork=parent.number if parent else 0,
            continues=continues,
            pending=" ".join(pending),
            cursor=cursor,
        )
        os.fsync(self._opened().fileno())

    def issue(self, samples: Sequence[SampleId], cursor: str) -> None:
        self._append("issue", samples=spans(samples), cursor=cursor)

    def drop(self, samples: Sequence[SampleId], reason: str, step: int | None) -> None:
        self._append("drop", samples=spans(samples), reason=reason, step=step)

    def consume(self, step: int, samples: Sequence[SampleId]) -> None:
        self._append("consume", samples=spans(samples), step=step)

    def commit(self, step: int) -> None:
        """What a checkpoint on disk builds on is on disk, too."""
        self._append("commit", step=step)
        os.fsync(self._opened().fileno())

    def _append(self, event: str, *, cursor: str | None = "", **fields: object) -> None:
        """`cursor` is JSON already; None: nothing is drawn; "": the event has none."""
        line = json.dumps({"event": event, "lineage": self._lineage, **fields})
        if cursor != "":
            line = f'{line[:-1]}, "cursor": {cursor or "null"}}}'
        try:
            taken = self._opened().write(f"{line}\n".encode())
        except OSError as error:
            raise AtollError(
                f"{self._path} cannot be written: {error}; fix the cause, then continue with --resume"
            ) from error
        if taken <= len(line):
            raise AtollError(f"{self._path}: the disk is full; make room, then continue with --resume")

    def _opened(self) -> IO[bytes]:
        if self._file is None:
            self._file = self._path.open("a+b", buffering=0)
        return self._file

    def _end_line(self) -> None:
        """A writer may have been killed, or the disk full, within a line."""
        file = self._opened()
        size = file.seek(0, os.SEEK_END)
        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            file.write(b"\n")


def spans(samples: Sequence[SampleId]) -> str:
    """In the order given, neighbours of one group as one: "0/17/0-7 0/18/0-7"."""
    words = []
    for group, members in groupby(samples, key=attrgetter("group")):
        indices = [id.index for id in members]
        first, last = indices[0], indices[-1]
        if indices == list(range(first, last + 1)):
            words.append(f"{group.epoch}/{group.prompt}/{first}-{last}")
        else:
            words += [f"{group.epoch}/{group.prompt}/{index}-{index}" for index in indices]
    return " ".join(words)
