"""Publisher and Refit over a collective transport (tcp): rounds, epochs, deltas, several trainer ranks and
several replicas of several ranks."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count

import pytest
import torch

from atoll.rollout.refit import Refit
from atoll.runtime.errors import WeightPushError
from atoll.trainer.publish import DTYPES, Publisher, merge_published
from atoll.weights.plan import plan
from atoll.weights.transport.base import open_receiver, open_sender
from atoll.wire.types import Membership, PublishedPart, PublishRequest, PushPart, Version
from tests.unit.weight_layouts import Shard, random_model, shard_layouts, shards

V0, V1, V2, V3 = (Version("a3f0", number) for number in range(4))
DEADLINE_S = 20.0
OPEN = partial(open_sender, "tcp", DEADLINE_S, "127.0.0.1")

Model = dict[str, torch.Tensor]


class Replica:
    def __init__(self, targets: Sequence[Shard]) -> None:
        self._targets = targets
        buffers = [[torch.zeros_like(b) for b in shard.buffers] for shard in targets]
        self.receivers = [open_receiver("tcp", DEADLINE_S) for _ in targets]
        self.ranks = [
            Refit(flat, V0, receiver, rank)
            for rank, (flat, receiver) in enumerate(zip(buffers, self.receivers, strict=True))
        ]

    def commit(self, version: Version) -> Model:
        model = {name: torch.full_like(tensor, torch.nan) for name, tensor in random_model(0).items()}
        for refit, shard in zip(self.ranks, self._targets, strict=True):
            Shard(shard.shard_layout, refit.commit(version)).read_into(model)
        return model


class Fleet:
    """The coordinator's part of a push in which no replica fails."""

    def __init__(
        self, sources: list[Shard], targets: list[Shard], dtype: str, *, delta: bool = False
    ) -> None:
        self.sources, self.dtype = sources, dtype
        self.plan = plan(shard_layouts(sources), shard_layouts(targets), part_elements=256)
        self.publishers = [
            Publisher(r, s.buffers, OPEN, delta=delta, stays_readable=False) for r, s in enumerate(sources)
        ]
        self._targets = targets
        self._replicas: list[Replica] = []
        self._threads = ThreadPoolExecutor(16)

    def join(self) -> Replica:
        self._replicas.append(Replica(self._targets))
        return self._replicas[-1]

    def train(self, model: Model) -> Model:
        """Returns what replicas should then hold."""
        for shard in self.sources:
            shard.fill(model)
        return {name: tensor.to(DTYPES[self.dtype]).float() for name, tensor in model.items()}

    def publish(self, version: Version, epoch: int, part: int, num_members: int) -> PublishedPart:
        members = {self.plan.id: Membership(epoch, num_members)}
        return merge_published(
            [
                p.publish(PublishRequest(version, self.dtype, members, [self.plan], part))
                for p in self.publishers
            ]
        )

    def receive(
        self, version: Version, epoch: int, published: PublishedPart, replicas: Sequence[Replica]
    ) -> None:
        calls = [
            self._threads.submit(
                refit.receive,
                PushPart(version, published.streams, self.plan, Membership(epoch, len(replicas), member)),
            )
            for member, replica in enumerate(replicas)
            for refit in replica.ranks
        ]
        for call in calls:
            call.result()

    def push(self, version: Version, epoch: int, replicas: Sequence[Replica]) -> int:
        """Returns the number of bytes transferred."""
        num_bytes = 0
        for part in count():
            published = self.publish(version, epoch, part, len(replicas))
            self.receive(version, epoch, published, replicas)
            num_bytes += published.num_bytes
            if published.last:
                return num_bytes
        raise AssertionError

    def close(self) -> None:
        for publisher in self.publishers:
            publisher.close()
        for replica in self._replicas:
            for receiver in replica.receivers:
                receiver.close()
        self._threads.shutdown()


MakeFleet = Callable[..., Fleet]


@pytest.fixture
def make_fleet() -> Iterator[MakeFleet]:
    fleets = []

    def make(
        source: tuple[int, int] = (2, 1), target: int = 1, dtype: str = "float32", **kwargs: bool
    ) -> Fleet:
        fleets.append(Fleet(shards(*source), shards(target, dtype=DTYPES[dtype], gap=3), dtype, **kwargs))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.close()


def assert_equal(got: Model, expected: Model) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=0, msg=name)


def model_bytes(dtype: str, num_targets: int = 1) -> int:
    """Bytes held by a replica's ranks: each has all of "norm", and its part of the split tensors."""
    model = random_model(0)
    num_elements = sum(t.numel() for t in model.values()) + (num_targets - 1) * model["norm"].numel()
    return DTYPES[dtype].itemsize * num_elements


