"""Replicas that send what they must not: it is their fault alone, and nothing of it is kept."""

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.coordinator.fleet.replicas import ReplicaState
from atoll.coordinator.rollouts.groups import PendingGroup
from atoll.runtime.clients.rollout import Arrival
from atoll.runtime.errors import (
    AtollError,
    ProtocolError,
    ServiceUnavailableError,
    StaleFenceError,
    StoreError,
    UserError,
)
from atoll.wire.codec.trajectories import decode_payload, encode_trajectories
from atoll.wire.types import (
    NEW_CONVERSATION,
    WHOLE,
    FinishReason,
    GroupId,
    SampleId,
    Trajectory,
    TrajectoryStatus,
    TurnRequest,
    TurnReward,
    Version,
    VersionSpan,
)
from atoll.wire.v1 import types_pb2
from tests import virtual_clock
from tests.builders import arrival, group_id, node, pending, sample, sample_id
from tests.fake_replicas import V3, VOCAB_SIZE, Fleet

Answer = Callable[[Sequence[Trajectory]], Arrival]


def honest(samples: Sequence[Trajectory]) -> Arrival:
    return arrival(*samples)


class Peer:
    """Answers each call at once, in one message."""

    def __init__(self, answer: Answer = honest) -> None:
        self.answer = answer
        self.asked: list[tuple[SampleId, int]] = []
        self.calls: list[list[GroupId]] = []
        self.aborted: list[str] = []

    async def generate(self, model: str, requests: Sequence[TurnRequest]) -> AsyncGenerator[Arrival, None]:
        asked = [(id.sample, id.attempt) for request in requests for id in request.ids]
        self.asked += asked
        self.calls.append([r.group for r in requests])
        yield self.answer([made(id, attempt) for id, attempt in asked])

    async def abort(self, id_prefix: str) -> int:
        self.aborted.append(id_prefix)
        return 1


def made(id: SampleId, attempt: int) -> Trajectory:
    return sample(id, node([4, 5], versions=V3), attempt=attempt)


class Kept:
    """A sink that keeps what a journal would."""

    def __init__(self, expected: int) -> None:
        self.samples: list[Trajectory] = []
        self.payloads: list[bytes] = []
        self.retries: list[str] = []
        self.dropped_for: list[str] = []
        self.done = asyncio.Event()
        self._expected = expected

    async def on_finished(self, samples: Sequence[Trajectory], payload: bytes) -> None:
        self.samples += samples
        self.payloads.append(payload)

    async def on_retried(self, samples: Sequence[SampleId], reason: str) -> None:
        self.retries.append(reason)

    async def on_completed(self, group: PendingGroup) -> None:
        self._one_less()

    async def on_dropped(self, group: PendingGroup, reason: str) -> None:
        self.dropped_for.append(reason)
        self._one_less()

    def _one_less(self) -> None:
        self._expected -= 1
        if not self._expected:
            self.done.set()


