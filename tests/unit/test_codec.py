"""Every domain type survives the wire unchanged."""

import zlib
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.wire.codec.batches import (
    chunk_tokens,
    decode_forward_backward,
    decode_step_key,
    encode_forward_backward,
    join_segments,
    split_by_groups,
)
from atoll.wire.codec.rewards import (
    decode_score,
    decode_score_item,
    decode_verdict,
    encode_score,
    encode_score_item,
    encode_verdict,
)
from atoll.wire.codec.rollout import (
    decode_sampling,
    decode_turn_request,
    encode_sampling,
    encode_turn_request,
)
from atoll.wire.codec.trajectories import decode_trajectories, encode_trajectories
from atoll.wire.codec.values import encode_group_id
from atoll.wire.codec.weights import (
    decode_plan,
    decode_published,
    decode_shard_layout,
    decode_stream,
    encode_plan,
    encode_published,
    encode_shard_layout,
    encode_stream,
)
from atoll.wire.types import (
    BOX,
    NEW_CONVERSATION,
    TRANSFER,
    WHOLE,
    Batch,
    FinishReason,
    Graded,
    GradingError,
    GroupId,
    Message,
    Origin,
    Plan,
    PolicyBatch,
    PublishedPart,
    SampleId,
    Sampling,
    ScoreItem,
    Segments,
    ShardLayout,
    StepKey,
    StreamManifest,
    SupervisedBatch,
    ToolCall,
    Trajectory,
    TrajectoryStatus,
    Turn,
    TurnId,
    TurnRequest,
    TurnReward,
    ValueBatch,
    Version,
)
from atoll.wire.v1 import reward_pb2, rollout_pb2, trainer_pb2, types_pb2
from tests.builders import node

GROUP = GroupId("toy/run", 2, 7)


V3, V4 = Version("a3f0", 3), Version("a3f0", 4)


def turn(node: int, text: str, reason: FinishReason = FinishReason.STOP) -> Turn:
    return Turn(node, reason, text, Origin("rollout-0", "9f"), 10.0 + node, 11.5)


SINGLE = Trajectory(
    SampleId(GROUP, 1), 0, (node([8, 10], versions=[V3, V4]),), (turn(0, "46"),), TrajectoryStatus.COMPLETED
)
ROUTED = SINGLE._replace(  # its second node's record holds its parent's last token
    nodes=(
        node([8, 10])._replace(routes=np.arange(12, dtype=np.uint8).reshape(3, 2, 2)),
        node([9], [0], parent=0),
        node([7], parent=1)._replace(routes=np.arange(8, dtype=np.uint8).reshape(2, 2, 2) + 100),
    ),
    turns=(turn(0, "46"), turn(2, "4")),
)
# two turns after a tool's answer, one of them after the tool's answer was summarised, and one by a sub-agent
BRANCHING = Trajectory(
    SampleId(GroupId("toy/run", 2, 9), 4),
    2,
    (
        node([5, 6], versions=V3),
        node([7, 7, 7], [0, 0, 0], parent=0),
        node([9], parent=1, versions=V4),
        node([1, 2], [0, 0], parent=NEW_CONVERSATION),
        node([], parent=3),
    ),
    (turn(0, "call"), turn(2, "so"), turn(4, "", FinishReason.LENGTH)),
    TrajectoryStatus.COMPLETED,
    rewards=(
        TurnReward(0, 0.5, {"tool": 0.5}),
        TurnReward(WHOLE, 1.0, {"exact_match": 1.0, "format": 0.0}, {"format": "boxed: two"}),
    ),
    reason="done",
    messages=(
        Message("assistant", "", (ToolCall("c1", "sum", '{"a": 1}'),)),
        Message("tool", "3", tool_call_id="c1"),
    ),
    environment={"state": "solved"},
)
ABORTED = Trajectory(
    SampleId(GROUP, 2), 1, (node([]),), (turn(0, "", FinishReason.ABORT),), TrajectoryStatus.ABORTED
)


