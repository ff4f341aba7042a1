"""Pushes between processes, and commits while a captured graph decodes: parts 9 and 10.

Letters in shapes: B sequences, H hidden size.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from threading import Event, Thread

import numpy as np
import torch
from torch import Tensor

from atoll.cli.plan_weights import CASES, replica_shard_layouts, trainer_shard_layouts
from atoll.config.schema import ParallelConfig
from atoll.rollout.refit import Refit
from atoll.trainer.publish import Publisher
from atoll.weights.plan import plan
from atoll.wire.types import (
    BOX,
    Membership,
    PublishRequest,
    PushPart,
    ShardLayout,
    StreamManifest,
    Version,
)
from benchmarks.gpu.report import Row
from benchmarks.gpu.timing import finish
from benchmarks.weight_devices import measure
from benchmarks.weight_push import flat

CUDA = torch.device("cuda")
LAYERS, HIDDEN, SEQUENCES = 28, 1536, 32
SWITCH_INTERVALS = (5e-3, 1e-6)  # seconds: Python's own, and that of the replica's receiver
ALONE = Membership(1, 1)


def pushes(transport: str = "cuda_ipc", devices: Sequence[str] = ("cuda:0", "cuda:0")) -> Iterator[Row]:
    """A dense model's large tensors, and the many small ones of a mixture of experts."""
    source, target = expert_layouts()
    for name, result in (
        ("339 matrices of float32", measure(transport, devices)),
        ("four layers of 30B-A3B in bfloat16", measure(transport, devices, source, target, "bfloat16")),
    ):
        for what, seconds in result["seconds"].items():
            speed = result["bytes"] / seconds / 1e9
            yield Row(f"{name}: {what}", f"{seconds:.3f} s, {speed:.1f} GB/s")


def expert_layouts(num_layers: int = 4) -> tuple[ShardLayout, ShardLayout]:
    """Of one trainer rank and one replica rank, each in one buffer."""
    spec = next(case.spec for case in CASES if case.model == "30B-A3B")
    spec = replace(spec, num_layers=num_layers)
    [source], [target] = trainer_shard_layouts(spec, ParallelConfig()), replica_shard_layouts(spec, 1)
    return flat(source)[0], flat(target)[0]


class Rooms:
    """Both ends of a transport within this process: rooms that stay readable."""

    def __init__(self, device: torch.device, part_bytes: Sequence[int]) -> None:
        self.rooms = [torch.zeros(size, dtype=torch.uint8, device=device) for size in part_bytes]

    def begin(self, membership: Membership) -> None:
        """Nobody has to be waited for."""

    def room(self, part: int) -> Tensor:
        return self.rooms[part]

    def send(self, part: int, target: int, num_bytes: int) -> tuple[str, int]:
        return str(part), 0

    def take(self, stream: StreamManifest, membership: Membership) -> Tensor:
        return self.rooms[int(stream.location)][: stream.num_bytes]

    def close(self) -> None:
        """Frees nothing."""


def commits(
    device: torch.device = CUDA,
    num_layers: int = LAYERS,
    hidden: int = HIDDEN,
    seconds: float = 10.0,
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[Row]:
    """Decode steps per second without and with a thread that receives and commits; outputs after a commit are
    those of the new weights."""
    torch.manual_seed(0)
    size = num_layers * 8 * hidden * hidden
    live = (torch.randn(size, device=device) / (2 * hidden**0.5)).to(dtype)
    input_BH = torch.randn(SEQUENCES, hidden, device=device, dtype=dtype)
    decode, output_BH = captured(lambda: _decode(live, input_BH, num_layers), device)
    versions = [live.clone().neg_(), live.clone()]  # pushed alternately
    pusher = Pusher(live, versions, num_layers, hidden, device)

    yield Row("decode steps per s, without pushes", f"{_rate(decode, device, seconds):,.0f}")
    usual = sys.getswitchinterval()
    for interval in SWITCH_INTERVALS:
        sys.setswitchinterval(interval)
        with pusher:
            rate = _rate(decode, device, seconds)
        yield Row(
            f"decode steps per s during pushes, switch interval {interval:g} s",
            f"{rate:,.0f}; {pusher.num_commits} commits",
        )
    sys.setswitchinterval(usual)
    for _ in range(2):
        weights = pusher.push()
        decode()
        finish(device)
        torch.testing.assert_close(output_BH, _decode(weights, input_BH, num_layers), rtol=0, atol=0)
    yield Row("outputs after a commit", "equal those of the new weights")


class Pusher:
    """Commits versions one after another, in a thread while it is entered."""

    def __init__(
        self, live: Tensor, versions: Sequence[Tensor], num_layers: int, hidden: int, device: torch.device
    ) -> None:
        rows, columns = 8 * num_layers, hidden * hidden
        boxes = np.array([(t, 0, 1, 0, columns, 0, t * columns, columns) for t in range(rows)], BOX)
        layout = ShardLayout(tuple(f"matrix.{t}" for t in range(rows)), boxes)
        self._plan = plan([layout], [layout], part_elements=1 << 40)
        self._versions, self._source = versions, live.clone()
        self._transport = Rooms(device, [live.nbytes])
        self._publisher = Publisher(0, [self._source], lambda parts: self._transport, stays_readable=True)
        self._refit = Refit([live], Version("bench", 0), self._transport, in_place=True)
        self._dtype = str(live.dtype).removeprefix("torch.")
        self._device, self._stop, self._number = device, Event(), 0
        self._thread = Thread()
        self.num_commits = 0  # since it was entered

    def push(self) -> Tensor:
        """Returns the weights that are live now."""
        self._number += 1
        version, weights = Version("bench", self._number), self._versions[self._number % 2]
        self._publisher.train_on()
        self._source.copy_(weights)
        new_plans = [self._plan] if self._number == 1 else []
        request = PublishRequest(version, self._dtype, {self._plan.id: ALONE}, new_plans, 0)
        published = self._publisher.publish(request)
        self._refit.receive(PushPart(version, published.streams, self._plan, ALONE))
        self._refit.commit(version)
        finish(self._device)
        self.num_commits += 1
        return weights

    def __enter__(self) -> "Pusher":
        self._stop.clear()
        self.num_commits = 0
        self._thread = Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.push()


def captured(function: Callable[[], Tensor], device: torch.device) -> tuple[Callable[[], None], Tensor]:
    """Replays `function`, and what it then has written: a graph on a GPU, the function itself on a CPU."""
    output = function()
    if device.type == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = function()
        return graph.replay, output

    def replay() -> None:
        output.copy_(function())

    return replay, output


def _decode(weights: Tensor, input_BH: Tensor, num_layers: int) -> Tensor:
    """A layer of two matrices, as an MLP has them, for each layer of the model."""
    hidden = input_BH.shape[1]
    state_BH = input_BH
    for layer in weights.view(num_layers, 2, 4 * hidden * hidden).unbind():
        inner = torch.nn.functional.silu(state_BH @ layer[0].view(hidden, 4 * hidden))
        state_BH = torch.nn.functional.rms_norm(
            state_BH + inner @ layer[1].view(4 * hidden, hidden), (hidden,)
        )
    return state_BH


def _rate(decode: Callable[[], None], device: torch.device, seconds: float) -> float:
    """Steps per second; each is awaited, as a scheduler awaits its tokens."""
    steps, started = 0, time.perf_counter()
    while (passed := time.perf_counter() - started) < seconds:
        decode()
        finish(device)
        steps += 1
    return steps / passed
