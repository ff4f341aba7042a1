"""Pushes between host and device, emulated on a CPU: both ends choose the same checksum wherever boxes and
parts lie, and a device gets few launches."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
import xxhash
from torch.utils._python_dispatch import TorchDispatchMode

from atoll.cli.plan_weights import replica_shard_layouts, trainer_shard_layouts
from atoll.config.schema import ParallelConfig
from atoll.rollout.refit import Refit
from atoll.runtime.errors import WeightPushError
from atoll.runtime.model_spec import Experts, ModelSpec
from atoll.trainer.publish import Publisher
from atoll.weights.plan import plan
from atoll.wire.types import (
    Membership,
    PublishedPart,
    PublishRequest,
    PushPart,
    ShardLayout,
    StreamManifest,
    Version,
)
from tests.builders import model_spec
from tests.unit.test_weight_boxes import words_sum
from tests.unit.weight_layouts import Shard, random_model, shards

V0, V1, V2 = (Version("a3f0", number) for number in range(3))
ALONE = Membership(1, 1)


class OnDevice(torch.Tensor):
    """A tensor in host memory that claims to be on a device. So does what is computed from it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs)
        return args[0] if func is torch.Tensor.copy_ else result  # which may be on the host

    @property
    def is_cuda(self) -> bool:
        return True

    def cpu(self, *arguments: object, **options: object) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)

    def numpy(self, *arguments: object, **options: object) -> Any:
        raise TypeError("the memory of a device cannot be read on the host")


KINDS = {"host": torch.Tensor, "device": OnDevice}


class Memory:
    """Sender and receiver of a transport that keeps its parts on the host or on a device."""

    def __init__(self, kind: str, part_bytes: Sequence[int]) -> None:
        self._rooms = [torch.zeros(size, dtype=torch.uint8).as_subclass(KINDS[kind]) for size in part_bytes]

    def begin(self, membership: Membership) -> None: ...

    def room(self, part: int) -> torch.Tensor:
        return self._rooms[part]

    def send(self, part: int, target: int, num_bytes: int) -> tuple[str, int]:
        return "", part

    def take(self, stream: StreamManifest, membership: Membership) -> torch.Tensor:
        return self._rooms[stream.offset][: stream.num_bytes]

    def close(self) -> None: ...


class Pushes:
    """One trainer rank and one replica rank in bfloat16.

    "merged" sources are those of LoRA: matrices that have adapters are merged on the host, others are on the
    device. A "staged" target is on a device and stages on the host.
    """

    def __init__(self, source: str, part: str, target: str, **sender: bool) -> None:
        self._target_kind = target
        (self._source,), (self._target,) = shards(1), shards(1, dtype=torch.bfloat16, gap=3)
        self._plan = plan([self._source.shard_layout], [self._target.shard_layout], part_elements=400)
        kinds = ("host", "device") if source == "merged" else (source, source)
        buffers = [b.as_subclass(KINDS[kind]) for b, kind in zip(self._source.buffers, kinds, strict=True)]
        self._publisher = Publisher(
            0, buffers, partial(self._open, part), **{"stays_readable": True} | sender
        )

    def _open(self, part: str, part_bytes: Sequence[int]) -> Memory:
        self.memory = Memory(part, part_bytes)
        on_host = self._target_kind == "host"
        live = [b.as_subclass(KINDS["host" if on_host else "device"]) for b in self._target.buffers]
        staging = "host" if self._target_kind == "staged" else "device"
        self.refit = Refit(live, V0, self.memory, in_place=not on_host, staging=staging)
        return self.memory

    def publish(self, version: Version) -> list[PublishedPart]:
        parts: list[PublishedPart] = []
        while not parts or not parts[-1].last:
            request = PublishRequest(version, "bfloat16", {self._plan.id: ALONE}, [self._plan], len(parts))
            parts.append(self._publisher.publish(request))
        return parts

    def receive(self, version: Version, parts: Sequence[PublishedPart]) -> int:
        return sum(self.refit.receive(PushPart(version, part.streams, self._plan, ALONE)) for part in parts)

    def push(self, version: Version, model: dict[str, torch.Tensor]) -> tuple[int, int]:
        """Returns the bytes sent and copied. The replica then holds the model."""
        self._source.fill(model)
        parts = self.publish(version)
        num_bytes = self.receive(version, parts)
        self.assert_live(version, model)
        return sum(part.num_bytes for part in parts), num_bytes

    def assert_live(self, version: Version, model: dict[str, torch.Tensor]) -> None:
        got = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
        live = [buffer.as_subclass(torch.Tensor) for buffer in self.refit.commit(version)]
        Shard(self._target.shard_layout, live).read_into(got)
        for name, tensor in model.items():
            torch.testing.assert_close(got[name], tensor.bfloat16().float(), rtol=0, atol=0)


