"""The coordinator's groups and samples <-> files and values of the store. Pure."""

from collections.abc import Iterator, Sequence

import numpy as np
from google.protobuf.message import DecodeError

from atoll.wire.codec.trajectories import decode_trajectories, encode_trajectories
from atoll.wire.codec.values import decode_group_id, decode_version, encode_group_id, encode_version
from atoll.wire.types import Group, JournalIndex, Prompt, Version
from atoll.wire.v1 import journal_pb2, types_pb2


def encode_prompt(prompt: Prompt) -> types_pb2.Prompt:
    return types_pb2.Prompt(
        id=encode_group_id(prompt.id),
        token_ids=prompt.token_ids.astype("<i4", copy=False).tobytes(),
        text=prompt.text,
        ground_truth=prompt.ground_truth,
        data_source=prompt.data_source,
        extra=prompt.extra,
        agent=prompt.agent,
    )


def decode_prompt(message: types_pb2.Prompt) -> Prompt:
    return Prompt(
        id=decode_group_id(message.id),
        token_ids=np.frombuffer(message.token_ids, "<i4"),
        text=message.text,
        ground_truth=message.ground_truth,
        data_source=message.data_source,
        extra=dict(message.extra),
        agent=message.agent,
    )


def encode_dump(step: int, version: Version, groups: Sequence[Group]) -> Iterator[bytes]:
    """One consumed batch as a file's content, in pieces that follow one another: each holds the interpreter
    for one group only, and the batch is never in memory twice."""
    yield types_pb2.Dump(step=step).SerializeToString()
    for group in groups:
        encoded = types_pb2.Group(
            prompt=encode_prompt(group.prompt),
            samples=encode_trajectories(group.samples),
            baseline=encode_trajectories([group.baseline] if group.baseline else []),
        )
        yield types_pb2.Dump(groups=[encoded]).SerializeToString()
    yield types_pb2.Dump(version=encode_version(version)).SerializeToString()


def decode_dump(content: bytes) -> tuple[int, Version, list[Group]]:
    """Raises ValueError if the content is no dump."""
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
                tuple(decode_trajectories(group.samples)),
                next(iter(decode_trajectories(group.baseline)), None),
            )
            for group in message.groups
        ],
    )


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
