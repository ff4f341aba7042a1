"""Publisher and Refit in one process: what arrives, what is refused, what is not sent again."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import xxhash

from atoll.rollout.refit import Refit
from atoll.runtime.errors import WeightPushError
from atoll.trainer import publish
from atoll.trainer.publish import OpenSender, Publisher
from atoll.weights.boxes import tensor_checksums
from atoll.weights.plan import plan
from atoll.weights.transport import shm
from atoll.weights.transport.base import Receiver
from atoll.wire.types import Membership, PublishedPart, PublishRequest, PushPart, StreamManifest, Version
from tests.unit.weight_layouts import Shard, random_model, shard_layouts, shards

V0, V1, V2, V3 = (Version("a3f0", number) for number in range(4))
ALONE = Membership(0, 1)


class Fleet:
    """Trainer ranks and the target ranks per replica class."""

    def __init__(
        self,
        sources: list[Shard],
        targets: list[Shard],
        dtype: str = "float32",
        part_elements: int = 4096,
        *,
        open_sender: Callable[[int], OpenSender] = lambda rank: shm.ShmSender,
        open_receiver: Callable[[int], Receiver] = lambda rank: shm.ShmReceiver(),
    ) -> None:
        self._open_receiver = open_receiver
        self.sources, self.targets, self.dtype = sources, targets, dtype
        self.plan = plan(shard_layouts(sources), shard_layouts(targets), part_elements=part_elements)
        self.publishers = [
            Publisher(rank, shard.buffers, open_sender(rank), stays_readable=True)
            for rank, shard in enumerate(sources)
        ]
        self.replica = self.join()

    def join(self) -> list[Refit]:
        buffers = [[torch.zeros_like(b) for b in shard.buffers] for shard in self.targets]
        return [Refit(flat, V0, self._open_receiver(rank), rank) for rank, flat in enumerate(buffers)]

    def train(self, seed: int) -> dict[str, torch.Tensor]:
        model = random_model(seed)
        for shard in self.sources:
            shard.fill(model)
        return model

    def publish(self, version: Version) -> list[PublishedPart]:
        parts: list[PublishedPart] = []
        while not parts or not parts[-1].last:
            each = [
                p.publish(PublishRequest(version, self.dtype, {self.plan.id: ALONE}, [self.plan], len(parts)))
                for p in self.publishers
            ]
            parts.append(publish.merge_published(each))
        return parts

    def receive(self, version: Version, parts: list[PublishedPart], replica: list[Refit]) -> int:
        return sum(
            refit.receive(PushPart(version, part.streams, self.plan, ALONE))
            for part in parts
            for refit in replica
        )

    def push(self, version: Version) -> list[PublishedPart]:
        parts = self.publish(version)
        self.receive(version, parts, self.replica)
        for refit in self.replica:
            refit.commit(version)
        return parts

    def live(self, replica: list[Refit]) -> dict[str, torch.Tensor]:
        model = {name: torch.full_like(tensor, torch.nan) for name, tensor in random_model(0).items()}
        for refit, shard in zip(replica, self.targets, strict=True):
            Shard(shard.shard_layout, refit.commit(refit.version)).read_into(model)
        return model


def streams_of(parts: list[PublishedPart]) -> list[StreamManifest]:
    """By trainer rank."""
    return sorted((stream for part in parts for stream in part.streams), key=lambda stream: stream.source)


def assert_equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("target", [1, 2])
@pytest.mark.parametrize("source", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_layouts(source, target, dtype):
    serving = publish.DTYPES[dtype]
    fleet = Fleet(shards(*source), shards(target, dtype=serving, gap=3), dtype)
    for seed, version in enumerate((V1, V2, V3)):
        model = fleet.train(seed)
        fleet.push(version)
        assert_equal(fleet.live(fleet.replica), {name: t.to(serving).float() for name, t in model.items()})


def test_generation_sees_the_old_weights_until_commit():
    fleet = Fleet(shards(2), shards(1))
    old = fleet.train(1)
    fleet.push(V1)
    new = fleet.train(2)
    fleet.receive(V2, fleet.publish(V2), fleet.replica)
    assert_equal(fleet.live(fleet.replica), old)
    fleet.replica[0].commit(V2)
    assert_equal(fleet.live(fleet.replica), new)
    assert fleet.replica[0].version == V2


def test_a_slow_replica_still_reads_the_version_before():
    """The segment has two halves: the next version does not overwrite the last."""
    fleet = Fleet(shards(2), shards(1))
    model = fleet.train(1)
    parts = fleet.publish(V1)
    fleet.train(2)
    fleet.publish(V2)
    fleet.receive(V1, parts, fleet.replica)
    fleet.replica[0].commit(V1)
    assert_equal(fleet.live(fleet.replica), model)


def test_buffers_may_be_views():
    """Of one large allocation, as Megatron's parameter buffers are."""
    fleet = Fleet(shards(1), shards(1))
    model = fleet.train(1)
    large = torch.zeros(10_000)
    views = [
        large[7 : 7 + fleet.sources[0].buffers[0].numel()],
        large[5000 : 5000 + fleet.sources[0].buffers[1].numel()],
    ]
    for view, buffer in zip(views, fleet.sources[0].buffers, strict=True):
        view.copy_(buffer)
    fleet.publishers = [Publisher(0, views, shm.ShmSender, stays_readable=True)]
    fleet.push(V1)
    assert_equal(fleet.live(fleet.replica), model)


