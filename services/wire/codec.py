"""Domain types <-> messages of package atoll.v1. Pure; one encode and one decode per type.

long because every type that crosses a service boundary has its two converters here.
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, repeat, starmap
from typing import Generic, TypeVar

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from atoll.wire.types import (
    BOX,
    TRANSFER,
    Batch,
    Bool,
    Catalog,
    Execution,
    ExternalServer,
    FinishReason,
    Float32,
    Graded,
    GradingError,
    Group,
    GroupId,
    Int32,
    JournalIndex,
    Limits,
    Membership,
    Node,
    Plan,
    PolicyBatch,
    Prompt,
    Provenance,
    Published,
    Sample,
    SampleId,
    Sampling,
    ScoreItem,
    Segments,
    ServerHealth,
    ServiceEntry,
    Status,
    StepKey,
    StreamManifest,
    SupervisedBatch,
    TurnReward,
    ValueBatch,
    Verdict,
    Version,
    VersionSpan,
)
from atoll.wire.v1 import coordinator_pb2, journal_pb2, reward_pb2, trainer_pb2, types_pb2

T = TypeVar("T")

MAX_INFLATED_BYTES = 512 << 20  # of decompressed boxes: five times those of the largest plan that was made
MAX_CHUNK_BYTES = 2 << 20  # of one streamed message; whole groups, so a single huge group may exceed it

_REASON_TO_WIRE = {
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: types_pb2.FINISH_REASON_ABORT,
}
_REASON_FROM_WIRE = {wire: reason for reason, wire in _REASON_TO_WIRE.items()}


def encode_tensor(array: NDArray[np.generic]) -> types_pb2.Tensor:
    message = types_pb2.Tensor()
    put_tensor(message, array)
    return message


# put_...: into a message that is part of another. One that is given to the other's constructor is serialized
# and parsed again, which costs more than all else that is done for a batch or a response.


def put_tensor(message: types_pb2.Tensor, array: NDArray[np.generic]) -> None:
    message.dtype = array.dtype.name
    message.shape.extend(array.shape)
    message.data = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def decode_tensor(message: types_pb2.Tensor) -> NDArray[np.generic]:
    """A read-only view of the message's bytes. Raises ValueError where size and shape disagree."""
    dtype = np.dtype(message.dtype).newbyteorder("<")
    return np.frombuffer(message.data, dtype).reshape(tuple(message.shape))


def encode_version(version: Version) -> types_pb2.Version:
    return types_pb2.Version(lineage=version.lineage, number=version.number)


def decode_version(message: types_pb2.Version) -> Version:
    return Version(message.lineage, message.number)


def encode_group_id(group: GroupId) -> types_pb2.GroupId:
    return types_pb2.GroupId(run=group.run, epoch=group.epoch, prompt=group.prompt)


def decode_group_id(message: types_pb2.GroupId) -> GroupId:
    return GroupId(message.run, message.epoch, message.prompt)


def encode_sampling(sampling: Sampling) -> types_pb2.Sampling:
    return types_pb2.Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_new_tokens=sampling.max_new_tokens,
        stop_token_ids=sampling.stop_token_ids,
        stop=sampling.stop,
        seed=sampling.seed,
    )


def decode_sampling(message: types_pb2.Sampling) -> Sampling:
    return Sampling(
        max_new_tokens=message.max_new_tokens,
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        stop_token_ids=tuple(message.stop_token_ids),
        stop=tuple(message.stop),
        seed=message.seed,
    )