@pytest.mark.parametrize(
    "samples", [[SINGLE], [SINGLE, ABORTED], [BRANCHING], [SINGLE, BRANCHING, ABORTED, ROUTED]]
)
def test_trajectories_round_trip(samples: list[Trajectory]) -> None:
    wire = types_pb2.Trajectories.FromString(encode_trajectories(samples).SerializeToString())
    for sent, got in zip(samples, decode_trajectories(wire), strict=True):
        assert got._replace(nodes=()) == sent._replace(nodes=())
        for a, b in zip(sent.nodes, got.nodes, strict=True):
            assert (a.parent, a.spans) == (b.parent, b.spans)
            for array in ("token_ids", "loss_mask", "logprobs", "routes"):
                np.testing.assert_array_equal(getattr(a, array), getattr(b, array))


def test_single_turns_leave_out_the_columns_of_trees() -> None:
    """So that they cost what they did, and what was written before there were turns is read."""
    wire = encode_trajectories([SINGLE, ABORTED])
    for column in ("turn_offsets", "turn_node", "status", "reason", "conversation", "rewards"):
        assert not getattr(wire, column)


def test_samples_with_missing_tokens_are_refused() -> None:
    wire = encode_trajectories([SINGLE])
    wire.token_ids = wire.token_ids[:4]
    with pytest.raises(
        ValueError, match="1 token ids, 2 mask entries and 2 log-probabilities, expected as many"
    ):
        decode_trajectories(wire)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"node_parent": [-1, 1, 1, -2, 3]}, "toy/run/2/9/4: a node whose parent is no earlier node"),
        ({"node_parent": [-1, 0, 1, -3, 3]}, "a node whose parent is no earlier node"),
        ({"turn_node": [0, 2, 5]}, r"produced nodes \[0, 2, 5\], expected some of its 5"),
        ({"turn_offsets": [0, 2]}, r"offsets \[0, 2\], expected them to ascend from 0 to 3"),
        (
            {"turn_node": [1, 2, 4]},
            r"rewards for nodes \[0\], expected -1 or what a turn produced: \[1, 2, 4\]",
        ),
        ({"span_end": [1, 1]}, "token 1 of a node of 2 is in no span, and the policy produced it"),
        ({"span_offsets": [0, 1, 2, 2, 2, 2]}, "token 0 of a node of 3 is in a span, and the policy did not"),
    ],
)
def test_a_tree_that_is_none_is_refused(changes: Mapping[str, list[int]], message: str) -> None:
    wire = encode_trajectories([BRANCHING])
    for column, values in changes.items():
        del getattr(wire, column)[:]
        getattr(wire, column).extend(values)
    with pytest.raises(ValueError, match=message):
        decode_trajectories(wire)


def test_turn_requests_round_trip() -> None:
    ids = tuple(TurnId(SampleId(GROUP, index), index + 1) for index in (0, 2))
    later = (TurnId(SampleId(GROUP, 0), 1, 3), TurnId(SampleId(GROUP, 0), 1, 3, 1))
    for request in (
        TurnRequest(ids, np.array([5, 6], np.int32), Sampling(8, stop=("x",), seed=3)),
        TurnRequest(later, np.array([5, 6, 7], np.int32), Sampling(8), "toy/run/2/7/0/1"),
    ):
        back = decode_turn_request(encode_turn_request(request))
        assert (back.ids, back.sampling, back.session) == (request.ids, request.sampling, request.session)
        np.testing.assert_array_equal(back.context_ids, request.context_ids)
    assert [str(id) for id in later] == ["toy/run/2/7/0/1/3/0", "toy/run/2/7/0/1/3/1"]


def test_a_turns_first_id_alone_records_the_routes_of_its_context() -> None:
    ids = tuple(TurnId(SampleId(GROUP, 0), 1, 3, branch) for branch in range(2))
    request = decode_turn_request(
        encode_turn_request(TurnRequest(ids, np.arange(6, dtype=np.int32), Sampling(8), "s", num_routed=4))
    )
    assert [request.first_route(id) for id in ids] == [4, 6]


def test_a_request_for_no_turn_is_refused() -> None:
    with pytest.raises(ValueError, match="a request for turns of group toy/run/2/7 names none"):
        decode_turn_request(rollout_pb2.TurnRequest(group=encode_group_id(GROUP)))


TREE = Segments(  # two groups: a prompt of 2 with responses of 1 and 3; a single segment of 2
    token_ids=np.array([1, 2, 3, 4, 5, 6, 7, 8], np.int32),
    offsets=np.array([0, 2, 3, 6, 8], np.int64),
    parents=np.array([-1, 0, 0, -1], np.int32),
    groups=np.array([4, 4, 4, 9], np.int32),
    routes=np.arange(48, dtype=np.int16).reshape(8, 3, 2),
)


