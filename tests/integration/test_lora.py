"""Adapters against the peft library: updates, files in both directions, pushes, checkpoints.

One launch per layout makes all its assertions.
"""

import asyncio
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from atoll.config.schema import LoraConfig, ParallelConfig
from atoll.rollout.engines.base import Completion
from atoll.rollout.engines.local import LocalEngine
from atoll.trainer.checkpoint import Checkpointer
from atoll.trainer.megatron.adapters.lora import weights_to_push
from atoll.trainer.megatron.hf import export_hf
from atoll.trainer.megatron.model import ModelSettings, initialize_parallel
from atoll.trainer.publish import Publisher, merge_published
from atoll.trainer.step import Learner
from atoll.weights.plan import plan
from atoll.weights.transport import shm
from atoll.wire.types import (
    LoraSpec,
    Membership,
    Plan,
    PublishedPart,
    PublishRequest,
    PushPart,
    Sampling,
    Segments,
    ShardLayout,
    StreamManifest,
    Version,
)
from tests.builders import turn_request
from tests.conftest import write_model
from tests.plain_loop import ADAMW, PPO, TEMPERATURE, Reference, check_updates, key, reference_loop, run_step
from tests.torch_ranks import run_ranks
from tests.trainer_models import policy_forward, policy_learner

pytestmark = pytest.mark.long

RANK, ALPHA = 4, 6.0
ALL = LoraConfig().targets
IDS = torch.arange(3, 43).view(2, 20)
PROMPT = np.array([7, 30, 12, 5], np.int32)
SAMPLING = Sampling(max_new_tokens=12, temperature=TEMPERATURE)
ALONE = Membership(epoch=0, num_members=1)
OLD, NEW = Version("a3f0", 0), Version("a3f0", 1)

Push = Literal["merged", "adapter"]
PUSHES: tuple[Push, ...] = ("merged", "adapter")