@pytest.mark.parametrize(("target", "dtype"), [(1, "float32"), (2, "bfloat16")])
@pytest.mark.parametrize("source", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_layouts(make_fleet, source, target, dtype):
    fleet = make_fleet(source, target, dtype)
    replicas = [fleet.join(), fleet.join()]
    for seed, version in enumerate((V1, V2)):  # the second over the communicators of the first
        expected = fleet.train(random_model(seed))
        assert fleet.push(version, 1, replicas) == model_bytes(dtype, target)
        for replica in replicas:
            assert_equal(replica.commit(version), expected)


def test_a_repeated_call_sends_nothing(make_fleet):
    fleet = make_fleet()
    replicas = [fleet.join()]
    expected = fleet.train(random_model(1))
    first = fleet.publish(V1, 1, 0, 1)
    again = fleet.publish(V1, 1, 0, 1)
    assert (again.num_bytes, again.last) == (0, first.last)
    for one, other in zip(first.streams, again.streams, strict=True):
        assert (one.location, one.offset, one.num_bytes) == (other.location, other.offset, other.num_bytes)
    fleet.push(V1, 1, replicas)
    assert_equal(replicas[0].commit(V1), expected)


def test_the_rest_of_a_push_goes_on_in_a_new_epoch(make_fleet):
    """One of two replicas dies after the first part: the other gets the whole version in the next epoch."""
    fleet = make_fleet((2, 2), 2)
    alive, dead = fleet.join(), fleet.join()
    expected = fleet.train(random_model(1))
    fleet.receive(V1, 1, fleet.publish(V1, 1, 0, 2), [alive, dead])
    fleet.publish(V1, 1, 1, 2)  # which nobody receives
    fleet.push(V1, 2, [alive])
    assert_equal(alive.commit(V1), expected)
    with pytest.raises(WeightPushError, match="a push to epoch 1, but epoch 2 has begun"):
        fleet.publish(V1, 1, 0, 2)


def test_the_first_of_its_class_does_not_get_other_weights_under_a_versions_name(make_fleet):
    """During a step the trainer has nothing to send that equals the committed version."""
    fleet = make_fleet()
    fleet.train(random_model(1))
    fleet.push(V1, 1, [fleet.join()])
    for publisher in fleet.publishers:
        publisher.train_on()
    other = plan(shard_layouts(fleet.sources), shard_layouts(shards(2)), part_elements=256)
    with pytest.raises(WeightPushError, match="a3f0:1 was never packed for these replicas, and the weights"):
        fleet.publishers[0].publish(PublishRequest(V1, "float32", {other.id: Membership(2, 1)}, [other], 0))
    fleet.publishers[0].publish(PublishRequest(V2, "float32", {other.id: Membership(2, 1)}, [], 0))


def test_who_has_the_version_takes_part_in_its_push(make_fleet):
    """Such as a replica that has committed it, but whose answer was lost."""
    fleet = make_fleet((2, 1), 2)
    early, late = fleet.join(), fleet.join()
    committed = fleet.train(random_model(1))
    fleet.push(V1, 1, [early])
    early.commit(V1)
    fleet.push(V1, 2, [early, late])
    for replica in (early, late):
        assert_equal(replica.commit(V1), committed)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_late_joiner_gets_the_committed_version(make_fleet, dtype):
    """From the trainer's copy, since the weights have been trained since."""
    fleet = make_fleet(dtype=dtype)
    early, late = fleet.join(), fleet.join()
    committed = fleet.train(random_model(1))
    fleet.push(V1, 1, [early])
    early.commit(V1)
    for publisher in fleet.publishers:
        publisher.train_on()
    trained_on = fleet.train(random_model(2))
    fleet.push(V1, 2, [late])
    assert_equal(late.commit(V1), committed)
    fleet.push(V2, 3, [early, late])
    for replica in (early, late):
        assert_equal(replica.commit(V2), trained_on)


def test_delta_in_the_same_epoch_alone(make_fleet):
    """One element of every tensor changes: members with the last version get a few bytes, others get all."""
    fleet = make_fleet((2, 1), 2, "bfloat16", delta=True)
    early, full_bytes = fleet.join(), model_bytes("bfloat16", 2)
    model = random_model(1)
    fleet.train(model)
    assert fleet.push(V1, 1, [early]) == full_bytes
    early.commit(V1)
    for tensor in model.values():
        tensor[-1, -1] += 1
    expected = fleet.train(model)
    assert 0 < fleet.push(V2, 1, [early]) < full_bytes / 4
    assert_equal(early.commit(V2), expected)
    late = fleet.join()
    assert fleet.push(V2, 2, [late]) == full_bytes
    assert_equal(late.commit(V2), expected)
    model["out"][0, 0] += 1
    expected = fleet.train(model)
    assert fleet.push(V3, 3, [early, late]) == full_bytes
    for replica in (early, late):
        assert_equal(replica.commit(V3), expected)


def test_delta_to_who_lacks_the_last_version_is_never_committed(make_fleet):
    """As if the coordinator had kept the epoch although a replica's commit failed."""
    fleet = make_fleet(dtype="bfloat16", delta=True)
    replica = fleet.join()
    model = random_model(1)
    fleet.train(model)
    fleet.push(V1, 1, [replica])
    replica.ranks[0].rollback(V1)
    model["out"][0, 0] += 1
    fleet.train(model)
    with pytest.raises(WeightPushError, match="nothing was committed"):
        fleet.push(V2, 1, [replica])
    with pytest.raises(WeightPushError, match="nothing is staged"):
        replica.commit(V2)


def test_where_nearly_all_changes_the_part_travels_whole(make_fleet):
    fleet = make_fleet(dtype="bfloat16", delta=True)
    replica = fleet.join()
    for seed, version in enumerate((V1, V2)):
        expected = fleet.train(random_model(seed))
        assert fleet.push(version, 1, [replica]) == model_bytes("bfloat16")
        assert_equal(replica.commit(version), expected)