def encode_samples(samples: Iterable[Sample]) -> types_pb2.Samples:
    """Samples of any groups, in columns."""
    samples = list(samples)
    nodes = [node for sample in samples for node in sample.nodes]
    spans = [span for node in nodes for span in node.spans]
    groups, origins, versions = _Table[GroupId](), _Table[tuple[str, str]](), _Table[Version]()
    return types_pb2.Samples(
        group=[groups.number(sample.id.group) for sample in samples],
        groups=[encode_group_id(group) for group in groups],
        index=[sample.id.index for sample in samples],
        attempt=[sample.attempt for sample in samples],
        finish_reason=[_REASON_TO_WIRE[sample.finish_reason] for sample in samples],
        text=[sample.text for sample in samples],
        origin=[origins.number((s.provenance.replica, s.provenance.incarnation)) for s in samples],
        origins=[types_pb2.Origin(replica=replica, incarnation=start) for replica, start in origins],
        started=[sample.provenance.started for sample in samples],
        finished=[sample.provenance.finished for sample in samples],
        node_offsets=_offsets(len(sample.nodes) for sample in samples),
        node_parent=[node.parent for node in nodes],
        token_offsets=_offsets(len(node.token_ids) for node in nodes),
        token_ids=b"".join(node.token_ids.astype("<i4", copy=False).tobytes() for node in nodes),
        loss_mask=b"".join(node.loss_mask.tobytes() for node in nodes),
        logprobs=b"".join(node.logprobs.astype("<f4", copy=False).tobytes() for node in nodes),
        span_offsets=_offsets(len(node.spans) for node in nodes),
        span_version=[versions.number(span.version) for span in spans],
        versions=[encode_version(version) for version in versions],
        span_start=[span.start for span in spans],
        span_end=[span.end for span in spans],
        rewards=[encode_rewards(sample.rewards) for sample in samples]
        if any(sample.rewards for sample in samples)
        else [],
    )


def decode_samples(message: types_pb2.Samples) -> list[Sample]:
    """Raises ValueError for columns that do not fit together, log-probabilities that are not finite, token
    ids below 0, unknown finish reasons, and tokens of the policy that no span covers."""
    token_ids = np.frombuffer(message.token_ids, "<i4")
    loss_mask = np.frombuffer(message.loss_mask, np.bool_)
    logprobs = np.frombuffer(message.logprobs, "<f4")
    num_tokens = len(token_ids)
    if not num_tokens == len(loss_mask) == len(logprobs):
        raise ValueError(
            f"samples: {num_tokens} token ids, {len(loss_mask)} mask entries and {len(logprobs)} "
            "log-probabilities, expected as many of each"
        )
    _check_tokens(token_ids, loss_mask, logprobs)
    versions = [decode_version(version) for version in message.versions]
    span_version = _looked_up(versions, message.span_version)
    spans = list(
        starmap(VersionSpan, zip(span_version, message.span_start[:], message.span_end[:], strict=True))
    )
    parents = message.node_parent[:]
    nodes = [
        Node(
            parent, token_ids[start:end], loss_mask[start:end], logprobs[start:end], tuple(spans[first:last])
        )
        for parent, (start, end), (first, last) in zip(
            parents,
            _ranges(message.token_offsets, num_tokens),
            _ranges(message.span_offsets, len(spans)),
            strict=True,
        )
    ]
    for node in nodes:
        _check_spans(node)
    samples = [
        Sample(
            SampleId(group, index),
            attempt,
            tuple(nodes[first:last]),
            reason,
            text,
            Provenance(origin[0], origin[1], started, finished),
            decode_rewards(rewards) if rewards else (),
        )
        for group, index, attempt, (first, last), reason, text, origin, started, finished, rewards in zip(
            _looked_up([decode_group_id(group) for group in message.groups], message.group),
            message.index[:],
            message.attempt[:],
            _ranges(message.node_offsets, len(nodes)),
            _known_reasons(message.finish_reason[:]),
            message.text[:],
            _looked_up([(origin.replica, origin.incarnation) for origin in message.origins], message.origin),
            message.started[:],
            message.finished[:],
            message.rewards or repeat(None, len(message.group)),
            strict=True,
        )
    ]
    if parents.count(-1) < len(parents):  # of single turns all are
        for sample in samples:
            if not all(-1 <= node.parent < number for number, node in enumerate(sample.nodes)):
                raise ValueError(f"sample {sample.id}: a node whose parent is no earlier node of the sample")
    return samples


def _check_tokens(token_ids: Int32, loss_mask: Bool, logprobs: Float32) -> None:
    """In one pass over all samples of a message; an error need not say which sample it is."""
    if not len(token_ids):
        return
    if token_ids.min() < 0:
        raise ValueError(f"samples: token id {token_ids.min()}, expected 0 or more")
    if loss_mask.view(np.uint8).max() > 1:
        raise ValueError(f"samples: a mask entry of {loss_mask.view(np.uint8).max()}, expected 0 or 1")
    if not np.isfinite(logprobs).all():
        raise ValueError(
            f"samples: {np.count_nonzero(~np.isfinite(logprobs))} log-probabilities that are not finite"
        )


