"""The service's client side of the receivers in an SGLang server's workers."""

import asyncio
import pickle  # of an empty list, in SGLang's own loopback call: see _call_loaders
import tempfile
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from atoll.config.load import WORKER_SOCKETS
from atoll.rollout.engines.sglang.messages import version_text
from atoll.rollout.engines.sglang.worker import commit_outcome, outcome_path, refit, socket_path
from atoll.runtime.clients.worker import WorkerClient
from atoll.runtime.errors import EngineDiedError, WeightPushError
from atoll.runtime.memory import BYTES
from atoll.wire.types import BOX, PushPart, ReceiverSetup, ShardLayout, Version

Post = Callable[[str, Mapping[str, Any]], Awaitable[object]]  # a call of the server's HTTP; raises unless 200

Boxes = NDArray[np.void]  # of BOX
LOADER = f"{refit.__module__}.{refit.__qualname__}"
READ_BYTES = 16 << 20  # of one tensor at a time, from all ranks


class Workers:
    """All ranks of one server, from its start to its end. What changes weights comes one call at a time."""

    def __init__(self, tp_size: int, version: Version, setup: ReceiverSetup) -> None:
        """`version` names the weights that the server loads."""
        self._version, self._setup = version, setup
        self._folder = tempfile.TemporaryDirectory(prefix="atoll-")  # only this user may enter it
        folder, ranks = Path(self._folder.name), range(tp_size)
        self._outcomes = [outcome_path(folder, rank) for rank in ranks]
        self._clients = [
            WorkerClient(f"unix:{socket_path(folder, rank)}", setup.deadline_s) for rank in ranks
        ]
        self._shard_layouts: tuple[ShardLayout, ...] = ()
        self._dtype = ""
        self._lock = asyncio.Lock()

    @property
    def environment(self) -> dict[str, str]:
        """What the server's process needs."""
        return {WORKER_SOCKETS: self._folder.name}

    @property
    def arguments(self) -> list[str]:
        """What its command line needs."""
        return ["--custom-weight-loader", LOADER]

    async def attach(self, post: Post) -> None:
        """Starts the receivers, once the server answers. Raises UserError for a model, or options of the
        server, whose parameters weights cannot be pushed to."""
        await self._call_loaders(post, None)
        answers = await asyncio.gather(
            *(client.attach(self._version, self._setup) for client in self._clients)
        )
        self._shard_layouts = tuple(shard_layout for shard_layout, _ in answers)
        self._dtype = answers[0][1]

    def shard_layouts(self) -> tuple[ShardLayout, ...]:
        return self._shard_layouts

    async def receive(self, part: PushPart) -> int:
        """Every rank stages what is its own. Returns the bytes copied. Raises WeightPushError."""
        async with self._lock:
            calls = [client.receive(part) for client in self._clients]
            return sum(await asyncio.gather(*calls))

    @asynccontextmanager
    async def prepare(self, version: Version) -> AsyncIterator[None]:
        """Inside, every rank has the staged version ready for `commit`, and keeps it. Raises WeightPushError,
        with every rank as it was, where one has not got it whole."""
        async with self._lock:
            await asyncio.gather(*(client.prepare(version) for client in self._clients))
            yield

    async def commit(self, version: Version, post: Post) -> None:
        """Makes the prepared version live on every rank; the caller has paused generation in place. Raises
        EngineDiedError if the ranks may have parted: the server must be restarted then."""
        try:
            await self._call_loaders(post, version_text(version))
            self._confirm(version)
        except Exception as error:
            raise EngineDiedError(
                f"{version} may be live on only some of the server's {len(self._clients)} ranks: {error}"
            ) from error

    def _confirm(self, version: Version) -> None:
        """Raises WeightPushError if a rank has not written that it has the version live."""
        for rank, path in enumerate(self._outcomes):
            outcome = path.read_text() if path.exists() else "nothing"
            if outcome != commit_outcome(version):
                raise WeightPushError(f"rank {rank} should have committed {version}; it says: {outcome}")

    async def release(self) -> None:
        """Before SGLang releases the parameters."""
        async with self._lock:
            await asyncio.gather(*(client.release() for client in self._clients))

    async def restore(self) -> None:
        """Once SGLang has them again."""
        async with self._lock:
            await asyncio.gather(*(client.restore() for client in self._clients))

    async def rollback(self, version: Version) -> None:
        async with self._lock:
            await asyncio.gather(*(client.rollback(version) for client in self._clients))

    async def checksums(self) -> dict[str, int]:
        """xxh3-64 of each canonical tensor's bytes in the serving dtype, row-major, read from the ranks'
        parameters now. Raises WeightPushError if ranks that hold the same box differ in it."""
        async with self._lock:
            names = dict.fromkeys(
                name for shard_layout in self._shard_layouts for name in shard_layout.tensors
            )
            return {name: await self._checksum(name) for name in names}

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in self._clients))
        self._folder.cleanup()

    async def _call_loaders(self, post: Post, weight_version: str | None) -> None:
        """`refit` runs on every rank's scheduler thread. The call carries no tensors, so nothing of SGLang's
        is pickled but an empty list."""
        await post("/begin_weight_update", {"selector": "target"})  # not a draft model, if there is one
        try:
            await post(
                "/update_weights_from_tensor",
                {
                    "serialized_named_tensors": [b64encode(pickle.dumps([])).decode()] * len(self._clients),
                    "load_format": LOADER,
                    "selector": "target",
                    "flush_cache": False,  # running requests would forbid it; prefixes are keyed by version
                    "weight_version": weight_version,
                },
            )
        finally:
            await post("/end_weight_update", {})

    async def _checksum(self, tensor: str) -> int:
        held = [_boxes_of(shard_layout, tensor) for shard_layout in self._shard_layouts]
        rows, columns = (
            max(int((boxes[at] + boxes[size]).max(initial=0)) for boxes in held)
            for at, size in (("row", "rows"), ("column", "columns"))
        )
        at_once = max(1, READ_BYTES // (columns * BYTES[self._dtype]))
        hasher = xxhash.xxh3_64()
        for first in range(0, rows, at_once):
            end = min(rows, first + at_once)
            cuts = [_cut_rows(boxes, first, end) for boxes in held]
            parts = await asyncio.gather(
                *(
                    client.read(ShardLayout((tensor,), boxes))
                    for client, boxes in zip(self._clients, cuts, strict=True)
                )
            )
            whole = _assemble(tensor, cuts, parts, (end - first, columns), BYTES[self._dtype])
            hasher.update(whole.data)
        return hasher.intdigest()


def _boxes_of(shard_layout: ShardLayout, tensor: str) -> Boxes:
    """The boxes of one tensor, as those of a shard layout of that tensor alone."""
    if tensor not in shard_layout.tensors:
        return np.empty(0, BOX)
    boxes: Boxes = shard_layout.boxes[
        shard_layout.boxes["tensor"] == shard_layout.tensors.index(tensor)
    ].copy()
    boxes["tensor"] = 0
    return boxes


def _cut_rows(boxes: Boxes, first: int, end: int) -> Boxes:
    """What lies in rows [first, end), which become rows [0, end - first)."""
    cut = boxes.copy()
    cut["row"] = np.maximum(boxes["row"], first)
    cut["rows"] = np.minimum(boxes["row"] + boxes["rows"], end) - cut["row"]
    cut["offset"] += (cut["row"] - boxes["row"]) * boxes["stride"]
    cut["row"] -= first
    some: Boxes = cut[cut["rows"] > 0]
    return some


def _assemble(
    tensor: str,
    cuts: Sequence[Boxes],
    parts: Sequence[bytes],
    shape: tuple[int, int],
    item_bytes: int,
) -> NDArray[np.uint8]:
    """uint8 [R, C * item_bytes] out of each rank's boxes. Raises WeightPushError if copies differ."""
    whole = np.zeros((shape[0], shape[1] * item_bytes), np.uint8)
    holder: dict[tuple[int, ...], int] = {}  # by box
    for rank, (boxes, part) in enumerate(zip(cuts, parts, strict=True)):
        offset = 0
        for row, rows, column, columns in boxes[["row", "rows", "column", "columns"]].tolist():
            place = whole[row : row + rows, column * item_bytes : (column + columns) * item_bytes]
            box = np.frombuffer(part, np.uint8, place.size, offset).reshape(place.shape)
            offset += box.size
            key = (row, rows, column, columns)
            if key in holder and not np.array_equal(place, box):
                raise WeightPushError(f"ranks {holder[key]} and {rank} hold different copies of {tensor!r}")
            holder[key] = rank
            place[:] = box
    return whole
