"""Pushes from trainer layouts into the parameters of real SGLang servers of two ranks.

The trainer's ranks are in this process: their shards are cut by trainer/megatron/names.py, as in a fleet.
"""

import asyncio
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
import xxhash
from safetensors.torch import load_file, save_file

from atoll.rollout.engines.base import Engine
from atoll.runtime.errors import WeightPushError
from atoll.runtime.model_spec import ModelSpec, read_spec
from atoll.trainer.megatron.names import Chunk, tensor_slices
from atoll.trainer.publish import Publisher, merge_published
from atoll.weights.plan import plan
from atoll.weights.transport import shm
from atoll.wire.types import BOX, PublishedPart, PublishRequest, PushPart, Sampling, ShardLayout, Version
from tests.conftest import write_model
from tests.contract.engines import ALONE, ask, collect, logprobs_of
from tests.sglang.engines import V0, started_with

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]

WHOLE = range(2)  # layers of the tiny models
LAYOUTS = {
    # tensor-parallel 2 in each of two pipeline stages, which both hold the tied embedding
    "qwen2": [Chunk(range(s, s + 1), s == 0, s == 1, rank, 2) for s in range(2) for rank in range(2)],
    # two experts on each of two ranks, which both hold everything else
    "qwen3_moe": [Chunk(WHOLE, True, True, experts=range(e, e + 2)) for e in (0, 2)],
    # two data-parallel copies; of SGLang's ranks the first has 64 rows of the vocabulary, the second 6
    "llama": [Chunk(WHOLE, True, True)] * 2,
}
SETTINGS = {
    "qwen2": {"tie_word_embeddings": True},
    "qwen3_moe": {"norm_topk_prob": True, "moe_intermediate_size": 64},  # SGLang pads 32 columns a rank
    "llama": {"vocab_size": 70},
}
PROMPTS = [[7, 30, 12], [40, 41, 42, 43, 44, 45, 46, 47, 3, 4, 5, 6]]
SHORT, LONG = (Sampling(max_new_tokens=number, temperature=0.0) for number in (4, 250))


class Trainer:
    """The ranks of a layout, with the weights of a folder."""

    def __init__(self, folder: Path, layout: Sequence[Chunk], engine: Engine) -> None:
        spec = read_spec(folder)
        shards = [shard(spec, chunk, load_file(folder / "model.safetensors")) for chunk in layout]
        self.plan = plan(
            [shard_layout for shard_layout, _ in shards], engine.shard_layouts(), part_elements=1 << 13
        )
        self._publishers = [
            Publisher(rank, [flat], shm.ShmSender, stays_readable=True)
            for rank, (_, flat) in enumerate(shards)
        ]

    def publish(self, version: Version) -> list[PublishedPart]:
        parts: list[PublishedPart] = []
        while not parts or not parts[-1].last:
            each = [
                publisher.publish(
                    PublishRequest(version, "float32", {self.plan.id: ALONE}, [self.plan], len(parts))
                )
                for publisher in self._publishers
            ]
            parts.append(merge_published(each))
        return parts

    async def stage(self, engine: Engine, version: Version, parts: Sequence[PublishedPart]) -> int:
        return sum(
            [await engine.receive(PushPart(version, part.streams, self.plan, ALONE)) for part in parts]
        )

    def close(self) -> None:
        for publisher in self._publishers:
            publisher.close()


def shard(spec: ModelSpec, chunk: Chunk, model: dict[str, torch.Tensor]) -> tuple[ShardLayout, torch.Tensor]:
    """One rank's shard layout and its buffer."""
    names, boxes, parts, offset = list(model), [], [], 0
    for held in tensor_slices(spec, chunk).values():
        for piece in held:
            place = (piece.row, piece.rows, piece.column, piece.columns)
            boxes.append((names.index(piece.tensor), *place, 0, offset, piece.columns))
            matrix = model[piece.tensor].reshape(len(model[piece.tensor]), -1)
            rows, columns = (
                slice(piece.row, piece.row + piece.rows),
                slice(piece.column, piece.column + piece.columns),
            )
            parts.append(matrix[rows, columns].flatten())
            offset += piece.rows * piece.columns
    return ShardLayout(tuple(names), np.array(boxes, BOX)), torch.cat(parts)


def updated(folder: Path, into: Path, seed: int) -> Path:
    """The model with different weights."""
    shutil.copytree(folder, into)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.05)
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    return into