def _check_spans(node: Node) -> None:
    """Spans follow one another; between them nothing was produced by the policy."""
    at, length = 0, len(node.token_ids)
    if len(node.spans) == 1 and node.spans[0][1:] == (0, length):
        return  # as most do
    gaps = []
    for span in node.spans:
        if not at <= span.start <= span.end <= length:
            raise ValueError(
                f"samples: span [{span.start}, {span.end}) of a node of {length} tokens, expected one "
                f"between {at} and {length}"
            )
        gaps.append((at, span.start))
        at = span.end
    for start, end in [*gaps, (at, length)]:
        if start < end and node.loss_mask[start:end].any():
            raise ValueError(f"samples: no span covers tokens [{start}, {end}), which the policy produced")


def _ranges(offsets: Sequence[int], size: int) -> Iterator[tuple[int, int]]:
    """[first, last) of each row, which together cover [0, size)."""
    ends = offsets[:]  # a list: reading a message's column costs more
    if not ends or ends[0] != 0 or ends[-1] != size or ends != sorted(ends):
        raise ValueError(f"samples: offsets {_head(ends)}, expected them to ascend from 0 to {size}")
    return pairwise(ends)


def _looked_up(table: Sequence[T], numbers: Sequence[int]) -> Iterator[T]:
    numbers = numbers[:]
    if numbers and not 0 <= min(numbers) <= max(numbers) < len(table):
        raise ValueError(f"samples: entries {_head(numbers)} of a table of {len(table)}")
    return map(table.__getitem__, numbers)


def _known_reasons(reasons: Sequence[types_pb2.FinishReason.ValueType]) -> Sequence[FinishReason]:
    if unknown := set(reasons) - _REASON_FROM_WIRE.keys():
        raise ValueError(f"samples: unknown finish reasons {sorted(unknown)}")
    return [_REASON_FROM_WIRE[reason] for reason in reasons]


def _head(numbers: Sequence[int]) -> str:
    return f"{list(numbers[:8])}{' ...' if len(numbers) > 8 else ''}"


def encode_rewards(rewards: Sequence[TurnReward]) -> types_pb2.Rewards:
    return types_pb2.Rewards(
        reward=[
            types_pb2.TurnReward(
                node=reward.node,
                value=reward.value,
                components=reward.components,
                reasons=reward.reasons,
            )
            for reward in rewards
        ]
    )


def decode_rewards(message: types_pb2.Rewards) -> tuple[TurnReward, ...]:
    return tuple(
        TurnReward(reward.node, reward.value, dict(reward.components), dict(reward.reasons))
        for reward in message.reward
    )


class _Table(Generic[T]):
    """Numbers distinct values in the order of their first use."""

    def __init__(self) -> None:
        self._numbers: dict[T, int] = {}

    def number(self, value: T) -> int:
        return self._numbers.setdefault(value, len(self._numbers))

    def __iter__(self) -> Iterator[T]:
        return iter(self._numbers)


def encode_prompt(prompt: Prompt) -> types_pb2.Prompt:
    return types_pb2.Prompt(
        id=encode_group_id(prompt.id),
        token_ids=prompt.token_ids.astype("<i4", copy=False).tobytes(),
        text=prompt.text,
        ground_truth=prompt.ground_truth,
        data_source=prompt.data_source,
        extra=prompt.extra,
    )


def decode_prompt(message: types_pb2.Prompt) -> Prompt:
    return Prompt(
        id=decode_group_id(message.id),
        token_ids=np.frombuffer(message.token_ids, "<i4"),
        text=message.text,
        ground_truth=message.ground_truth,
        data_source=message.data_source,
        extra=dict(message.extra),
    )


def encode_dump(step: int, version: Version, groups: Sequence[Group]) -> bytes:
    """One consumed batch as a file's content."""
    message = types_pb2.Dump(
        step=step,
        version=encode_version(version),
        groups=[
            types_pb2.Group(
                prompt=encode_prompt(group.prompt),
                samples=encode_samples(group.samples),
                baseline=encode_samples([group.baseline] if group.baseline else []),
            )
            for group in groups
        ],
    )
    return message.SerializeToString()