def test_parts():
    """A version in rounds of 128 elements at most: the same bytes, each sent once."""
    fleet = Fleet(shards(2), shards(1), part_elements=128)
    model = fleet.train(1)
    parts = fleet.push(V1)
    assert len(parts) > 2
    assert sum(part.num_bytes for part in parts) == 4 * sum(tensor.numel() for tensor in model.values())
    assert_equal(fleet.live(fleet.replica), model)


def test_repeated_call_answers_from_the_record():
    fleet = Fleet(shards(1), shards(1))
    fleet.train(1)
    first = fleet.publish(V1)[0]
    fleet.train(2)  # the trainer has moved on; version 1 is what it was
    again = fleet.publish(V1)[0]
    assert again.num_bytes == 0
    assert again.streams[0].checksum == first.streams[0].checksum


def test_unchanged_bytes_are_neither_written_nor_copied():
    fleet = Fleet(shards(2, 2), shards(1))
    model = fleet.train(1)
    before = fleet.push(V1)
    segment = shm.attach(before[0].streams[0].location)
    bytes_before = segment.clone()
    parts = fleet.publish(V2)
    assert sum(part.num_bytes for part in parts) == 0
    assert fleet.receive(V2, parts, fleet.replica) == 0
    torch.testing.assert_close(segment, bytes_before, rtol=0, atol=0)
    fleet.replica[0].commit(V2)
    assert fleet.replica[0].version == V2
    assert_equal(fleet.live(fleet.replica), model)


def test_parts_that_did_not_change_are_not_copied_again():
    """Also if the version before last was the last to change them: the staging side then has older bytes."""
    fleet = Fleet(shards(1), shards(1), part_elements=128)
    fleet.train(1)
    fleet.push(V1)
    model = fleet.train(2)
    fleet.push(V2)
    model["norm"][3, 0] += 1
    fleet.sources[0].fill(model)
    norm = fleet.plan.tensors.index("norm")
    [part] = {int(t["round"]) for t in fleet.plan.transfers if t["tensor"] == norm}
    run = fleet.plan.transfers[fleet.plan.transfers["round"] == part]
    num_bytes = 4 * int((run["rows"] * run["columns"]).sum())
    assert num_bytes < 4 * 128 + 1
    assert fleet.receive(V3, fleet.publish(V3), fleet.replica) == num_bytes
    fleet.replica[0].commit(V3)
    assert_equal(fleet.live(fleet.replica), model)


def test_late_joiner_reads_what_is_there():
    fleet = Fleet(shards(2), shards(1))
    fleet.train(1)
    fleet.push(V1)
    model = fleet.train(2)
    parts = fleet.push(V2)
    fleet.train(3)  # the trainer trains on, and publishes nothing
    late = fleet.join()
    fleet.receive(V2, parts, late)
    late[0].commit(V2)
    assert_equal(fleet.live(late), model)


def test_corrupted_byte_is_named_and_never_committed():
    fleet = Fleet(shards(2), shards(1))
    model = fleet.train(1)
    fleet.push(V1)
    fleet.train(2)
    parts = fleet.publish(V2)
    down = next(
        t for t in fleet.plan.transfers if fleet.plan.tensors[t["tensor"]] == "down" and t["source"] == 1
    )
    stream = next(stream for part in parts for stream in part.streams if stream.source == 1)
    segment = shm.attach(stream.location)
    segment[stream.offset + 4 * int(down["stream"]) + 2] ^= 1
    with pytest.raises(
        WeightPushError, match=r"part 1 of trainer rank 1, from 'embed' to 'norm': got checksum 0x"
    ):
        fleet.receive(V2, parts, fleet.replica)
    with pytest.raises(WeightPushError, match="nothing is staged"):
        fleet.replica[0].commit(V2)
    assert fleet.replica[0].version == V1
    assert_equal(fleet.live(fleet.replica), model)

    segment[stream.offset + 4 * int(down["stream"]) + 2] ^= 1  # mended: the same version goes through
    fleet.receive(V2, parts, fleet.replica)
    fleet.replica[0].commit(V2)
    assert fleet.replica[0].version == V2


