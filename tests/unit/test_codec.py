"""Every domain type survives the wire unchanged."""

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.wire.codec.batches import (
    decode_forward_backward,
    decode_step_key,
    encode_forward_backward,
    join_segments,
    split_by_groups,
)
from atoll.wire.codec.rewards import decode_score_item, decode_verdict, encode_score_item, encode_verdict
from atoll.wire.codec.rollout import decode_sampling, encode_sampling
from atoll.wire.codec.samples import decode_samples, encode_samples
from atoll.wire.codec.weights import (
    decode_catalog,
    decode_plan,
    decode_published,
    decode_stream,
    encode_catalog,
    encode_plan,
    encode_published,
    encode_stream,
)
from atoll.wire.types import (
    BOX,
    TRANSFER,
    Batch,
    Catalog,
    FinishReason,
    Graded,
    GradingError,
    GroupId,
    Node,
    Plan,
    PolicyBatch,
    Provenance,
    Published,
    Sample,
    SampleId,
    Sampling,
    ScoreItem,
    Segments,
    StepKey,
    StreamManifest,
    SupervisedBatch,
    TurnReward,
    ValueBatch,
    Version,
    VersionSpan,
)
from atoll.wire.v1 import trainer_pb2, types_pb2

GROUP = GroupId("toy/run", 2, 7)


def node(parent: int, ids: list[int], spans: tuple[VersionSpan, ...]) -> Node:
    return Node(
        parent=parent,
        token_ids=np.array(ids, np.int32),
        loss_mask=np.array([True] * len(ids), np.bool_),
        logprobs=-np.arange(len(ids), dtype=np.float32),
        spans=spans,
    )


def test_samples_round_trip() -> None:
    spans = (VersionSpan(Version("a3f0", 3), 0, 1), VersionSpan(Version("a3f0", 4), 1, 2))
    origin = Provenance("rollout-0", "9f", 10.0, 11.5)
    samples = [
        Sample(SampleId(GROUP, 1), 0, (node(-1, [8, 10], spans),), FinishReason.STOP, "46", origin),
        Sample(
            SampleId(GroupId("toy/run", 2, 9), 4),
            2,
            (node(-1, [], ()), node(0, [5, 6], spans)),
            FinishReason.ABORT,
            "",
            origin,
            (TurnReward(1, 0.5, {"exact_match": 1.0, "format": 0.0}, {"format": "boxed: two"}),),
        ),
    ]
    wire = types_pb2.Samples.FromString(encode_samples(samples).SerializeToString())
    back = decode_samples(wire)
    for sent, got in zip(samples, back, strict=True):
        for field in ("id", "attempt", "finish_reason", "text", "provenance", "rewards"):
            assert getattr(sent, field) == getattr(got, field), field
        for a, b in zip(sent.nodes, got.nodes, strict=True):
            assert (a.parent, a.spans) == (b.parent, b.spans)
            for array in ("token_ids", "loss_mask", "logprobs"):
                np.testing.assert_array_equal(getattr(a, array), getattr(b, array))


def test_samples_with_missing_tokens_are_refused() -> None:
    origin = Provenance("rollout-0", "9f", 10.0, 11.5)
    sample = Sample(SampleId(GROUP, 1), 0, (node(-1, [8, 10], ()),), FinishReason.STOP, "46", origin)
    wire = encode_samples([sample])
    wire.token_ids = wire.token_ids[:4]
    with pytest.raises(
        ValueError, match="1 token ids, 2 mask entries and 2 log-probabilities, expected as many"
    ):
        decode_samples(wire)


TREE = Segments(  # two groups: a prompt of 2 with responses of 1 and 3; a single segment of 2
    token_ids=np.array([1, 2, 3, 4, 5, 6, 7, 8], np.int32),
    offsets=np.array([0, 2, 3, 6, 8], np.int64),
    parents=np.array([-1, 0, 0, -1], np.int32),
    groups=np.array([4, 4, 4, 9], np.int32),
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
    for array in ("token_ids", "offsets", "parents", "groups"):
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


def test_catalog_and_stream_round_trip() -> None:
    boxes = np.array([(0, 0, 4, 0, 2, 1, 6, 2), (1, 4, 1, 0, 9, 0, 0, 9)], BOX)
    back = decode_catalog(encode_catalog(Catalog(("q", "k"), boxes)))
    assert back.tensors == ("q", "k")
    np.testing.assert_array_equal(back.boxes, boxes)
    sums = np.array([2**64 - 1, 7], np.uint64)
    stream = decode_stream(encode_stream(StreamManifest(3, "atoll-x", 4096, 64, "p", 5, sums, True)))
    assert (stream.source, stream.location, stream.offset, stream.num_bytes) == (3, "atoll-x", 4096, 64)
    assert (stream.plan_id, stream.first, stream.delta) == ("p", 5, True)
    np.testing.assert_array_equal(stream.checksums, sums)
    published = decode_published(encode_published(Published((stream, stream), 96, True)))
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
        decode_catalog(encode_catalog(Catalog(("a", "b"), boxes)))


def test_boxes_that_inflate_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 MiB of zlib may become 64 GB."""
    monkeypatch.setattr("atoll.wire.codec.weights.MAX_INFLATED_BYTES", 1 << 20)
    fits = types_pb2.Boxes(tensors=zlib.compress(b"a\0"), columns=zlib.compress(bytes(8 * len(BOX) * 1000)))
    assert len(decode_catalog(fits).boxes) == 1000
    bomb = types_pb2.Boxes(tensors=zlib.compress(b""), columns=zlib.compress(bytes(2 << 20)))
    with pytest.raises(ValueError, match="more than 1,048,576 bytes when decompressed"):
        decode_catalog(bomb)


@pytest.mark.parametrize("columns", [b"not zlib", zlib.compress(bytes(800))[:-3]], ids=["garbage", "cut off"])
def test_boxes_that_cannot_be_inflated_are_refused(columns: bytes) -> None:
    with pytest.raises(ValueError, match="boxes: "):
        decode_catalog(types_pb2.Boxes(tensors=zlib.compress(b""), columns=columns))