def decode_dump(content: bytes) -> tuple[int, Version, list[Group]]:
    """Raises ValueError where the content is no dump."""
    try:
        message = types_pb2.Dump.FromString(content)
    except DecodeError as error:
        raise ValueError(str(error)) from None
    return (
        message.step,
        decode_version(message.version),
        [
            Group(
                decode_prompt(group.prompt),
                tuple(decode_samples(group.samples)),
                next(iter(decode_samples(group.baseline)), None),
            )
            for group in message.groups
        ],
    )


def _offsets(lengths: Iterable[int]) -> list[int]:
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    return offsets


def put_segments(message: types_pb2.Segments, segments: Segments) -> None:
    put_tensor(message.token_ids, segments.token_ids)
    put_tensor(message.offsets, segments.offsets)
    put_tensor(message.parents, segments.parents)
    put_tensor(message.groups, segments.groups)


def decode_segments(message: types_pb2.Segments) -> Segments:
    return Segments(
        token_ids=decode_tensor(message.token_ids).astype(np.int32, copy=False),
        offsets=decode_tensor(message.offsets).astype(np.int64, copy=False),
        parents=decode_tensor(message.parents).astype(np.int32, copy=False),
        groups=decode_tensor(message.groups).astype(np.int32, copy=False),
    )


def split_by_groups(segments: Segments, max_tokens: int) -> Iterator[tuple[Segments, slice]]:
    """Whole groups of at most `max_tokens` tokens (more only where one group is larger), and their
    slice of the flat token arrays. Parents count from the first segment of each part."""
    starts = np.flatnonzero(np.diff(segments.groups, prepend=segments.groups[:1] - 1))
    bounds = [*starts.tolist(), len(segments.groups)]
    first = 0
    for i in range(1, len(bounds)):
        last_of_all = i == len(bounds) - 1
        if not last_of_all and segments.offsets[bounds[i + 1]] - segments.offsets[first] <= max_tokens:
            continue
        end = bounds[i]
        yield segments.part(first, end)
        first = end


def join_segments(parts: Sequence[Segments]) -> Segments:
    """The inverse of `split_by_groups`."""
    firsts = np.cumsum([0, *(len(part.parents) for part in parts)])
    tokens = np.cumsum([0, *(len(part.token_ids) for part in parts)])
    return Segments(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        offsets=np.concatenate(
            [
                np.zeros(1, np.int64),
                *(part.offsets[1:] + at for part, at in zip(parts, tokens[:-1], strict=True)),
            ]
        ),
        parents=np.concatenate(
            [
                np.where(part.parents >= 0, part.parents + first, -1).astype(np.int32)
                for part, first in zip(parts, firsts[:-1], strict=True)
            ]
        ),
        groups=np.concatenate([part.groups for part in parts]),
    )