def test_order_of_calls():
    fleet = Fleet(shards(2), shards(1))
    refit = fleet.replica[0]
    fleet.train(1)
    streams = streams_of(fleet.publish(V1))
    with pytest.raises(WeightPushError, match="never sent: send the plan"):
        refit.receive(PushPart(V1, streams, None, ALONE))
    with pytest.raises(WeightPushError, match="commit of a3f0:1, but nothing is staged"):
        refit.commit(V1)
    refit.receive(PushPart(V1, streams[:1], fleet.plan, ALONE))
    expected = "1 of 2 parts have not arrived; the first is part 1 of trainer rank 1, from 'embed' to 'norm'"
    with pytest.raises(WeightPushError, match=expected):
        refit.commit(V1)
    refit.receive(PushPart(V1, streams[1:], None, ALONE))
    with pytest.raises(WeightPushError, match="commit of a3f0:2, but a3f0:1 is staged"):
        refit.commit(V2)
    refit.rollback(V2)  # another version: nothing to forget
    refit.rollback(V1)
    with pytest.raises(WeightPushError, match="nothing is staged"):
        refit.commit(V1)
    refit.receive(PushPart(V1, streams, None, ALONE))
    refit.commit(V1)
    refit.commit(V1)  # repeated: nothing
    assert refit.receive(PushPart(V1, streams, None, ALONE)) == 0
    fleet.push(V2)
    with pytest.raises(WeightPushError, match="got a3f0:1, but a3f0:2 is live"):
        refit.receive(PushPart(V1, streams, None, ALONE))
    restored = Version("b111", 1)
    refit.receive(PushPart(restored, streams_of(fleet.publish(restored)), None, ALONE))
    refit.commit(restored)


def test_unknown_plan_is_refused_by_the_trainer():
    fleet = Fleet(shards(1), shards(1))
    with pytest.raises(WeightPushError, match="trainer rank 0 has no plan feed"):
        fleet.publishers[0].publish(PublishRequest(V1, "float32", {"feed": ALONE}, [], 0))


def test_parts_are_asked_for_in_order():
    fleet = Fleet(shards(1), shards(1), part_elements=128)
    fleet.train(1)
    with pytest.raises(WeightPushError, match="part 1 of a3f0:1 is requested after part -1 of None"):
        fleet.publishers[0].publish(PublishRequest(V1, "float32", {fleet.plan.id: ALONE}, [fleet.plan], 1))
    fleet.push(V1)
    fleet.train(2)
    fleet.publishers[0].publish(PublishRequest(V2, "float32", {fleet.plan.id: ALONE}, [], 0))
    with pytest.raises(WeightPushError, match="part 2 of a3f0:2 is requested after part 0 of a3f0:2"):
        fleet.publishers[0].publish(PublishRequest(V2, "float32", {fleet.plan.id: ALONE}, [], 2))


def test_writer_is_gone():
    fleet = Fleet(shards(1), shards(1))
    fleet.train(1)
    stream = fleet.publish(V1)[0].streams[0]
    gone = replace(stream, location="/proc/1/fd/99999")
    with pytest.raises(WeightPushError, match="cannot map the weights of trainer rank 0"):
        fleet.replica[0].receive(PushPart(V1, [gone], fleet.plan, ALONE))


@pytest.mark.long
def test_killed_writer_leaves_nothing():
    script = (
        "from atoll.weights.transport.shm import SharedSegment\n"
        "segment = SharedSegment(1 << 20)\n"
        "segment.memory.fill_(7)\n"
        "print(segment.location, flush=True)\n"
        "input()\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        location = writer.stdout.readline().strip()
        memory = shm.attach(location)
        writer.kill()
    assert memory.shape == (1 << 20,)
    assert memory.unique().tolist() == [7]  # who has it mapped can go on reading
    with pytest.raises(OSError, match="No such file"):
        shm.attach(location)
    assert not [name for name in os.listdir("/dev/shm") if "atoll" in name]


def test_tensor_checksums():
    """Of whole tensors, by name, however they are laid out; in the serving dtype."""
    model = random_model(5)
    whole = shards(1, gap=2)[0]
    whole.fill(model)
    expected = {n: xxhash.xxh3_64_intdigest(t.bfloat16().view(torch.int16).numpy()) for n, t in model.items()}
    assert tensor_checksums(whole.shard_layout, whole.buffers, torch.bfloat16) == expected