MODEL_BYTES = 2 * sum(tensor.numel() for tensor in random_model(0).values())
EVERYWHERE = list(product(("host", "device", "merged"), KINDS, ("host", "device", "staged")))


@pytest.mark.parametrize(("source", "part", "target"), EVERYWHERE)
def test_a_full_push_from_and_to_any_memory(source, part, target):
    pushes = Pushes(source, part, target)
    model = random_model(1)
    assert pushes.push(V1, model) == (MODEL_BYTES, MODEL_BYTES)
    assert pushes.push(V2, model) == (0, 0)  # nothing changed
    for stream in (stream for published in pushes.publish(V2) for stream in published.streams):
        data = pushes.memory.take(stream, ALONE).as_subclass(torch.Tensor).numpy().tobytes()
        by_definition = {"host": xxhash.xxh3_64_intdigest, "device": words_sum}[part]
        assert stream.checksum == by_definition(data)


@pytest.mark.parametrize(("source", "part", "target"), EVERYWHERE)
def test_a_delta_from_and_to_any_memory(source, part, target):
    pushes = Pushes(source, part, target, stays_readable=False, delta=True)
    model = random_model(1)
    assert pushes.push(V1, model) == (MODEL_BYTES, MODEL_BYTES)
    for tensor in model.values():
        tensor[-1, -1] += 1
    sent, copied = pushes.push(V2, model)
    assert 0 < sent < MODEL_BYTES / 4 < copied  # whole parts are staged


@pytest.mark.parametrize("target", ["host", "device", "staged"])
def test_what_was_released_is_brought_again_as_a_whole(target):
    """Also the version that was live, of which the trainer sends nothing again."""
    pushes = Pushes("device", "device", target)
    model = random_model(1)
    pushes.push(V1, model)
    for buffer in pushes.refit.commit(V1):
        buffer.zero_()  # as released memory is
    pushes.refit.release()
    pushes.refit.restore()
    with pytest.raises(WeightPushError, match="commit of a3f0:1, but nothing is staged"):
        pushes.refit.commit(V1)
    *parts, last = pushes.publish(V1)
    num_bytes = pushes.receive(V1, parts)
    with pytest.raises(WeightPushError, match=f"1 of {len(parts) + 1} parts have not arrived"):
        pushes.refit.check(V1)
    assert num_bytes + pushes.receive(V1, [last]) == MODEL_BYTES
    pushes.assert_live(V1, model)
    pushes.receive(V2, pushes.publish(V2))
    pushes.refit.release()  # between the last part and the commit
    with pytest.raises(WeightPushError, match="commit of a3f0:2, but nothing is staged"):
        pushes.refit.commit(V2)


class Launches(TorchDispatchMode):
    """Counts what a GPU would be asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.num_launches = 0
        self.num_ops = 0  # that Python calls, views among them, but for fused copies

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._foreach_copy_.default:
            self.num_launches += copy_launches(*args[:2])
        else:
            self.num_ops += 1
            self.num_launches += not func.is_view
        return func(*args, **(kwargs or {}))


def copy_launches(into: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> int:
    """Of foreach_tensor_copy_list_kernel_cuda_ (ForeachBinaryOpList.cu). It fuses dense tensors of one dtype
    and device with the strides of their counterparts: 64 per launch, in 320 blocks of 65,536 elements."""
    fused = all(
        box.is_cuda
        and source.is_cuda
        and source.dtype == sources[0].dtype
        and box.stride() == source.stride()
        and box.is_contiguous()
        for box, source in zip(into, sources, strict=True)
    )
    num_blocks = sum(-(-box.numel() // 65536) for box in into)
    return max(-(-len(into) // 64), -(-num_blocks // 320)) if fused else len(into)


def spec_of(num_experts: int) -> ModelSpec:
    """A small Qwen3: its layers have as many tensors as a large one's."""
    experts = Experts(num=num_experts, per_token=8, intermediate_size=16, norm_topk_prob=True)
    return model_spec(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=96,
        head_dim=8,
        qkv_bias=False,
        qk_norm=True,
        experts=experts if num_experts else None,
    )