def encode_forward_backward(key: StepKey, batch: Batch) -> Iterator[trainer_pb2.ForwardBackwardRequest]:
    """Chunks of whole groups; the key rides on each."""
    for segments, tokens in split_by_groups(batch.segments, MAX_CHUNK_BYTES // 28):
        request = trainer_pb2.ForwardBackwardRequest(key=encode_step_key(key))
        put_segments(request.segments, segments)
        put_tensor(request.loss_weights, batch.loss_weights[tokens])
        match batch:
            case PolicyBatch(old_logprobs=old, ref_logprobs=ref):
                put_tensor(request.policy.samples, batch.samples[tokens])
                put_tensor(request.policy.advantages, batch.advantages[tokens])
                put_tensor(request.policy.rollout_logprobs, batch.rollout_logprobs[tokens])
                if old is not None:
                    put_tensor(request.policy.old_logprobs, old[tokens])
                if ref is not None:
                    put_tensor(request.policy.ref_logprobs, ref[tokens])
            case ValueBatch():
                put_tensor(request.value.values, batch.values[tokens])
                put_tensor(request.value.returns, batch.returns[tokens])
        yield request


def decode_forward_backward(chunks: Sequence[trainer_pb2.ForwardBackwardRequest]) -> Batch:
    segments = join_segments([decode_segments(chunk.segments) for chunk in chunks])
    loss_weights = _joined(chunk.loss_weights for chunk in chunks)
    match chunks[0].WhichOneof("tensors"):
        case "policy":
            first, parts = chunks[0].policy, [chunk.policy for chunk in chunks]
            has_old, has_ref = first.HasField("old_logprobs"), first.HasField("ref_logprobs")
            return PolicyBatch(
                segments,
                samples=np.concatenate([decode_tensor(part.samples).astype(np.int32) for part in parts]),
                loss_weights=loss_weights,
                advantages=_joined(part.advantages for part in parts),
                rollout_logprobs=_joined(part.rollout_logprobs for part in parts),
                old_logprobs=_joined(part.old_logprobs for part in parts) if has_old else None,
                ref_logprobs=_joined(part.ref_logprobs for part in parts) if has_ref else None,
            )
        case "value":
            values = _joined(chunk.value.values for chunk in chunks)
            return ValueBatch(segments, loss_weights, values, _joined(c.value.returns for c in chunks))
        case _:
            return SupervisedBatch(segments, loss_weights)


def _joined(tensors: Iterable[types_pb2.Tensor]) -> Float32:
    return np.concatenate([decode_tensor(tensor).astype(np.float32, copy=False) for tensor in tensors])


def encode_step_key(key: StepKey) -> trainer_pb2.StepKey:
    return trainer_pb2.StepKey(lineage=key.lineage, step=key.step, minibatch=key.minibatch, role=key.role)


def decode_step_key(message: trainer_pb2.StepKey) -> StepKey:
    return StepKey(message.lineage, message.step, message.minibatch, message.role)


def encode_boxes(tensors: Sequence[str], rows: NDArray[np.void]) -> types_pb2.Boxes:
    """A structured array of integers as columns, in the order of its fields. They are so regular that a plan
    of 825,000 transfers, 94 MiB, becomes 6 (benchmarks/plan_scale.py)."""
    assert rows.dtype.names is not None
    names = "".join(f"{tensor}\0" for tensor in tensors).encode()
    columns = b"".join(rows[name].astype("<i8").tobytes() for name in rows.dtype.names)
    return types_pb2.Boxes(tensors=zlib.compress(names, 1), columns=zlib.compress(columns, 1))


def decode_boxes(
    message: types_pb2.Boxes, dtype: np.dtype[np.void]
) -> tuple[tuple[str, ...], NDArray[np.void]]:
    assert dtype.names is not None
    columns = np.frombuffer(_inflated(message.columns), "<i8").reshape(len(dtype.names), -1)
    rows = np.empty(columns.shape[1], dtype)
    for name, column in zip(dtype.names, columns, strict=True):
        rows[name] = column
    return tuple(_inflated(message.tensors).decode().split("\0")[:-1]), rows


def _inflated(data: bytes) -> bytes:
    """Raises ValueError for what is not zlib's, or larger than any boxes are."""
    try:
        stream = zlib.decompressobj()
        content = stream.decompress(data, MAX_INFLATED_BYTES)
    except zlib.error as error:
        raise ValueError(f"boxes: {error}") from None
    if not stream.eof:
        raise ValueError(f"boxes: cut off, or more than {MAX_INFLATED_BYTES:,} bytes when decompressed")
    return content


def encode_catalog(catalog: Catalog) -> types_pb2.Boxes:
    return encode_boxes(catalog.tensors, catalog.boxes)


def decode_catalog(message: types_pb2.Boxes) -> Catalog:
    """Raises ValueError for boxes of tensors that it does not name."""
    names, boxes = decode_boxes(message, BOX)
    if len(boxes) and not 0 <= boxes["tensor"].min() <= boxes["tensor"].max() < len(names):
        raise ValueError(f"boxes: a tensor that is not among the {len(names)} named")
    return Catalog(names, boxes)


def encode_plan(plan: Plan) -> types_pb2.Plan:
    return types_pb2.Plan(id=plan.id, transfers=encode_boxes(plan.tensors, plan.transfers))


def decode_plan(message: types_pb2.Plan) -> Plan:
    return Plan(message.id, *decode_boxes(message.transfers, TRANSFER))


def encode_stream(stream: StreamManifest) -> types_pb2.StreamManifest:
    return types_pb2.StreamManifest(
        source=stream.source,
        location=stream.location,
        offset=stream.offset,
        plan_id=stream.plan_id,
        num_bytes=stream.num_bytes,
        first=stream.first,
        checksums=encode_tensor(stream.checksums),
        delta=stream.delta,
    )


def decode_stream(message: types_pb2.StreamManifest) -> StreamManifest:
    return StreamManifest(
        source=message.source,
        location=message.location,
        offset=message.offset,
        plan_id=message.plan_id,
        num_bytes=message.num_bytes,
        first=message.first,
        checksums=decode_tensor(message.checksums).astype(np.uint64, copy=False),
        delta=message.delta,
    )


def encode_membership(membership: Membership) -> types_pb2.Membership:
    return types_pb2.Membership(
        epoch=membership.epoch, num_members=membership.num_members, member=membership.member
    )


def decode_membership(message: types_pb2.Membership) -> Membership:
    return Membership(message.epoch, message.num_members, message.member)


def encode_published(published: Published) -> trainer_pb2.PublishWeightsReply:
    return trainer_pb2.PublishWeightsReply(
        streams=[encode_stream(stream) for stream in published.streams],
        num_bytes=published.num_bytes,
        last=published.last,
    )


def decode_published(message: trainer_pb2.PublishWeightsReply) -> Published:
    streams = tuple(decode_stream(stream) for stream in message.streams)
    return Published(streams, message.num_bytes, message.last)


def encode_score_item(item: ScoreItem) -> reward_pb2.ScoreItem:
    message = reward_pb2.ScoreItem()
    put_score_item(message, item)
    return message


def put_score_item(message: reward_pb2.ScoreItem, item: ScoreItem) -> None:
    message.id = str(item.id)
    message.prompt = item.prompt
    message.response = item.response
    message.ground_truth = item.ground_truth
    message.data_source = item.data_source
    message.finish_reason = item.finish_reason.value
    message.response_length = item.response_length
    if item.extra:
        message.extra.update(item.extra)


def decode_score_item(message: reward_pb2.ScoreItem) -> ScoreItem:
    return ScoreItem(
        id=SampleId.parse(message.id),
        prompt=message.prompt,
        response=message.response,
        ground_truth=message.ground_truth,
        data_source=message.data_source,
        finish_reason=FinishReason(message.finish_reason),
        response_length=message.response_length,
        extra=dict(message.extra),
    )


def encode_verdict(verdict: Verdict) -> reward_pb2.Verdict:
    if isinstance(verdict, Graded):
        return reward_pb2.Verdict(
            id=str(verdict.id),
            graded=reward_pb2.Graded(
                value=verdict.value, components=verdict.components, reasons=verdict.reasons
            ),
        )
    return reward_pb2.Verdict(
        id=str(verdict.id),
        error=reward_pb2.GradingError(
            grader=verdict.grader, cause=verdict.cause, retryable=verdict.retryable
        ),
    )


def decode_verdict(message: reward_pb2.Verdict, sample: SampleId) -> Verdict:
    """`sample` is what the message's id stands for."""
    if message.HasField("graded"):
        graded, reasons = message.graded, message.graded.reasons
        components = {name: graded.components[name] for name in graded.components}  # dict() is slow
        return Graded(sample, graded.value, components, dict(reasons) if reasons else {})
    if message.HasField("error"):
        return GradingError(sample, message.error.grader, message.error.cause, message.error.retryable)
    return GradingError(
        sample, grader="", cause="the service sent a verdict without outcome", retryable=False
    )


def parse_score_item(content: bytes) -> ScoreItem:
    return decode_score_item(reward_pb2.ScoreItem.FromString(content))


def parse_verdict(content: bytes, sample: SampleId) -> Verdict:
    return decode_verdict(reward_pb2.Verdict.FromString(content), sample)


def encode_execute(source: str, stdin: bytes, limits: Limits) -> reward_pb2.ExecuteRequest:
    return reward_pb2.ExecuteRequest(
        source=source,
        stdin=stdin,
        timeout_s=limits.timeout_s,
        memory_bytes=limits.memory_bytes,
        output_bytes=limits.output_bytes,
    )


def decode_execute(message: reward_pb2.ExecuteRequest) -> tuple[str, bytes, Limits]:
    """A limit that the message leaves out is that of `Limits`."""
    default = Limits()
    limits = Limits(
        timeout_s=message.timeout_s or default.timeout_s,
        memory_bytes=message.memory_bytes or default.memory_bytes,
        output_bytes=message.output_bytes or default.output_bytes,
    )
    return message.source, message.stdin, limits


def encode_execution(execution: Execution) -> reward_pb2.ExecuteReply:
    return reward_pb2.ExecuteReply(
        status=execution.status.value,
        detail=execution.detail,
        stdout=execution.stdout,
        stderr=execution.stderr,
        wall_s=execution.wall_s,
        cpu_s=execution.cpu_s,
    )


def decode_execution(message: reward_pb2.ExecuteReply) -> Execution:
    return Execution(
        status=Status(message.status),
        detail=message.detail,
        stdout=message.stdout,
        stderr=message.stderr,
        wall_s=message.wall_s,
        cpu_s=message.cpu_s,
    )


def encode_server(server: ExternalServer) -> coordinator_pb2.ExternalServer:
    return coordinator_pb2.ExternalServer(
        kind=server.kind,
        name=server.name,
        url=server.url,
        protocol=server.protocol,
        options=server.options,
        auth=server.auth,
        concurrency=server.concurrency,
        timeout_s=server.timeout_s,
        address=server.address,
    )


def decode_server(message: coordinator_pb2.ExternalServer) -> ExternalServer:
    """Whether kind, protocol and options exist is for `atoll.external` to say."""
    return ExternalServer(
        kind=message.kind,  # type: ignore[arg-type]
        name=message.name,
        url=message.url,
        protocol=message.protocol,
        options=dict(message.options),
        auth=message.auth,
        concurrency=message.concurrency,
        timeout_s=message.timeout_s,
        address=message.address,
    )


def decode_kept_server(content: bytes) -> ExternalServer:
    """What the store keeps of a registered server: its message."""
    return decode_server(coordinator_pb2.ExternalServer.FromString(content))


def encode_server_health(health: ServerHealth) -> coordinator_pb2.ServerHealth:
    return coordinator_pb2.ServerHealth(
        server=encode_server(health.server), well=health.well, cause=health.cause
    )


def decode_server_health(message: coordinator_pb2.ServerHealth) -> ServerHealth:
    return ServerHealth(decode_server(message.server), message.well, message.cause)


def encode_service(entry: ServiceEntry) -> coordinator_pb2.Service:
    return coordinator_pb2.Service(
        role=entry.role, name=entry.name, incarnation=entry.incarnation, address=entry.address
    )


def decode_service(message: coordinator_pb2.Service) -> ServiceEntry:
    return ServiceEntry(message.role, message.name, message.incarnation, message.address)


def decode_payload(content: bytes) -> list[Sample]:
    """Finished samples as they arrive and as the journal keeps them. Raises ValueError as `decode_samples`
    does, and for content that is no such message."""
    return decode_samples(parse_samples(content))


def parse_samples(content: bytes) -> types_pb2.Samples:
    """Raises ValueError for anything else."""
    try:
        return types_pb2.Samples.FromString(content)
    except DecodeError as error:
        raise ValueError(f"samples: {error}") from None


def encode_payload(samples: Iterable[Sample]) -> bytes:
    return encode_samples(samples).SerializeToString()


def encode_journal_payload(number: str, content: bytes) -> bytes:
    payload = journal_pb2.JournalPayload(number=number, content=content)
    return journal_pb2.JournalRecord(payload=payload).SerializeToString()


def encode_journal_index(index: JournalIndex) -> bytes:
    return journal_pb2.JournalRecord(
        index=journal_pb2.JournalIndex(
            issued=index.issued, finished=index.finished, cursor=index.cursor or "", lineages=index.lineages
        )
    ).SerializeToString()


def decode_journal_record(data: bytes) -> tuple[str, bytes] | JournalIndex:
    """A payload with its number, or the index."""
    record = journal_pb2.JournalRecord.FromString(data)
    if record.WhichOneof("record") == "payload":
        return record.payload.number, record.payload.content
    index = record.index
    return JournalIndex(index.issued, index.finished, index.cursor or None, tuple(index.lineages))