class Run(Fleet):
    async def generate(self, num_groups: int = 1, num_samples: int = 2) -> Kept:
        await self.route_all()
        kept = Kept(num_groups)
        running = asyncio.create_task(self.generation.run())
        self.generation.submit([pending(number, num_samples) for number in range(num_groups)], kept)
        waits = asyncio.create_task(kept.done.wait())
        await asyncio.wait((running, waits), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return kept


def changed(**columns: object) -> Answer:
    """The message with some of its columns replaced."""

    def answer(samples: Sequence[Trajectory]) -> Arrival:
        message = encode_trajectories(samples)
        for name, value in columns.items():
            message.ClearField(name)  # type: ignore[arg-type]
            if isinstance(value, bytes):
                setattr(message, name, value)
            else:
                getattr(message, name).extend(value)
        return Arrival.parse(message.SerializeToString())

    return answer


def remade(change: Callable[[Trajectory], Trajectory]) -> Answer:
    return lambda samples: arrival(*map(change, samples))


def with_version(version: Version) -> Answer:
    return remade(lambda s: s._replace(nodes=(node([4, 5], versions=version),)))


def with_node(**fields: Any) -> Answer:
    return remade(lambda s: s._replace(nodes=(s.nodes[0]._replace(**fields),)))


def raises(error: Exception) -> Answer:
    def answer(samples: Sequence[Trajectory]) -> Arrival:
        raise error

    return answer


VIOLATIONS = {
    "no samples at all": (lambda samples: Arrival.parse(b""), "offsets"),
    "an encoded message of no samples": (lambda samples: arrival(), "without samples"),
    "bytes that are no message": (lambda samples: Arrival.parse(b"\xff\xff"), "samples: "),
    "a logprob that is not a number": (with_node(logprobs=np.array([-1, np.nan], np.float32)), "not finite"),
    "an infinite logprob": (with_node(logprobs=np.array([-np.inf, -1], np.float32)), "not finite"),
    "a token beyond the vocabulary": (
        with_node(token_ids=np.array([4, VOCAB_SIZE], np.int32)),
        "token id 50",
    ),
    "a token below zero": (with_node(token_ids=np.array([-1, 4], np.int32)), "token id -1"),
    "experts of another model": (
        with_node(routes=np.zeros((1, 2, 4), np.uint8)),
        r"routes of \(2, 4\) layers and experts of a token, expected its route_shape = \(2, 3\)",
    ),
    "experts that are no numbers": (
        with_node(routes=np.zeros((1, 2, 3), np.float32)),
        "routes of dtype 'float32'",
    ),
    "another group": (remade(lambda s: s._replace(id=sample_id(9, s.id.index))), "toy/0/9/0, attempt 0"),
    "an index nobody asked for": (remade(lambda s: s._replace(id=sample_id(0, s.id.index + 7))), "toy/0/0/7"),
    "an index below zero": (remade(lambda s: s._replace(id=sample_id(0, s.id.index - 9))), "toy/0/0/-9"),
    "another attempt": (remade(lambda s: s._replace(attempt=17)), "attempt 17"),
    "a sample twice": (lambda samples: arrival(*samples, samples[0]), "twice in one message"),
    "a span that ends early": (
        with_node(spans=(VersionSpan(V3, 0, 1),)),
        "token 1 of a node of 2 is in no span",
    ),
    "a span beyond the tokens": (with_node(spans=(VersionSpan(V3, 0, 3),)), r"span \[0, 3\)"),
    "no span": (with_node(spans=()), "token 0 of a node of 2 is in no span"),
    "an older version": (with_version(Version("run", 2)), "version run:2"),
    "a version that is not there yet": (with_version(Version("run", 4)), "version run:4"),
    "another lineage": (with_version(Version("stray", 3)), "version stray:3"),
    "an unknown finish reason": (changed(finish_reason=(9, 9)), "finish reasons"),
    "a column too short": (changed(attempt=(0,)), "zip"),
    "a table entry that is not there": (changed(group=(0, 5)), "table of 1"),
    "a table entry counted from the end": (changed(origin=(0, -1)), "table of 1"),
    "offsets that go back": (changed(token_offsets=(0, 3, 2, 4)), "offsets"),
    "fewer logprobs than tokens": (changed(logprobs=b"\0" * 4), "as many of each"),
    "half a token": (changed(token_ids=b"\0" * 15), "multiple"),
    "a mask that is not boolean": (changed(loss_mask=b"\1\1\2\1"), "mask entry of 2"),
    "a parent that comes later": (changed(node_parent=(0, -1)), "parent"),
    "a token that is not its own": (
        with_node(loss_mask=np.array([1, 0], np.bool_)),
        "token 1 of a node of 2",
    ),
    "a reward": (remade(lambda s: s.add_reward(TurnReward(WHOLE, 9.0, {}))), "rewards"),
    "a tree": (remade(lambda s: s._replace(nodes=(*s.nodes, node([4], parent=0)))), "a single turn"),
    "two turns": (remade(lambda s: s._replace(turns=(*s.turns, *s.turns))), "a single turn"),
    "a conversation of its own": (with_node(parent=NEW_CONVERSATION), "a single turn"),
    "another status": (remade(lambda s: s._replace(status=TrajectoryStatus.TRUNCATED)), "a single turn"),
    "an unknown status": (changed(status=(9, 9)), "table of 4"),
    "nodes of another sample": (changed(node_offsets=(0, 0, 2)), "produced nodes"),
    "a parent that nothing is": (changed(node_parent=(-3, -3)), "parent"),
    "an environment's words": (remade(lambda s: s._replace(environment={"reward": "9"})), "a single turn"),
    "a finished sample without tokens": (
        remade(lambda s: s._replace(nodes=(node([], versions=V3),))),
        "without tokens",
    ),
}


@pytest.mark.parametrize(("answer", "words"), VIOLATIONS.values(), ids=VIOLATIONS.keys())
def test_what_a_replica_must_not_send_is_its_own_fault_and_is_not_kept(answer: Answer, words: str) -> None:
    async def scene() -> None:
        bad, good = Peer(answer), Peer()
        run = Run(bad, good)
        kept = await run.generate()
        assert bad.asked == [(sample_id(0, 0), 0), (sample_id(0, 1), 0)]
        assert good.asked == [(sample_id(0, 0), 1), (sample_id(0, 1), 1)]
        assert [s.attempt for s in kept.samples] == [1, 1]
        (payload,) = kept.payloads
        assert [s.attempt for s in decode_payload(payload)] == [1, 1]
        (reason,) = kept.retries
        assert reason.startswith("lost with rollout-0: ")
        assert re.search(words, reason), reason
        assert [member.state for member in run.members] == [ReplicaState.UNHEALTHY, ReplicaState.ROUTED]
        assert run.members[0].excluded_until == 10.0  # nobody asks it before
        assert run.generation.take_metrics()["rollout/num_violations"] == 1

    virtual_clock.run(scene())


@pytest.mark.parametrize(
    "error",
    [AtollError("a bug of its own"), StoreError("says the peer"), StaleFenceError("says the peer")],
    ids=lambda error: type(error).__name__,
)
def test_no_error_that_a_replica_answers_ends_the_run(error: AtollError) -> None:
    async def scene() -> None:
        run = Run(Peer(raises(error)), Peer())
        kept = await run.generate()
        assert [s.attempt for s in kept.samples] == [1, 1]
        assert run.members[0].state is ReplicaState.UNHEALTHY

    virtual_clock.run(scene())


def test_one_prompt_that_no_replica_takes_costs_its_group_alone() -> None:
    def answer(samples: Sequence[Trajectory]) -> Arrival:
        if any(s.id.group == group_id(1) for s in samples):
            raise UserError("the prompt is too long")
        return arrival(*samples)

    async def scene() -> None:
        run = Run(Peer(answer))
        kept = await run.generate(num_groups=4)
        assert sorted(s.id for s in kept.samples) == [sample_id(n, i) for n in (0, 2, 3) for i in (0, 1)]
        assert all(s.attempt == 0 for s in kept.samples)  # the others lost no attempt
        assert kept.dropped_for == [
            "3 attempts failed, the last: rollout-0 refused it: the prompt is too long"
        ]
        assert run.members[0].state is ReplicaState.ROUTED

    virtual_clock.run(scene())


def test_a_replica_that_refuses_everything_is_out() -> None:
    async def scene() -> None:
        run = Run(Peer(raises(UserError("this replica serves another model"))), Peer())
        kept = await run.generate(num_groups=8)
        assert len(kept.samples) == 16
        assert not kept.dropped_for
        assert [member.state for member in run.members] == [ReplicaState.UNHEALTHY, ReplicaState.ROUTED]

    virtual_clock.run(scene())


def test_a_replica_is_out_for_twice_as_long_each_time() -> None:
    async def scene() -> None:
        run = Run(Peer())
        for expected in (10, 20, 40, 80, 160, 300, 300):
            run.replicas.blame(run.members[0], "test")
            assert run.members[0].excluded_until == expected

    virtual_clock.run(scene())


def test_a_lost_stream_of_a_healthy_replica_is_joined_again() -> None:
    """No attempt begins and nobody is suspended: what arrives goes on where the stream broke."""
    losses = iter([ServiceUnavailableError("the stream was reset")] * 2)

    class Breaks(Peer):
        async def generate(
            self, model: str, requests: Sequence[TurnRequest]
        ) -> AsyncGenerator[Arrival, None]:
            async for arrived in super().generate(model, requests):
                yield arrival(arrived.samples[0])
                if error := next(losses, None):
                    raise error
                if arrived.samples[1:]:
                    yield arrival(*arrived.samples[1:])

    async def scene() -> None:
        peer = Breaks()
        run = Run(peer)
        kept = await run.generate(num_samples=4)
        assert [[id.index for id, _ in peer.asked][i : i + n] for i, n in ((0, 4), (4, 3), (7, 2))] == [
            [0, 1, 2, 3],
            [1, 2, 3],
            [2, 3],
        ]
        assert [s.attempt for s in kept.samples] == [0, 0, 0, 0]
        assert not kept.retries
        assert run.members[0].state is ReplicaState.ROUTED

    virtual_clock.run(scene())


def test_a_replica_whose_stream_is_lost_twice_with_nothing_between_is_unwell() -> None:
    async def scene() -> None:
        run = Run(Peer(raises(ServiceUnavailableError("connection refused"))), Peer())
        kept = await run.generate()
        assert len(kept.retries) == 1
        assert [member.state for member in run.members] == [ReplicaState.UNHEALTHY, ReplicaState.ROUTED]
        assert run.members[0].violations == 0

    virtual_clock.run(scene())


MESSAGE = encode_trajectories([made(sample_id(0, index), 0) for index in range(3)]).SerializeToString()


@given(st.data())
def test_whatever_bytes_arrive_are_samples_or_a_bad_answer(data: st.DataObject) -> None:
    content = bytearray(MESSAGE)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        arrived = Arrival.parse(bytes(content))
    except ProtocolError:
        return
    for s in arrived.samples:
        assert isinstance(s.finish_reason, FinishReason)
        for n in s.nodes:
            assert len(n.token_ids) == len(n.loss_mask) == len(n.logprobs)
            assert np.isfinite(n.logprobs).all()
            covered = np.zeros(len(n.token_ids), bool)
            for span in n.spans:
                covered[span.start : span.end] = True
            assert covered[n.loss_mask].all()
    assert types_pb2.Trajectories.FromString(arrived.payload)
