"""Engines under contract, and what they are measured against: transformers, and a trainer of one rank."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from atoll.rollout.engines.base import Completion, Engine
from atoll.rollout.engines.local import LocalEngine
from atoll.runtime.model_spec import read_spec
from atoll.trainer.publish import Publisher
from atoll.weights.plan import plan
from atoll.weights.transport import shm
from atoll.wire.types import (
    BOX,
    Membership,
    PublishRequest,
    PushPart,
    Sampling,
    ShardLayout,
    TurnRequest,
    Version,
)
from tests.builders import group_id, turn_request

V0 = Version("a3f0", 0)
ALONE = Membership(epoch=0, num_members=1)
GREEDY = Sampling(max_new_tokens=24, temperature=0.0)
ENDLESS = 3000  # tokens of a sequence that is not to end
PROMPTS = [[7, 30, 12], [5], [40, 41, 42, 43, 44, 45, 46, 47, 3, 4, 5, 6], [9, 9, 9, 9, 9, 9]]


async def start_local(
    folder: Path,
    *,
    slots: int = 8,
    max_length: int = 4096,
    dtype: str = "float32",
    takes_turns: bool = False,
) -> Engine:
    return LocalEngine(
        folder,
        dtype=getattr(torch, dtype),
        slots=slots,
        max_length=max_length,
        version=V0,
        receiver=shm.ShmReceiver(),
        records_routes=has_experts(folder),
        takes_turns=takes_turns,
    )


def has_experts(folder: Path) -> bool:
    return read_spec(folder).experts is not None


@dataclass(frozen=True, slots=True)
class Kind:
    """An engine that keeps the contract, and the families (fixtures of tests/conftest.py) that are worth
    a start of it."""

    start: Callable[[Path], Awaitable[Engine]]  # serves the folder's weights as V0, in fp32
    families: tuple[str, ...]
    # tokens that take it seconds: a sequence which something is to catch in its midst, though processes
    # stand still for a moment, as they do on a busy machine
    long: int


LOCAL = {
    "local": Kind(
        start_local,
        (
            "tiny_qwen2",
            "tiny_qwen2_tied",
            "tiny_qwen3",
            "tiny_llama3",
            "tiny_qwen3_moe",
            "tiny_qwen3_moe_plain",
        ),
        long=600,
    )
}


def kinds() -> dict[str, Kind]:
    """Those of this environment: SGLang's own, or ours."""
    if find_spec("sglang.srt") is None:
        return LOCAL
    from tests.sglang.engines import started_with

    # the families of two ranks, and tied embeddings, are in tests/sglang/test_weights.py
    return {
        "sglang": Kind(started_with(tp_size=1), ("tiny_llama3", "tiny_qwen3_moe"), long=1000),
        "sglang-tp2": Kind(started_with(tp_size=2), (), long=200),
    }


KINDS = kinds()


class FakeTrainer:
    """Publishes the weights of Hugging Face folders of one model, as a trainer of one rank would."""

    def __init__(self, folder: Path, engine: Engine) -> None:
        tensors = load_file(folder / "model.safetensors")
        boxes, offset = [], 0
        for t, tensor in enumerate(tensors.values()):
            rows, columns = tensor.shape if tensor.ndim == 2 else (len(tensor), 1)
            boxes.append((t, 0, rows, 0, columns, 0, offset, columns))
            offset += tensor.numel()
        self._names = tuple(tensors)
        self._buffer = torch.empty(offset)
        self._plan = plan(
            [ShardLayout(self._names, np.array(boxes, BOX))], engine.shard_layouts(), part_elements=1 << 20
        )
        self._publisher = Publisher(0, [self._buffer], shm.ShmSender, stays_readable=True)

    async def stage(self, engine: Engine, folder: Path, version: Version) -> None:
        tensors = load_file(folder / "model.safetensors")
        self._buffer.copy_(torch.cat([tensors[name].flatten() for name in self._names]))
        dtype, published, part = engine.info().dtype, None, 0
        while published is None or not published.last:
            published = self._publisher.publish(
                PublishRequest(version, dtype, {self._plan.id: ALONE}, [self._plan], part)
            )
            await engine.receive(PushPart(version, published.streams, self._plan, ALONE))
            part += 1

    def close(self) -> None:
        self._publisher.close()