def write_start(folder: Path, base: Path, targets: tuple[str, ...]) -> Path:
    """Writes an adapter created by peft; neither A nor B is 0."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    config = PeftConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(targets), init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(folder)
    return folder


def new_learner(base: Path, lora: LoraConfig, parallel: ParallelConfig) -> Learner:
    initialize_parallel(parallel)
    recompute = "full" if parallel.world_size == 1 else "none"
    settings = ModelSettings(sequence_parallel=parallel.sequence, recompute=recompute, lora=lora)
    optimizer = ADAMW.model_copy(update={"distributed": parallel.data > 1})
    return policy_learner(policy_forward(base, temperature=TEMPERATURE, settings=settings), optimizer, PPO)


def check_rank(
    base: Path, lora: LoraConfig, reference: Reference, parallel: ParallelConfig, out: Path
) -> tuple[dict[Push, int], float]:
    """Returns the bytes of a push, and the gradient norm of the step after the checkpoint."""
    learner = new_learner(base, lora, parallel)
    check_updates(learner, reference)
    export_hf(learner.model, out / "model")
    saved = Checkpointer()
    saved.save(learner, out / "checkpoint").result()
    saved.close()
    num_bytes = {push: check_push(learner, base, lora.model_copy(update={"push": push})) for push in PUSHES}
    return num_bytes, run_step(learner, [(key(7), reference.batches[0])])["actor/grad_norm"]


def check_push(learner: Learner, base: Path, lora: LoraConfig) -> int:
    """A replica on rank 0 generates with the trainer's logprobs. Returns the bytes that the ranks have
    written."""
    served = weights_to_push(replace(learner.model, lora=lora))
    engine = None
    if dist.get_rank() == 0:
        engine = LocalEngine(
            base,
            dtype=torch.float32,
            slots=4,
            max_length=64,
            version=OLD,
            receiver=shm.ShmReceiver(),
            lora=LoraSpec(lora.rank, lora.alpha, lora.targets) if lora.push == "adapter" else None,
        )
    sources: list[ShardLayout] = gathered(served.shard_layout)
    (targets, *_) = gathered(engine.shard_layouts()[0] if engine else None)
    way = plan(sources, [targets], part_elements=1 << 20)
    publisher = Publisher(dist.get_rank(), served.buffers, shm.ShmSender, served.refresh, stays_readable=True)
    rounds: list[PublishedPart] = []
    while not rounds or not rounds[-1].last:
        rounds.append(publisher.publish(PublishRequest(NEW, "float32", {way.id: ALONE}, [way], len(rounds))))
    published = merge_published(rounds)
    streams = [stream for part in gathered(published.streams) for stream in part]
    completion = asyncio.run(receive_and_generate(engine, streams, way)) if engine else None
    (drawn, *_) = gathered(completion)
    publisher.close()
    tokens = np.concatenate([PROMPT, drawn.token_ids]).astype(np.int32)
    segments = Segments(tokens, np.array([0, len(tokens)]), np.array([-1], np.int32), np.zeros(1, np.int32))
    logprobs = learner.forward.compute_logprobs(segments)[len(PROMPT) :]
    np.testing.assert_allclose(drawn.logprobs, logprobs, rtol=0, atol=1e-4)
    return sum(gathered(published.num_bytes))


def gathered(value: Any) -> list[Any]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


async def receive_and_generate(engine: LocalEngine, streams: list[StreamManifest], way: Plan) -> Completion:
    request = turn_request(PROMPT, sampling=SAMPLING)
    try:
        await engine.receive(PushPart(NEW, streams, way, ALONE))
        await engine.commit(NEW)
        async with aclosing(engine.generate([request])) as stream:
            (completion,) = await anext(stream)
    finally:
        await engine.close()
    return completion


def check_resumed(
    base: Path, lora: LoraConfig, reference: Reference, out: Path, expected_norm: float
) -> None:
    learner = new_learner(base, lora, ParallelConfig())
    saved = Checkpointer()
    saved.load(learner, out / "checkpoint")
    saved.close()
    metrics = run_step(learner, [(key(7), reference.batches[0])])
    np.testing.assert_allclose(metrics["actor/grad_norm"], expected_norm, rtol=1e-5)


@torch.no_grad()
def check_files(base: Path, out: Path, lora: LoraConfig) -> None:
    """peft and transformers load the exported files; both give the same policy."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    merged = AutoModelForCausalLM.from_pretrained(out)
    plain = AutoModelForCausalLM.from_pretrained(base)
    before = plain(IDS).logits
    adapted = PeftModel.from_pretrained(plain, out / "adapter")
    assert adapted.peft_config["default"].target_modules == set(lora.targets)
    logits = adapted(IDS).logits
    assert (logits - before).abs().max() > 0.1
    torch.testing.assert_close(merged(IDS).logits, logits, rtol=0, atol=1e-5)
    expected = adapted.merge_and_unload().state_dict()
    for name, tensor in merged.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "parallel", "targets"),
    [
        ("qwen2", ParallelConfig(), ALL),
        ("qwen3", ParallelConfig(tensor=2), ALL),
        ("qwen2", ParallelConfig(tensor=2, sequence=True), ("q_proj", "v_proj", "o_proj", "up_proj")),
        ("qwen2", ParallelConfig(pipeline=2), ALL),
        ("qwen3_moe", ParallelConfig(data=2), ("q_proj", "k_proj", "v_proj", "o_proj")),
    ],
    ids=["world1", "tp2", "tp2_sp", "pp2", "moe_dp2_distopt"],
)
def test_adapters_are_those_of_peft(
    tmp_path: Path, family: str, parallel: ParallelConfig, targets: tuple[str, ...]
) -> None:
    base = write_model(tmp_path / "base", family)
    start = write_start(tmp_path / "start", base, targets)
    reference = reference_loop(base, start)
    lora = LoraConfig(rank=RANK, alpha=ALPHA, targets=targets, path=start)
    answers = run_ranks(check_rank, parallel.world_size, base, lora, reference, parallel, tmp_path)
    check_files(base, tmp_path / "model", lora)
    num_bytes, next_norm = answers[0]
    elements = {
        name: tensor.numel() for name, tensor in load_file(start / "adapter_model.safetensors").items()
    }
    assert num_bytes["adapter"] == 4 * sum(elements.values())
    assert num_bytes["merged"] == 4 * sum(t.numel() for t in load_file(base / "model.safetensors").values())
    if parallel.tensor == 2:
        run_ranks(check_resumed, 1, base, lora, reference, tmp_path, next_norm)
