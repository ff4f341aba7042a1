"""What a run has dumped, whichever version of the code wrote it: one type, and a reader of each format.

Letter in shapes: T tokens of a sample: its prompt's, then those of its nodes in their order.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message
from grpc_tools import protoc

from atoll.runtime.dump import read_dump
from atoll.wire.types import WHOLE, Bool, Float32, Group, Int32, Int64, Trajectory

V0 = Path(__file__).parent / "data" / "dump_v0.proto"
NO_VERSION = -1  # of a token that no policy produced


@dataclass(frozen=True, slots=True, eq=False)
class DumpedSample:
    id: str  # "epoch/prompt/index": two runs have different names
    token_ids: Int32  # [T]
    mask: Bool  # [T] True where the policy produced the token
    logprobs: Float32  # [T]
    versions: Int64  # [T] number of the version that produced each token, or NO_VERSION; lineages are random
    rewards: Mapping[str, float]  # by "WHERE" its value, by "WHERE NAME" a component's: see _by_name


def read_samples(path: Path) -> list[DumpedSample]:
    """The samples of one dump in the order of the batch, a greedy baseline after its group's."""
    return read_v0(path) if _is_v0(path.read_bytes()) else read_current(path)


def read_v0(path: Path) -> list[DumpedSample]:
    dump: Any = _v0().FromString(path.read_bytes())
    return [
        sample
        for group in dump.groups
        for columns in (group.samples, group.baseline)
        for sample in _from_columns(np.frombuffer(group.prompt.token_ids, "<i4"), columns)
    ]


def _from_columns(prompt_ids: Int32, columns: Any) -> Iterable[DumpedSample]:
    flat_ids = np.frombuffer(columns.token_ids, "<i4")
    flat_mask = np.frombuffer(columns.loss_mask, np.bool_)
    flat_logprobs = np.frombuffer(columns.logprobs, "<f4")
    flat_versions = np.full(len(flat_ids), NO_VERSION)
    for node, first in enumerate(columns.token_offsets[:-1]):
        for span in range(columns.span_offsets[node], columns.span_offsets[node + 1]):
            tokens = slice(first + columns.span_start[span], first + columns.span_end[span])
            flat_versions[tokens] = columns.versions[columns.span_version[span]].number
    for i, (group, index) in enumerate(zip(columns.group, columns.index, strict=True)):
        id = columns.groups[group]
        first, end = (columns.token_offsets[columns.node_offsets[n]] for n in (i, i + 1))
        rewards = columns.rewards[i].reward if columns.rewards else ()
        last = (
            columns.node_offsets[i + 1] - columns.node_offsets[i] - 1
        )  # the node of a sample's only verdict
        yield DumpedSample(
            f"{id.epoch}/{id.prompt}/{index}",
            np.concatenate([prompt_ids, flat_ids[first:end]]),
            *_below(prompt_ids, flat_mask[first:end], flat_logprobs[first:end], flat_versions[first:end]),
            _by_name((WHOLE if r.node == last else r.node, r.value, r.components) for r in rewards),
        )


def read_current(path: Path) -> list[DumpedSample]:
    """By the code itself."""
    _, groups = read_dump(path)
    return [
        _from_sample(group, sample)
        for group in groups
        for sample in (*group.samples, group.baseline)
        if sample is not None
    ]


def _from_sample(group: Group, sample: Trajectory) -> DumpedSample:
    prompt_ids, nodes = group.prompt.token_ids, sample.nodes
    versions = [np.full(len(node.token_ids), NO_VERSION) for node in nodes]
    for node, versions_T in zip(nodes, versions, strict=True):
        for span in node.spans:
            versions_T[span.start : span.end] = span.version.number
    return DumpedSample(
        f"{sample.id.group.epoch}/{sample.id.group.prompt}/{sample.id.index}",
        np.concatenate([prompt_ids, *(node.token_ids for node in nodes)]),
        *_below(
            prompt_ids,
            np.concatenate([node.loss_mask for node in nodes]),
            np.concatenate([node.logprobs for node in nodes]),
            np.concatenate(versions),
        ),
        _by_name((r.node, r.value, r.components) for r in sample.rewards),
    )


def _below(prompt_ids: Int32, mask: Bool, logprobs: Float32, versions: Int64) -> tuple[Bool, Float32, Int64]:
    """[T] each, with what they are at the prompt's tokens."""
    before = len(prompt_ids), 0
    return (
        np.pad(mask, before),
        np.pad(logprobs, before),
        np.pad(versions, before, constant_values=NO_VERSION),
    )


def _by_name(rewards: Iterable[tuple[int, float, Mapping[str, float]]]) -> dict[str, float]:
    """Of rewards for a node, or for the trajectory: sums, "node 0" or "whole", and "whole exact_match"."""
    sums: dict[str, float] = {}
    for node, value, components in rewards:
        where = "whole" if node == WHOLE else f"node {node}"
        for name, part in ((where, value), *((f"{where} {name}", components[name]) for name in components)):
            sums[name] = sums[name] + part if name in sums else part  # 0.0 + -0.0 would lose the sign
    return sums


@cache
def _v0() -> type[Message]:
    """The class of the old format's message, from its schema alone."""
    with TemporaryDirectory() as folder:
        compiled = Path(folder) / "dump_v0"
        assert protoc.main(["protoc", f"-I{V0.parent}", f"--descriptor_set_out={compiled}", str(V0)]) == 0
        files = descriptor_pb2.FileDescriptorSet.FromString(compiled.read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("atoll.dump_v0.Dump"))


def _is_v0(content: bytes) -> bool:
    """Whether the old schema knows all fields, and every reward names a node: none was for a trajectory."""
    try:
        dump: Any = _v0().FromString(content)
    except DecodeError:
        return False
    size = dump.ByteSize()
    dump.DiscardUnknownFields()
    rewards = (r for g in dump.groups for sample in g.samples.rewards for r in sample.reward)
    return dump.ByteSize() == size and all(reward.node >= 0 for reward in rewards)