def file_sums(folder: Path) -> dict[str, int]:
    tensors = load_file(folder / "model.safetensors")
    return {name: xxhash.xxh3_64_intdigest(tensor.numpy().tobytes()) for name, tensor in tensors.items()}


async def assert_serves(engine: Engine, folder: Path, version: Version, row: int) -> None:
    assert await engine.checksums() == (version, file_sums(folder))
    requests = [ask(prompt, row=row + i) for i, prompt in enumerate(PROMPTS)]
    for (i, _), completion in (await collect(engine, requests)).items():
        assert {span.version for span in completion.spans} == {version}
        expected = logprobs_of(folder, PROMPTS[i - row], completion.token_ids)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=LAYOUTS)
async def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[str, Path, Engine]]:
    family = request.param
    folder = write_model(tmp_path_factory.mktemp(family), family, **SETTINGS[family])
    engine = await started_with(tp_size=2)(folder)
    yield family, folder, engine
    await engine.close()


async def test_pushes(
    served: tuple[str, Path, Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order: a complete push during a request; one that never goes live; a commit whose caller leaves."""
    family, folder, engine = served
    versions = [replace(V0, number=number) for number in range(4)]
    await assert_serves(engine, folder, V0, row=0)

    first = updated(folder, tmp_path / "1", seed=1)
    trainer = Trainer(first, LAYOUTS[family], engine)
    requests = [ask(PROMPTS[1], SHORT, row=10), ask(PROMPTS[0], LONG, row=11)]
    async with asyncio.timeout(60), aclosing(engine.generate(requests)) as stream:
        await anext(stream)  # the short one
        await trainer.stage(engine, versions[1], trainer.publish(versions[1]))
        stall_s = await engine.commit(versions[1])
        (completion,) = await anext(stream)
    spans = completion.spans
    assert [span.version for span in spans] == [V0, versions[1]]
    assert 0 < spans[0].end == spans[1].start < spans[1].end == LONG.max_new_tokens
    assert 0 < stall_s < 5
    await assert_serves(engine, first, versions[1], row=20)
    trainer.close()

    second = updated(folder, tmp_path / "2", seed=2)
    trainer = Trainer(second, LAYOUTS[family], engine)
    parts = trainer.publish(versions[2])
    for broken in (corrupted(parts), orphaned(parts)):
        with pytest.raises(WeightPushError):
            await trainer.stage(engine, versions[2], broken)
        with pytest.raises(WeightPushError, match=f"commit of {versions[2]}"):
            await engine.commit(versions[2])
    await trainer.stage(engine, versions[2], parts[:-1])
    with pytest.raises(WeightPushError, match="have not arrived"):
        await engine.commit(versions[2])
    await engine.rollback(versions[2])
    await assert_serves(engine, first, versions[1], row=30)

    await trainer.stage(engine, versions[3], trainer.publish(versions[3]))
    await give_up_in_its_midst(engine, engine.commit(versions[3]), monkeypatch)
    await assert_serves(engine, second, versions[3], row=40)
    trainer.close()


async def give_up_in_its_midst(
    engine: Engine, commit: Coroutine[Any, Any, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancels the commit once SGLang has been told to load the weights."""
    begun, to_the_ranks = asyncio.Event(), engine._workers.commit

    async def noticed(*arguments: Any) -> None:
        begun.set()
        await to_the_ranks(*arguments)

    monkeypatch.setattr(engine._workers, "commit", noticed)
    caller = asyncio.ensure_future(commit)
    await begun.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller


def corrupted(parts: Sequence[PublishedPart]) -> list[PublishedPart]:
    """The last part does not match its checksum."""
    *others, stream = parts[-1].streams
    return [*parts[:-1], replace(parts[-1], streams=(*others, replace(stream, checksum=stream.checksum ^ 1)))]


def orphaned(parts: Sequence[PublishedPart]) -> list[PublishedPart]:
    """The sender of the last part was killed."""
    sender = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from atoll.weights.transport.shm import SharedSegment; s = SharedSegment(1 << 20); "
            "print(s.location, flush=True); sys.stdin.read()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert sender.stdout is not None
    location = sender.stdout.readline().strip()
    sender.kill()
    sender.communicate()
    *others, stream = parts[-1].streams
    return [*parts[:-1], replace(parts[-1], streams=(*others, replace(stream, location=location)))]