@dataclass(frozen=True, slots=True)
class Counts:
    transfers: int
    parts: int
    ops: int
    launches: int


@cache
def count_push(num_experts: int, num_parts: int, staging: str = "device") -> Counts:
    """Of a push from two ranks to a replica of two, all on devices."""
    spec = spec_of(num_experts)
    layout = ParallelConfig(expert=2, data=2) if num_experts else ParallelConfig(tensor=2)
    sources, targets = trainer_shard_layouts(spec, layout), replica_shard_layouts(spec, 2)
    size = sum(int((t.boxes["rows"] * t.boxes["columns"]).sum()) for t in targets)
    push_plan = plan(sources, targets, part_elements=size // num_parts)

    def buffers(shard_layout: ShardLayout, dtype: torch.dtype) -> list[torch.Tensor]:
        boxes = shard_layout.boxes
        ends = boxes["offset"] + boxes["rows"] * boxes["stride"]
        return [
            torch.randn(int(ends[boxes["buffer"] == buffer].max())).to(dtype).as_subclass(OnDevice)
            for buffer in range(int(boxes["buffer"].max()) + 1)
        ]

    memories: list[Memory] = []

    def open_sender(part_bytes: Sequence[int]) -> Memory:
        memories.append(Memory("device", part_bytes))
        return memories[-1]

    trained = [buffers(shard_layout, torch.float32) for shard_layout in sources]
    publishers = [Publisher(r, b, open_sender, stays_readable=True) for r, b in enumerate(trained)]
    refits = [
        Refit(
            buffers(shard_layout, torch.bfloat16),
            V0,
            _FromAll(memories),
            rank,
            in_place=True,
            staging=staging,
        )
        for rank, shard_layout in enumerate(targets)
    ]
    for version in (V1, V2):  # the first makes the views
        for shard in trained:
            for buffer in shard:
                buffer.add_(1)
        with Launches() as counted:
            for part in range(int(push_plan.transfers["round"].max()) + 1):
                request = PublishRequest(version, "bfloat16", {push_plan.id: ALONE}, [push_plan], part)
                streams = [
                    stream for publisher in publishers for stream in publisher.publish(request).streams
                ]
                for refit in refits:
                    refit.receive(PushPart(version, streams, push_plan, ALONE))
            for refit in refits:
                refit.commit(version)
    parts = {tuple(t) for t in push_plan.transfers[["source", "round"]].tolist()}
    return Counts(len(push_plan.transfers), len(parts), counted.num_ops, counted.num_launches)


@dataclass(frozen=True, slots=True)
class _FromAll:
    memories: Sequence[Memory]  # by trainer rank

    def take(self, stream: StreamManifest, membership: Membership) -> torch.Tensor:
        return self.memories[stream.source].take(stream, membership)

    def close(self) -> None: ...


@pytest.mark.parametrize("staging", ["device", "host"])
@pytest.mark.parametrize(("num_experts", "num_parts"), [(128, 8), (0, 2)])
def test_a_push_has_at_most_two_launches_per_transfer(num_experts, num_parts, staging):
    counts = count_push(num_experts, num_parts, staging)
    assert counts.launches <= 2 * counts.transfers


def test_a_part_takes_as_many_calls_however_many_transfers_it_has():
    few, many = count_push(16, 8), count_push(128, 8)
    assert few.parts == many.parts
    assert few.transfers < many.transfers / 4
    assert few.ops == many.ops