@dataclass(slots=True)
class Live:
    """A started engine that tests share, and what it serves: a push makes `other` live."""

    engine: Engine
    folder: Path  # whose weights are live
    other: Path  # other weights of the same model
    long: int  # see Kind
    version: Version = V0
    _trainer: FakeTrainer = field(init=False)

    def __post_init__(self) -> None:
        self._trainer = FakeTrainer(self.folder, self.engine)

    async def stage(self) -> Version:
        """Stages the other weights as the version after the live one."""
        version = Version(self.version.lineage, self.version.number + 1)
        await self._trainer.stage(self.engine, self.other, version)
        return version

    async def commit(self, version: Version) -> float:
        stall_s = await self.engine.commit(version)
        self.folder, self.other, self.version = self.other, self.folder, version
        return stall_s

    async def push(self) -> None:
        await self.commit(await self.stage())

    async def close(self) -> None:
        await self.engine.close()
        self._trainer.close()


async def start_live(kind: str, folder: Path, other: Path) -> Live:
    """`other` is an empty folder, which gets the model after an update."""
    shutil.copytree(folder, other, dirs_exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(other)
    return Live(await KINDS[kind].start(folder), folder, other, KINDS[kind].long)


@cache
def reference(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


_GREEDY: dict[tuple[Path, tuple[int, ...]], list[int]] = {}  # the longest answers so far


def reference_greedy(folder: Path, prompt: Sequence[int], num_tokens: int) -> list[int]:
    key = folder, tuple(prompt)
    if len(_GREEDY.get(key, [])) < num_tokens:
        output = reference(folder).generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        _GREEDY[key] = output[0, len(prompt) :].tolist()
    return _GREEDY[key][:num_tokens]


@torch.no_grad()
def reference_logits(folder: Path, prompt: Sequence[int], response: Sequence[int]) -> np.ndarray:
    """[T, V] in front of each token of the response."""
    logits = reference(folder)(torch.tensor([[*prompt, *response]])).logits[0]
    return logits[len(prompt) - 1 : -1].double().numpy()


@torch.no_grad()
def reference_routes(folder: Path, ids: Sequence[int], per_token: int) -> np.ndarray:
    """[T, Y, C] experts of each token and layer, ascending."""
    logits = reference(folder)(torch.tensor([ids]), output_router_logits=True).router_logits
    return torch.stack([layer.topk(per_token).indices.sort().values for layer in logits], 1).numpy()


@torch.no_grad()
def continued(old: Path, new: Path, prompt: Sequence[int], response: Sequence[int], change: int) -> list[int]:
    """Greedy tokens of the new model after `change` tokens of the old one, whose keys and values stay."""
    ids = [*prompt, *response[: change - 1]]
    cache = reference(old)(torch.tensor([ids]), use_cache=True).past_key_values
    tokens = [*response[:change]]
    while len(tokens) < len(response):
        logits = reference(new)(torch.tensor([tokens[-1:]]), past_key_values=cache, use_cache=True).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens


def sampling_logprobs(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """[V] of one position, by the definition: temperature, then the top k, then the smallest set of
    probability top_p, each renormalised."""
    weights = np.exp((logits - logits.max()) / temperature)
    order = np.argsort(-weights)
    if top_k:
        weights[order[top_k:]] = 0
    weights /= weights.sum()
    mass_before = np.cumsum(weights[order]) - weights[order]
    weights[order[mass_before >= top_p]] = 0
    with np.errstate(divide="ignore"):
        return np.log(weights / weights.sum())


def logprobs_of(
    folder: Path,
    prompt: Sequence[int],
    response: Sequence[int],
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> list[float]:
    """Of each token of the response, under the distribution that it was drawn from."""
    logits = reference_logits(folder, prompt, response)
    return [
        sampling_logprobs(at, temperature, top_k, top_p)[token]
        for at, token in zip(logits, response, strict=True)
    ]


def ask(
    prompt: Sequence[int],
    sampling: Sampling = GREEDY,
    *,
    row: int = 0,
    indices: Sequence[int] = (0,),
    attempt: int = 0,
) -> TurnRequest:
    return turn_request(prompt, group=group_id(row), indices=indices, attempt=attempt, sampling=sampling)


async def collect(engine: Engine, requests: Sequence[TurnRequest]) -> dict[tuple[int, int], Completion]:
    """By row and index; every sample exactly once."""
    found: dict[tuple[int, int], Completion] = {}
    async with asyncio.timeout(60):
        async for completions in engine.generate(requests):
            for completion in completions:
                key = (completion.id.sample.group.prompt, completion.id.sample.index)
                assert key not in found
                found[key] = completion
    assert sorted(found) == sorted((r.group.prompt, id.sample.index) for r in requests for id in r.ids)
    return found


async def one(engine: Engine, request: TurnRequest) -> Completion:
    (completion,) = (await collect(engine, [request])).values()
    return completion
