"""Weights pushed from a trainer fleet to rollout processes over gRPC stay equal and complete, whichever
process dies."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from atoll.config.schema import ParallelConfig
from atoll.runtime.errors import ServiceUnavailableError
from atoll.weights.transport import shm
from atoll.wire.types import (
    PushPart,
    ServiceEntry,
)
from tests.trainer_fleet import Fleet, fleet, update
from tests.weight_pushes import (
    LOCAL,
    Rollouts,
    Run,
    assert_hold,
    check_kill,
    check_layout,
    connected,
    push,
    rollouts,
    tensor_sums,
)

Two = Callable[[Path], Sequence[ServiceEntry]]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    """Two replicas of a model; all trainer layouts push to them."""
    with ExitStack() as running:

        @cache
        def start(model: Path) -> Sequence[ServiceEntry]:
            services = running.enter_context(rollouts(tmp_path_factory.mktemp("rollouts"), model))
            return services.start({"rollout-0": LOCAL, "rollout-1": LOCAL})

        yield start


@pytest.mark.long
@pytest.mark.parametrize(
    ("fixture", "layout", "finish_running"),
    [
        ("tiny_qwen3", ParallelConfig(), False),
        ("tiny_qwen3", ParallelConfig(pipeline=2), True),
        ("tiny_qwen3", ParallelConfig(data=2), False),
        ("tiny_qwen3", ParallelConfig(tensor=2, sequence=True, pipeline=2), False),
        ("tiny_qwen2_tied", ParallelConfig(pipeline=2), False),
        ("tiny_qwen3_moe", ParallelConfig(expert=2, data=2), False),
    ],
)
def test_layouts(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    two: Two,
    fixture: str,
    layout: ParallelConfig,
    finish_running: bool,
) -> None:
    model = request.getfixturevalue(fixture)
    with fleet(tmp_path, model, layout) as running:
        asyncio.run(check_layout(running, two(model), model, tmp_path, layout, finish_running=finish_running))


def test_push(tmp_path: Path, tiny_qwen3: Path) -> None:
    layout = ParallelConfig(tensor=2)
    with fleet(tmp_path, tiny_qwen3, layout) as running, rollouts(tmp_path, tiny_qwen3) as services:
        entries = services.start({"rollout-0": LOCAL, "rollout-1": LOCAL})
        asyncio.run(check_layout(running, entries, tiny_qwen3, tmp_path, layout))
        asyncio.run(check_deaths(running, services, entries, tiny_qwen3, tmp_path))


@pytest.mark.long
def test_push_over_tcp(tmp_path: Path, tiny_qwen3: Path) -> None:
    layout, weights = ParallelConfig(tensor=2), {"transport": "tcp", "deadline_s": 5.0}
    with (
        fleet(tmp_path, tiny_qwen3, layout, weights=weights) as running,
        rollouts(tmp_path, tiny_qwen3, **weights) as services,
    ):
        entries = services.start({"rollout-0": LOCAL, "rollout-1": LOCAL})
        asyncio.run(check_layout(running, entries, tiny_qwen3, tmp_path, layout, **weights))
        asyncio.run(check_epochs(running, services, entries, tiny_qwen3, tmp_path, weights))


async def check_deaths(
    running: Fleet, services: Rollouts, entries: Sequence[ServiceEntry], model: Path, folder: Path
) -> None:
    async with connected(running, entries, model, finish_running=False) as run:
        first = run.members[0]
        await push(run, 1)
        await check_corruption(run, folder)

        await check_kill(run, services, folder / "3", 3)
        assert [replica.entry.name for replica in run.replicas] == ["rollout-0"]

        # one that joins gets it from what the trainer has written
        await update(run.trainer, 4)
        [entry] = services.start({"rollout-2": LOCAL})
        late = await run.join(entry)
        await assert_hold([first, late], folder / "3", run.version(3))

        # the trainer dies: the replicas keep what they hold
        for rank in running.ranks:
            rank.kill()
        with pytest.raises(ServiceUnavailableError):
            await run.sync.push(run.version(4))
        assert await late.client.checksums() == (run.version(3), tensor_sums(folder / "3"))
        await late.client.close()


async def check_epochs(
    running: Fleet,
    services: Rollouts,
    entries: Sequence[ServiceEntry],
    model: Path,
    folder: Path,
    weights: dict[str, object],
) -> None:
    """For transports whose two ends enter each part together."""
    async with connected(running, entries, model, finish_running=False, **weights) as run:
        first, _ = run.members
        await push(run, 1)
        await check_kill(run, services, folder / "3", 3)

        # one that joins is a member of the next push
        [entry] = services.start({"rollout-1": LOCAL})
        late = await run.join(entry)
        assert run.replicas.waiting == {late}
        await update(run.trainer, 4)
        await run.trainer.export_hf(folder / "4")
        assert (await run.sync.push(run.version(4))).num_replicas == 2
        await assert_hold([first, late], folder / "4", run.version(4))
        await late.client.close()


async def check_corruption(run: Run, folder: Path) -> None:
    """One replica finds a flipped byte in the trainer's memory: it keeps its version, and catches up."""
    first, second = run.members
    before = await second.client.checksums()
    first_is_done = asyncio.Event()
    receive = {replica: replica.client.receive_weights for replica in run.members}

    async def receive_well(*arguments: object) -> int:
        first_is_done.clear()
        num_bytes = await receive[first](*arguments)
        first_is_done.set()
        return num_bytes

    async def receive_corrupted(part: PushPart) -> int:
        await first_is_done.wait()
        stream = part.streams[0]
        byte = shm.attach(stream.location)[stream.offset + stream.num_bytes // 2 :][:1]
        byte ^= 1
        try:
            return await receive[second](part)
        finally:
            byte ^= 1

    first.client.receive_weights, second.client.receive_weights = receive_well, receive_corrupted
    await update(run.trainer, 2)
    report = await run.sync.push(run.version(2))
    first.client.receive_weights, second.client.receive_weights = receive[first], receive[second]
    assert report.failed.keys() == {"rollout-1"}
    assert "got checksum" in report.failed["rollout-1"]
    assert "nothing was committed" in report.failed["rollout-1"]
    assert await second.client.checksums() == before
    assert list(run.replicas) == [first]
    await run.trainer.export_hf(folder / "2")
    await run.sync.catch_up(second)  # as happens once it generates
    assert list(run.replicas) == [first, second]
    await assert_hold(run.members, folder / "2", run.version(2))