def test_positions_and_predecessors_by_hand() -> None:
    np.testing.assert_array_equal(TREE.positions, [0, 1, 2, 2, 3, 4, 0, 1])
    np.testing.assert_array_equal(TREE.predecessors, [-1, 0, 1, 1, 3, 4, -1, 6])


def test_predecessor_skips_an_empty_segment_and_starts_at_the_parent() -> None:
    tree = Segments(
        np.array([1, 2], np.int32),
        np.array([0, 1, 1, 2], np.int64),
        np.array([-1, 0, 0], np.int32),
        np.zeros(3, np.int32),
    )
    np.testing.assert_array_equal(tree.predecessors, [-1, 0])


@pytest.mark.parametrize(("max_tokens", "parts"), [(1, 2), (7, 2), (8, 1)])
def test_split_keeps_groups_whole(max_tokens: int, parts: int) -> None:
    split = list(split_by_groups(TREE, max_tokens))
    assert len(split) == parts
    joined = join_segments([part for part, _ in split])
    for array in ("token_ids", "offsets", "parents", "groups", "routes"):
        np.testing.assert_array_equal(getattr(joined, array), getattr(TREE, array))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 60))
def test_no_part_is_larger_than_asked_unless_one_group_is(lengths: list[int], max_tokens: int) -> None:
    segments = Segments(
        np.arange(sum(lengths), dtype=np.int32),
        np.cumsum([0, *lengths]).astype(np.int64),
        np.full(len(lengths), -1, np.int32),
        np.arange(len(lengths), dtype=np.int32),
    )
    parts = list(split_by_groups(segments, max_tokens))
    assert all(len(p.token_ids) <= max_tokens or len(p.groups) == 1 for p, _ in parts)
    np.testing.assert_array_equal(np.concatenate([p.token_ids for p, _ in parts]), segments.token_ids)
    assert [segments.token_ids[tokens].tolist() for _, tokens in parts] == [
        p.token_ids.tolist() for p, _ in parts
    ]


def test_routes_make_chunks_of_fewer_tokens() -> None:
    assert chunk_tokens(TREE, 28) == (2 << 20) // (28 + 3 * 2 * 2)
    assert chunk_tokens(replace(TREE, routes=None), 28) == (2 << 20) // 28


def random_batch(kind: str) -> Batch:
    weights, *others = (np.random.default_rng(i).random(8, np.float32) for i in range(5))
    samples = np.array([-1, -1, 0, 0, 0, 1, 1, 2], np.int32)
    batches: dict[str, Batch] = {
        "on_policy": PolicyBatch(TREE, samples, weights, others[0], others[1], None, None),
        "off_policy": PolicyBatch(TREE, samples, weights, *others),
        "value": ValueBatch(TREE, weights, others[0], others[1]),
        "supervised": SupervisedBatch(TREE, weights),
    }
    return batches[kind]


@pytest.mark.parametrize("kind", ["on_policy", "off_policy", "value", "supervised"])
def test_forward_backward_round_trip(kind: str) -> None:
    batch, key = random_batch(kind), StepKey("a3f0", 5, 1, "actor")
    chunks = [
        trainer_pb2.ForwardBackwardRequest.FromString(chunk.SerializeToString())
        for chunk in encode_forward_backward(key, batch)
    ]
    assert decode_step_key(chunks[0].key) == key
    back = decode_forward_backward(chunks)
    assert type(back) is type(batch)
    for name, array in vars(batch).items():
        if name == "segments":
            np.testing.assert_array_equal(back.segments.parents, TREE.parents)
            np.testing.assert_array_equal(back.segments.routes, TREE.routes)
        elif array is None:
            assert vars(back)[name] is None
        else:
            np.testing.assert_array_equal(vars(back)[name], array)
            assert vars(back)[name].dtype == array.dtype


def test_small_types_round_trip() -> None:
    sampling = Sampling(8, 0.7, 0.9, 5, (1, 2), ("\n\n", "#"), 3)
    assert decode_sampling(encode_sampling(sampling)) == sampling
    item = ScoreItem(SampleId(GROUP, 3), "1+1=", "2", "2", "toy", FinishReason.LENGTH, 4, {"index": "7"})
    assert decode_score_item(encode_score_item(item)) == item
    for verdict in (
        Graded(item.id, 1.0, {"a": 1.0}),
        GradingError(item.id, "math", "ZeroDivisionError", True),
    ):
        assert decode_verdict(encode_verdict(verdict), item.id) == verdict


