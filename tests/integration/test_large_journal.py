"""A journal of 4 GB is saved, restored and rebuilt in parts: heartbeats do not wait, memory stays small."""

import asyncio
import hashlib
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from atoll.coordinator.fleet.registry import Registry
from atoll.coordinator.journal.journal import Checkpoint, Journal
from atoll.coordinator.journal.ledger import LEDGER, Ledger
from atoll.coordinator.journal.snapshot import payloads_of
from atoll.runtime.store import Store, run_embedded_server
from atoll.wire.types import SampleId, ServiceEntry, Version
from tests.builders import arrival, group_id, node, sample

NUM_GROUPS = 40_000
NUM_TRAINED = 2_000  # more, which a checkpoint does not need
GROUP_SIZE = 8
NUM_BYTES = 104_000  # of a group: samples of 1,000 tokens
BEAT_S = 0.05


class Watch:
    """Heartbeats beside the journal's work: the longest one, and the most memory that this process had."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._start = self._process.memory_info().rss
        self.peak_mb = 0.0
        self.longest_s = 0.0

    @asynccontextmanager
    async def over(self, store: Store) -> AsyncIterator[None]:
        registry = Registry(store.new_connection(), lease_s=60)
        entry = ServiceEntry("rollout", "rollout-0", "1", "127.0.0.1:1")
        await registry.register(entry)
        beating = asyncio.create_task(self._beat(registry, entry))
        begun = time.monotonic()
        yield
        beating.cancel()
        print(
            f"{time.monotonic() - begun:.1f} s, longest heartbeat so far {self.longest_s:.3f} s, "
            f"peak so far {self.peak_mb:.0f} MiB"
        )

    async def _beat(self, registry: Registry, entry: ServiceEntry) -> None:
        while True:
            due = time.monotonic() + BEAT_S
            await asyncio.sleep(BEAT_S)
            await registry.renew(entry)
            self.longest_s = max(self.longest_s, time.monotonic() - due)
            self.peak_mb = max(self.peak_mb, (self._process.memory_info().rss - self._start) / 2**20)


def members(prompt: int) -> list[SampleId]:
    return [SampleId(group_id(prompt), index) for index in range(GROUP_SIZE)]


async def fill(journal: Journal, version: Version) -> None:
    """Random bytes for payloads, but those of the first group, which can be read."""
    for prompt in range(NUM_GROUPS + NUM_TRAINED):
        ids = members(prompt)
        samples = [sample(id, node([1, 2, 3], versions=version)) for id in ids]
        await journal.issue(ids, f'{{"drawn": [{prompt + 1}]}}')
        await journal.finish(samples, arrival(*samples).payload if prompt == 0 else os.urandom(NUM_BYTES))
    await journal.consume(
        1, [id for prompt in range(NUM_GROUPS, NUM_GROUPS + NUM_TRAINED) for id in members(prompt)]
    )


async def contents(store: Store) -> tuple[dict[str, str], dict[str, int]]:
    """A digest of every payload, and the length of each table."""
    numbers = [number.decode() for number in await store.read("HKEYS", "journal/payloads")]
    digests = {}
    async for part in payloads_of(store, numbers):
        for number, payload in part:
            assert payload is not None
            digests[number] = hashlib.blake2b(payload, digest_size=8).hexdigest()
    lengths = {name: await store.read("HLEN", f"journal/{name}") for name in ("issued", "finished", "refs")}
    return digests, lengths


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:  # pytest would keep 13 GB of the last three runs
        yield Path(name)


@pytest.mark.long
async def test_a_journal_of_4_gb_is_saved_restored_and_rebuilt(folder: Path) -> None:
    watch, path = Watch(), folder / "journal.bin"
    with run_embedded_server(folder / "first") as server:
        store = Store(server.url, "toy")
        await store.take_epoch()
        journal = Journal(store, "toy", Ledger(folder / LEDGER), max_bytes=4_000_000_000)
        version = Version((await journal.restore(None)).lineage, 0)
        await fill(journal, version)
        assert journal.full
        async with watch.over(store):  # a checkpoint
            await (await journal.snapshot(1)).write(path)
            await journal.commit(1)
        assert path.stat().st_size > 4_000_000_000
        checkpoint = Checkpoint(1, version, path)
        async with watch.over(store):  # a restart on the store's own tables
            kept = await journal.restore(checkpoint)
        before = await contents(store)
        await store.close()
    with run_embedded_server(folder / "second") as server:
        store = Store(server.url, "toy")
        await store.take_epoch()
        journal = Journal(store, "toy", Ledger(folder / LEDGER))
        async with watch.over(store):  # a restart with an empty store
            rebuilt = await journal.restore(checkpoint)
        after = await contents(store)
        (first,) = await journal.load(rebuilt.groups[:1])
        await store.close()
    assert after == before
    assert after[1] == {"issued": 0, "finished": NUM_GROUPS * GROUP_SIZE, "refs": NUM_GROUPS}
    assert rebuilt.groups == kept.groups
    assert [group.id.prompt for group in rebuilt.groups] == list(range(NUM_GROUPS))
    assert rebuilt.cursor == kept.cursor
    assert all(each is not None and each.nodes[0].token_ids.tolist() == [1, 2, 3] for each in first.samples)
    assert watch.longest_s < 5  # 1 on a machine that does nothing else
    assert watch.peak_mb < 512