def test_what_the_responses_of_a_group_share_travels_once() -> None:
    tests = {"tests": "x" * 1000}
    shared = ScoreItem(SampleId(GROUP, 0), "1+1=", "2", "two", "toy", FinishReason.STOP, 1, tests)
    other = ScoreItem(
        SampleId(GroupId("toy/run", 2, 8), 0), "1+2=", "3", "three", "toy", FinishReason.STOP, 1
    )
    items = [shared, other, shared._replace(id=SampleId(GROUP, 5), response="3", response_length=4)]
    request = encode_score(items, by_group=True)
    assert [item.question for item in request.items] == [0, 1, 0]
    assert request.SerializeToString().count(b"x" * 1000) == 1
    assert decode_score(reward_pb2.ScoreRequest.FromString(request.SerializeToString())) == items

    whole = encode_score(items, by_group=False)
    assert (len(whole.questions), [item.prompt for item in whole.items]) == (0, ["1+1=", "1+2=", "1+1="])
    assert decode_score(whole) == items

    del request.questions[1:]
    with pytest.raises(ValueError, match="an item has question 1, but there are 1"):
        decode_score(request)


def test_shard_layout_and_stream_round_trip() -> None:
    boxes = np.array([(0, 0, 4, 0, 2, 1, 6, 2), (1, 4, 1, 0, 9, 0, 0, 9)], BOX)
    back = decode_shard_layout(encode_shard_layout(ShardLayout(("q", "k"), boxes)))
    assert back.tensors == ("q", "k")
    np.testing.assert_array_equal(back.boxes, boxes)
    stream = StreamManifest(3, "atoll-x", 4096, 64, "p", part=5, checksum=2**64 - 1, delta=True)
    assert decode_stream(encode_stream(stream)) == stream
    published = decode_published(encode_published(PublishedPart((stream, stream), 96, True)))
    assert (len(published.streams), published.num_bytes, published.last) == (2, 96, True)


def test_plan_round_trip() -> None:
    transfers = np.arange(30).reshape(2, 15) - 3
    rows = np.array([tuple(row) for row in transfers.tolist()], TRANSFER)
    back = decode_plan(encode_plan(Plan("f00d", ("q", "k"), rows)))
    assert (back.id, back.tensors) == ("f00d", ("q", "k"))
    np.testing.assert_array_equal(back.transfers, rows)


def test_sample_id_text_keeps_slashes_in_the_run() -> None:
    sample = SampleId(GROUP, 3)
    assert str(sample) == "toy/run/2/7/3"
    assert SampleId.parse(str(sample)) == sample


@pytest.mark.parametrize("number", [-1, 2])
def test_boxes_of_a_tensor_without_a_name_are_refused(number: int) -> None:
    boxes = np.zeros(1, BOX)
    boxes["tensor"] = number
    with pytest.raises(ValueError, match="not among the 2 named"):
        decode_shard_layout(encode_shard_layout(ShardLayout(("a", "b"), boxes)))


def test_boxes_that_inflate_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 MiB of zlib may become 64 GB."""
    monkeypatch.setattr("atoll.wire.codec.weights.MAX_INFLATED_BYTES", 1 << 20)
    fits = types_pb2.BoxTable(
        tensors=zlib.compress(b"a\0"), columns=zlib.compress(bytes(8 * len(BOX) * 1000))
    )
    assert len(decode_shard_layout(fits).boxes) == 1000
    bomb = types_pb2.BoxTable(tensors=zlib.compress(b""), columns=zlib.compress(bytes(2 << 20)))
    with pytest.raises(ValueError, match="more than 1,048,576 bytes when decompressed"):
        decode_shard_layout(bomb)


@pytest.mark.parametrize("columns", [b"not zlib", zlib.compress(bytes(800))[:-3]], ids=["garbage", "cut off"])
def test_boxes_that_cannot_be_inflated_are_refused(columns: bytes) -> None:
    with pytest.raises(ValueError, match="boxes: "):
        decode_shard_layout(types_pb2.BoxTable(tensors=zlib.compress(b""), columns=columns))
